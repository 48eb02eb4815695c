"""The training job in u-muP, in float16 and FP8 without scales, with 8-bit state."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from lm import config
from lm.errors import UserError
from ranks.pool import Pool
from train_job import TINY, digests, edit_header, losses, run, run_on, summary

U_MUP = (*TINY, "--parametrization", "u-mup", "--lr", "0.5", "--clip", 0, "--min-quantized-numel", 64)
#: With 24-bit master weights beside float16 ones.
PRECISIONS = {
    "fp32": (),
    "fp16": ("--precision", "fp16", "--master-weight-bits", 24),
    "fp8": ("--precision", "fp8"),
}


@pytest.fixture(scope="module")
def exact(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output of a run in float32, in one process."""
    output = tmp_path_factory.mktemp("exact")
    assert run(*U_MUP, "--backend", "single", "--data", text, "--output", output) == 0
    return output


def largest_difference(output: Path, other: Path) -> float:
    """Of the losses of two runs; of their last ones, where one has fewer."""
    count = min(len(losses(output)), len(losses(other)))
    return max(abs(a - b) for a, b in zip(losses(output)[-count:], losses(other)[-count:], strict=True))


@pytest.fixture(scope="module")
def own_error(exact: Path, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], float]:
    """Of a precision, how far its losses in one process are from float32's. Two more roundings may double that."""

    @cache
    def of(precision: str) -> float:
        output = tmp_path_factory.mktemp(precision)
        assert run(*U_MUP, *PRECISIONS[precision], "--backend", "single", "--data", text, "--output", output) == 0
        return largest_difference(output, exact)

    return of


@pytest.mark.parametrize("precision", PRECISIONS)
def test_sharded(
    ranks: Pool, exact: Path, own_error: Callable[[str], float], text: Path, tmp_path: Path, precision: str
) -> None:
    """Losses are those of float32 in one process, and a run that resumes on one rank goes on."""
    output = tmp_path / "sharded"
    options = (*U_MUP, *PRECISIONS[precision], "--data", text)
    found = run_on(ranks, 2, *options, "--backend", "fsdp2", "--output", output)
    assert losses(output)[-1] < losses(output)[0] - 0.5
    if precision == "fp32":
        assert losses(output) == pytest.approx(losses(exact), rel=1e-3)
    else:
        assert 0 < largest_difference(output, exact) <= 2 * own_error(precision)
    assert found["state_bytes_per_parameter"] < (4.5 if precision == "fp16" else 3.5)
    assert found["weight_bytes_per_parameter"] == (2 if precision == "fp16" else 4)
    resumed = (
        "--resume",
        output / "checkpoints" / "step-00000004",
        "--backend",
        "single",
        "--output",
        tmp_path / "one",
    )
    assert run(*options, *resumed) == 0
    assert summary(tmp_path / "one")["verified"]["codes"] > 0
    if precision == "fp32":
        assert losses(tmp_path / "one") == pytest.approx(losses(output)[4:], rel=1e-3)
    else:
        assert largest_difference(tmp_path / "one", output) <= 2 * own_error(precision)


def test_accumulation_changes_no_gradient(exact: Path, text: Path, tmp_path: Path) -> None:
    """Neither their direction nor their scale."""
    options = (*U_MUP, "--backend", "single", "--accumulate", 4, "--data", text, "--output", tmp_path)
    assert run(*options, "--resume", exact / "checkpoints" / "step-00000004") == 0
    assert losses(tmp_path) == pytest.approx(losses(exact)[4:], rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["ddp", "fsdp1", "zero_redundancy"])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_other_backends(
    ranks: Pool, own_error: Callable[[str], float], text: Path, tmp_path: Path, backend: str, precision: str
) -> None:
    """Their bits are those of FSDP2, where float32 is rounded nowhere else."""
    options = (*U_MUP, *PRECISIONS[precision], "--data", text)
    run_on(ranks, 2, *options, "--backend", "fsdp2", "--output", tmp_path / "fsdp2")
    run_on(ranks, 2, *options, "--backend", backend, "--output", tmp_path / backend)
    if precision == "fp32":
        assert digests(tmp_path / backend, 8) == digests(tmp_path / "fsdp2", 8)
    else:
        assert largest_difference(tmp_path / backend, tmp_path / "fsdp2") <= 2 * own_error(precision)


@pytest.mark.parametrize("precision", ["fp16", "fp8"])
def test_standard_parametrization(text: Path, tmp_path: Path, precision: str) -> None:
    """The loss falls at least half as far as in float32, and differs from it."""
    options = (*TINY, *PRECISIONS[precision], "--backend", "single", "--data", text)
    assert run(*options, "--output", tmp_path / precision) == 0
    assert run(*TINY, "--backend", "single", "--data", text, "--output", tmp_path / "fp32") == 0
    found, exact = losses(tmp_path / precision), losses(tmp_path / "fp32")
    assert found != exact
    assert found[0] - found[-1] > (exact[0] - exact[-1]) / 2 > 0


def test_a_checkpoint_of_the_other_parametrization_is_refused(
    exact: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = exact / "checkpoints" / "step-00000004"
    options = (*TINY, "--backend", "single", "--data", text, "--output", tmp_path / "sp", "--min-quantized-numel", 64)
    assert run(*options, "--resume", path) == 2
    assert "from another model: parametrization is u-mup, not sp" in capsys.readouterr().err


def test_older_checkpoints_do_not_say_the_parametrization(text: Path, tmp_path: Path) -> None:
    options = (*TINY, "--backend", "single", "--data", text)
    assert run(*options, "--output", tmp_path / "old") == 0
    path = tmp_path / "old" / "checkpoints" / "step-00000004"
    edit_header(path, lambda header: header["model"].pop("parametrization"))
    assert run(*options, "--output", tmp_path / "new", "--resume", path) == 0
    assert digests(tmp_path / "new", 8) == digests(tmp_path / "old", 8)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--parametrization", "u-mup"], "got clip 1.0, expected 0"),
        (["--parametrization", "u-mup", "--clip", "0", "--tied"], "got tied True"),
        (["--parametrization", "u-mup", "--clip", "0", "--dropout", "0.1"], "got dropout 0.1, expected 0"),
        (
            ["--parametrization", "u-mup", "--clip", "0", "--optimizer", "muon"],
            "got optimizer muon, expected one of adamw",
        ),
        (
            [
                "--parametrization",
                "u-mup",
                "--clip",
                "0",
                "--backend",
                "deepspeed",
                "--deepspeed",
                "configs/zero2.json",
            ],
            "got backend deepspeed, expected",
        ),
        (
            ["--precision", "fp16", "--backend", "deepspeed", "--deepspeed", "configs/zero2.json"],
            "precision: got fp16 with backend deepspeed",
        ),
        (["--precision", "int8"], "got 'int8', expected one of fp32"),
    ],
)
def test_what_does_not_go_together(options: list[str], complaint: str) -> None:
    with pytest.raises(UserError, match=complaint):
        config.load(options)
