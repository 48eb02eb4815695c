"""A rank that dies under torchrun: all ranks start again from the last checkpoint, and nothing shows in the end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import shardopt.checkpoint
from lm.errors import EXIT_RANKS_LOST
from ranks.pool import Pool
from shardopt.checkpoint.errors import LostRanksError
from train_job import (
    ROOT,
    TINY,
    assert_same_run,
    pid_of_rank,
    run,
    run_on,
    wait_for_checkpoint,
)
from versions import needs_fsdp2_on_the_cpu

TORCHRUN = (
    *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"),
    *("--nproc-per-node", "2", "--max-restarts", "1", str(ROOT / "launch" / "train.py")),
)
LONG = (
    *(*TINY, "--config", str(ROOT / "configs" / "small.yaml"), "--clip", "0", "--keep-checkpoints", "0"),
    *("--steps", "500", "--checkpoint-interval", "20", "--stop-at-step", "80"),
)


@pytest.mark.slow  # test_multinode.py loses a whole machine by default
@needs_fsdp2_on_the_cpu
def test_a_killed_rank_starts_again(ranks: Pool, text: Path, tmp_path: Path) -> None:
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    run_on(ranks, 2, *LONG, "--data", text, "--output", whole)

    process = subprocess.Popen(
        [*TORCHRUN, *LONG, "--backend", "fsdp2", "--resume", "auto", "--data", text, "--output", killed],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        wait_for_checkpoint(killed, process)
        os.kill(pid_of_rank(killed, 1), signal.SIGKILL)
        said, _ = process.communicate(timeout=240)
    finally:
        process.terminate()
    assert process.returncode == 0, said
    assert said.count(f"resumed {killed}/checkpoints/step-") == 1
    assert_same_run(killed, whole, steps=(20, 40, 60, 80))


@pytest.mark.parametrize("cause", [RuntimeError("[gloo/transport] Read error. Or more"), None])
def test_a_rank_lost_in_a_save_is_no_bad_input(
    cause: Exception | None,
    text: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The save cannot complete, but the checkpoint's files are well."""

    def lose(*args: object, **options: object) -> None:
        raise LostRanksError("the ranks cannot talk to each other any more") from cause

    monkeypatch.setattr(shardopt.checkpoint, "save", lose)
    assert run(*TINY, "--backend", "single", "--data", text, "--output", tmp_path / "output") == EXIT_RANKS_LOST
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("train.py: error")]
    reason = "[gloo/transport] Read error" if cause else "the ranks cannot talk to each other any more"
    assert line.startswith(f"train.py: error: another rank is gone or did not answer in time ({reason}): see")
