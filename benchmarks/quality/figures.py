"""Figures of the study as SVG, legible on light and dark pages: no background, everything of medium lightness."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

from quality.choices import CHOICES, choice_of
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
    "torchao8": "#1fa3a8",
    "torchao4": "#c24f3d",
    "torchao_fp8": "#7f9a2c",
    "log8_repaid": "#1c4f94",
    "log8_half": "#56b4c9",
    "log8_double": "#2f7f8f",
    "bf16_master32": "#5b9bd5",
    "bf16_master24": "#4aa3df",
    "bf16_stochastic": "#c07bc0",
    "bf16_nearest": "#b58900",
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
#: Lines in the figure of curves; the others are in the tables.
_CURVES = ("fp32", "fp32_init", "log8", "companded8", "dynamic8", "bf16", "log4", "torchao4")
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
    """Writes quality-NAME.svg for curves, intervals, bytes, streams, levels, updates, course and drift.

    Leaves those without data as they are.
    """
    with plt.rc_context(_STYLE):
        if compared:
            _save(_curves(compared), folder / "quality-curves.svg")
            _save(_intervals(compared), folder / "quality-intervals.svg")
            _save(_bytes(compared), folder / "quality-bytes.svg")
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


def _panels(
    names: list[str], width: float, height: float, columns: int = 3, **shared: Any
) -> tuple[Any, Iterator[Any]]:
    """A figure, and a panel for each name."""
    rows = -(-len(names) // columns)
    size = (width * columns, height * rows)
    figure, axes = plt.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained", **shared)
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


def _curves(compared: dict[str, list[Comparison]]) -> Any:
    """Per task the training loss, and its difference to float32 of the same seed; means, and ranges of the runs."""
    titles = [title for task in compared for title in (task, f"{task}: difference to float32, %")]
    figure, panels = _panels(titles, 2.9, 2.2, columns=4)
    for comparisons in compared.values():
        losses, differences = next(panels), next(panels)
        exact = next((it.curves for it in comparisons if it.name == "fp32"), {})
        for it in comparisons:
            if it.name not in _CURVES or not it.curves:
                continue
            style = {"color": _colour(it.name), "lw": 2 if it.name == "fp32" else 1}
            _band(losses, np.array(list(it.curves.values())), it.choice.label, style)
            pairs = [(curve, exact[seed]) for seed, curve in it.curves.items() if seed in exact]
            if pairs and it.name != "fp32":
                _band(differences, np.array([100 * (np.divide(*pair) - 1) for pair in pairs]), it.choice.label, style)
        losses.set(xlabel="share of the steps, %", ylabel="training loss")
        differences.axhline(0, color=_GREY, lw=0.8)
        differences.set(xlabel="share of the steps, %")
    _legend(figure)
    return figure


def _band(panel: Any, curves: np.ndarray[Any, Any], label: str, style: dict[str, Any]) -> None:
    share = 100 * (np.arange(curves.shape[1]) + 0.5) / curves.shape[1]
    panel.plot(share, curves.mean(0), label=label, **style)
    panel.fill_between(share, curves.min(0), curves.max(0), color=style["color"], alpha=0.15, lw=0)


def _intervals(compared: dict[str, list[Comparison]]) -> Any:
    """Mean differences with their 95% t intervals; the band is the goal."""
    shown = {task: [it for it in found if it.difference is not None] for task, found in compared.items()}
    labels = list(dict.fromkeys(it.choice.label for found in shown.values() for it in found))
    figure, panels = _panels(list(shown), 3.1, 0.6 + 0.19 * len(labels), sharey=True)
    for found, panel in zip(shown.values(), panels, strict=False):
        panel.axvspan(-GOAL, GOAL, color=_GREY, alpha=0.2, lw=0)
        panel.axvline(0, color=_GREY, lw=0.8)
        for it in found:
            assert it.difference is not None
            row, (low, high) = labels.index(it.choice.label), it.difference.t
            panel.plot([low, high], [row, row], color=_colour(it.name), lw=2, solid_capstyle="butt")
            panel.plot(it.difference.mean, row, "o", color=_colour(it.name), ms=4)
        panel.set_xscale("symlog", linthresh=1, linscale=1.5)
        _ticks(panel.xaxis)
        panel.set(xlabel="difference to float32, %", ylim=(len(labels) - 0.5, -0.5))
        panel.set_yticks(range(len(labels)), labels)
    return figure


def _ticks(axis: Any) -> None:
    """Ticks of an axis of differences, linear up to 1%, logarithmic beyond."""
    axis.set_major_locator(FixedLocator([sign * x for x in (0.3, 1, 10, 100) for sign in (-1, 1)] + [0]))
    axis.set_major_formatter("{x:g}")
    axis.set_minor_locator(NullLocator())


def _bytes(compared: dict[str, list[Comparison]]) -> Any:
    """Bytes of weights and state against the difference; points on the dashed line are beaten by none."""
    figure, panels = _panels(list(compared), 3.4, 2.6)
    for comparisons, panel in zip(compared.values(), panels, strict=False):
        points = []
        for it in comparisons:
            if it.name.endswith(("_lr", "_init")) or it.choice.baseline != "fp32":
                continue
            if it.name != "fp32" and (it.difference is None or it.diverged):
                continue
            mean = it.difference.mean if it.difference else 0.0
            half = it.difference.t[1] - mean if it.difference and it.difference.count > 1 else 0.0
            points.append((it.weight_bytes + it.state_bytes, mean))
            style = {"color": _colour(it.name), "ms": 4, "lw": 1, "label": it.choice.label}
            panel.errorbar(*points[-1], yerr=half, fmt="o", **style)
        front = [(x, y) for x, y in sorted(points) if all(y < b for a, b in points if (a, b) < (x, y) and a <= x)]
        panel.plot(*zip(*front, strict=True), color=_GREY, lw=0.8, ls="--") if front else None
        panel.axhline(0, color=_GREY, lw=0.8)
        panel.set_yscale("symlog", linthresh=1, linscale=1.5)
        _ticks(panel.yaxis)
        panel.set(xlabel="weights and state, bytes per parameter", ylabel="difference, %")
    _legend(figure)
    return figure


def _streams(lines: list[Record]) -> Any:
    """Drift over the steps, a panel per stream of gradients."""
    scenarios = list(dict.fromkeys(line["scenario"] for line in lines))
    figure, panels = _panels(scenarios, 2.9, 2.4, columns=4, sharey=True)
    for scenario, panel in zip(scenarios, panels, strict=False):
        for line in lines:
            if line["scenario"] == scenario:
                mean = [value or np.nan for value in line["mean"]]
                steps = 10 * (np.arange(len(mean)) + 1)
                label = CHOICES[line["optimizer"]].label
                panel.plot(steps, mean, color=_colour(line["optimizer"]), lw=1.2, label=label)
        panel.set(yscale="log", xlabel="steps", ylabel="mean drift")
    _legend(figure)
    return figure


def _levels(lines: list[Record]) -> Any:
    """Root of the second moment over float32's, with the usual decay: a panel per stream, a line per optimizer."""
    usual = [line for line in lines if line["beta2"] == BETAS[1]]
    figure, panels = _panels(list(dict.fromkeys(line["stream"] for line in usual)), 3.2, 2.8, sharey=True)
    for stream, panel in zip(dict.fromkeys(line["stream"] for line in usual), panels, strict=False):
        panel.axhline(1, color=_GREY, lw=0.8)
        for line in usual:
            if line["stream"] == stream:
                style = {"color": _colour(line["optimizer"]), "lw": 1.2, "ms": 3}
                panel.plot(line["steps"], line["levels"], "o-", label=choice_of(line["optimizer"]).label, **style)
        _log_ticks(panel, _LEVEL_TICKS)
        panel.set(xscale="log", ylim=_LEVELS, xlabel="steps", ylabel="ratio of norms")
        _step_ticks(panel, usual[0]["steps"])
    _legend(figure)
    return figure


def _updates(lines: list[Record]) -> Any:
    """Mean of |update| over float32's over the steps, a line per optimizer."""
    figure, panels = _panels([""], 5.2, 2.6, columns=1)
    panel = next(panels)
    panel.axhline(1, color=_GREY, lw=0.8)
    for line in lines:
        name = line["optimizer"]
        panel.plot(line["steps"], line["ratios"], color=_colour(name), lw=1.2, label=choice_of(name).label)
    panel.set(ylim=(0.95, 1.05), xlabel="steps", ylabel="size of updates, over float32's")
    _legend(figure)
    return figure


def _course(long_runs: list[Course]) -> Any:
    """Per optimizer the mean difference over the steps, with its 95% t interval; the band is the goal."""
    titles = [textwrap.fill(course.choice.label, 26) for course in long_runs]
    figure, panels = _panels(titles, 2.4, 2.1, 4, sharey=True)
    for course, panel in zip(long_runs, panels, strict=False):
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
        "exp_avg_sq": "root of exp_avg_sq: distance",
        "exp_avg_sq_norm": "root of exp_avg_sq: ratio of norms",
    }
    figure, panels = _panels(list(titles.values()), 3.2, 2.8)
    for drawn, panel in zip(titles, panels, strict=False):
        for course in long_runs:
            steps = list(course.drift)
            style = {"color": _colour(course.name), "lw": 1.2, "ms": 3, "label": course.choice.label}
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
