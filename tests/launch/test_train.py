"""The training job: backends, checkpoints that outlive kills and other numbers of ranks, bad input."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import shardopt.checkpoint
from lm import checkpoint
from lm.backends import Learner
from lm.errors import EXIT_RANKS_LOST
from ranks.pool import Pool
from shardopt.checkpoint.errors import LostRanksError
from shardopt.checkpoint.index import INDEX_NAME
from train_job import (
    CLEAR,
    ROOT,
    TINY,
    TINY_MODEL,
    assert_same_run,
    contents,
    edit_header,
    losses,
    run,
    run_on,
    summary,
)
from versions import needs_fsdp2_on_the_cpu


def test_what_a_run_leaves(two_ranks: Path) -> None:
    rows = [json.loads(line) for line in (two_ranks / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [*range(1, 9), 8]
    assert {"train_loss", "lr", "grad_norm", "optimizer_ms"} <= rows[0].keys()
    found = summary(two_ranks)
    assert found["heldout_loss"] == rows[-1]["heldout_loss"] < 5.6
    assert 2 < found["state_bytes_per_parameter"] < 8
    assert found["optimizer_ms"] > 0
    kept = sorted(path.name for path in (two_ranks / "checkpoints").iterdir())
    assert kept == ["step-00000004", "step-00000008"]


@pytest.mark.parametrize("backend", ["ddp", "fsdp1"])
def test_backends_leave_the_same_bits(backend: str, ranks: Pool, two_ranks: Path, text: Path, tmp_path: Path) -> None:
    """The mean of two gradients is the same, whoever takes it: so is everything that is made of it."""
    found = run_on(ranks, 2, *CLEAR, "--backend", backend, "--data", text, "--output", tmp_path)
    assert_same_run(tmp_path, two_ranks)
    expected = summary(two_ranks)
    assert found["state_bytes_per_parameter"] == pytest.approx(expected["state_bytes_per_parameter"], rel=0.1)
    assert found["parameters"] == expected["parameters"]


@needs_fsdp2_on_the_cpu
def test_ordered_gradients_on_other_numbers_of_ranks(ranks: Pool, text: Path, tmp_path: Path) -> None:
    """A run that goes on with other backends, on 3, 1 and 2 ranks, has the bits of one process."""
    job = (*TINY, "--ordered", "--micro-batches", "6", "--clip", "0.2", "--dropout", "0.1", "--data", text)
    run_on(ranks, 1, *job, "--backend", "single", "--output", tmp_path / "alone")
    job = (*job, "--output", tmp_path / "moved", "--resume", "auto", "--checkpoint-interval", 1)
    for backend, world_size, step in (("ddp", 3, 3), ("fsdp2", 1, 6), ("fsdp2", 2, 8)):
        run_on(ranks, world_size, *job, "--backend", backend, "--stop-at-step", step)
    assert_same_run(tmp_path / "moved", tmp_path / "alone")


@pytest.mark.parametrize(("backend", "world_size"), [("fsdp1", 3), ("single", 1)])
def test_checkpoint_loads_elsewhere_bit_for_bit(
    backend: str, world_size: int, ranks: Pool, two_ranks: Path, text: Path, tmp_path: Path
) -> None:
    options = [*CLEAR, "--data", text, "--output", tmp_path, "--backend", backend]
    options += ["--resume", two_ranks / "checkpoints" / "step-00000004", "--stop-at-step", 5]
    found = run_on(ranks, world_size, *options)["verified"]
    assert found["world_size"] == 2
    assert found["tensors"] == len(contents(two_ranks, 4))
    assert found["codes"] == found["scales"] > 0
    assert losses(tmp_path) == pytest.approx(losses(two_ranks)[4:5], rel=1e-4)


def test_resuming_keeps_the_hyper_parameters_asked_for(two_ranks: Path, text: Path, tmp_path: Path) -> None:
    saved = two_ranks / "checkpoints" / "step-00000004"
    options = [*TINY, "--backend", "single", "--data", text, "--resume", saved, "--stop-at-step", 6]
    found = []
    for name, more in {
        "same": [],
        "decay": ["--options", "weight_decay=0.5"],
        "betas": ["--options", "betas=[0.8, 0.9]"],
    }.items():
        assert run(*options, *more, "--output", tmp_path / name) == 0
        found.append(contents(tmp_path / name, 6)["model.head.weight"])
    assert len(set(found)) == 3


def test_verify_sees_one_wrong_bit(
    two_ranks: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = checkpoint.save

    def of_a_wrong_bit(folder: Path, header: dict[str, Any], learner: Learner, keep: int) -> Path:
        codes = next(state["exp_avg_codes"] for state in learner.optimizer.state.values() if "exp_avg_codes" in state)
        codes.view(torch.uint8).flatten()[0] ^= 1
        return save(folder, header, learner, keep)

    monkeypatch.setattr(checkpoint, "save", of_a_wrong_bit)
    resumed = two_ranks / "checkpoints" / "step-00000004"
    options = [*TINY, "--data", text, "--output", tmp_path / "out", "--backend", "single", "--resume", resumed]
    assert run(*options) == 2
    assert re.search(r"1 of \d+ tensors .* optimizer\..*\.exp_avg_codes", capsys.readouterr().err)


def test_a_run_resumes_from_its_last_complete_checkpoint(
    ranks: Pool, two_ranks: Path, text: Path, tmp_path: Path
) -> None:
    """A save that was killed leaves no index under its name. Runs are killed in test_multinode.py."""
    output = shutil.copytree(two_ranks, tmp_path / "run")
    unfinished = output / "checkpoints" / "step-00000008"
    (unfinished / INDEX_NAME).rename(unfinished / f"{INDEX_NAME}.{'0' * 16}")
    job = (*CLEAR, "--data", text, "--output", output, "--resume", "auto", "--keep-checkpoints", 1)
    run_on(ranks, 2, *job)
    assert_same_run(output, two_ranks, [8])
    assert [path.name for path in (output / "checkpoints").iterdir()] == ["step-00000008"]


@pytest.mark.parametrize(
    ("backend", "precision", "options"),
    [
        ("single", "bf16", ("--optimizer", "sgd", "--options", "momentum=0.9", "nesterov=true", "codec=dynamic8")),
        ("fsdp1", "bf16-mixed", ("--options", "weight_decay=0.1", "min_quantized_numel=0", "codec=bf16")),
    ],
)
def test_precisions_and_options(
    backend: str, precision: str, options: tuple[str, ...], text: Path, tmp_path: Path
) -> None:
    common = [*TINY, "--data", text, "--output", tmp_path, "--backend", backend, "--precision", precision, *options]
    assert run(*common, "--stop-at-step", 2) == 0
    assert run(*common, "--stop-at-step", 3, "--resume", tmp_path / "checkpoints") == 0
    assert summary(tmp_path)["heldout_loss"] < 5.8


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_config_runs(path: Path, text: Path, tmp_path: Path) -> None:
    few = ["--batch", 12, "--steps", 3, "--warmup", 1, "--eval-windows", 4, "--checkpoint-interval", 2]
    assert run("--config", path, *TINY_MODEL, *few, "--data", text, "--output", tmp_path) == 0
    left_out = {"backend", "device", "context", "batch", "steps", "warmup", "eval_windows", "checkpoint_interval"}
    given = {key: value for key, value in yaml.safe_load(path.read_text()).items() if key not in left_out | {"output"}}
    options = summary(tmp_path)["options"]
    assert {key: options[key] for key in given} == given


BAD_INPUT = {
    "missing data": (["--data", "/nowhere"], "data /nowhere not found"),
    "empty folder": (["--data", "EMPTY"], "at least 2"),
    "unknown codec": (["--options", "codec=nope"], "nope"),
    "no value": (["--options", "codec"], "expected NAME=VALUE"),
    "another model": (["--resume", "TWO", "--dim", "64"], "cannot load the checkpoint"),
    "later checkpoints": (["--output", "RUN"], "later than this run's start"),
    "micro-batches": (["--ordered", "--micro-batches", "5"], "got 5 on 1 ranks and a batch of 12, expected a multiple"),
    "unordered": (["--ordered", "--backend", "fsdp1"], "ordered: got backend fsdp1 and accumulate 1, expected fsdp2"),
    "no config": (["--config", "/nowhere.yaml"], "/nowhere.yaml"),
    "nothing to resume": (["--resume", "EMPTY"], "no complete checkpoint"),
    "damaged": (["--resume", "DAMAGED"], "the file was changed after the save"),
    "somebody else's": (["--resume", "OTHER"], "was not saved by train.py"),
    "not a checkpoint": (["--resume", "STRANGE"], "file of another kind"),
}


@pytest.mark.parametrize(("options", "complaint"), BAD_INPUT.values(), ids=BAD_INPUT)
def test_bad_input_gets_one_line(
    options: list[str], complaint: str, two_ranks: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    places = {name: tmp_path / name for name in ("EMPTY", "DAMAGED", "OTHER", "STRANGE")}
    places |= {"TWO": two_ranks / "checkpoints", "RUN": two_ranks}
    places["EMPTY"].mkdir()
    for name in places.keys() - {"EMPTY", "TWO", "RUN"}:
        if name in options:
            shutil.copytree(places["TWO"], places[name])
    for path in places["OTHER"].glob("*"):
        edit_header(path, lambda header: header.clear())
    for path in places["STRANGE"].glob("*"):
        (path / INDEX_NAME).write_text('{"format": 1}')
    for path in places["DAMAGED"].glob("*/*.bin"):
        path.write_bytes(path.read_bytes()[:1000])
    options = [str(places.get(option, option)) for option in options]
    assert run(*TINY, "--data", text, "--backend", "single", "--output", tmp_path / "out", *options) == 2
    printed = capsys.readouterr().err.splitlines()
    assert len(printed) == 1, printed
    assert printed[0].startswith("train.py: error: ")
    assert complaint in printed[0]


def test_a_rank_lost_in_a_save_is_no_bad_input(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The save cannot complete, but the checkpoint's files are well."""

    def lose(*args: object, **options: object) -> None:
        cause = RuntimeError("[gloo/transport] Read error. Or more")
        raise LostRanksError("the ranks cannot talk to each other any more") from cause

    monkeypatch.setattr(shardopt.checkpoint, "save", lose)
    assert run(*TINY, "--backend", "single", "--data", text, "--output", tmp_path / "output") == EXIT_RANKS_LOST
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("train.py: error")]
    reason = "[gloo/transport] Read error"
    assert line.startswith(f"train.py: error: another rank is gone or did not answer in time ({reason}): see")
