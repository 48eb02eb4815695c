"""The programs in examples/ run, learn, and go on from their checkpoints."""

from __future__ import annotations

import contextlib
import io
import json
import re
import runpy
import sys
from pathlib import Path

import pytest

import hugging_face
from needed import needs
from ranks.deepspeed import import_deepspeed
from ranks.pool import Pool

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"


def run(name: str, *arguments: object) -> dict[int, float]:
    """Runs an example as a rank of the world that there is; returns the losses by step, as it prints them."""
    if name == "trainer.py":
        hugging_face.fresh("ddp")
    if name == "deepspeed_offload.py":
        import_deepspeed()
    output, argv = io.StringIO(), sys.argv
    sys.argv = [name, *map(str, arguments)]
    try:
        with contextlib.redirect_stdout(output):
            runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    finally:
        sys.argv = argv
    found = re.findall(r"^step (\d+): loss ([\d.]+)$", output.getvalue(), re.MULTILINE)
    return {int(step): float(loss) for step, loss in found}


def save_tiny_llama(folder: Path) -> None:
    hugging_face.tiny_llama(vocabulary=256).save_pretrained(folder)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("the quick brown fox jumps over the lazy dog. " * 100)
    return path


@pytest.fixture
def llama(client_ranks: Pool, tmp_path: Path) -> Path:
    client_ranks.run(1, save_tiny_llama, tmp_path / "llama")
    return tmp_path / "llama"


def test_examples_are_short_and_all_here() -> None:
    found = {path.name: len(path.read_text().splitlines()) for path in EXAMPLES.glob("*.py")}
    assert found.keys() == {
        "deepspeed_offload.py",
        "fsdp2_finetune.py",
        "muon_pretrain.py",
        "rl_sleep_wake.py",
        "trainer.py",
    }
    assert max(found.values()) <= 60


def test_muon_pretrain(ranks: Pool, text: Path) -> None:
    losses = ranks.run(2, run, "muon_pretrain.py", text, 12)[0]
    assert len(losses) == 12
    assert losses[11] < losses[0] - 1.0


def test_rl_sleep_wake() -> None:
    losses = run("rl_sleep_wake.py", 20)
    assert len(losses) == 20
    assert losses[19] < losses[0] - 0.2


@needs("deepspeed")
def test_deepspeed_offload(deepspeed_ranks: Pool, tmp_path: Path) -> None:
    before = deepspeed_ranks.run(2, run, "deepspeed_offload.py", tmp_path / "run", 6)[0]
    after = deepspeed_ranks.run(1, run, "deepspeed_offload.py", tmp_path / "run", 12)[0]
    assert list(before) == list(range(6))
    assert list(after) == list(range(6, 12))
    assert after[11] < before[0]


@needs("transformers")
def test_fsdp2_finetune(client_ranks: Pool, llama: Path, text: Path, tmp_path: Path) -> None:
    before = client_ranks.run(2, run, "fsdp2_finetune.py", llama, text, tmp_path / "run", 6)[0]
    after = client_ranks.run(1, run, "fsdp2_finetune.py", llama, text, tmp_path / "run", 12)[0]
    assert list(before) == list(range(6))
    assert list(after) == list(range(6, 12))
    assert after[11] < before[0]
    exported = client_ranks.run(2, run, "fsdp2_finetune.py", tmp_path / "run" / "model", text, tmp_path / "next", 1)[0]
    assert exported[0] < before[0]


@needs("transformers", "accelerate")
def test_trainer(client_ranks: Pool, llama: Path, text: Path, tmp_path: Path) -> None:
    client_ranks.run(2, run, "trainer.py", llama, text, tmp_path / "run", 6)
    assert losses_of(tmp_path / "run" / "checkpoint-6").keys() == set(range(1, 7))
    client_ranks.run(1, run, "trainer.py", llama, text, tmp_path / "run", 12)
    found = losses_of(tmp_path / "run" / "checkpoint-12")
    assert found.keys() == set(range(1, 13))
    assert found[12] < found[1]


def losses_of(checkpoint: Path) -> dict[int, float]:
    history = json.loads((checkpoint / "trainer_state.json").read_text())["log_history"]
    return {entry["step"]: entry["loss"] for entry in history if "loss" in entry}
