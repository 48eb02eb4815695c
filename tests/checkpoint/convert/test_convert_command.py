"""The command ``shardopt convert``, memory, and failures that leave nothing behind."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from filelock import FileLock
from torch.distributed.checkpoint.state_dict import get_state_dict

import shardopt
from convert_runs import PIECE, assert_loads, make, trained
from programs import Programs
from ranks.runs import snapshot_of
from ranks.snapshot import assert_same
from safetensors_files import save_by_library
from shardopt import checkpoint
from shardopt.__main__ import main
from shardopt.checkpoint import CheckpointError, convert_command
from shardopt.checkpoint.convert import FORMATS, convert
from shardopt.checkpoint.index import dump_index, load_index
from shardopt.checkpoint.storage import folder_at


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    checkpoint.save(tmp_path / "saved", *trained(), epoch=3)
    return tmp_path / "saved"


def test_command(saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "target"
    assert main(["convert", str(saved), str(target), "--codec", "companded8", "--block-size", "64"]) == 0
    text = capsys.readouterr().out
    assert f"{saved} (portable) -> {target} (portable)" in text
    assert "states encoded anew: 2 (log8 in blocks of 128 state for companded8 in blocks of 64)" in text
    expected = make(codec="companded8", block_size=64)
    checkpoint.load(saved, *expected, convert=True)
    assert_loads(target, expected, codec="companded8", block_size=64)
    assert main(["convert", str(saved), str(target), "--quiet"]) == 1
    found = capsys.readouterr()
    assert found.out == ""
    assert found.err == f"{target}: got a target that exists, expected a new path; remove it, or choose another\n"
    assert main(["convert", str(saved), str(tmp_path / "file"), "--to", "safetensors"]) == 0
    assert "left out: extra: epoch" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (["--codec", "log8", "--to", "torch"], "got codec for torch, whose moments are float32"),
        (["--block-size", "100"], "block_size: got 100"),
        (["--codec", "log4"], "two moments share its codes"),
    ],
)
def test_options_that_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], match: str
) -> None:
    checkpoint.save(tmp_path / "saved", *trained("Lion"))
    assert main(["convert", str(tmp_path / "saved"), str(tmp_path / "target"), *arguments]) == 1
    assert match in capsys.readouterr().err
    assert not (tmp_path / "target").exists()


def test_lines_without_tqdm(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(convert_command, "find_spec", lambda name: None if name == "tqdm" else find_spec(name))
    monkeypatch.setattr(convert_command, "_SECONDS", 0)
    assert main(["convert", str(saved), str(tmp_path / "target")]) == 0
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) > 5
    assert all(" of " in line and line.endswith("MiB") for line in lines)


@pytest.mark.parametrize("to", FORMATS)
def test_progress_ends_at_the_total(saved: Path, tmp_path: Path, to: str) -> None:
    seen: list[tuple[int, int]] = []
    convert(saved, tmp_path / "target", to, progress=lambda done, total: seen.append((done, total)), piece_numel=PIECE)
    assert seen == sorted(seen)
    assert seen[-1][0] == seen[-1][1] > 0


@pytest.mark.parametrize("to", FORMATS)
def test_damage_leaves_nothing(saved: Path, tmp_path: Path, to: str) -> None:
    (data,) = saved.glob("*.bin")
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)
    with pytest.raises(CheckpointError, match="checksum"):
        convert(saved, tmp_path / "target", to, piece_numel=PIECE)
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda h: h.update(optimizer="Evil"), "got the state of Evil, expected one of"),
        (lambda h: h.update(optimizer=3), "got the state of 3"),
        (lambda h: h.update(optimizer="Lion"), "expected .* of Lion with its options"),
        (lambda h: h.update(param_groups=3), "got param_groups as int"),
        (lambda h: h["param_groups"].pop(), "in no param group"),
        (lambda h: h["param_groups"][0]["parameters"].append("x"), "got state of x and no such parameter"),
        (lambda h: h["param_groups"][0]["options"].update(codec="x"), "codec"),
        (lambda h: h["param_groups"][0]["options"].update(codec=["x"]), "codec"),
        (lambda h: h["param_groups"][0]["options"].update(block_size=1 << 70), "block_size"),
        (lambda h: h["param_groups"][0]["options"].update(block_size=64), "scales of uneven"),
        (lambda h: h["param_groups"][0]["options"].update(betas="ab"), "betas"),
        (lambda h: h["param_groups"][0]["options"].update(params=[]), ""),
    ],
)
def test_headers_that_no_save_writes(saved: Path, tmp_path: Path, change: Any, match: str) -> None:
    """With a right checksum. An option by the name ``params`` is none, and stays one more key."""
    index = load_index(folder_at(saved))
    change(index.header)
    (saved / "checkpoint.json").write_bytes(dump_index(index))
    if not match:
        convert(saved, tmp_path / "target", codec="fp32", piece_numel=PIECE)
        return
    with pytest.raises(CheckpointError, match=match):
        convert(saved, tmp_path / "target", codec="fp32", piece_numel=PIECE)
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]


@pytest.mark.parametrize("to", FORMATS)
def test_an_interrupt_leaves_nothing(saved: Path, tmp_path: Path, to: str) -> None:
    def interrupt(done: int, total: int) -> None:
        if done > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(saved, tmp_path / "target", to, progress=interrupt, piece_numel=PIECE)
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]


def test_urls(saved: Path) -> None:

    convert(saved, "memory://converted/one", codec="companded8", piece_numel=PIECE)
    convert("memory://converted/one", "memory://converted/two", codec="companded8", piece_numel=PIECE)
    expected = make(codec="companded8")
    checkpoint.load(saved, *expected, convert=True)
    for name in ("one", "two"):
        other = make(codec="companded8")
        checkpoint.load(f"memory://converted/{name}", *other)
        assert_same(snapshot_of(*other), snapshot_of(*expected))
    with pytest.raises(CheckpointError, match="a target that exists"):
        convert(saved, "memory://converted/one")


def test_urls_are_for_portable_checkpoints(saved: Path) -> None:
    with pytest.raises(CheckpointError, match="expected a path"):
        convert(saved, "memory://target", "torch")


def test_a_full_disk_leaves_nothing(saved: Path, programs: Programs, tmp_path: Path) -> None:
    """In a process of its own, which may write no file beyond 64 KiB."""
    program = (
        "import resource, signal, sys\n"
        "from shardopt.checkpoint.convert import FORMATS, convert\n"
        "from shardopt.checkpoint import CheckpointError\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))\n"
        "for to in FORMATS:\n"
        "    try:\n"
        f"        convert({str(saved)!r}, {str(tmp_path / 'target')!r}, to)\n"
        "    except CheckpointError as error:\n"
        "        print(error)\n"
    )
    (folder := tmp_path / "program").mkdir()
    programs.run(program, folder)
    said = (folder / "output.txt").read_text()
    assert len(said.splitlines()) == len(FORMATS)
    assert said.count("File too large") == len(FORMATS)
    assert set(tmp_path.iterdir()) == {tmp_path / "saved", folder}


def test_sources_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "text").write_text("hello")
    (tmp_path / "nothing").touch()
    for name, match in (
        ("empty", "in it; check"),
        (
            "text",
            r"got a file that begins with b'hello', expected one of safetensors or torch.save, .*; check the path",
        ),
        ("nothing", "got an empty file, expected one of safetensors or torch.save"),
        ("no", "no such file"),
    ):
        with pytest.raises(CheckpointError, match=match):
            convert(tmp_path / name, tmp_path / "target")
    assert not (tmp_path / "target").exists()


@pytest.mark.parametrize("value", [torch.nan, -1.0])
def test_state_from_which_no_step_could_go_on(tmp_path: Path, value: float) -> None:
    model, optimizer = trained(codec="fp32")
    optimizer.state[model.long]["exp_avg_sq"][1, 2, 2999] = value
    checkpoint.save(tmp_path / "saved", model, optimizer)
    with pytest.raises(CheckpointError, match=r"long: got exp_avg_sq that stands for"):
        convert(tmp_path / "saved", tmp_path / "target", codec="log8", piece_numel=PIECE)
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]


_MEMORY = """
import resource, sys, threading, time
import shardopt
from shardopt.checkpoint.convert import convert
source, target, to, codec, numel = sys.argv[1:]

def held():
    for line in open("/proc/self/status"):
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024

codec = codec or None
convert(source + ".small", target + ".small", to, codec=codec, piece_numel=int(numel))
before, most, over = held(), 0, False

def watch():
    global most
    while not over:
        most = max(most, held())
        time.sleep(0.001)

thread = threading.Thread(target=watch)
thread.start()
convert(source, target, to, codec=codec, piece_numel=int(numel))
over = True
thread.join()
print(most - before)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc/self/status, which only Linux has")
@pytest.mark.parametrize(
    ("kind", "to", "codec"),
    [
        ("portable", "portable", "companded8"),
        pytest.param("safetensors", "torch", "", marks=pytest.mark.slow),
        pytest.param("torch", "dcp", "log8", marks=pytest.mark.slow),
        pytest.param("dcp", "safetensors", "log8", marks=pytest.mark.slow),
    ],
)
def test_memory_does_not_grow_with_the_checkpoint(tmp_path: Path, kind: str, to: str, codec: str) -> None:
    """A checkpoint of 96 MiB or more, of one tensor, in 64 MiB: five chunks of 8 MiB, and pieces of 2^17 elements."""
    for name, rows in (("run.small", 64), ("run", 8192)):
        model = torch.nn.Linear(2048, rows, bias=False)
        optimizer = shardopt.AdamW([("weight", model.weight)], codec="log8" if kind == "portable" else "fp32")
        model.weight.grad = torch.full_like(model.weight, 0.5)
        optimizer.step()
        if kind == "portable":
            checkpoint.save(tmp_path / name, model, optimizer)
        elif kind == "dcp":
            dcp.save(
                dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True)),
                checkpoint_id=tmp_path / name,
            )
        elif kind == "safetensors":
            save_by_library(tmp_path / name, model, optimizer)
        else:
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / name)
    arguments = [str(tmp_path / "run"), str(tmp_path / "target"), to, codec, str(1 << 17)]
    command = [sys.executable, "-c", _MEMORY, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
    assert int(done.stdout) < 64 << 20


_KILLED = """
import os, signal
from shardopt.checkpoint.convert import convert
convert(*PLACES, progress=lambda done, total: done > total // 2 and os.kill(os.getpid(), signal.SIGKILL))
"""


@pytest.mark.parametrize("to", ["portable", "torch", *(pytest.param(to, marks=pytest.mark.slow) for to in FORMATS[2:])])
def test_what_a_killed_conversion_leaves_is_removed_by_the_next(
    saved: Path, programs: Programs, tmp_path: Path, to: str
) -> None:
    target = tmp_path / "target"
    (folder := tmp_path / "program").mkdir()
    for _ in range(2):
        with pytest.raises(AssertionError, match="got exit code -9"):
            programs.run(_KILLED.replace("PLACES", repr((str(saved), str(target), to))), folder)
        (left,) = tmp_path.glob("target.*")
        assert not target.exists()
    others = [tmp_path / "target.bak", tmp_path / "target.0.unfinished", tmp_path / "other.01234567.unfinished"]
    for path in others:
        path.write_text("a user's")
    mine = tmp_path / "target.01234567.unfinished"
    mine.mkdir()
    (mine / "notes").write_text("a user's")
    link, linked = tmp_path / "target.aaaaaaaa.unfinished", tmp_path / "linked" / "content"
    linked.parent.mkdir()
    linked.write_text("a user's")
    link.symlink_to(linked.parent)
    unreadable = tmp_path / "target.bbbbbbbb.unfinished"  # as another user's folder
    (unreadable / "checkpoint.lock").mkdir(parents=True)
    held = tmp_path / "target.89abcdef.unfinished"
    held.mkdir()
    lock = FileLock(held / "checkpoint.lock")
    lock.acquire()
    convert(saved, target, to, piece_numel=PIECE)
    kept = {tmp_path / "saved", folder, target, mine, held, link, linked.parent, unreadable, *others}
    assert set(tmp_path.iterdir()) == kept
    assert (mine / "notes").read_text() == linked.read_text() == "a user's"
    assert not left.exists()
    lock.release()
    convert(target, tmp_path / "back", optimizer="AdamW")
    assert (held / "checkpoint.lock").exists()  # a conversion to the same target alone looks


def test_what_a_killed_conversion_leaves_in_an_object_store_is_no_obstacle(saved: Path) -> None:
    import fsspec

    fsspec.filesystem("memory").pipe_file("/killed/one/0123456789abcdef-0.bin", b"half")
    convert(saved, "memory://killed/one", piece_numel=PIECE)
    fsspec.filesystem("memory").pipe_file("/killed/two/notes", b"a user's")
    with pytest.raises(CheckpointError, match="a target that exists"):
        convert(saved, "memory://killed/two", piece_numel=PIECE)
