"""The report of an import: the outcome for each parameter's state."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

#: "exact": the same codes and scales, or float32 as float32. "requantized": a moment was decoded, then encoded anew.
#: "quantized": encoded from float32. "as float32": decoded, and kept in float32.
Outcome = Literal["exact", "requantized", "quantized", "as float32"]


@dataclass(frozen=True)
class ImportReport:
    """The result of :func:`shardopt.checkpoint.foreign.import_state`. ``print(report)`` prints a summary.

    Attributes:
        source: the package whose state was imported.
        parameters: the outcome of each parameter's moments, by name, without parameters that had no state.
        ignored: entries and hyper-parameters of the source that shardopt does not have.
    """

    source: str
    parameters: Mapping[str, Outcome]
    ignored: tuple[str, ...]

    @property
    def counts(self) -> dict[Outcome, int]:
        """The number of parameters with each outcome, without outcomes that no parameter had."""
        return dict(Counter(self.parameters.values()))

    def __str__(self) -> str:
        total = ", ".join(f"{count} {outcome}" for outcome, count in self.counts.items())
        lines = [f"imported the state of {len(self.parameters)} parameters from {self.source}: {total}"]
        for outcome in self.counts:
            names = [name for name, found in self.parameters.items() if found == outcome]
            lines.append(f"  {outcome}: {', '.join(names)}")
        if self.ignored:
            lines.append(f"  ignored: {', '.join(self.ignored)}")
        return "\n".join(lines)
