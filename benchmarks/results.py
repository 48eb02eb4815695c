"""The form in which benchmarks keep figures: one table of one run, a JSON file in results/<benchmark>/<kind>.json.

``kind`` names the kind of machine. A newer run on the same kind replaces the file; git keeps the past. write_results.py
makes RESULTS.md, README's table and the figures of docs/ from these files.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FOLDER = Path(__file__).resolve().parent / "results"
#: Names of microarchitectures by vendor, CPU family and model, as Linux numbers them: first and last model.
ARCHITECTURES = {
    ("AuthenticAMD", 25): {(0x00, 0x0F): "zen3", (0x10, 0x1F): "zen4", (0x20, 0x5F): "zen3", (0x60, 0xAF): "zen4"},
    ("AuthenticAMD", 26): {(0x00, 0xFF): "zen5"},
    ("GenuineIntel", 6): {
        (85, 85): "skylake-sp",
        (106, 108): "ice-lake",
        (143, 143): "sapphire-rapids",
        (173, 174): "granite-rapids",
        (207, 207): "emerald-rapids",
    },
}

#: A figure, several of repeated runs, a text, or nothing.
Cell = float | int | str | None | list[float]


@dataclass(frozen=True)
class Column:
    """A column of a table.

    Attributes:
        name: its heading.
        unit: of its figures; "" for ratios, counts and texts.
        digits: behind the point, of floats; None for three significant ones.
    """

    name: str
    unit: str = ""
    digits: int | None = None

    @property
    def head(self) -> str:
        """The heading with its unit."""
        return f"{self.name}, {self.unit}" if self.unit else self.name

    def round(self, cell: Cell) -> Cell:
        """A cell with as many digits as the column shows."""
        if isinstance(cell, list):
            return [float(self.round(x)) for x in cell]  # type: ignore[arg-type]
        if not isinstance(cell, float):
            return cell
        return float(f"{cell:.3g}") if self.digits is None else round(cell, self.digits)

    def text(self, cell: Cell) -> str:
        """A cell as tables show it."""
        if isinstance(cell, list):
            return ", ".join(self.text(x) for x in cell)
        if isinstance(cell, float):
            return str(cell) if self.digits is None else f"{cell:.{self.digits}f}"
        return str(cell if cell is not None else "")


@dataclass(frozen=True)
class Goal:
    """A goal that was set before the run, with what the run gave, and whether that meets it."""

    text: str
    met: bool


@dataclass(frozen=True)
class Table:
    """Figures of one run.

    Attributes:
        benchmark: the folder's name: that of the script, and of the part of it.
        title: a heading.
        machine: in words.
        kind: of machine, the file's name, as ``amd-zen4-2-cores``.
        date: of the run, ``YYYY-MM-DD``.
        commit: of the code that ran, abbreviated, or "unknown".
        command: that gave the figures, from the repository's root.
        threads: of a process; None where rows say it, or where nothing depends on it.
        columns: the first one names the rows.
        rows: a cell for each column.
        goals: those of this benchmark on this kind of machine.
        notes: sentences that the reader of the figures needs.
    """

    benchmark: str
    title: str
    machine: str
    kind: str
    date: str
    commit: str
    command: str
    threads: int | None
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    goals: tuple[Goal, ...] = ()
    notes: tuple[str, ...] = ()

    def column(self, name: str) -> dict[str, Cell]:
        """Cells of a column, by the names of the rows.

        Raises:
            ValueError: there is no such column.
        """
        names = [column.name for column in self.columns]
        if name not in names:
            file = f"results/{self.benchmark}/{self.kind}.json"
            raise ValueError(f"got the columns {names} in {file}, expected {name!r}, too; run the whole benchmark")
        return {str(row[0]): row[names.index(name)] for row in self.rows}

    def texts(self, name: str) -> dict[str, str]:
        """Cells of a column as tables show them, by the names of the rows."""
        cells = self.column(name)
        (column,) = [column for column in self.columns if column.name == name]
        return {row: column.text(cell) for row, cell in cells.items()}

    def json(self) -> str:
        """The file's text: a line for each column and row."""
        lines = []
        for name, value in asdict(self).items():
            if isinstance(value, (list, tuple)) and value:
                inside = ",\n".join(f"    {json.dumps(item, ensure_ascii=False)}" for item in value)
                lines.append(f"  {json.dumps(name)}: [\n{inside}\n  ]")
            else:
                lines.append(f"  {json.dumps(name)}: {json.dumps(value, ensure_ascii=False)}")
        return "{\n" + ",\n".join(lines) + "\n}\n"


def read(path: Path) -> Table:
    """The table in a file.

    Raises:
        ValueError: a row has more or fewer cells than there are columns, or the file stands elsewhere than its
            benchmark and kind say.
        TypeError: a field is missing, or unknown.
    """
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    columns = tuple(Column(**column) for column in found.pop("columns"))
    rows = tuple(tuple(row) for row in found.pop("rows"))
    goals = tuple(Goal(**goal) for goal in found.pop("goals"))
    table = Table(columns=columns, rows=rows, goals=goals, notes=tuple(found.pop("notes")), **found)
    for row in rows:
        if len(row) != len(columns):
            raise ValueError(
                f"{path}: got {len(row)} cells in the row {row[0]!r}, expected {len(columns)}, one a column"
            )
    place = f"{table.benchmark}/{table.kind}.json"
    if "/".join(path.parts[-2:]) != place:
        raise ValueError(f"got the table of {place} in {path}; rename the file, or mend its benchmark and kind")
    return table


def read_all(folder: Path = FOLDER) -> dict[str, list[Table]]:
    """All tables by benchmark, those of a benchmark by kind of machine."""
    found: dict[str, list[Table]] = {}
    for path in sorted(folder.glob("*/*.json")):
        found.setdefault(path.parent.name, []).append(read(path))
    return found


def parser(text: str | None) -> argparse.ArgumentParser:
    """A parser of a benchmark's options, with the text of its module as help and ``--json [FOLDER]``."""
    made = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    said = "also write the figures to <benchmark>/<machine kind>.json there (default: benchmarks/results)"
    made.add_argument("--json", type=Path, nargs="?", const=FOLDER, metavar="FOLDER", help=said)
    return made


def report(
    where: Path | None,
    benchmark: str,
    title: str,
    columns: Sequence[Column],
    rows: Iterable[Sequence[Cell]],
    *,
    threads: int | None = None,
    goals: Sequence[Goal | None] = (),
    notes: Sequence[str] = (),
) -> None:
    """Prints the figures of this run, each row as soon as it is there, and writes them.

    Args:
        where: the folder, the value of ``--json``; None for nowhere.
        benchmark, title, columns, rows, threads, notes: as in :class:`Table`; floats are rounded.
        goals: None stands for a goal of which the run measured nothing.
    """
    print(f"\n{title}\n{machine()}, commit {commit()}, {command()}\n")
    widths = [32, *(max(len(column.head), 7) for column in columns[1:])]
    print_row([column.head for column in columns], widths)
    taken: list[tuple[Cell, ...]] = []
    for row in rows:
        taken.append(tuple(column.round(cell) for column, cell in zip(columns, row, strict=True)))
        print_row([column.text(cell) for column, cell in zip(columns, taken[-1], strict=True)], widths)
    set_goals = tuple(goal for goal in goals if goal is not None)
    for text in (*notes, *(f"goal {'met' if goal.met else 'MISSED'}: {goal.text}" for goal in set_goals)):
        print(text)
    if where is None:
        return
    table = Table(
        benchmark,
        title,
        machine(),
        kind(),
        str(date.today()),
        commit(),
        command(),
        threads,
        tuple(columns),
        tuple(taken),
        set_goals,
        tuple(notes),
    )
    path = where / table.benchmark / f"{table.kind}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(table.json(), encoding="utf-8")
    print(f"written to {path}")


def print_row(cells: Sequence[str], widths: Sequence[int]) -> None:
    """Prints a row, its name on the left and figures to the right of their columns."""
    name, *figures = (f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True))
    print(name.strip().ljust(widths[0]), *figures, sep="  ", flush=True)


def at_most(text: str, got: float | None, limit: float) -> Goal | None:
    """A goal that a figure meets unless it is larger than the limit; None if nothing was measured."""
    return None if got is None else Goal(f"{text} {got:.3g}, at most {limit:g}", got <= limit)


def at_least(text: str, got: float | None, limit: float) -> Goal | None:
    """A goal that a figure meets unless it is smaller than the limit; None if nothing was measured."""
    return None if got is None else Goal(f"{text} {got:.3g}, at least {limit:g}", got >= limit)


def ratio(x: float | None, y: float | None) -> float | None:
    """``x / y``, or None where one of them was not measured."""
    return None if x is None or y is None else x / y


def machine() -> str:
    """The processor, as far as the system tells, and PyTorch's version."""
    import torch

    from shardopt.kernels.dispatch import cpu_target

    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line.split(":")[1].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        model = f"{len(names)} x {names[0]}" if names else model
    return f"{model}, kernels {cpu_target()}, torch {torch.__version__}"


def kind() -> str:
    """The kind of this machine: vendor, microarchitecture (or the name of the model), number of processors."""
    cpuinfo = Path("/proc/cpuinfo")
    return kind_of(cpuinfo.read_text()) if cpuinfo.exists() else slug(platform.machine())


def kind_of(cpuinfo: str) -> str:
    """The kind of the machine that has this /proc/cpuinfo."""
    lines = [line.split(":", 1) for line in cpuinfo.splitlines() if ":" in line]
    processors = sum(name.strip() == "processor" for name, _ in lines)
    first = {name.strip(): value.strip() for name, value in reversed(lines)}
    vendor, family, model = (first.get(name, "") for name in ("vendor_id", "cpu family", "model"))
    if family.isdigit() and model.isdigit():
        models = ARCHITECTURES.get((vendor, int(family)), {})
        for (begin, end), name in models.items():
            if begin <= int(model) <= end:
                return f"{'amd' if 'AMD' in vendor else 'intel'}-{name}-{processors}-cores"
    return f"{slug(first.get('model name', platform.machine()))}-{processors}-cores"


def slug(name: str) -> str:
    """A name in small letters, digits and hyphens."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def commit() -> str:
    """The commit of the checkout, abbreviated."""
    try:
        found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    except FileNotFoundError:  # the GPU's machine may have no git
        return "unknown"
    return found.stdout.strip() or "unknown"


def command() -> str:
    """The command of this process, as it is given in the repository's root; without ``--json``."""
    script = Path(sys.argv[0]).resolve()
    name = script.relative_to(ROOT) if script.is_relative_to(ROOT) else script.name
    arguments = re.sub(r"(?:^| )--json(?:[= ](?!-)\S+)?", "", shlex.join(sys.argv[1:])).strip()
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return f"torchrun --nproc_per_node {os.environ['LOCAL_WORLD_SIZE']} {name} {arguments}".rstrip()
    return f"python {name} {arguments}".rstrip()
