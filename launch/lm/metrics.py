"""The reports of a run: metrics as JSON lines, a plot of the losses, a summary."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def begin(path: Path, start: int) -> None:
    """Makes a metrics file; one of a resumed run keeps its rows up to step `start`."""
    _write(path, "".join(_line(row) for row in read(path) if row["step"] <= start) if start else "")


def append(path: Path, row: Row) -> None:
    """Adds a row, which must have "step"."""
    with path.open("a", encoding="utf-8") as file:
        file.write(_line(row))


def read(path: Path) -> list[Row]:
    """The rows of a metrics file, without a truncated last line."""
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else []:
        try:
            rows.append(json.loads(line))
        except ValueError:
            break
    return rows


def write_summary(path: Path, content: Row) -> None:
    """Writes a JSON file atomically."""
    _write(path, json.dumps(_finite(content), indent=1) + "\n")


def plot_losses(runs: dict[str, Path], png: Path) -> None:
    """Draws the losses of one or more metrics files, by label, into a PNG."""
    from matplotlib.figure import Figure  # half a second, for the one rank that draws

    figure = Figure(figsize=(8, 5))
    axes = figure.subplots()
    axes.set(xlabel="step", ylabel="loss [nats per byte]")
    axes.grid(alpha=0.3)
    for index, (label, path) in enumerate(runs.items()):
        # Draws thinner lines over thicker ones, so that runs with equal losses are all visible.
        width = 1.2 + 2.4 * (len(runs) - 1 - index)
        for key, what, style in (("train_loss", "training", "-"), ("heldout_loss", "held out", "o--")):
            points = {row["step"]: row[key] for row in read(path) if row.get(key) is not None}
            look: dict[str, Any] = {"color": f"C{index}", "linewidth": width, "label": f"{label} {what}".strip()}
            axes.plot(list(points), list(points.values()), style, **look)
    axes.legend()
    figure.savefig(png, dpi=120)


def _write(path: Path, text: str) -> None:
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


def _line(row: Row) -> str:
    return json.dumps(_finite(row)) + "\n"


def _finite(row: Row) -> Row:
    """Replaces NaN and Inf, which JSON does not have, by None."""
    return {key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in row.items()}
