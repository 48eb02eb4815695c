"""Figures of the study as SVG, legible on light and dark pages: no background, everything of medium lightness."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

from quality.compare import GOAL, Comparison
from quality.over_time import Course
from quality.records import Record
from quality.task import BETAS

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.ticker import FixedLocator, NullLocator

_GREY = "#808080"
_COLOURS = {
    "log8": "#3b82d6",
    "companded8": "#e0822a",
    "dynamic8": "#2fa05a",
    "bf16": "#8f6ad0",
    "log4": "#d0487a",
    "bnb8": "#a87b3c",
}
_STYLE = {
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.transparent": True,
    "text.color": _GREY,
    "axes.labelcolor": _GREY,
    "axes.edgecolor": _GREY,
    "xtick.color": _GREY,
    "ytick.color": _GREY,
    "axes.titlecolor": _GREY,
    "legend.frameon": False,
    "font.size": 9,
    "svg.hashsalt": "quality",
}
#: Optimizers in the figures, by what they are called there; the others are in the tables.
_SHOWN = {
    "fp32_init": "control",
    **{name: name for name in ("log8", "companded8", "dynamic8", "bf16", "log4")},
    "bnb8": "bitsandbytes",
}
_STREAMS = ("iid", "log-normal", "rare rows")
_WIDTH = 2.4  # inches of a panel: three of them are 691 pixels, where 9 points of text are 12
_LEVELS = (0.7, 1.1)
_LEVEL_TICKS = (0.7, 0.8, 0.9, 1, 1.1)
_DISTANCE_TICKS = (0.02, 0.05, 0.1, 0.2, 0.5, 1)


def draw(
    compared: dict[str, list[Comparison]],
    streams: list[Record],
    levels: list[Record],
    updates: list[Record],
    long_runs: list[Course],
    folder: Path,
) -> None:
    """Writes quality-NAME.svg for intervals, streams, levels, updates, course and drift.

    Leaves those without data as they are.
    """
    with plt.rc_context(_STYLE):
        if compared:
            _save(_intervals(compared), folder / "quality-intervals.svg")
        if streams:
            _save(_streams(streams), folder / "quality-streams.svg")
        if levels:
            _save(_levels(levels), folder / "quality-levels.svg")
        if updates:
            _save(_updates(updates), folder / "quality-updates.svg")
        if long_runs:
            _save(_course(long_runs), folder / "quality-course.svg")
            _save(_drift(long_runs), folder / "quality-drift.svg")


def _save(figure: Any, path: Path) -> None:
    figure.savefig(path, format="svg", bbox_inches="tight", metadata={"Date": None, "Creator": None})
    plt.close(figure)


def _panels(names: list[str], height: float, **shared: Any) -> tuple[Any, Iterator[Any]]:
    """A figure, and a panel for each name, in rows of three."""
    rows = -(-len(names) // 3)
    size = (3 * _WIDTH, height * rows)
    figure, axes = plt.subplots(rows, 3, figsize=size, squeeze=False, layout="constrained", **shared)
    flat = list(axes.flat)
    for panel in flat[len(names) :]:
        panel.axis("off")
    for panel, name in zip(flat, names, strict=False):
        panel.set_title(name)
        panel.spines[["top", "right"]].set_visible(False)
    return figure, iter(flat)


def _legend(figure: Any) -> None:
    """One legend for all panels, an entry per name."""
    entries: dict[str, Any] = {}
    for panel in figure.axes:
        for handle, label in zip(*panel.get_legend_handles_labels(), strict=True):
            entries.setdefault(label, handle)
    figure.legend(entries.values(), entries.keys(), loc="outside lower center", ncols=4)


def _colour(name: str) -> str:
    return _COLOURS.get(name, _GREY)


def _intervals(compared: dict[str, list[Comparison]]) -> Any:
    """Mean differences with their 95% t intervals; the band is the goal."""
    figure, panels = _panels(list(compared), 0.8 + 0.2 * len(_SHOWN), sharey=True)
    names = list(_SHOWN)
    for found, panel in zip(compared.values(), panels, strict=False):
        panel.axvspan(-GOAL, GOAL, color=_GREY, alpha=0.2, lw=0)
        panel.axvline(0, color=_GREY, lw=0.8)
        for it in found:
            if it.difference is None or it.name not in names:
                continue
            row, (low, high) = names.index(it.name), it.difference.t
            panel.plot([low, high], [row, row], color=_colour(it.name), lw=2, solid_capstyle="butt")
            panel.plot(it.difference.mean, row, "o", color=_colour(it.name), ms=4)
        panel.set(xlim=(-1, 1), ylim=(len(names) - 0.5, -0.5))
        panel.set_xticks((-1, -GOAL, 0, GOAL, 1), ("-1", f"-{GOAL}", "0", f"{GOAL}", "1%"))
        panel.set_yticks(range(len(names)), list(_SHOWN.values()))
    return figure


def _ticks(axis: Any) -> None:
    """Ticks of an axis of differences, linear up to 1%, logarithmic beyond."""
    axis.set_major_locator(FixedLocator([sign * x for x in (0.3, 1, 10, 100) for sign in (-1, 1)] + [0]))
    axis.set_major_formatter("{x:g}")
    axis.set_minor_locator(NullLocator())


def _streams(lines: list[Record]) -> Any:
    """Drift over the steps, a panel per stream of gradients."""
    figure, panels = _panels(list(_STREAMS), 2.6, sharey=True)
    for scenario, panel in zip(_STREAMS, panels, strict=False):
        for line in lines:
            if line["scenario"] == scenario and (name := line["optimizer"]) in _SHOWN:
                mean = [value or np.nan for value in line["mean"]]
                steps = 10 * (np.arange(len(mean)) + 1)
                panel.plot(steps, mean, color=_colour(name), lw=1.2, label=_SHOWN[name])
        panel.set(yscale="log", xlabel="steps")
    _legend(figure)
    return figure


def _levels(lines: list[Record]) -> Any:
    """Root of the second moment over float32's, with the usual decay: a panel per stream, a line per optimizer."""
    usual = [line for line in lines if line["beta2"] == BETAS[1]]
    figure, panels = _panels(list(dict.fromkeys(line["stream"] for line in usual)), 2.6, sharey=True)
    for stream, panel in zip(dict.fromkeys(line["stream"] for line in usual), panels, strict=False):
        panel.axhline(1, color=_GREY, lw=0.8)
        for line in usual:
            if line["stream"] == stream:
                style = {"color": _colour(line["optimizer"]), "lw": 1.2, "ms": 3}
                panel.plot(line["steps"], line["levels"], "o-", label=_SHOWN[line["optimizer"]], **style)
        _log_ticks(panel, _LEVEL_TICKS)
        panel.set(xscale="log", ylim=_LEVELS, xlabel="steps")
        _step_ticks(panel, usual[0]["steps"])
    _legend(figure)
    return figure


def _updates(lines: list[Record]) -> Any:
    """Mean of |update| over float32's over the steps, a line per optimizer."""
    figure, panel = plt.subplots(figsize=(3 * _WIDTH, 2.6), layout="constrained")
    panel.axhline(1, color=_GREY, lw=0.8)
    for line in lines:
        name = line["optimizer"]
        panel.plot(line["steps"], line["ratios"], color=_colour(name), lw=1.2, label=_SHOWN[name])
    panel.set(ylim=(0.99, 1.01), xlabel="steps", ylabel="size of updates, over float32's")
    panel.spines[["top", "right"]].set_visible(False)
    _legend(figure)
    return figure


def _course(long_runs: list[Course]) -> Any:
    """Per optimizer the mean difference over the steps, with its 95% t interval; the band is the goal."""
    courses = [course for course in long_runs if course.name in list(_SHOWN)[:6]]
    figure, panels = _panels([_SHOWN[course.name] for course in courses], 2.1, sharey=True)
    for course, panel in zip(courses, panels, strict=False):
        steps, found = list(course.differences), list(course.differences.values())
        panel.axhspan(-GOAL, GOAL, color=_GREY, alpha=0.2, lw=0)
        panel.axhline(0, color=_GREY, lw=0.8)
        low, high = (np.array([it.t[end] if it.count > 1 else it.mean for it in found]) for end in (0, 1))
        panel.fill_between(steps, low, high, color=_colour(course.name), alpha=0.25, lw=0)
        panel.plot(steps, [it.mean for it in found], "o-", color=_colour(course.name), ms=3, lw=1.2)
        panel.set_xscale("log")
        panel.set_yscale("symlog", linthresh=1, linscale=1.5)
        _ticks(panel.yaxis)
        _step_ticks(panel, steps)
        panel.set(xlabel="steps")
    return figure


def _drift(long_runs: list[Course]) -> Any:
    """Mean distance of moments to those of float32 over the steps, and the ratio of norms, a line per optimizer."""
    titles = {
        "exp_avg": "exp_avg: distance",
        "exp_avg_sq": "root of exp_avg_sq:\ndistance",
        "exp_avg_sq_norm": "root of exp_avg_sq:\nratio of norms",
    }
    figure, panels = _panels(list(titles.values()), 2.8)
    for drawn, panel in zip(titles, panels, strict=False):
        for course in (course for course in long_runs if course.name in _SHOWN):
            steps = list(course.drift)
            style = {"color": _colour(course.name), "lw": 1.2, "ms": 3, "label": _SHOWN[course.name]}
            panel.plot(steps, [of[drawn] for of in course.drift.values()], "o-", **style)
        panel.set(xscale="log", xlabel="steps")
        if not drawn.endswith("_norm"):
            _log_ticks(panel, _DISTANCE_TICKS)
        _step_ticks(panel, sorted({step for course in long_runs for step in course.drift}))
    _legend(figure)
    return figure


def _log_ticks(panel: Any, ticks: tuple[float, ...]) -> None:
    """A logarithmic y axis with these ticks alone."""
    panel.set_yscale("log")
    panel.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    panel.yaxis.set_minor_locator(NullLocator())


def _step_ticks(panel: Any, steps: list[int]) -> None:
    panel.set_xticks(steps, [f"{step:,}" for step in steps], rotation=45)
    panel.xaxis.set_minor_locator(NullLocator())
