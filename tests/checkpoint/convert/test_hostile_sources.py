"""Sources of other packages that ask for more time or memory than their size justifies, or change the process."""

from __future__ import annotations

import io
import os
import pickle
import resource
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import metadata

from convert_runs import PIECE, trained
from shardopt import checkpoint
from shardopt.checkpoint import CheckpointError, header
from shardopt.checkpoint.convert import FORMATS, convert, dcp_metadata, pickled, torch_zip
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
        (b")" + b"\x85" * 200 + b".", "more than 128 values in one another"),
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


def colliding(count: int, made: bytes) -> bytes:
    """The keys of a dict: tuples with equal hashes, as -1 and -2 have the same."""
    numbers = b"J\xff\xff\xff\xffq\x01J\xfe\xff\xff\xffq\x02\x86q\x03"
    keys = (b"(" + b"".join(b"h\x01" if i >> bit & 1 else b"h\x02" for bit in range(16)) + b"t" for i in range(count))
    return b"}" + numbers + b"Ns(" + b"".join(made.replace(b"KEY", key) + b"N" for key in keys) + b"u."


@pytest.mark.parametrize("made", [b"KEY", b"ctorch\nSize\nKEY\x85R", b"ctorch\nSize\nKEY\x85\x81"])
def test_keys_with_equal_hashes_are_refused(made: bytes) -> None:
    for classes in (torch_zip._CLASSES, dcp_metadata._CLASSES):
        with pytest.raises((pickle.UnpicklingError, TypeError), match=r"tuples as keys|NEWOBJ"):
            pickled.unpickled(b"\x80\x02" + colliding(1000, made), classes)


def test_indices_of_equal_offsets_have_other_hashes() -> None:
    state = b"}(" + text("fqn") + text("a") + text("offset") + b"ctorch\nSize\nKEY\x85Ru"
    found = pickled.unpickled(b"\x80\x02" + colliding(1000, INDEX + b")\x81" + state + b"b"), dcp_metadata._CLASSES)
    indices = [key for key in found if isinstance(key, metadata.MetadataIndex)]
    assert len(indices) == 1000
    assert len({hash(index.offset) for index in indices}) == 1
    assert len({hash(index) for index in indices}) == 1000


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
    """A tensor of 40 KB of which the file has one element."""
    found = saved(tmp_path / "dcp", torch.zeros(3))
    shape = torch.Size([100, 100])
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


@pytest.mark.parametrize("kind", ["torch", "dcp"])
def test_memory_that_many_tensors_share(tmp_path: Path, kind: str) -> None:
    """Of which 2 MB would become 512 MB."""
    value, names = torch.zeros(1 << 19), [f"a{i}" for i in range(256)]
    if kind == "torch":
        torch.save({"model": dict.fromkeys(names, value)}, tmp_path / kind)
    else:
        found = saved(tmp_path / kind, value)
        ((key, stored),) = found.storage_data.items()
        for name in names:
            found.planner_data[name] = ("model", name)
            found.state_dict_metadata[name] = found.state_dict_metadata["model.a"]
            found.storage_data[metadata.MetadataIndex(name, key.offset)] = stored
        (tmp_path / kind / ".metadata").write_bytes(pickle.dumps(found))
    with pytest.raises(CheckpointError, match=r"got tensors that come to \d+ bytes in \d+ bytes, expected at most 64"):
        convert(tmp_path / kind, tmp_path / "target")
    assert os.listdir(tmp_path) == [kind]


@pytest.mark.parametrize("to", FORMATS)
def test_extra_values_of_earlier_versions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, to: str) -> None:
    """Which were nested as deep as Python's parser allows."""
    model, optimizer = trained()
    value: Any = 1
    for depth in range(300):
        if depth == header.MOST_NESTED:
            checkpoint.save(tmp_path / "most", model, optimizer, deep=value)
        value = [value]
    with monkeypatch.context() as patched:
        patched.setattr(header, "MOST_NESTED", 300)
        checkpoint.save(tmp_path / "deeper", model, optimizer, deep=value)
    convert(tmp_path / "most", tmp_path / "target", to)
    assert to == "safetensors" or convert(tmp_path / "target", tmp_path / "back", optimizer="AdamW")
    if to == "safetensors":
        assert convert(tmp_path / "deeper", tmp_path / "other", to).left_out == ["extra: deep"]
        return
    with pytest.raises(CheckpointError, match=r"deeper: extra\.deep: got lists and dicts nested more than 100 deep"):
        convert(tmp_path / "deeper", tmp_path / "other", to)
    assert sorted(os.listdir(tmp_path)) == ["back", "deeper", "most", "target"]


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


def test_universal_checkpoints_of_more_files_than_a_process_may_open(tmp_path: Path) -> None:
    folder, names = tmp_path / "universal", [f"a{i}" for i in range(100)]
    (folder / "zero").mkdir(parents=True)
    torch.save({"param_groups": [{"params": [0]}]}, folder / "zero" / "optimizer_state.pt")
    content = {"param_shapes": [dict.fromkeys(names, torch.Size([3]))], "module": {}}
    torch.save(content, folder / "mp_rank_00_model_states.pt")
    for name in names:
        (folder / "zero" / name).mkdir()
        for key in ("fp32", "exp_avg", "exp_avg_sq"):
            torch.save({"param": torch.ones(3)}, folder / "zero" / name / f"{key}.pt")
        torch.save(torch.tensor(1.0), folder / "zero" / name / "step.pt")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 50, hard))
    try:
        convert(folder, tmp_path / "target", optimizer="AdamW")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_floats_of_eight_bits(tmp_path: Path) -> None:
    """Which torch.save writes by other functions than float32."""
    value = torch.arange(8.0).to(torch.float8_e4m3fn)
    torch.save({"model": {"a": value, "b": torch.nn.Parameter(torch.ones(2))}}, tmp_path / "run.pt")
    convert(tmp_path / "run.pt", tmp_path / "target")
    convert(tmp_path / "target", tmp_path / "again.pt", "torch")
    convert(tmp_path / "again.pt", tmp_path / "again")
    convert(tmp_path / "again", tmp_path / "dcp", "dcp")
    convert(tmp_path / "dcp", tmp_path / "back")
    for name in ("target", "again", "back"):
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
