"""Makes the tables of docs/quality.md and results/tables.md, and the figures in docs/figures, from run.py's lines.

    python benchmarks/quality/report.py [--results FOLDER] [--docs FOLDER]

Replaces what stands between the lines ``<!-- table NAME -->`` and ``<!-- end -->`` of the pages, and nothing else.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from pathlib import Path

if not __package__:
    _BENCHMARKS = Path(__file__).resolve().parents[1]
    sys.path[0:1] = [str(_BENCHMARKS), str(_BENCHMARKS.parent / "launch")]

from quality import records
from quality.choices import LONG, choice_of
from quality.compare import GOAL, Comparison, compare, current, differences
from quality.intervals import Summary, summary
from quality.over_time import Course, courses
from quality.task import BETAS, TASKS

RESULTS = Path(__file__).parent / "results"
DOCS = Path(__file__).parents[2] / "docs"
#: The page, in the folder of docs, and the page with the tables that it leaves out, in the folder of results.
PAGE, MORE = "quality.md", "tables.md"


#: Codecs of the table on docs/quality.md.
CODECS = ("log8", "companded8", "dynamic8", "bf16", "log4")


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--docs", type=Path, default=DOCS)
    given = parser.parse_args(argv)
    lines = {task: records.read(given.results / f"{task}.jsonl") for task in TASKS}
    compared = {task: compare(found) for task, found in lines.items() if found}
    tuning = {task: records.read(given.results / "tuning" / f"{task}.jsonl") for task in TASKS}
    long_runs = courses(lines[LONG])
    others = ("streams", "levels", "updates")
    streams, levels, updates = (records.read(given.results / f"{name}.jsonl") for name in others)
    tables = {
        "verdicts": verdict_table(compared),
        "overview": overview(compared),
        "tuning": tuning_table(tuning),
        "time": time_table(lines),
        **{task: task_table(found) for task, found in compared.items()},
        "levels": levels_table(levels),
        "course": course_table(long_runs),
        "drift": drift_table(long_runs),
        "rates": rates_table(lines[LONG]),
    }
    restart = given.results / "restart.json"
    if restart.exists():
        tables["restart"] = restart_table(json.loads(restart.read_text()))
    pages = [given.docs / PAGE, given.results / MORE]
    for page, text in zip(pages, replaced([page.read_text() for page in pages], tables), strict=True):
        page.write_text(text)

    from quality import figures  # matplotlib takes seconds

    folder = given.docs / "figures"
    folder.mkdir(exist_ok=True)
    figures.draw(compared, streams, levels, updates, long_runs, folder)
    print(f"{', '.join(map(str, pages))}: {', '.join(tables)}; figures in {folder}")


def replaced(pages: list[str], tables: dict[str, str]) -> list[str]:
    """The pages with new tables.

    Raises:
        ValueError: not exactly one page has a place for a table.
    """
    pages = list(pages)
    for name, table in tables.items():
        begin, end = f"<!-- table {name} -->\n", "<!-- end -->"
        places = sum(page.count(begin) for page in pages)
        if places != 1:
            raise ValueError(f"{PAGE}, {MORE}: got {places} places for the table {name}, expected 1: {begin}{end}")
        number = next(number for number, page in enumerate(pages) if begin in page)
        before, _, after = pages[number].partition(begin)
        pages[number] = f"{before}{begin}{table}\n{end}{after.partition(end)[2]}"
    return pages


def table_of(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    names = list(head)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (names, ["---"] * len(names), *rows))


def verdict_table(compared: dict[str, list[Comparison]]) -> str:
    """Rows: tasks; columns: codecs; difference in %, half of its t interval, and pairs; bold within the goal."""
    found = {task: {it.name: it for it in comparisons} for task, comparisons in compared.items()}
    sizes = {name: it[name].state_bytes for name in CODECS for it in found.values() if name in it}
    heads = [f"`{name}`, {sizes[name]:.2f} bytes" if name in sizes else f"`{name}`" for name in CODECS]
    return table_of(
        ["task", *heads], ([task, *(_evidence(it.get(name)) for name in CODECS)] for task, it in found.items())
    )


def _evidence(it: Comparison | None) -> str:
    if it is None or it.difference is None:
        return ""
    text = _plus_minus(it.difference)
    return f"{f'**{text}**' if it.verdict == 'yes' else text} ({it.difference.count})"


def task_table(comparisons: list[Comparison]) -> str:
    """A row per optimizer of one task."""
    head = ["optimizer", "state, bytes per parameter", "runs", "held-out loss"]
    head += ["difference, %", "t interval", "bootstrap interval", "one run's deviation", f"<= {GOAL}%"]
    return table_of(head, (_row(comparison) for comparison in comparisons))


def _row(it: Comparison) -> list[str]:
    cells = [
        it.choice.label,
        f"{it.state_bytes:.2f}",
        f"{it.runs}, {it.diverged} diverged" if it.diverged else f"{it.runs}",
        "" if it.loss is None else f"{it.loss:.4f}",
    ]
    if it.choice.baseline == it.name:
        return [*cells, "baseline", "", "", "", ""]
    if it.difference is None:
        return [*cells, "", "", "", "", it.verdict]
    found = it.difference
    if found.count == 1:
        return [*cells, f"{found.mean:+.2f}", "", "", "", it.verdict]
    return [
        *cells,
        f"{found.mean:+.2f}",
        _interval(found.t),
        _interval(found.bootstrap),
        f"{found.spread:.2f}",
        it.verdict,
    ]


def _interval(limits: tuple[float, float]) -> str:
    return f"{limits[0]:+.2f} to {limits[1]:+.2f}"


def overview(compared: dict[str, list[Comparison]]) -> str:
    """Rows: optimizers; columns: tasks; difference in % and half of its t interval."""
    rows: dict[str, dict[str, str]] = {}
    for task, comparisons in compared.items():
        for it in comparisons:
            if it.choice.baseline == it.name:
                continue
            cell = _plus_minus(it.difference)
            cell += f" ({it.diverged} of {it.runs} diverged)" if it.diverged else ""
            rows.setdefault(it.choice.label, {})[task] = cell.strip()
    return table_of(
        ["difference to float32, %", *compared],
        ([label, *(cells.get(task, "") for task in compared)] for label, cells in rows.items()),
    )


def _plus_minus(found: Summary | None) -> str:
    """Mean and half of the t interval; of one pair the mean alone."""
    if found is None:
        return ""
    return f"{found.mean:+.2f}" + (f" ± {found.t[1] - found.mean:.2f}" if found.count > 1 else "")


def course_table(long_runs: list[Course]) -> str:
    """Rows: optimizers; columns: marked steps; difference in % and half of its t interval."""
    steps = sorted({step for course in long_runs for step in course.differences})
    return table_of(
        ["difference to float32, %", "pairs", *(f"step {step:,}" for step in steps), "rise"],
        (
            [
                course.choice.label,
                f"{max(found.count for found in course.differences.values())}",
                *(_plus_minus(course.differences.get(step)) for step in steps),
                _plus_minus(course.rise),
            ]
            for course in long_runs
        ),
    )


def drift_table(long_runs: list[Course]) -> str:
    """Rows: optimizers and figures of their moments; columns: marked steps; means over seeds."""
    steps = sorted({step for course in long_runs for step in course.drift})
    figures = {
        "exp_avg": "`exp_avg`, distance",
        "exp_avg_sq": "root of `exp_avg_sq`, distance",
        "exp_avg_sq_norm": "root of `exp_avg_sq`, ratio of norms",
    }
    rows = []
    for course in long_runs:
        found = [course.drift.get(step) for step in steps]
        for figure, label in figures.items():
            cells = ["" if of is None else f"{of[figure]:.3f}" for of in found]
            rows.append([course.choice.label, label, *cells])
    return table_of(["moments against float32's", "", *(f"step {step:,}" for step in steps)], rows)


def rates_table(lines: list[records.Record]) -> str:
    """Rows: learning rates; log8 against float32 at the same rate, and each against its own runs at the tuned rate.

    Takes the seeds that have a run of both at every rate; a run that diverged is in no mean.
    """

    def diverged(found: dict[int, records.Record]) -> int:
        return sum(not run["finite"] for run in found.values())

    runs = current(lines)
    rates = ("_half", "", "_double")
    of = {name: [runs.get(name + rate, {}) for rate in rates] for name in ("fp32", "log8")}
    seeds = sorted(set.intersection(*(set(found) for found in (*of["fp32"], *of["log8"]))))
    exact, coded = ([{seed: found[seed] for seed in seeds} for found in of[name]] for name in ("fp32", "log8"))
    rows = []
    for rate, theirs, ours in zip(rates, exact, coded, strict=True) if seeds else ():
        found = [differences(ours, theirs)]
        found += [differences(theirs, exact[1]), differences(ours, coded[1])] if rate else [[], []]
        cells = [_plus_minus(summary(pairs) if pairs else None) for pairs in found]
        lost = {"float32": diverged(theirs), "log8": diverged(ours)}
        runs_made = [f"{len(seeds)}", *(f"{count} of {name} diverged" for name, count in lost.items() if count)]
        rows.append([f"{theirs[seeds[0]]['lr']:g}", ", ".join(runs_made), *cells])
    head = ["learning rate", "seeds", "log8 against float32, %"]
    head += ["float32 against itself at the tuned rate, %", "log8 against itself at the tuned rate, %"]
    return table_of(head, rows)


def restart_table(found: records.Record) -> str:
    """The comparison of a restarted run with the undisturbed one."""
    legs = ", ".join(f"{ranks} to step {stop:,}" for ranks, stop in found["legs"])
    first = found["first_difference"]
    rows = [
        ["ranks of the restarted run", legs],
        ["training losses compared", f"{found['training_losses']:,}"],
        ["held-out losses compared", f"{found['heldout_losses']}"],
        ["tensors compared at the end, weights and state", f"{found['tensors']}"],
        ["first step with another loss", "none" if first is None else f"{first:,}"],
        ["the same bits", "yes" if found["same"] else "no"],
    ]
    return table_of(["restart, against one undisturbed rank", ""], rows)


def levels_table(lines: list[records.Record]) -> str:
    """Rows: streams and optimizers; columns: steps, then faster decay; root of the second moment over float32's."""
    found = {
        (line["stream"], line["optimizer"], line["beta2"], step): level
        for line in lines
        for step, level in zip(line["steps"], line["levels"], strict=True)
    }
    steps = sorted({step for *_, step in found})
    columns = [(BETAS[1], step) for step in steps]
    columns += [(beta2, steps[-1]) for beta2 in sorted({key[2] for key in found} - {BETAS[1]}, reverse=True)]
    rows = []
    for stream, optimizer in dict.fromkeys(key[:2] for key in found):
        cells = [found.get((stream, optimizer, *column)) for column in columns]
        rows.append([stream, choice_of(optimizer).label, *("" if cell is None else f"{cell:.3f}" for cell in cells)])
    heads = [f"step {step:,}" if beta2 == BETAS[1] else f"`betas[1] = {beta2:g}`" for beta2, step in columns]
    return table_of(["stream", "optimizer", *heads], rows)


def tuning_table(tuning: dict[str, list[records.Record]]) -> str:
    """Held-out loss of AdamW with float32 state by learning rate, means over seeds, of each task's last definition."""
    rows = []
    for task, lines in tuning.items():
        losses: dict[float, list[float]] = {}
        for line in lines:
            losses.setdefault(line["lr"], []).append(line["loss"] if line["finite"] else float("inf"))
        means = {lr: sum(values) / len(values) for lr, values in sorted(losses.items())}
        if means:
            rows.append([task, ", ".join(f"{lr:g}: {loss:.4f}" for lr, loss in means.items())])
    return table_of(["task", "learning rate: held-out loss"], rows)


def time_table(lines: dict[str, list[records.Record]]) -> str:
    rows = []
    for task, found in lines.items():
        seconds = sorted(line["seconds"] for line in found)
        if seconds:
            some = found[-1]
            rows.append(
                [
                    task,
                    f"{some['steps']}",
                    f"{some['parameters']:,}",
                    f"{some['trained']:,}",
                    f"{100 * some['quantizable']:.1f}",
                    f"{len(found)}",
                    f"{seconds[len(seconds) // 2]:.1f}",
                    f"{sum(seconds) / 3600:.2f}",
                ]
            )
    head = ["task", "steps", "parameters", "trained", "in tensors large enough to quantize, %", "runs"]
    return table_of([*head, "seconds of a run, median", "hours of all"], rows)


if __name__ == "__main__":
    main(sys.argv[1:])
