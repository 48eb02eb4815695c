"""Rooms stay within the sizes of budgets.txt."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CODE = (".py", ".pyi", ".h", ".cpp", ".cu", ".sh")
BUDGETS = {
    room: int(limit)
    for line in (Path(__file__).parent / "budgets.txt").read_text().splitlines()
    if not line.startswith("#")
    for room, limit in [line.split()]
}


def lines_of(room: str) -> int:
    """Lines of a folder's files of code, or of Markdown in docs and README.md."""
    kinds = (".md",) if room == "docs" else CODE
    files = [path for path in (ROOT / room).rglob("*") if path.suffix in kinds]
    files += [ROOT / "README.md"] if room == "docs" else []
    return sum(len(path.read_bytes().splitlines()) for path in files)


@pytest.mark.parametrize("room", BUDGETS)
def test_rooms_stay_within_their_budgets(room: str) -> None:
    found = lines_of(room)
    assert 0 < found <= BUDGETS[room], f"{room}: got {found} lines, expected at most {BUDGETS[room]}; make it smaller"


def test_every_room_has_a_budget() -> None:
    rooms = {f"shardopt/{path.parent.name}" for path in (ROOT / "shardopt").glob("*/__init__.py")}
    assert rooms - {"shardopt/report"} <= BUDGETS.keys()
