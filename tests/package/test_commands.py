"""The console command `shardopt` in a pipe."""

from __future__ import annotations

import os
import sys

import pytest

from shardopt.__main__ import main


def test_a_reader_that_has_seen_enough_ends_a_command_without_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as output:
        monkeypatch.setattr(sys, "stdout", output)
        assert main(["estimate", "7B"]) == 141
        monkeypatch.undo()
