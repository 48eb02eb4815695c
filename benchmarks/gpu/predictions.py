"""Calculated from the compiled kernels (sm_90, nvcc 13.0) before any GPU had run them, to be seen beside it.

Shares are of the speed of a device-to-device copy, which was predicted as 3.0 TB/s on an H100 and 4.3 TB/s on an H200.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple


class Predicted(NamedTuple):
    """A share of a copy's speed on each GPU, its range on an H100, and milliseconds for 1e9 parameters there."""

    h100: float | None = None
    h200: float | None = None
    low: float | None = None
    high: float | None = None
    ms: float | None = None


#: By the name of a race, which comes first, or of a contender in races of 1e8 parameters and more.
PREDICTIONS = {
    "log8 bf16": Predicted(0.95, 0.90, 0.90, 1.0, 3.58),
    "log8 fp32": Predicted(0.97, 0.95, 0.94, 1.01, 5.56),
    "companded8 bf16": Predicted(0.95, 0.90, ms=3.55),
    "log8 bf16+8": Predicted(0.95, 0.90, ms=4.28),
    "dynamic8 bf16": Predicted(0.80, 0.65, 0.7, 0.9, 4.2),
    "fp32 fp32": Predicted(0.90, ms=10.4),
    "nadam log8 bf16": Predicted(0.55, 0.45, 0.4, 0.75, 6.2),  # 10 to 13 ms when blocks were computed three times
    "torch fused bf16": Predicted(0.90, ms=5.2),
    "torch fused fp32": Predicted(0.90, ms=10.4),
    "shardopt norm": Predicted(0.27, 0.2, ms=2.5),
    "rows of 130": Predicted(0.85),
    "rows of 257": Predicted(0.85),
    "rows of 33": Predicted(0.75),
    "half of the rows never have a gradient": Predicted(0.94, 0.89),
    "1e7": Predicted(low=0.75, high=0.85),
}


def measured(found: dict[str, Any]) -> Iterator[tuple[str, dict[str, float], Predicted]]:
    """Each measurement in a first.json's races: "race, contender", what was seen, and what was predicted."""
    of_races = (found["sections"].get(section, [{}])[0] for section in ("races", "others"))
    for title, race in (entry for each in of_races for entry in each.items()):
        for who, seen in race.items() if isinstance(race, dict) and "parameters" in race else ():
            if isinstance(seen, dict):
                name = title.partition(":")[0]
                default = PREDICTIONS.get(who) if race["parameters"] >= 10**8 else None
                predicted = PREDICTIONS.get(name) or default or Predicted()
                yield f"{name}, {who}", seen, scaled(predicted, race["parameters"] / 1e9)


def scaled(predicted: Predicted, by: float) -> Predicted:
    """The prediction for another number of parameters."""
    return predicted if predicted.ms is None else predicted._replace(ms=round(predicted.ms * by, 3))


def text_of(name: str, seen: dict[str, float], predicted: Predicted) -> str:
    """A measurement beside its prediction."""
    said = f"{name}: {seen['ms']} ms, {seen['of copy']} of a copy, host {seen['host us']} us"
    parts = [
        f"{predicted.h100} of a copy" if predicted.h100 else "",
        f"{predicted.h200} on an H200" if predicted.h200 else "",
        f"{predicted.low} to {predicted.high}" if predicted.low else "",
        f"{predicted.ms} ms" if predicted.ms else "",
    ]
    return f"{said}; predicted {', '.join(filter(None, parts))}" if any(parts) else said
