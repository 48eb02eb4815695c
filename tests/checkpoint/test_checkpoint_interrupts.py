"""Ctrl-C during saves and loads: at chosen places only, and what it then leaves."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import shardopt
from checkpoint_folder import content_of, linear_run
from shardopt.checkpoint import restore
from shardopt.checkpoint.interrupts import deferred_interrupts, interruption_point
from shardopt.checkpoint.local_folder import LocalFolder
from shardopt.checkpoint.saving import Saving


def _interrupt() -> None:
    """Sends SIGINT to this process; the handler runs before this returns."""
    signal.raise_signal(signal.SIGINT)


@pytest.fixture(autouse=True)
def _own_handler() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    signal.signal(signal.SIGINT, before)


def test_at_a_point() -> None:
    reached = False
    with pytest.raises(KeyboardInterrupt), deferred_interrupts():  # noqa: PT012
        interruption_point()
        _interrupt()
        reached = True
        interruption_point()
        raise AssertionError
    assert reached


def test_at_the_end() -> None:
    reached = False
    with pytest.raises(KeyboardInterrupt), deferred_interrupts():  # noqa: PT012
        _interrupt()
        _interrupt()
        reached = True
    assert reached
    with deferred_interrupts():
        interruption_point()


def test_nested() -> None:
    reached = []
    with pytest.raises(KeyboardInterrupt), deferred_interrupts():  # noqa: PT012
        with deferred_interrupts():
            _interrupt()
            reached.append("inner")
        reached.append("outer")
    assert reached == ["inner", "outer"]


def test_a_handler_of_the_programs_own() -> None:
    seen = []
    signal.signal(signal.SIGINT, lambda number, frame: seen.append(number))
    with deferred_interrupts():
        _interrupt()
        assert not seen
        interruption_point()
        assert seen == [signal.SIGINT]
    assert seen == [signal.SIGINT]
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.mark.parametrize("handler", [signal.SIG_IGN, signal.SIG_DFL])
def test_what_is_no_handler_stays(handler: Any) -> None:
    signal.signal(signal.SIGINT, handler)
    with deferred_interrupts():
        assert signal.getsignal(signal.SIGINT) is handler
    signal.signal(signal.SIGINT, signal.default_int_handler)


def test_other_threads_take_no_part() -> None:
    """A save in another thread must not raise the main thread's interrupt."""
    raised = []

    def work() -> None:
        try:
            with deferred_interrupts():
                interruption_point()
        except BaseException as error:
            raised.append(error)

    with pytest.raises(KeyboardInterrupt), deferred_interrupts():  # noqa: PT012
        _interrupt()
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert not raised


def test_during_the_change_of_model_and_optimizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An interrupt after the first parameter was changed waits until all are."""
    saved, other = linear_run(0), linear_run(1)
    shardopt.checkpoint.save(tmp_path, *saved)
    apply = restore.apply

    def interrupted(*args: Any) -> None:
        assert content_of(*other) != content_of(*linear_run(1))
        _interrupt()
        apply(*args)

    monkeypatch.setattr(restore, "apply", interrupted)
    with pytest.raises(KeyboardInterrupt):
        shardopt.checkpoint.load(tmp_path, *other)
    assert content_of(*other) == content_of(*saved)


def test_while_reading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved, other = linear_run(0), linear_run(1)
    shardopt.checkpoint.save(tmp_path, *saved)
    opened = LocalFolder.open

    def interrupted(self: LocalFolder, name: str) -> Any:
        _interrupt()
        return opened(self, name)

    monkeypatch.setattr(LocalFolder, "open", interrupted)
    threads = threading.active_count()
    with pytest.raises(KeyboardInterrupt):
        shardopt.checkpoint.load(tmp_path, *other)
    assert content_of(*other) == content_of(*linear_run(1))
    assert threading.active_count() == threads


@pytest.mark.parametrize("commits", [False, True])
def test_while_saving(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, commits: bool) -> None:
    """Before the last piece is written the save ends; once it commits, it is completed."""
    old, new = linear_run(0), linear_run(1)
    shardopt.checkpoint.save(tmp_path, *old)
    name = "_commit" if commits else "_write"
    original = getattr(Saving, name)

    def interrupted(*args: Any) -> Any:
        _interrupt()
        return original(*args)

    threads = threading.active_count()
    with monkeypatch.context() as context:
        context.setattr(Saving, name, interrupted)
        with pytest.raises(KeyboardInterrupt):
            shardopt.checkpoint.save(tmp_path, *new)
    assert threading.active_count() == threads
    assert len(list(tmp_path.glob("*.bin"))) == 1
    loaded = linear_run(2)
    shardopt.checkpoint.load(tmp_path, *loaded)
    assert content_of(*loaded) == content_of(*(new if commits else old))
    shardopt.checkpoint.save(tmp_path, *new)
