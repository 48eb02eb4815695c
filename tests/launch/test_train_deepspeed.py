"""The training job with DeepSpeed: every config, against FSDP2, and checkpoints to and from other backends."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch.utils.cpp_extension

import train
from lm import backends
from lm.errors import UserError
from lm.options import load
from ranks.pool import Pool
from train_job import ROOT, TINY, assert_same_run, contents, losses, run_on, summary

CONFIGS = ROOT / "configs"
UNCLIPPED = (*TINY, "--clip", 0)  # a norm is summed in another order elsewhere


@pytest.fixture(scope="module")
def fsdp2(deepspeed_ranks: Pool, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output of a run on 2 ranks of FSDP2, with checkpoints at steps 4 and 8."""
    output = tmp_path_factory.mktemp("fsdp2")
    run_on(deepspeed_ranks, 2, *UNCLIPPED, "--data", text, "--output", output)
    return output


@pytest.fixture(scope="module")
def zero3(deepspeed_ranks: Pool, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Trains with ZeRO 3."""
    output = tmp_path_factory.mktemp("zero3")
    run_deepspeed(deepspeed_ranks, CONFIGS / "zero3.json", *UNCLIPPED, "--data", text, "--output", output)
    return output


def run_deepspeed(ranks: Pool, path: Path, *options: object) -> dict[str, Any]:
    """Runs the job on 2 ranks of DeepSpeed, which may compile nothing, and returns its summary."""
    argv = [str(option) for option in (*options, "--backend", "deepspeed", "--deepspeed", path)]
    assert ranks.run(2, _without_compiler, argv) == [0, 0]
    return summary(Path(argv[argv.index("--output") + 1]))


def _without_compiler(argv: list[str]) -> int:
    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError(f"got a compilation of {args}, expected none")

    torch.utils.cpp_extension.load = refuse
    return train.main(argv)


def write_config(folder: Path, **settings: Any) -> Path:
    path = folder / "deepspeed.json"
    path.write_text(json.dumps(settings))
    return path


@pytest.mark.parametrize("name", ["zero1", "zero2", "zero2_offload"])
def test_zero_1_and_2_leave_the_bits_of_fsdp2(
    name: str, deepspeed_ranks: Pool, fsdp2: Path, text: Path, tmp_path: Path
) -> None:
    path = CONFIGS / f"{name}.json"
    found = run_deepspeed(deepspeed_ranks, path, *UNCLIPPED, "--data", text, "--output", tmp_path)
    assert_same_run(tmp_path, fsdp2)
    assert losses(tmp_path)[-1] < losses(tmp_path)[0] - 0.3
    theirs = summary(fsdp2)
    assert found["parameters"] == theirs["parameters"]
    assert found["state_bytes_per_parameter"] == pytest.approx(theirs["state_bytes_per_parameter"], rel=0.1)


def test_zero_3_with_offload_leaves_the_bits_of_zero_3(
    deepspeed_ranks: Pool, zero3: Path, fsdp2: Path, text: Path, tmp_path: Path
) -> None:
    options = (*UNCLIPPED, "--data", text, "--output", tmp_path)
    run_deepspeed(deepspeed_ranks, CONFIGS / "zero3_offload.json", *options)
    assert_same_run(tmp_path, zero3)
    assert losses(tmp_path)[-1] < losses(tmp_path)[0] - 0.3
    # ZeRO 3 multiplies matrices in a function of its own.
    assert losses(tmp_path) == pytest.approx(losses(fsdp2), rel=1e-4)


def test_accumulation_and_clipping(deepspeed_ranks: Pool, text: Path, tmp_path: Path) -> None:
    common = (*TINY, "--data", text, "--accumulate", 2, "--clip", 0.5, "--checkpoint-interval", 0)
    run_on(deepspeed_ranks, 2, *common, "--output", tmp_path / "fsdp2")
    run_deepspeed(deepspeed_ranks, CONFIGS / "zero2.json", *common, "--output", tmp_path / "zero2")
    assert losses(tmp_path / "zero2") == pytest.approx(losses(tmp_path / "fsdp2"), rel=1e-5)
    norms = [[row["grad_norm"] for row in rows(tmp_path / name) if "grad_norm" in row] for name in ("zero2", "fsdp2")]
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)
    assert max(norms[1]) > 0.5  # it was clipped


def rows(output: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(("name", "source"), [("zero2", "fsdp2"), ("zero3", "zero3")])
def test_a_checkpoint_resumes(
    name: str, source: str, deepspeed_ranks: Pool, fsdp2: Path, zero3: Path, text: Path, tmp_path: Path
) -> None:
    """Under ZeRO 2 bit for bit as if it had never been another backend's, which computes as FSDP2 does."""
    before = {"zero3": zero3, "fsdp2": fsdp2}[source]
    saved = before / "checkpoints" / "step-00000004"
    options = (*UNCLIPPED, "--data", text, "--output", tmp_path, "--resume", saved)
    found = run_deepspeed(deepspeed_ranks, CONFIGS / f"{name}.json", *options)
    assert found["verified"]["tensors"] == len(contents(before, 4))
    assert found["verified"]["codes"] == found["verified"]["scales"] > 0
    assert contents(tmp_path, 8) == contents(before, 8)
    assert losses(tmp_path) == losses(before)[4:]


def test_bfloat16_without_masters(deepspeed_ranks: Pool, text: Path, tmp_path: Path) -> None:
    options = (*TINY, "--data", text, "--output", tmp_path, "--precision", "bf16")
    options = (*options, "--options", "master_weight_bits=24")
    run_deepspeed(deepspeed_ranks, CONFIGS / "zero2.json", *options, "--stop-at-step", 4)
    found = run_deepspeed(deepspeed_ranks, CONFIGS / "zero2.json", *options, "--resume", "auto")
    assert found["verified"]["tensors"] == len(contents(tmp_path, 4))
    assert losses(tmp_path)[-1] < losses(tmp_path)[0] - 0.3


def test_refusals_are_one_line(deepspeed_ranks: Pool, text: Path, tmp_path: Path) -> None:
    path = write_config(tmp_path, zero_optimization={"stage": 1})
    argv = [*TINY, "--options", "quantum=3", "--data", text, "--output", tmp_path]
    argv += ["--backend", "deepspeed", "--deepspeed", path]
    for code, said in deepspeed_ranks.run(2, _run_and_listen, [str(option) for option in argv]):
        assert code == 2
        (line,) = said.splitlines()
        assert line.startswith(f"train.py: error: {path}: optimizer.params of AdamW8bit: got unknown option 'quantum'")


def _run_and_listen(argv: list[str]) -> tuple[int, str]:
    with contextlib.redirect_stderr(io.StringIO()) as said:
        code = train.main(argv)
    return code, said.getvalue()


def test_settings_that_the_job_decides_are_refused(tmp_path: Path) -> None:
    paths = (CONFIGS / "zero3_nvme.json", write_config(tmp_path, optimizer={"type": "Adam"}))
    taken, found = (load(["--backend", "deepspeed", "--deepspeed", str(path)]) for path in paths)
    assert backends.engine_settings(taken, 2)["zero_optimization"]["stage"] == 3
    with pytest.raises(UserError, match="got optimizer, which the job's options decide; leave it out"):
        backends.engine_settings(found, 2)
