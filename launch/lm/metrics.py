"""The reports of a run: metrics as JSON lines, a plot of the losses, a summary."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

Row = dict[str, Any]


class MetricsFile:
    """Metrics as JSON lines, one per logged step."""

    def __init__(self, path: Path, start: int) -> None:
        """Opens `path`, keeping the rows of a resumed run up to step `start`."""
        rows = [row for row in read(path) if row["step"] <= start] if start else []
        temporary = path.with_name(path.name + ".tmp")
        temporary.write_text("".join(_line(row) for row in rows), encoding="utf-8")
        os.replace(temporary, path)
        self._file = path.open("a", encoding="utf-8")

    def write(self, row: Row) -> None:
        """Appends a row, which must have "step"."""
        self._file.write(_line(row))
        self._file.flush()

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


def read(path: Path) -> list[Row]:
    """The rows of a metrics file, without a truncated last line."""
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else []:
        try:
            rows.append(json.loads(line))
        except ValueError:
            break
    return rows


def write_json(path: Path, content: Row) -> None:
    """Writes a JSON file atomically."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(json.dumps(_finite(content), indent=1) + "\n", encoding="utf-8")
    os.replace(temporary, path)


def plot_losses(runs: dict[str, Path], png: Path) -> None:
    """Draws the losses of one or more metrics files, by label, into a PNG."""
    from matplotlib.figure import Figure  # half a second, for the one rank that draws

    figure = Figure(figsize=(8, 5))
    axes = figure.subplots()
    for index, (label, path) in enumerate(runs.items()):
        # Draws thinner lines over thicker ones, so that runs with equal losses are all visible.
        width = 1.2 + 2.4 * (len(runs) - 1 - index)
        rows = read(path)
        for key, what, style in (("train_loss", "training", "-"), ("heldout_loss", "held out", "o--")):
            points = [(row["step"], row[key]) for row in rows if row.get(key) is not None]
            if points:
                name = f"{label} {what}".strip()
                axes.plot(
                    *zip(*points, strict=True),
                    style,
                    color=f"C{index}",
                    label=name,
                    linewidth=width,
                    markersize=4 + width,
                )
    axes.set_xlabel("step")
    axes.set_ylabel("loss [nats per byte]")
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend()
    temporary = png.with_name(png.name + ".tmp")
    figure.savefig(temporary, dpi=120, format="png")
    os.replace(temporary, png)


def _line(row: Row) -> str:
    return json.dumps(_finite(row)) + "\n"


def _finite(row: Row) -> Row:
    """Replaces NaN and Inf, which JSON does not have, by None."""
    return {key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in row.items()}
