"""Safetensors files have model and optimizer bit for bit, and the library reads them; others are refused."""

from __future__ import annotations

import builtins
import errno
import json
import os
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardopt
from convert_runs import PIECE
from convert_runs import trained as trained_net
from helpers import EIGHT_BIT, everything
from ranks.models import make_net, named_parameters, set_gradients
from ranks.pool import Pool
from ranks.runs import snapshot_of, step_with, trained
from ranks.snapshot import assert_same
from safetensors_files import content, load_file, save_by_library, save_file
from shardopt import checkpoint
from shardopt.checkpoint import CheckpointError
from shardopt.checkpoint.convert import convert, safetensors

STEPS = 2


@pytest.mark.parametrize("codec", [*EIGHT_BIT, "fp32"])
@pytest.mark.parametrize("rule", ["adamw", "lion", "nesterov", "sgd"])
@pytest.mark.parametrize("save", [save_file, save_by_library])
def test_round_trip(tmp_path: Path, save: Callable[..., None], rule: str, codec: str) -> None:
    model, optimizer = trained("single", STEPS, rule, codec=codec)
    save(tmp_path / "run", model, optimizer)
    other_model, other = trained("single", 1, rule, codec=codec)
    load_file(tmp_path / "run", other_model, other)
    assert_same(snapshot_of(other_model, other), snapshot_of(model, optimizer))
    for run in ((model, optimizer), (other_model, other)):
        step_with(*run, STEPS)
    assert_same(snapshot_of(other_model, other), snapshot_of(model, optimizer))


@pytest.mark.parametrize("codec", ["log8", "log4", "fp32"])
def test_pieces_of_tensors(tmp_path: Path, codec: str) -> None:
    """Both ways, as the library has the tensors."""
    run = trained_net(codec=codec)
    save_by_library(tmp_path / "whole", *run)
    save_file(tmp_path / "in pieces", *run, piece_numel=PIECE)
    convert(tmp_path / "in pieces", tmp_path / "again", "safetensors", piece_numel=PIECE)
    for name in ("in pieces", "again"):
        assert_same(content(tmp_path / name)[0], content(tmp_path / "whole")[0])


@pytest.mark.parametrize("bits", [None, 24, 32])
def test_bfloat16_with_master_weights(tmp_path: Path, bits: int | None) -> None:
    runs = []
    for _ in range(2):
        model = make_net(torch.bfloat16)
        runs.append((model, shardopt.AdamW8bit(model.parameters(), master_weight_bits=bits)))
    step_with(*runs[0], 0)
    save_file(tmp_path / "run", *runs[0])
    load_file(tmp_path / "run", *runs[1])
    assert_same(snapshot_of(*runs[1]), snapshot_of(*runs[0]))
    for run in runs:
        step_with(*run, 1)
    assert_same(snapshot_of(*runs[1]), snapshot_of(*runs[0]))


def test_names_and_metadata(tmp_path: Path) -> None:
    model, optimizer = trained("single", STEPS, lr=0.5)
    save_file(tmp_path / "run", model, optimizer)
    tensors, header = content(tmp_path / "run")
    expected: dict[str, Tensor] = {}
    for name, param in named_parameters(model).items():
        expected[f"model.{name}"] = param.detach()
        expected |= {f"optimizer.{name}.{key}": value for key, value in optimizer.state[param].items()}
    assert_same(tensors, dict(sorted(expected.items())))
    (group,) = header["param_groups"]
    assert group["parameters"] == list(named_parameters(model))
    assert {"lr": 0.5, "codec": "log8", "block_size": 128, "betas": [0.9, 0.999]}.items() <= group["options"].items()
    assert (header["format_version"], header["dequantized"]) == (1, False)
    assert header["optimizer"] == type(optimizer).__name__


def test_tensors_begin_aligned(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(7, 33, dtype=torch.bfloat16), nn.BatchNorm1d(33), nn.Linear(33, 129))
    optimizer = shardopt.AdamW8bit(model.parameters(), min_quantized_numel=0)
    set_gradients(model, 0)
    optimizer.step()
    save_file(tmp_path / "run", model, optimizer)
    data = (tmp_path / "run").read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    widths = {"F32": 4, "BF16": 2, "U8": 1, "I64": 8}
    described = [value for key, value in header.items() if key != "__metadata__"]
    assert {tensor["dtype"] for tensor in described} == set(widths)
    assert all((8 + size + tensor["data_offsets"][0]) % widths[tensor["dtype"]] == 0 for tensor in described)


def test_buffers_and_param_groups(tmp_path: Path) -> None:
    """Persistent buffers come along, and a param group need not be JSON."""
    model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64))
    model.register_buffer("cache", torch.ones(2), persistent=False)
    model[1].running_mean += 1
    optimizer = shardopt.AdamW8bit([{"params": model[0].parameters(), "tag": object()}, {"params": [model[1].weight]}])
    optimizer.param_groups[0]["lr"] = torch.tensor(0.25)
    set_gradients(model, 0)
    optimizer.step()
    save_file(tmp_path / "run", model, optimizer)
    tensors, header = content(tmp_path / "run")
    assert {name for name in tensors if name.startswith("model.1.")} == {
        f"model.1.{name}" for name in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
    }
    assert "model.cache" not in tensors
    assert [group["parameters"] for group in header["param_groups"]] == [["0.weight", "0.bias"], ["1.weight"]]
    other = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64))
    loaded = shardopt.AdamW8bit([{"params": other[0].parameters()}, {"params": [other[1].weight]}])
    load_file(tmp_path / "run", other, loaded)
    assert_same(everything(loaded), everything(optimizer))
    assert_same(dict(other.named_buffers()), {k: v for k, v in model.named_buffers() if k != "cache"})
    assert [group["lr"] for group in loaded.param_groups] == [0.25, 1e-3]


def test_before_the_first_step(tmp_path: Path) -> None:
    save_file(tmp_path / "run", *trained("single", 0, lr=0.5))
    model, optimizer = trained("single", 0)
    load_file(tmp_path / "run", model, optimizer)
    assert not optimizer.state
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_dequantized_files(tmp_path: Path) -> None:
    """Files of earlier versions with float32 moments, which any codec takes in, as load_state_dict does."""
    model, other_model = make_net(torch.bfloat16), make_net(torch.bfloat16)
    optimizer = shardopt.AdamW8bit(model.parameters(), min_quantized_numel=64)
    step_with(model, optimizer, 0)
    save_by_library(tmp_path / "run", model, optimizer, dequantize=True)
    loaded, expected = (shardopt.AdamW8bit(other_model.parameters(), codec="dynamic8", block_size=64) for _ in range(2))
    load_file(tmp_path / "run", other_model, loaded, codec="dynamic8", block_size=64)
    expected.load_state_dict(optimizer.state_dict(dequantize=True))
    assert_same(everything(loaded), everything(expected))
    assert_same(dict(other_model.named_parameters()), dict(model.named_parameters()))


def _save_sharded(way: str, path: Path) -> None:
    checkpoint.save(path, *trained(way, STEPS))


def _load_sharded(way: str, path: Path) -> None:
    model, optimizer = trained(way, 1)
    checkpoint.load(path, model, optimizer)
    assert_same(snapshot_of(model, optimizer), snapshot_of(*trained("single", STEPS)))


def test_shards(ranks: Pool, tmp_path: Path) -> None:
    ranks.run(4, _save_sharded, "fsdp tp", tmp_path / "saved")
    convert(tmp_path / "saved", tmp_path / "run", "safetensors")
    convert(tmp_path / "run", tmp_path / "back")
    ranks.run(2, _load_sharded, "fsdp columns", tmp_path / "back")


# --- refused


@pytest.mark.parametrize("dtype", [torch.complex64, torch.float8_e4m3fn, torch.uint16], ids=str)
def test_a_dtype_that_the_file_cannot_hold(tmp_path: Path, dtype: torch.dtype) -> None:
    model, optimizer = trained("single", STEPS)
    model.register_buffer("odd", torch.zeros(3, dtype=dtype))
    with pytest.raises(
        CheckpointError, match=rf"got model\.odd of {dtype}, expected one of torch\.float64, .*; choose another format"
    ):
        save_file(tmp_path / "run", model, optimizer)
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize(
    ("dtype", "name"), [(torch.complex64, "C64"), (torch.float8_e4m3fn, "F8_E4M3"), (torch.uint16, "U16")]
)
def test_a_dtype_of_the_library_alone(tmp_path: Path, dtype: torch.dtype, name: str) -> None:
    model, optimizer = trained("single", STEPS)
    model.register_buffer("odd", torch.zeros(3, dtype=dtype))
    save_by_library(tmp_path / "run", model, optimizer)
    _assert_refused(tmp_path, rf"got model\.odd of '{name}' and shape \(3,\), expected one of F64, ")


def _assert_refused(folder: Path, message: str) -> None:
    before = sorted(os.listdir(folder))
    with pytest.raises(CheckpointError, match=f"run: {message}"):
        convert(folder / "run", folder / "target")
    assert sorted(os.listdir(folder)) == before


def _without_metadata(path: Path) -> None:
    from safetensors.torch import save_file as save

    save({"model.x": torch.ones(3)}, path)


def _replace(old: bytes, new: bytes) -> Callable[[Path], object]:
    def change(path: Path) -> None:
        data = path.read_bytes()
        assert data.count(old) == 1
        header = data[8 : 8 + int.from_bytes(data[:8], "little")]
        changed = header.replace(old, new)
        path.write_bytes(len(changed).to_bytes(8, "little") + changed + data[8 + len(header) :])

    return change


def _link(path: Path) -> None:
    path.unlink()
    path.symlink_to("nowhere")


def _fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _tensor(
    name: str, description: str = '{"dtype":"U8","shape":[0],"data_offsets":[0,0]}'
) -> Callable[[Path], object]:
    """Adds a tensor without elements to the header."""
    return _replace(b'"__metadata__":', f'"{name}":{description},"__metadata__":'.encode())


def _shaped(dtype: str, *shape: int) -> Callable[[Path], object]:
    return _tensor("odd", json.dumps({"dtype": dtype, "shape": shape, "data_offsets": [0, 0]}))


VERSION = rb"{\"format_version\": 1, "
WHOLE = "expected a whole safetensors file of shardopt convert; write it again"
FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (Path.unlink, "there is no such file"),
    "a link to nothing": (_link, "there is no such file"),
    "a FIFO": (_fifo, "got no known checkpoint"),
    "a folder": (_folder, "got no known checkpoint"),
    "empty": (lambda path: path.write_bytes(b""), "got an empty file"),
    "text": (lambda path: path.write_text("hello world"), "got a file that begins with b'hello wor', expected one of"),
    "cut off": (lambda path: path.write_bytes(path.read_bytes()[:-100]), f"got SafetensorError: .*, {WHOLE}"),
    "cut off early": (lambda path: path.write_bytes(path.read_bytes()[:100]), f"got SafetensorError: .*, {WHOLE}"),
    "longer": (lambda path: path.write_bytes(path.read_bytes() + b"\0"), f"got SafetensorError: .*, {WHOLE}"),
    "a terabyte more": (lambda path: os.truncate(path, 1 << 40), f"got SafetensorError: .*, {WHOLE}"),
    "a tensor that stands twice": (_tensor("model.up.weight"), f"got ValueError: a key that stands twice, {WHOLE}"),
    "a list for a tensor": (_tensor("odd", '["U8",[0],[0,0]]'), rf"got odd as \['U8', \[0\], \[0, 0\]\], {WHOLE}"),
    "many dimensions": (_shaped("U8", *[0] * 65), r"got odd of 'U8' and shape .*, expected one of F64, .* at most 64 "),
    "many indices": (_shaped("U8", 0, 1 << 63), r"got odd of 'U8' and shape \(0, 9223372036854775808\), expected"),
    "elements of 4 bits": (_shaped("F4", 0), r"got odd of 'F4' and shape \(0,\), expected one of F64"),
    "no metadata": (_without_metadata, "got a safetensors file of another kind, expected one of shardopt convert"),
    "newer": (_replace(VERSION, VERSION.replace(b"1", b"2")), "got format version 2, expected at most 1; update"),
    "no version": (_replace(VERSION, VERSION.replace(b"1", b"true")), "got format_version True and dequantized False"),
    "a key that stands twice": (_replace(VERSION, VERSION + VERSION[1:]), "got ValueError: a key that stands twice"),
    "no JSON": (_replace(VERSION, VERSION[1:]), f"got JSONDecodeError: .*, {WHOLE}"),
    "nested deep": (
        _replace(VERSION, VERSION + rb"\"deep\": " + b"[" * 17 + b"]" * 17 + b", "),
        "got ValueError: nest",
    ),
    "nested without end": (_replace(VERSION, b"[" * 100_000), f"got RecursionError: .*, {WHOLE}"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_files_that_are_refused(tmp_path: Path, name: str) -> None:
    spoil, message = FAULTS[name]
    save_file(tmp_path / "run", *trained("single", STEPS))
    spoil(tmp_path / "run")
    _assert_refused(tmp_path, message)


def test_without_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Writing needs none."""
    monkeypatch.setitem(sys.modules, "safetensors", None)
    save_file(tmp_path / "run", *trained("single", STEPS))
    with pytest.raises(ModuleNotFoundError, match=r"run: got a safetensors .*; install shardopt\[safetensors\]"):
        convert(tmp_path / "run", tmp_path / "target")
    assert os.listdir(tmp_path) == ["run"]


def _spoil_reads(monkeypatch: pytest.MonkeyPatch, after: int, spoil: Callable[[], object]) -> None:
    """Lets the files that safetensors opens do something before a read of data, after so many reads."""

    def opened(*args: Any) -> Any:
        file = builtins.open(*args)  # noqa: SIM115  the test closes it
        left = iter(range(after))

        class File:
            def __getattr__(self, name: str) -> Any:
                return getattr(file, name)

            def __enter__(self) -> Any:
                return self

            def __exit__(self, *args: object) -> None:
                file.close()

            def readinto(self, data: memoryview) -> int:
                if next(left, None) is None:
                    spoil()
                return file.readinto(data)

        return File()

    monkeypatch.setattr(safetensors, "open", opened, raising=False)


def _fail() -> None:
    raise OSError(errno.EIO, "Input/output error")


@pytest.mark.parametrize("dequantize", [False, True])
def test_a_read_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dequantize: bool) -> None:
    """Whichever it is, of the header's step counts or of the data; and a file that is cut off meanwhile."""
    save_by_library(tmp_path / "run", *trained("single", STEPS), dequantize=dequantize)
    reads = len(content(tmp_path / "run")[0])
    for good in range(reads):
        _spoil_reads(monkeypatch, good, _fail)
        _assert_refused(tmp_path, "cannot be read: Input/output error; write it again")
    _spoil_reads(monkeypatch, reads, _fail)
    convert(tmp_path / "run", tmp_path / "whole")
    _spoil_reads(monkeypatch, reads // 2, lambda: os.truncate(tmp_path / "run", 1000))
    _assert_refused(tmp_path, "ended while it was read, expected a whole")


def test_a_file_that_is_larger_than_memory(tmp_path: Path) -> None:
    """A parameter of 2^40 bytes, most of which is a hole, of which one piece is read."""
    options = {"parameters": ["a"], "options": {"lr": 0.5}}
    saved = {"format_version": 1, "dequantized": False, "optimizer": "AdamW", "param_groups": [options]}
    tensor = {"dtype": "U8", "shape": [1 << 20, 1 << 20], "data_offsets": [0, 1 << 40]}
    header = json.dumps({"__metadata__": {"shardopt": json.dumps(saved)}, "model.a": tensor}).encode()
    (tmp_path / "run").write_bytes(len(header).to_bytes(8, "little") + header)
    os.truncate(tmp_path / "run", 8 + len(header) + (1 << 40))

    def interrupt(done: int, total: int) -> None:
        assert (done, total) == (PIECE, 1 << 40)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(tmp_path / "run", tmp_path / "target", progress=interrupt, piece_numel=PIECE)
    assert os.listdir(tmp_path) == ["run"]


@pytest.mark.parametrize("to", ["safetensors", "torch"])
def test_names_outlast_a_crash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, to: str) -> None:
    """The file is on the disk before it gets its name, and the folder afterwards."""
    checkpoint.save(tmp_path / "saved", *trained("single", 1))
    done: list[str] = []
    fsync, replace = os.fsync, os.replace

    def syncing(file: int) -> None:
        done.append("folder" if stat.S_ISDIR(os.fstat(file).st_mode) else "file")
        fsync(file)

    def replacing(old: Path, new: Path) -> None:
        done.append("name")
        replace(old, new)

    monkeypatch.setattr(os, "fsync", syncing)
    monkeypatch.setattr(os, "replace", replacing)
    convert(tmp_path / "saved", tmp_path / "run", to)
    assert done == ["file", "name", "folder"]
