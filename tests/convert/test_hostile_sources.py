"""Sources of other packages that ask for more time or memory than their size justifies, or change the process."""

from __future__ import annotations

import io
import os
import pickle
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import metadata

from convert_runs import PIECE, trained
from shardopt import checkpoint
from shardopt.checkpoint import CheckpointError
from shardopt.checkpoint.convert import convert, pickled
from shardopt.checkpoint.convert import dcp as dcp_folders

DOUBLED = b"h\x00h\x00\x86q\x00" * 40
INDEX = b"ctorch.distributed.checkpoint.metadata\nMetadataIndex\n"


def text(value: str) -> bytes:
    return b"X" + len(value).to_bytes(4, "little") + value.encode()


@pytest.mark.parametrize(
    ("data", "match"),
    [
        (b"})q\x00" + DOUBLED + b"h\x00Ns.", "the same values too often"),
        (b"})q\x00" + DOUBLED + b"Ns.", "the same values too often"),
        (b"]q\x00" + DOUBLED + b".", "the same values too often"),
        (b"K\x01r\x00\x00\x00\x20.", "a place in the memo"),
        (b")" + b"\x85" * 200 + b".", "more than 100 values in one another"),
        (b"]q\x00h\x00a.", "APPEND of another value"),
        (b"}q\x00K\x01h\x00s.", "SETITEM of another value"),
        (b"}\x8a\x09" + bytes(9) + b"Ns.", "a large number as a key"),
        (INDEX + b"N}" + text("__eq__") + b"Ns\x86b.", "BUILD of another value"),
        (b"ccollections\nOrderedDict\n(](K\x01K\x02etR.", "a dict made of a list"),
        (b"c__builtin__\nbytearray\nJ\x00\x00\x00\x7f\x85R.", "builtins.bytearray|__builtin__.bytearray"),
        (b"NN.", "more than one value"),
        (b"N2.", "the opcode DUP"),
        (b"I1\n.", "the opcode INT"),
        (b"h\x00.", "KeyError"),
        (b"cto\x00ch\nx\n.", r"'to\\x00ch\.x'"),
        (b"t.", "IndexError"),
    ],
)
def test_pickles_that_are_refused(tmp_path: Path, data: bytes, match: str) -> None:
    """As the metadata of a folder of torch.distributed.checkpoint."""
    equals = metadata.MetadataIndex.__eq__
    (tmp_path / "dcp").mkdir()
    (tmp_path / "dcp" / ".metadata").write_bytes(b"\x80\x02" + data)
    with pytest.raises(CheckpointError, match=rf"\.metadata: got .*({match}).*, expected what DCP writes"):
        convert(tmp_path / "dcp", tmp_path / "target")
    assert metadata.MetadataIndex.__eq__ is equals
    assert os.listdir(tmp_path) == ["dcp"]


def test_what_is_shared_a_few_times_is_read() -> None:
    value = {"a": ["b" * 1000] * 1000, "c": [[1, 2]] * 100, "d": {(1, 2): 3.5, None: -1}}
    assert pickled.unpickled(pickle.dumps(value), {}) == value


@pytest.mark.parametrize("name", ["data.pkl", "data/0"])
def test_compressed_records(tmp_path: Path, name: str) -> None:
    """Of which a megabyte would take gigabytes."""
    file = io.BytesIO()
    torch.save({"model": {"a": torch.zeros(3)}}, file)
    with zipfile.ZipFile(file) as found, zipfile.ZipFile(tmp_path / "run.pt", "w") as archive:
        for each in found.namelist():
            data = found.read(each) + (bytes(100 << 20) if each.endswith(name) else b"")
            archive.writestr(each, data, zipfile.ZIP_DEFLATED if each.endswith(name) else zipfile.ZIP_STORED)
    with pytest.raises(CheckpointError, match=r"run\.pt: got .*a record that is compressed"):
        convert(tmp_path / "run.pt", tmp_path / "target")
    assert os.listdir(tmp_path) == ["run.pt"]


def saved(path: Path, value: torch.Tensor) -> metadata.Metadata:
    dcp.save({"model": {"a": value}}, checkpoint_id=path)
    return dcp.FileSystemReader(path).read_metadata()


def test_a_chunk_that_is_expanded(tmp_path: Path) -> None:
    """A tensor of 4 TiB in a file of 1.6 KB."""
    found = saved(tmp_path / "dcp", torch.zeros(3))
    shape = torch.Size([1 << 20, 1 << 20])
    torch.save(torch.zeros(1).expand(shape), tmp_path / "dcp" / "x.distcp")
    described = found.state_dict_metadata["model.a"]
    described.size, offsets = shape, torch.Size([0, 0])
    described.chunks = [metadata.ChunkStorageMetadata(offsets, shape)]
    (stored,) = found.storage_data.values()
    stored.relative_path, stored.offset = "x.distcp", 0
    stored.length = (tmp_path / "dcp" / "x.distcp").stat().st_size
    found.storage_data = {metadata.MetadataIndex("model.a", offsets): stored}
    (tmp_path / "dcp" / ".metadata").write_bytes(pickle.dumps(found))
    with pytest.raises(CheckpointError, match=r"x\.distcp: got torch\.float32 .*, expected a dense tensor"):
        convert(tmp_path / "dcp", tmp_path / "target")
    assert os.listdir(tmp_path) == ["dcp"]


def test_a_tensor_without_a_path(tmp_path: Path) -> None:
    found = saved(tmp_path / "dcp", torch.zeros(3))
    found.planner_data["model.a"] = ()
    (tmp_path / "dcp" / ".metadata").write_bytes(pickle.dumps(found))
    with pytest.raises(CheckpointError, match=r"got no model, expected"):
        convert(tmp_path / "dcp", tmp_path / "target")


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp"])
def test_files_with_holes(tmp_path: Path, name: str) -> None:
    """Of a terabyte."""
    saved(tmp_path / "dcp", torch.zeros(3))
    os.truncate(tmp_path / "dcp" / name, 1 << 40)
    if name == ".metadata":
        with pytest.raises(CheckpointError, match=rf"\.metadata: got {1 << 40} bytes, expected at most"):
            convert(tmp_path / "dcp", tmp_path / "target")
    else:
        convert(tmp_path / "dcp", tmp_path / "target")
    torch.save({"model": {"a": torch.zeros(3)}}, tmp_path / "run.pt")
    os.truncate(tmp_path / "run.pt", 1 << 40)
    with pytest.raises(CheckpointError, match=r"run\.pt: got BadZipFile"):
        convert(tmp_path / "run.pt", tmp_path / "other")


def test_chunks_that_are_not_row_major_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    value = torch.arange(300 * 700.0).view(300, 700).t()
    saved(tmp_path / "dcp", value)
    calls: list[Any] = []
    read = dcp_folders._value_in
    monkeypatch.setattr(dcp_folders, "_value_in", lambda *where: calls.append(where) or read(*where))
    convert(tmp_path / "dcp", tmp_path / "target", piece_numel=PIECE)
    assert len(calls) == 1
    model = torch.nn.Module()
    model.a = torch.nn.Parameter(torch.zeros(700, 300))
    checkpoint.load(tmp_path / "target", model)
    assert torch.equal(model.a, value)


def test_source_files_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(tmp_path / "dcp", torch.zeros(3))
    (tmp_path / "dcp" / ".metadata").unlink()
    (tmp_path / "dcp" / ".metadata").mkdir()
    with pytest.raises(CheckpointError, match=r"dcp/\.metadata: got .*Is a directory.*, expected"):
        convert(tmp_path / "dcp", tmp_path / "target")
    (tmp_path / "run.pt").touch()

    def forbidden(*arguments: Any) -> Any:
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "open", forbidden)
        with pytest.raises(CheckpointError, match=r"run\.pt: got PermissionError.*, expected"):
            convert(tmp_path / "run.pt", tmp_path / "target")


@pytest.mark.parametrize(
    "changed",
    [
        {"module": 3},
        {"module": {"x": 3}},
        {"param_shapes": [{"a": 3}]},
        {"param_shapes": [{3: torch.Size([3])}]},
        {"frozen_param_shapes": {"b": 3}},
    ],
)
def test_universal_checkpoints_of_other_types(tmp_path: Path, changed: dict[str, Any]) -> None:
    folder = tmp_path / "universal"
    (folder / "zero" / "a").mkdir(parents=True)
    torch.save({"param_groups": [{"params": [0], "step": 1}]}, folder / "zero" / "optimizer_state.pt")
    content = {
        "param_shapes": [{"a": torch.Size([3])}],
        "module": {"b": torch.zeros(2)},
        "ds_config": {"optimizer": {"type": "Adam"}},
    }
    torch.save({**content, **changed}, folder / "mp_rank_00_model_states.pt")
    for name in ("fp32", "exp_avg", "exp_avg_sq"):
        torch.save({"param": torch.zeros(3)}, folder / "zero" / "a" / f"{name}.pt")
    with pytest.raises(CheckpointError, match=r"got .*, expected"):
        convert(folder, tmp_path / "target")
    assert os.listdir(tmp_path) == ["universal"]


def test_floats_of_eight_bits(tmp_path: Path) -> None:
    """Which torch.save writes by other functions than float32."""
    value = torch.arange(8.0).to(torch.float8_e4m3fn)
    torch.save({"model": {"a": value, "b": torch.nn.Parameter(torch.ones(2))}}, tmp_path / "run.pt")
    convert(tmp_path / "run.pt", tmp_path / "target")
    convert(tmp_path / "target", tmp_path / "dcp", "dcp")
    convert(tmp_path / "dcp", tmp_path / "back")
    for name in ("target", "back"):
        model = torch.nn.Module()
        model.a = torch.nn.Parameter(torch.zeros(8).to(torch.float8_e4m3fn), requires_grad=False)
        model.b = torch.nn.Parameter(torch.zeros(2))
        checkpoint.load(tmp_path / name, model)
        assert torch.equal(model.a.view(torch.uint8), value.view(torch.uint8))


def test_damage_by_values_of_any_type(tmp_path: Path) -> None:
    """State dicts with other values where dicts, lists and tensors belong."""
    model, optimizer = trained(codec="fp32")
    whole = {"model": dict(model.state_dict()), "optimizer": optimizer.state_dict()}
    for number, value in enumerate([None, 3, "x", [1], {1: 2}, torch.zeros(1).expand(7)]):
        for place in ("model", "optimizer", "state", "param_groups", "exp_avg", "lr"):
            content = {**whole, "optimizer": {**whole["optimizer"]}}
            if place in content:
                content[place] = value
            elif place in content["optimizer"]:
                content["optimizer"][place] = value
            else:
                key = "state" if place == "exp_avg" else "param_groups"
                content["optimizer"][key] = {0: {place: value}} if key == "state" else [{place: value}]
            torch.save(content, tmp_path / "run.pt")
            target = tmp_path / f"{number} {place}"
            if (place, value) != ("optimizer", None):  # a model alone
                with pytest.raises(CheckpointError, match="expected"):
                    convert(tmp_path / "run.pt", target, optimizer="AdamW")
                assert not target.exists()
