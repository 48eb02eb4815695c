"""Writes RESULTS.md, README's sentence on speed, and the figures of benchmarks in docs/, from the files in results/.

python benchmarks/write_results.py            # after a run with --json
python benchmarks/write_results.py --gpu FILE # first takes the races of launch/gpu_first.sh's first.json into results/
python benchmarks/write_results.py --check    # exits with 1 where one of them is not up to date
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from gpu.predictions import measured
from result_bars import Bars
from results import FOLDER, ROOT, Column, Goal, Table, commit, read_all, slug

BEGIN, END = "<!-- speeds: written by benchmarks/write_results.py -->", "<!-- end of speeds -->"
FIGURES = ROOT / "docs" / "figures"
#: Words of kinds of machines, where capitals are not enough.
WORDS = {
    "avx2": "AVX2",
    "avx512": "AVX-512",
    "cuda": "CUDA",
    "epyc": "EPYC",
    "gpu": "GPU",
    "machine": "machine",
    "no": "no",
}


@dataclass(frozen=True)
class Shown:
    """A table of RESULTS.md: how many rows, or which ones, and which columns beside the first; None for all."""

    rows: int | tuple[str, ...]
    columns: tuple[str, ...] | None = None


#: Benchmarks with a table in RESULTS.md, in its order; others are listed at its end.
SHOWN = {
    "step_cpu": Shown(10, ("median",)),
    "step_cpu_peers": Shown(
        (
            "shardopt log8",
            "torch foreach",
            "DeepSpeedCPUAdam",
            "bitsandbytes AdamW8bit",
            "torchao AdamW8bit",
        )
    ),
    "step_cpu_in_cache": Shown(6),
    "step_cpu_settings_avx512vbmi": Shown(28, ("ns per parameter", "over the first's")),
    "step_overhead": Shown(5, ("alone",)),
    "optimizers": Shown(8, ("ns per parameter", "torch.optim", "drift")),
    "ordered_reduction": Shown(8, ("2 ranks", "4 ranks", "sent, of float32's")),
    "checkpoint": Shown(3, ("save", "async_save returns", "load")),
    "zero_offload": Shown(6, ("ratio",)),
    "gpu_first": Shown(12, ("median", "of a copy's", "predicted")),
}
#: Optimizers in the table at the head of RESULTS.md, by the names of their rows.
SPEEDS = {
    "shardopt log8": "`shardopt.AdamW8bit`, log8",
    "shardopt companded8": "`shardopt.AdamW8bit`, companded8",
    "DeepSpeedCPUAdam": "DeepSpeedCPUAdam, float32 state",
    "torch fused": "torch.optim.AdamW fused, float32 state",
}

Tables = dict[str, list[Table]]


def label(kind: str) -> str:
    """A kind of machine as it is written: "Zen 4, 2 cores" for "amd-zen4-2-cores"."""
    name = short(kind)
    cores = re.search(r"-(\d+)-cores$", kind)
    return f"{name}, {cores[1]} cores" if cores else name


def short(kind: str) -> str:
    """A kind of machine without the number of cores: "Zen 4"."""
    words = re.sub(r"^(amd|intel)-|-\d+-cores$", "", kind).split("-")
    named = [WORDS.get(word) or re.sub(r"^(zen)(\d)$", r"\1 \2", word).capitalize() for word in words]
    return " ".join(named)


def line(cells: Sequence[str]) -> str:
    """A row of a table in Markdown."""
    return "| " + " | ".join(cells) + " |"


def table_of(tables: list[Table], shown: Shown) -> Iterator[str]:
    """One table of a benchmark: rows of all kinds of machines, and columns of each."""
    heads, columns = [tables[0].columns[0].name], []
    for table in tables:
        for index, column in enumerate(table.columns[1:], 1):
            if shown.columns is None or column.name in shown.columns:
                heads.append(f"{short(table.kind)}: {column.head}" if len(tables) > 1 else column.head)
                columns.append({str(row[0]): column.text(row[index]) for row in table.rows})
    yield line(heads)
    yield line(["---"] * len(heads))
    rows = names_of(tables)[: shown.rows] if isinstance(shown.rows, int) else shown.rows
    for name in rows:
        yield line([name, *(column.get(name, "") for column in columns)])


def newest(tables: list[Table]) -> Table:
    """The table of the newest run; of several on a day that of the first kind of machine."""
    return max(tables, key=lambda table: table.date)


def names_of(tables: list[Table]) -> list[str]:
    """Names of the rows of all tables of a benchmark, each once."""
    return list(dict.fromkeys(str(row[0]) for table in tables for row in table.rows))


def link(table: Table, text: str) -> str:
    """A link from RESULTS.md to the table's file."""
    return f"[{text}](results/{table.benchmark}/{table.kind}.json)"


def goals_of(tables: list[Table], met: bool) -> str:
    """Goals that were met, or missed, in one line."""
    found: list[tuple[Table, Goal]] = [(table, goal) for table in tables for goal in table.goals if goal.met == met]
    several = len({table.kind for table in tables}) > 1
    return "; ".join(f"{goal.text}{f' ({label(table.kind)})' if several else ''}" for table, goal in found)


def section(tables: list[Table], shown: Shown) -> Iterator[str]:
    """The part of RESULTS.md about a benchmark."""
    yield f"## {tables[0].title}"
    yield ""
    yield from table_of(tables, shown)
    yield ""
    for table in tables:
        threads = f", {table.threads} thread{'s' if table.threads > 1 else ''}" if table.threads else ""
        run = f"{table.date}, {table.commit}, {table.machine}{threads}, `{table.command}`"
        yield f"- {link(table, label(table.kind))}: {run}. {' '.join(table.notes)}".rstrip()
    for heading, goals in (("**Goals missed**", goals_of(tables, False)), ("Goals met", goals_of(tables, True))):
        if goals:
            yield f"- {heading}: {goals}."
    yield ""


def results(found: Tables) -> str:
    """RESULTS.md."""
    lines = [
        "# Results",
        "",
        "The newest run of each benchmark on each kind of machine. Lower is better unless a heading says otherwise.",
        "Every link leads to all rows and columns of a run. [Tried and dropped](../docs/tried.md) has the failures.",
        "`python benchmarks/write_results.py` writes this page.",
        "",
        "In short, a step of 67 million parameters takes:",
        "",
        speeds(found),
        "",
    ]
    for benchmark, shown in SHOWN.items():
        lines += section(found[benchmark], shown) if benchmark in found else []
    lines += ["## Other tables", "", line(["figures", "goals met", "goals missed"]), line(["---"] * 3)]
    for benchmark, tables in found.items():
        if benchmark not in SHOWN:
            kinds = ", ".join(link(table, label(table.kind)) for table in tables)
            lines.append(line([f"{tables[0].title}: {kinds}", goals_of(tables, True), goals_of(tables, False)]))
    return "\n".join(lines) + "\n"


def speeds(found: Tables) -> str:
    """The table at the head of RESULTS.md."""
    tables = found["step_cpu"]
    lines = [line(["ms, median", *(short(table.kind) for table in tables)]), line(["---"] * (1 + len(tables)))]
    for row, name in SPEEDS.items():
        lines.append(line([name, *(table.texts("median").get(row, "") for table in tables)]))
    peers = newest(found["step_cpu_peers"])
    median = peers.texts("median")
    lines += [
        "",
        f"Beside 8-bit optimizers of other packages, on {short(peers.kind)} ({peers.date}): log8 "
        f"{median['shardopt log8']} ms, torchao {median['torchao AdamW8bit']},",
        f"bitsandbytes {median['bitsandbytes AdamW8bit']}.",
    ]
    return "\n".join(lines)


def sentence(found: Tables) -> str:
    """README's sentence on speed."""
    tables = found["step_cpu"]
    log8, companded8, deepspeed, torch = (" and ".join(x.texts("median")[row] for x in tables) for row in SPEEDS)
    where = " and ".join(short(table.kind) for table in tables)
    return (
        f"On {where} (2 cores) a step of 67 million parameters takes {log8} ms with log8,\n"
        f"{companded8} with companded8; with float32 state DeepSpeedCPUAdam takes {deepspeed}, torch's fused AdamW "
        f"{torch}."
    )


def readme(found: Tables, text: str) -> str:
    """README.md with the sentence on speed in its place.

    Raises:
        ValueError: the place is not marked.
    """
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"got a README without {BEGIN!r} and {END!r}; put these lines around its sentence on speed")
    return f"{before}{BEGIN}\n{sentence(found)}\n{END}{after}"


@dataclass(frozen=True)
class Drawn:
    """A figure of a benchmark.

    Attributes:
        benchmark: whose newest table is drawn, or the tables of all machines.
        title, digits, line: as in :class:`Bars`.
        caption: "{machine}" stands for the kind of machine.
        series: columns by what the legend calls them; or the one column that is drawn for each machine.
        rows: which rows are drawn, and in its group how they are named; a regular expression.
    """

    benchmark: str
    title: str
    caption: str
    series: dict[str, str] | str
    digits: int = 2
    rows: str = "(.*)"
    line: tuple[float, str] | None = None

    def __call__(self, found: Tables) -> Bars:
        tables = found[self.benchmark]
        if isinstance(self.series, str):
            columns = {label(table.kind): table.column(self.series) for table in tables}
        else:
            tables = [newest(tables)]
            columns = {name: tables[0].column(column) for name, column in self.series.items()}
        names = {row: match[1] for row in names_of(tables) if (match := re.fullmatch(self.rows, row))}
        series = {name: {names[row]: x for row, x in cells.items() if row in names} for name, cells in columns.items()}
        caption = self.caption.format(machine=label(newest(tables).kind))
        return Bars(self.title, caption, list(names.values()), series, self.digits, self.line)


def wrapped(found: Tables) -> Bars:
    """Losses of optimizers in quantize_state, over those with float32 state."""
    table = newest(found["quantize_state"])
    exact = numbers(table, "fp32")
    over: dict[str, dict[str, float]] = {
        codec: {name: loss / exact[name] for name, loss in numbers(table, codec).items()}
        for codec in ("log8", "dynamic8")
    }
    return Bars(
        "Loss of an MLP with state in 8 bits over that with float32 state, by optimizer",
        "loss over float32 state's, where it differs by more than 1%",
        [name for name in exact if any(abs(ratios[name] - 1) > 0.01 for ratios in over.values())],
        over,
        3,
        (1, "float32 state"),
    )


def numbers(table: Table, column: str) -> dict[str, float]:
    """Cells of a column that are single figures, by the names of the rows."""
    return {row: float(x) for row, x in table.column(column).items() if isinstance(x, (int, float))}


#: The figures of docs/, by their names.
DRAWN: dict[str, Callable[[Tables], Bars]] = {
    "bench-in-cache": Drawn(
        "step_cpu_in_cache",
        "Time of the kernels alone, by codec and machine",
        "ns per parameter in cache, one thread; lower is better",
        "ns per parameter",
    ),
    "bench-optimizers": Drawn(
        "optimizers",
        "Time of a step of every optimizer with log8 state, and of torch.optim's",
        "ns per parameter, 2 threads, {machine}; lower is better",
        {"log8 state": "ns per parameter", "torch.optim": "torch.optim"},
    ),
    "bench-sums": Drawn(
        "optimizers_sums",
        "Time of a step of optimizers with sums over the parameter, and of some without",
        "ns per parameter, 2 threads, {machine}; lower is better",
        {"log8 state": "ns per parameter"},
    ),
    "bench-ordered": Drawn(
        "ordered_reduction",
        "Time of ordered reductions over that of torch's float32 reduce-scatter",
        "time over torch's float32, {machine}; lower is better",
        {ranks: ranks for ranks in ("2 ranks", "4 ranks")},
        rows="(?!torch, fp32)(.*)",
        line=(1, "torch, float32"),
    ),
    "bench-quantize-state": wrapped,
}


def outputs() -> dict[Path, str]:
    """The files that this script writes, with their texts."""
    found = read_all()
    front = ROOT / "README.md"
    return {
        ROOT / "benchmarks" / "RESULTS.md": results(found),
        front: readme(found, front.read_text(encoding="utf-8")),
        **{FIGURES / f"{name}.svg": draw(found).figure() for name, draw in DRAWN.items()},
    }


def of_gpu(path: Path) -> Table:
    """The table of the races in a first.json."""
    found = json.loads(path.read_text(encoding="utf-8"))
    device = found["sections"]["facts"][0]["device"]["name"]
    rows = []
    for name, seen, predicted in measured(found):
        expected = predicted.h200 if "H200" in device else predicted.h100
        rows.append((name, seen["ms"], seen["fastest"], seen["GB/s"], seen["of copy"], expected, seen["host us"]))
    columns = [Column(""), Column("median", "ms", 3), Column("fastest", "ms", 3), Column("traffic", "GB/s", 0)]
    columns += [Column("of a copy's", digits=2), Column("predicted", digits=2), Column("host", "us", 0)]
    title, day, command = "One step on a GPU", found["began"][:10], "launch/gpu_first.sh"
    of_run = (device, slug(device), day, commit(), command, None)
    return Table("gpu_first", title, *of_run, tuple(columns), tuple(rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit with 1 where a file is not up to date"
    )
    parser.add_argument("--gpu", type=Path, metavar="FILE", help="first.json of launch/gpu_first.sh")
    args = parser.parse_args()
    if args.gpu is not None:
        table = of_gpu(args.gpu)
        (FOLDER / table.benchmark).mkdir(exist_ok=True)
        (FOLDER / table.benchmark / f"{table.kind}.json").write_text(table.json(), encoding="utf-8")
    stale = [path for path, text in outputs().items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    if args.check and stale:
        names = ", ".join(str(path.relative_to(ROOT)) for path in stale)
        sys.exit(f"not up to date: {names}; run python benchmarks/write_results.py")
    for path, text in outputs().items():
        if path in stale:
            path.write_text(text, encoding="utf-8")
            print(f"written: {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
