"""The training job in a size for tests: its options, its text, and runs of it."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import train
from checkpoint_folder import tensors_in
from lm import checkpoint
from ranks.pool import Pool
from shardopt.checkpoint.index import INDEX_NAME, dump_index, load_index
from shardopt.checkpoint.storage import folder_at

ROOT = Path(__file__).parents[2]
MULTINODE = ROOT / "launch" / "multinode"

#: Where the launchers of this environment are.
PROGRAMS = Path(sys.executable).parent

#: A model of 30 thousand parameters: some of its matrices are quantized, some are too small.
TINY_MODEL = ("--dim", "32", "--layers", "1", "--heads", "2", "--context", "32", "--device", "cpu")
TINY_RUN = ("--batch", "12", "--steps", "8", "--warmup", "2", "--eval-windows", "10", "--eval-interval", "0")
TINY = (*TINY_MODEL, *TINY_RUN, "--log-interval", "1", "--checkpoint-interval", "4", "--verify")
#: The configuration that the scripts of launch/multinode take.
SMALL = ROOT / "configs" / "small.yaml"
#: Gradients are not clipped: their norm would be summed in another order elsewhere.
CLEAR = ("--config", SMALL, *TINY, "--clip", "0")


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def write_text(folder: Path, files: int = 12) -> Path:
    """A folder of small source files, nested and not all of the same length."""
    source = Path(__file__).read_text()
    for index in range(files):
        path = folder / f"part{index % 3}" / f"file{index}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"# {index}\n" + source[: 1000 + 37 * index])
    return folder


def run(*options: object) -> int:
    """Runs the job in this process and returns its exit code."""
    return train.main([str(option) for option in options])


def run_on(ranks: Pool, world_size: int, *options: object) -> dict[str, Any]:
    """Runs the job on some ranks and returns its summary."""
    codes = ranks.run(world_size, train.main, [str(option) for option in options])
    assert codes == [0] * world_size
    return summary(Path(str(options[options.index("--output") + 1])))


def summary(output: Path) -> dict[str, Any]:
    """The summary of a run."""
    found: dict[str, Any] = json.loads((output / "summary.json").read_text())
    return found


def losses(output: Path) -> list[float]:
    """The training losses of a run, step by step."""
    rows = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return [row["train_loss"] for row in rows if "train_loss" in row]


def contents(output: Path, step: int) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """The tensors that a checkpoint holds: dtype, shape and bytes."""
    return tensors_in(output / "checkpoints" / f"step-{step:08d}")


def assert_same_run(output: Path, other: Path, steps: Iterable[int] = (4, 8)) -> None:
    """Demands that two runs have the same losses, and the same bits in their checkpoints at some steps."""
    assert losses(output) == losses(other)
    assert summary(output)["heldout_loss"] == summary(other)["heldout_loss"]
    for step in steps:
        assert contents(output, step) == contents(other, step)


def steps_saved(output: Path) -> list[int]:
    """The steps of which there are complete checkpoints."""
    return [int(path.name.removeprefix("step-")) for path in checkpoint.complete(output / "checkpoints")]


def wait_for_checkpoint(output: Path, process: subprocess.Popen[str], timeout: float = 120.0) -> None:
    """Waits until a run that goes on has saved a checkpoint."""
    deadline = time.monotonic() + timeout
    while not steps_saved(output):
        assert process.poll() is None, f"the run ended with {process.returncode}, expected a checkpoint first"
        assert time.monotonic() < deadline, f"no checkpoint in {timeout:g} s"
        time.sleep(0.02)


def edit_header(path: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    """Changes what the job saved with a checkpoint."""
    index = load_index(folder_at(path))
    edit(index.header["extra"]["job"])
    (path / INDEX_NAME).write_bytes(dump_index(index))
