"""The training job: backends, checkpoints that outlive kills and other numbers of ranks, bad input."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from ranks.pool import Pool
from train_job import ROOT, TINY, TINY_MODEL, digests, run, run_on, summary, write_text

TRAIN = ROOT / "launch" / "train.py"


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of text."""
    return write_text(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def two_ranks(ranks: Pool, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output of a run on 2 ranks of FSDP2, with checkpoints at steps 4 and 8."""
    output = tmp_path_factory.mktemp("two_ranks")
    run_on(ranks, 2, *TINY, "--data", text, "--output", output)
    return output


def losses(output: Path) -> list[float]:
    rows = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return [row["train_loss"] for row in rows if "train_loss" in row]


def test_what_a_run_leaves(two_ranks: Path) -> None:
    rows = [json.loads(line) for line in (two_ranks / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [*range(1, 9), 8]
    assert {"train_loss", "lr", "grad_norm", "optimizer_ms"} <= rows[0].keys()
    found = summary(two_ranks)
    assert found["heldout_loss"] == rows[-1]["heldout_loss"] < 5.6
    assert 2 < found["state_bytes_per_parameter"] < 8
    assert found["optimizer_ms"] > 0
    assert (two_ranks / "loss.png").read_bytes().startswith(b"\x89PNG")
    kept = sorted(path.name for path in (two_ranks / "checkpoints").iterdir())
    assert kept == ["step-00000004", "step-00000008"]


@pytest.mark.parametrize(("backend", "world_size"), [("ddp", 2), ("fsdp2", 3), ("single", 1)])
def test_backends_and_ranks_see_the_same_batches(
    backend: str, world_size: int, ranks: Pool, two_ranks: Path, text: Path, tmp_path: Path
) -> None:
    options = [*TINY, "--data", text, "--output", tmp_path, "--backend", backend]
    options += ["--checkpoint-interval", 0, "--accumulate", 2]
    if world_size > 1:
        run_on(ranks, world_size, *options)
    else:
        assert run(*options) == 0
    assert losses(tmp_path) == pytest.approx(losses(two_ranks), rel=1e-3)
    mine, theirs = summary(tmp_path)["heldout_loss"], summary(two_ranks)["heldout_loss"]
    assert mine == pytest.approx(theirs, rel=1e-3)


def test_resumed_run_equals_an_uninterrupted_one(ranks: Pool, two_ranks: Path, text: Path, tmp_path: Path) -> None:
    checkpoint = two_ranks / "checkpoints" / "step-00000004"
    run_on(ranks, 2, *TINY, "--data", text, "--output", tmp_path, "--resume", checkpoint)
    assert digests(tmp_path, 8) == digests(two_ranks, 8)
    assert losses(tmp_path) == losses(two_ranks)[4:]
    assert summary(tmp_path)["heldout_loss"] == summary(two_ranks)["heldout_loss"]


@pytest.mark.parametrize(("backend", "world_size"), [("fsdp2", 1), ("fsdp2", 3), ("ddp", 2), ("single", 1)])
def test_checkpoint_loads_elsewhere_bit_for_bit(
    backend: str, world_size: int, ranks: Pool, two_ranks: Path, text: Path, tmp_path: Path
) -> None:
    options = [*TINY, "--data", text, "--output", tmp_path, "--backend", backend]
    options += ["--resume", two_ranks / "checkpoints" / "step-00000004", "--stop-at-step", 5]
    if backend == "single":
        assert run(*options) == 0
    else:
        run_on(ranks, world_size, *options)
    found = summary(tmp_path)["verified"]
    assert found["world_size"] == 2
    assert found["tensors"] == len(digests(two_ranks, 4))
    assert found["codes"] == found["scales"] > 0
    assert losses(tmp_path) == pytest.approx(losses(two_ranks)[4:5], rel=1e-4)


def test_verify_sees_one_wrong_bit(two_ranks: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    copy = tmp_path / "step-00000004"
    shutil.copytree(two_ranks / "checkpoints" / "step-00000004", copy)
    header = json.loads((copy / "checkpoint.json").read_text())
    name = next(name for name in header["digests"] if name.endswith("exp_avg_codes"))
    header["digests"][name] = "0" * 64
    (copy / "checkpoint.json").write_text(json.dumps(header))
    options = [*TINY, "--data", text, "--output", tmp_path / "out", "--backend", "single", "--resume", copy]
    assert run(*options) == 2
    assert name in capsys.readouterr().err


def test_killed_run_resumes_from_its_last_complete_checkpoint(text: Path, tmp_path: Path) -> None:
    options = [*TINY_MODEL, "--data", text, "--batch", 2, "--eval-windows", 2, "--eval-interval", 0, "--verify"]
    options += ["--backend", "single", "--steps", 100_000, "--checkpoint-interval", 1]
    killed = tmp_path / "killed"
    folder = killed / "checkpoints"
    command = [sys.executable, TRAIN, *options, "--output", killed]
    process = subprocess.Popen([str(part) for part in command], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    # Killed in the middle of writing: a temporary folder is there, and a complete one before it.
    while not (any(folder.glob(".tmp-*")) and any(folder.glob("step-*3"))) and time.monotonic() < deadline:
        assert process.poll() is None
    process.send_signal(signal.SIGKILL)
    process.wait()
    (folder / ".tmp-step-99999999").mkdir()
    (folder / ".tmp-step-99999999" / "checkpoint.json").write_text("{")
    steps = sorted(int(path.name[5:]) for path in folder.glob("step-*"))
    last = steps[-1]
    assert steps == list(range(1, last + 1))

    assert run(*options, "--output", killed, "--resume", "auto", "--stop-at-step", last + 2) == 0
    assert not any(folder.glob(".tmp-*"))
    assert run(*options, "--output", tmp_path / "whole", "--stop-at-step", last + 2) == 0
    assert digests(killed, last + 2) == digests(tmp_path / "whole", last + 2)


def test_only_the_newest_checkpoints_are_kept(text: Path, tmp_path: Path) -> None:
    options = [*TINY, "--data", text, "--output", tmp_path, "--backend", "single", "--checkpoint-interval", 2]
    assert run(*options, "--keep-checkpoints", 2) == 0
    kept = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert kept == ["step-00000006", "step-00000008"]


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16"])
@pytest.mark.parametrize("backend", ["single", "fsdp2", "ddp"])
def test_precisions(backend: str, precision: str, text: Path, tmp_path: Path) -> None:
    options = [*TINY, "--data", text, "--output", tmp_path, "--backend", backend, "--precision", precision, "--tied"]
    assert run(*options, "--stop-at-step", 2) == 0
    assert run(*options, "--stop-at-step", 3, "--resume", "auto") == 0
    assert summary(tmp_path)["heldout_loss"] < 5.8


@pytest.mark.parametrize(
    "options",
    [
        ("--optimizer", "adam", "--eps", "1e-7", "--codec", "companded8"),
        ("--optimizer", "lion", "--betas", "0.9", "0.98", "--block-size", "64"),
        ("--optimizer", "sgd", "--momentum", "0.9", "--nesterov", "--codec", "dynamic8"),
        ("--weight-decay", "0.1", "--min-quantized-numel", "0", "--nonfinite", "raise", "--codec", "bf16"),
    ],
)
def test_optimizers_and_their_options(options: tuple[str, ...], text: Path, tmp_path: Path) -> None:
    common = [*TINY, *options, "--tied", "--data", text, "--output", tmp_path, "--backend", "single"]
    assert run(*common, "--stop-at-step", 2) == 0
    assert run(*common, "--stop-at-step", 3, "--resume", tmp_path / "checkpoints") == 0


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_config_runs(path: Path, text: Path, tmp_path: Path) -> None:
    few = ["--batch", 4, "--steps", 3, "--warmup", 1, "--eval-windows", 4, "--checkpoint-interval", 2]
    assert run("--config", path, *TINY_MODEL, *few, "--data", text, "--output", tmp_path) == 0
    left_out = {"backend", "device", "context", "batch", "steps", "warmup", "eval_windows", "checkpoint_interval"}
    given = {key: value for key, value in yaml.safe_load(path.read_text()).items() if key not in left_out | {"output"}}
    options = summary(tmp_path)["options"]
    assert {key: options[key] for key in given} == given


BAD_INPUT = {
    "missing data": (["--data", "/nowhere"], "data /nowhere not found"),
    "empty folder": (["--data", "EMPTY"], "at least 2"),
    "text too short": (["--context", "100000"], "too few for a context"),
    "unknown option": (["--learning-rate", "1"], "--learning-rate"),
    "unknown codec": (["--codec", "nope"], "nope"),
    "unknown backend": (["--backend", "mpi"], "fsdp2"),
    "option of another optimizer": (["--momentum", "0.9"], "momentum"),
    "bad optimizer option": (["--block-size", "100"], "block_size"),
    "bad betas": (["--betas", "0.9", "1.5"], "beta"),
    "not in this version": (["--offload", "state"], "offload"),
    "uneven batch": (["--accumulate", "5"], "batch 12"),
    "heads": (["--heads", "3"], "heads"),
    "no config": (["--config", "/nowhere.yaml"], "/nowhere.yaml"),
    "nothing to resume": (["--resume", "EMPTY"], "no complete checkpoint"),
    "another model": (["--resume", "TWO", "--dim", "64"], "another model"),
    "another codec": (["--resume", "TWO", "--codec", "fp32"], "another optimizer"),
    "past the end": (["--resume", "TWO", "--stop-at-step", "3"], "beyond the last step"),
    "no digests": (["--resume", "BARE"], "without --verify"),
    "damaged": (["--resume", "DAMAGED"], "damaged"),
    "unwritable": (["--output", "/proc/nowhere"], "/proc/nowhere"),
    "later checkpoints": (["--checkpoint-dir", "TWO"], "later than this run's start"),
}


@pytest.mark.parametrize(("options", "complaint"), BAD_INPUT.values(), ids=BAD_INPUT)
def test_bad_input_gets_one_line(
    options: list[str], complaint: str, two_ranks: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    places = {name: tmp_path / name for name in ("EMPTY", "BARE", "DAMAGED")} | {"TWO": two_ranks / "checkpoints"}
    places["EMPTY"].mkdir()
    for name in ("BARE", "DAMAGED"):
        if name in options:
            shutil.copytree(places["TWO"], places[name])
    for path in places["BARE"].glob("*/checkpoint.json"):
        header = json.loads(path.read_text())
        del header["digests"]
        path.write_text(json.dumps(header))
    for path in places["DAMAGED"].glob("*/*.distcp"):
        path.write_bytes(path.read_bytes()[:1000])
    options = [str(places.get(option, option)) for option in options]
    assert run(*TINY, "--data", text, "--backend", "single", "--output", tmp_path / "out", *options) == 2
    printed = capsys.readouterr().err.splitlines()
    assert len(printed) == 1, printed
    assert printed[0].startswith("train.py: error: ")
    assert complaint in printed[0]


def test_torchrun(text: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    command += ["--nproc-per-node", "2", str(TRAIN), *TINY, "--data", str(text), "--output", str(tmp_path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}

    good = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
    assert good.returncode == 0, good.stderr
    assert summary(tmp_path)["world_size"] == 2
    assert good.stderr.count("8/8") >= 1

    bad = subprocess.run([*command, "--codec", "nope"], capture_output=True, text=True, env=environment, timeout=120)
    assert bad.returncode != 0
    lines = [line for line in bad.stderr.splitlines() if line.startswith("train.py: error: ")]
    assert len(lines) == 1
    assert "nope" in lines[0]
    # torchrun reports in its own words and quotes the line; the job itself adds no traceback.
    assert f'File "{TRAIN}"' not in bad.stderr
    assert "exitcode  : 2" in bad.stderr
