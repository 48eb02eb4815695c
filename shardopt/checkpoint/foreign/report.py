"""What an import did to each parameter's state."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

#: "exact": the very codes and scales, or float32 as float32. "requantized": decoded, and coded anew.
#: "quantized": was float32, now coded. "as float32": decoded, and now kept in float32.
Outcome = Literal["exact", "requantized", "quantized", "as float32"]


@dataclass(frozen=True)
class ImportReport:
    """What :func:`shardopt.checkpoint.foreign.import_state` did. ``print`` it for a summary.

    Attributes:
        source: the package whose state was imported.
        parameters: by name, what became of the moments. A parameter that had no state is left out.
        ignored: what the source has and shardopt does not.
    """

    source: str
    parameters: Mapping[str, Outcome]
    ignored: tuple[str, ...]

    @property
    def counts(self) -> dict[Outcome, int]:
        """How many parameters had each outcome; those that none had are left out."""
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
