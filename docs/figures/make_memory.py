"""Draws memory.svg: bytes per parameter of AdamW with torch, bitsandbytes, FlashOptim and shardopt.

    python docs/figures/make_memory.py

Bars of torch and shardopt come from the estimator, for 7B parameters in 4096 x 4096 matrices on one GPU. Bars of other
packages follow from the layouts that they document:

- bitsandbytes 0.50.2, ``AdamW8bit``: one byte per moment and element, and a float32 scale per block of 256.
- FlashOptim 0.1.4 (arXiv 2602.23349), ``FlashAdamW`` with ``master_weight_bits=24``: bfloat16 weights and gradients,
  one byte per moment and element, a float16 scale per group of 32, and one byte that extends the weight.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from drawing import KINDS, Drawing
from shardopt.estimate.ledger import Setup, estimate
from shardopt.estimate.model import Model

TARGET = Path(__file__).with_name("memory.svg")
WIDTH, LEFT, TOP, ROW, UNIT = 840, 312, 40, 26, 28.5  # pixels; UNIT is those of one byte


class Bar(NamedTuple):
    """Bytes per parameter, by kind in the order of ``KINDS``."""

    name: str
    parts: tuple[float, float, float, float]


def estimated(
    name: str, optimizer: str = "adamw8bit", dtype: str = "bfloat16", release: bool = False, **options: object
) -> Bar:
    """A bar of what :func:`shardopt.memory_report` would find on the GPU."""
    model = Model.of_size("7B")
    setup = Setup(optimizer=optimizer, dtype=dtype, release_gradients=release, options=options)
    use = estimate(model, setup).device
    state = use.state + use.scales + use.offload_buffers
    return Bar(name, tuple(n / model.numel for n in (use.parameters, use.gradients, state, use.master_weights)))


def bars() -> list[list[Bar]]:
    """Bars in groups: torch, the other packages, shardopt."""
    bits = {"master_weight_bits": 24}
    return [
        [estimated("torch AdamW, float32", "adamw", "float32")],
        [
            Bar("bitsandbytes AdamW8bit, float32 weights", (4, 4, 2 * (1 + 4 / 256), 0)),
            Bar("FlashOptim AdamW, bf16 + 8 bits", (2, 2, 2 * (1 + 2 / 32), 1)),
            Bar("FlashOptim, released gradients", (2, 0, 2 * (1 + 2 / 32), 1)),
        ],
        [
            estimated("shardopt AdamW8bit, float32 weights", dtype="float32"),
            estimated("bf16 + 8 bits", **bits),
            estimated("... and release_gradients", release=True, **bits),
            estimated("... and AdamW4bit (experimental)", release=True, codec="log4", **bits),
            estimated('AdamW8bit, ... and offload="state"', release=True, offload="state", **bits),
        ],
    ]


def figure() -> str:
    """The figure as SVG."""
    drawing = Drawing(WIDTH, "Memory per parameter of AdamW: torch, bitsandbytes, FlashOptim, shardopt")
    drawing.legend(LEFT, 21, KINDS)
    y = TOP
    for group in bars():
        for bar in group:
            drawing.text(LEFT - 10, y + 14, bar.name, "end")
            x = float(LEFT)
            for size, colour in zip(bar.parts, KINDS.values(), strict=True):
                if size * UNIT >= 0.5:
                    drawing.rect(x, y, size * UNIT, ROW - 6, fill=colour)
                x += size * UNIT
            drawing.text(x + 7, y + 14, f"{sum(bar.parts):.2f}", bold=True)
            y += ROW
        y += 12
    drawing.text(LEFT, y + 6, "bytes per parameter on the GPU, activations not counted")
    return drawing.svg(y + 16)


if __name__ == "__main__":
    TARGET.write_text(figure())
