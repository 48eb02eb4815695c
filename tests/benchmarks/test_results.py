"""RESULTS.md, README's table and the benchmarks' figures are those of the files in benchmarks/results/."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest

import results
import write_results
from results import Column, Goal, Table


@pytest.mark.parametrize("path", write_results.outputs(), ids=lambda path: path.stem)
def test_written_files_are_up_to_date(path: Path) -> None:
    assert path.read_text(encoding="utf-8") == write_results.outputs()[path], "run python benchmarks/write_results.py"


def table(folder: Path) -> Table:
    """A small table, written by a script's call, as it is read again."""
    columns = [Column("optimizer"), Column("time", "ms", 2), Column("size")]
    rows = [["ours", 1.23456, 3], ["theirs", [1.5, 2.25], None]]
    goals = [results.at_most("time", 1.23456, 1.2), results.at_least("ratio", None, 2.0)]
    results.report(folder, "small", "A small benchmark", columns, rows, threads=2, goals=goals, notes=["a note"])
    return results.read(folder / "small" / "amd-zen4-2-cores.json")


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "kind", lambda: "amd-zen4-2-cores")
    monkeypatch.setattr(
        sys, "argv", [str(results.ROOT / "benchmarks" / "small.py"), "--rounds", "3", "--json", "--fast"]
    )


def test_what_a_script_writes_can_be_read(script: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = table(tmp_path)
    assert found.rows == (("ours", 1.23, 3), ("theirs", [1.5, 2.25], None))
    assert found.goals == (Goal("time 1.23, at most 1.2", False),)
    assert found.command == "python benchmarks/small.py --rounds 3 --fast"
    assert found.json() == (tmp_path / "small" / "amd-zen4-2-cores.json").read_text()
    assert [found.columns[1].text(row[1]) for row in found.rows] == ["1.23", "1.50, 2.25"]
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["optimizer", "time,", "ms", "size"] in lines
    assert ["ours", "1.23", "3"] in lines
    assert ["goal", "MISSED:", "time", "1.23,", "at", "most", "1.2"] in lines


def test_faulty_files_are_refused(script: None, tmp_path: Path) -> None:
    found = table(tmp_path)
    path = tmp_path / "small" / "amd-zen4-2-cores.json"
    path.write_text(dataclasses.replace(found, rows=(("ours", 1.0),)).json())
    with pytest.raises(ValueError, match=r"got 2 cells in the row 'ours', expected 3"):
        results.read(path)
