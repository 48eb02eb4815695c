"""The estimate as stacked bars."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from shardopt.estimate.table import COLUMNS, Row

_COLORS = ("#4c72b0", "#dd8452", "#ccb974", "#55a868", "#8c8c8c", "#8172b3", "#c44e52")


def draw(rows: Sequence[Row], path: str | Path) -> None:
    """Draws bytes per parameter by kind, a bar for each row's GPU and, hatched, one for its part of the host.

    Args:
        rows: of the same model.
        path: of the PNG.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
        OSError: the file cannot be written.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"got --chart without the package {error.name}, expected {error.name} to be installed; pip install "
            "'shardopt[plot]', or leave --chart out"
        ) from None
    bars = []
    for row in rows:
        bars.append((row.name.strip(), row.report.device, ""))
        if row.report.host.total:
            bars.append(("on the host", row.report.host, "///"))
    figure = Figure(figsize=(10, 1.8 + 0.5 * len(bars)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    ends = [0.0] * len(bars)
    for color, (kind, heading) in zip(_COLORS, COLUMNS.items(), strict=True):
        widths = [getattr(use, kind) / rows[0].model.numel for _, use, _ in bars]
        drawn = axes.barh(range(len(bars)), widths, left=ends, color=color, label=heading)
        for patch, (_, _, hatch) in zip(drawn, bars, strict=True):
            patch.set(hatch=hatch, edgecolor="white")
        ends = [end + width for end, width in zip(ends, widths, strict=True)]
    for place, end in enumerate(ends):
        axes.annotate(f"{end:.2f}", (end, place), xytext=(4, 0), textcoords="offset points", va="center")
    axes.set_yticks(range(len(bars)), [name for name, _, _ in bars])
    axes.invert_yaxis()
    axes.set_xlim(0, 1.1 * max(ends))
    axes.set_xlabel("bytes per parameter")
    axes.set_title(f"Memory of weights, gradients and optimizer state: {rows[0].model.name}")
    axes.legend(loc="lower right")
    figure.savefig(path, format="png", dpi=150)
