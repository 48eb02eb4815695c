"""One safetensors file has model and optimizer bit for bit, can be read by the library, and replaces another whole."""

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
from helpers import EIGHT_BIT, RULES, everything
from overlap_problem import start, train
from ranks.layered import Layers
from ranks.models import make_net, named_parameters, set_gradients
from ranks.offload import offload_from_cpu, slow_steps
from ranks.pool import Pool, RankFailure
from ranks.runs import snapshot_of, step_with, trained
from ranks.snapshot import assert_same
from shardopt.checkpoint import CheckpointError
from shardopt.checkpoint.foreign import load_safetensors, safetensors_writer, save_safetensors
from shardopt.optim import ShardedOptimizer

library = pytest.importorskip("safetensors")

STEPS = 2


def in_full(model: nn.Module, optimizer: ShardedOptimizer) -> dict[str, Tensor]:
    """Parameters, buffers and state; all ranks must call this."""
    return {**snapshot_of(model, optimizer), **dict(model.named_buffers())}


def read(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    with library.safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, json.loads(file.metadata()["shardopt"])  # noqa: SIM118


@pytest.mark.parametrize("codec", [*EIGHT_BIT, "fp32"])
@pytest.mark.parametrize("rule", ["adamw", "lion", "nesterov", "sgd"])
def test_round_trip(tmp_path: Path, rule: str, codec: str) -> None:
    path = tmp_path / "run.safetensors"
    model, optimizer = trained("single", STEPS, rule, codec=codec)
    save_safetensors(path, model, optimizer)
    other_model, other = trained("single", 1, rule, codec=codec)
    load_safetensors(path, other_model, other)
    assert_same(snapshot_of(other_model, other), snapshot_of(model, optimizer))
    for each in ((model, optimizer), (other_model, other)):
        step_with(*each, STEPS)
    assert_same(snapshot_of(other_model, other), snapshot_of(model, optimizer))


@pytest.mark.parametrize("bits", [None, 24, 32])
def test_bfloat16_with_master_weights(tmp_path: Path, bits: int | None) -> None:
    runs = []
    for _ in range(2):
        model = make_net(torch.bfloat16)
        runs.append((model, shardopt.AdamW8bit(model.parameters(), master_weight_bits=bits)))
    (model, optimizer), (other_model, other) = runs
    step_with(model, optimizer, 0)
    save_safetensors(tmp_path / "run", model, optimizer)
    load_safetensors(tmp_path / "run", other_model, other)
    assert_same(snapshot_of(other_model, other), snapshot_of(model, optimizer))
    for each in runs:
        step_with(*each, 1)
    assert_same(snapshot_of(other_model, other), snapshot_of(model, optimizer))


def test_names_and_metadata(tmp_path: Path) -> None:
    model, optimizer = trained("single", STEPS, lr=0.5)
    save_safetensors(tmp_path / "run", model, optimizer)
    tensors, header = read(tmp_path / "run")
    expected: dict[str, Tensor] = {}
    for name, param in named_parameters(model).items():
        expected[f"model.{name}"] = param.detach()
        expected |= {f"optimizer.{name}.{key}": value for key, value in optimizer.state[param].items()}
    assert_same(dict(sorted(tensors.items())), dict(sorted(expected.items())))
    (group,) = header["param_groups"]
    assert group["parameters"] == list(named_parameters(model))
    assert {"lr": 0.5, "codec": "log8", "block_size": 128, "betas": [0.9, 0.999]}.items() <= group["options"].items()
    assert (header["format_version"], header["dequantized"]) == (1, False)


def test_tensors_begin_aligned(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(7, 33, dtype=torch.bfloat16), nn.BatchNorm1d(33), nn.Linear(33, 129))
    optimizer = shardopt.AdamW8bit(model.parameters(), min_quantized_numel=0)
    set_gradients(model, 0)
    optimizer.step()
    save_safetensors(tmp_path / "run", model, optimizer)
    content = (tmp_path / "run").read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    widths = {"F32": 4, "BF16": 2, "U8": 1, "I64": 8}
    described = [value for key, value in header.items() if key != "__metadata__"]
    assert {each["dtype"] for each in described} == set(widths)
    assert all((8 + size + each["data_offsets"][0]) % widths[each["dtype"]] == 0 for each in described)


def test_buffers_and_wrappers(tmp_path: Path) -> None:
    """Persistent buffers come along, names do not tell of torch.compile, and a param group need not be JSON."""
    model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64))
    model.register_buffer("cache", torch.ones(2), persistent=False)
    model[1].running_mean += 1
    optimizer = shardopt.AdamW8bit([{"params": model[0].parameters(), "tag": object()}, {"params": [model[1].weight]}])
    optimizer.param_groups[0]["lr"] = torch.tensor(0.25)
    set_gradients(model, 0)
    optimizer.step()
    save_safetensors(tmp_path / "run", torch.compile(model), optimizer)
    tensors, header = read(tmp_path / "run")
    assert {name for name in tensors if name.startswith("model.1.")} == {
        f"model.1.{name}" for name in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
    }
    assert "model.cache" not in tensors
    assert [group["parameters"] for group in header["param_groups"]] == [["0.weight", "0.bias"], ["1.weight"]]
    other = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64))
    loaded = shardopt.AdamW8bit([{"params": other[0].parameters()}, {"params": [other[1].weight]}])
    load_safetensors(tmp_path / "run", other, loaded)
    assert_same(everything(loaded), everything(optimizer))
    assert_same(dict(other.named_buffers()), {k: v for k, v in model.named_buffers() if k != "cache"})
    assert [group["lr"] for group in loaded.param_groups] == [0.25, 1e-3]


def test_steps_that_overlap_with_the_next_forward_pass_are_waited_for(tmp_path: Path) -> None:
    expected = Layers()
    reference = start(expected, None)
    train(expected, reference, 1)
    model = Layers()
    with offload_from_cpu(), slow_steps(0.05):
        optimizer = start(model, True)
        train(model, optimizer, 1)
        save_safetensors(tmp_path / "run", model, optimizer)
    tensors, _ = read(tmp_path / "run")
    for name, param in expected.named_parameters():
        assert torch.equal(tensors[f"model.{name}"], param), name
        for key, value in reference.state[param].items():
            assert torch.equal(tensors[f"optimizer.{name}.{key}"], value), (name, key)


def test_before_the_first_step(tmp_path: Path) -> None:
    model, optimizer = trained("single", 0, lr=0.5)
    save_safetensors(tmp_path / "run", model, optimizer)
    other_model, other = trained("single", 1)
    load_safetensors(tmp_path / "run", other_model, other)
    assert not other.state
    assert other.param_groups[0]["lr"] == 0.5


@pytest.mark.parametrize("bits", [None, 24])
def test_float32_moments(tmp_path: Path, bits: int | None) -> None:
    """They are those of state_dict(dequantize=True), and any codec takes them in."""
    model, other_model = make_net(torch.bfloat16), make_net(torch.bfloat16)
    optimizer = shardopt.AdamW8bit(model.parameters(), min_quantized_numel=64)
    step_with(model, optimizer, 0)
    save_safetensors(tmp_path / "run", model, optimizer, dequantize=True)
    tensors, header = read(tmp_path / "run")
    expected = optimizer.state_dict(dequantize=True)
    for index, name in enumerate(named_parameters(model)):
        found = {key: tensors[f"optimizer.{name}.{key}"] for key in ("step", "exp_avg", "exp_avg_sq")}
        assert_same(found, expected["state"][index])
    assert not {"codec", "block_size"} & header["param_groups"][0]["options"].keys()
    options = {"codec": "dynamic8", "block_size": 64, "master_weight_bits": bits}
    loaded = shardopt.AdamW8bit(other_model.parameters(), **options)
    load_safetensors(tmp_path / "run", other_model, loaded)
    same = shardopt.AdamW8bit(other_model.parameters(), **options)
    same.load_state_dict(expected)
    assert_same(everything(loaded), everything(same))
    assert_same(dict(other_model.named_parameters()), dict(model.named_parameters()))


# --- sharded


def save_run(way: str, path: Path, dequantize: bool, codec: str) -> None:
    model, optimizer = trained(way, STEPS, codec=codec)
    save_safetensors(path, model, optimizer, dequantize=dequantize)


def load_run(way: str, path: Path, dequantized: bool, codec: str) -> None:
    model, optimizer = trained(way, 1, codec=codec)
    load_safetensors(path, model, optimizer)
    expected_model, expected = trained("single", STEPS, codec=codec)
    if dequantized:
        expected.load_state_dict(expected.state_dict(dequantize=True))
    assert_same(snapshot_of(model, optimizer), snapshot_of(expected_model, expected))


@pytest.mark.parametrize("dequantize", [False, True])
@pytest.mark.parametrize(
    ("saved_on", "saved_way", "loaded_on", "loaded_way"),
    [
        (1, "single", 4, "fsdp tp"),
        (2, "fsdp columns", 3, "fsdp"),
        (3, "fsdp", 2, "ddp"),
        (2, "ddp", 3, "fsdp columns"),
        (4, "fsdp tp", 2, "fsdp offload"),
        (2, "fsdp offload", 1, "single"),
    ],
)
def test_shards(
    ranks: Pool, tmp_path: Path, saved_on: int, saved_way: str, loaded_on: int, loaded_way: str, dequantize: bool
) -> None:
    path = tmp_path / "run"
    ranks.run(saved_on, save_run, saved_way, path, dequantize, "log8")
    assert os.listdir(tmp_path) == ["run"]
    ranks.run(loaded_on, load_run, loaded_way, path, dequantize, "log8")


def fill_the_disk(after: int) -> Callable[..., Any]:
    """An ``open`` whose files take only so many writes."""

    def opened(*args: Any, **kwargs: Any) -> Any:
        file = builtins.open(*args, **kwargs)  # noqa: SIM115
        writes = iter(range(after))

        class Full:
            def __getattr__(self, name: str) -> Any:
                return getattr(file, name)

            def write(self, data: Any) -> int:
                if next(writes, None) is None:
                    raise OSError(errno.ENOSPC, "No space left on device")
                return file.write(data)

        return Full()

    return opened


def save_to_a_full_disk(way: str, path: Path, after: int) -> str:
    model, optimizer = trained(way, STEPS)
    safetensors_writer.open = fill_the_disk(after)
    try:
        save_safetensors(path, model, optimizer)
    except CheckpointError as error:
        return str(error)
    finally:
        del safetensors_writer.open
    return "saved"


@pytest.mark.parametrize("after", [0, 1, 20])
@pytest.mark.parametrize(("world_size", "way"), [(1, "single"), (2, "fsdp")])
def test_a_full_disk_leaves_the_old_file(ranks: Pool, tmp_path: Path, world_size: int, way: str, after: int) -> None:
    path = tmp_path / "run"
    path.write_text("the old one")
    messages = ranks.run(world_size, save_to_a_full_disk, way, path, after)
    assert all("No space left on device" in message for message in messages)
    assert os.listdir(tmp_path) == ["run"]
    assert path.read_text() == "the old one"


# --- what cannot be loaded


def no_metadata(path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"model.x": torch.ones(3)}, path)


def newer(path: Path) -> None:
    content = path.read_bytes()
    assert b'{\\"format_version\\": 1,' in content
    path.write_bytes(content.replace(b'{\\"format_version\\": 1,', b'{\\"format_version\\": 2,', 1))


def other_model(path: Path) -> None:
    model = nn.Linear(64, 64)
    save_safetensors(path, model, shardopt.AdamW(model.parameters()))


def wider_model(path: Path) -> None:
    model, _ = trained("single", 0)
    model.gate = nn.Linear(71, 1)
    save_safetensors(path, model, RULES["adamw"].make(model.parameters()))


def of(rule: str, **options: Any) -> Callable[[Path], None]:
    def save(path: Path) -> None:
        save_safetensors(path, *trained("single", STEPS, rule, **options))

    return save


FAULTS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "missing": (Path.unlink, "no such file"),
    "empty": (lambda path: path.write_bytes(b""), "expected a whole safetensors file"),
    "cut off": (lambda path: path.write_bytes(path.read_bytes()[:-100]), "expected a whole safetensors file"),
    "cut off early": (lambda path: path.write_bytes(path.read_bytes()[:100]), "expected a whole safetensors file"),
    "no metadata": (no_metadata, "of another kind"),
    "newer": (newer, "format version 2, expected at most 1"),
    "other model": (other_model, "for model, expected"),
    "other shape": (wider_model, r"model.gate.weight of shape \(1, 71\)"),
    "other rule": (of("lion"), "expected .*exp_avg_sq_codes"),
    "other codec": (
        of("adamw", codec="dynamic8"),
        "codec='dynamic8', expected 'log8'; make .* or save with dequantize",
    ),
    "other block size": (of("adamw", block_size=64), "block_size=64"),
}


def _save_other_dtype(path: Path, dtype: torch.dtype) -> str:
    model, optimizer = trained("ddp", STEPS)
    model.module.register_buffer("odd", torch.zeros(3, dtype=dtype))
    with pytest.raises(ValueError, match=r"got model\.odd of ") as caught:
        save_safetensors(path, model, optimizer)
    return str(caught.value)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.float8_e4m3fn, torch.uint16], ids=str)
def test_a_dtype_that_the_file_cannot_hold(ranks: Pool, tmp_path: Path, dtype: torch.dtype) -> None:
    for message in ranks.run(2, _save_other_dtype, tmp_path / "run", dtype, timeout=60):
        assert f"got model.odd of {dtype}, expected one of torch.float64, " in message
        assert "register it with persistent=False, or save with shardopt.checkpoint.save" in message
    assert list(tmp_path.iterdir()) == []
    model, optimizer = trained("single", STEPS)
    model.register_buffer("odd", torch.zeros(3))
    save_safetensors(tmp_path / "run", model, optimizer)
    model.register_buffer("odd", torch.zeros(3, dtype=dtype))
    with pytest.raises(CheckpointError, match=rf"got model.odd of shape \(3,\) and F32, expected \(3,\) and {dtype};"):
        load_safetensors(tmp_path / "run", model, optimizer)


def _save_with_a_failing_writer(path: Path) -> str:
    model, optimizer = trained("fsdp", STEPS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(safetensors_writer, "_header", lambda tensors, metadata: {}["missing"])
        with pytest.raises(CheckpointError) as caught:
            save_safetensors(path, model, optimizer)
    save_safetensors(path, model, optimizer)
    return str(caught.value)


def test_any_error_of_the_writer_is_told_on_all_ranks(ranks: Pool, tmp_path: Path) -> None:
    first, second = ranks.run(2, _save_with_a_failing_writer, tmp_path / "run", timeout=60)
    assert "got KeyError while writing" in first
    assert first in second


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_changes_nothing(tmp_path: Path, name: str) -> None:
    spoil, message = FAULTS[name]
    path = tmp_path / "run"
    model, optimizer = trained("single", 1)
    save_safetensors(path, *trained("single", STEPS))
    spoil(path)
    before, groups = in_full(model, optimizer), [dict(group) for group in optimizer.param_groups]
    with pytest.raises(CheckpointError, match=message):
        load_safetensors(path, model, optimizer)
    assert_same(in_full(model, optimizer), before)
    assert [dict(group) for group in optimizer.param_groups] == groups


def load_on_one_rank_only(path: Path) -> None:
    """Rank 1 sees no file, as where a disk is not shared."""
    model, optimizer = trained("fsdp", 1)
    rank = torch.distributed.get_rank()
    load_safetensors(path if rank == 0 else path.with_name("other"), model, optimizer)


def test_a_rank_without_the_file(ranks: Pool, tmp_path: Path) -> None:
    save_safetensors(tmp_path / "run", *trained("single", STEPS))
    with pytest.raises(RankFailure, match=r"got an error on rank 1.*no such file"):
        ranks.run(2, load_on_one_rank_only, tmp_path / "run")


def test_other_parameters(tmp_path: Path) -> None:
    _, optimizer = trained("single", 1)
    with pytest.raises(ValueError, match="expected parameters of the model only"):
        save_safetensors(tmp_path / "run", nn.Linear(64, 64), optimizer)
    assert not os.listdir(tmp_path)


def test_without_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Saving and loading need none."""
    model, optimizer = trained("single", STEPS)
    monkeypatch.setitem(sys.modules, "safetensors", None)
    save_safetensors(tmp_path / "run", model, optimizer)
    other_model, other = trained("single", 1)
    load_safetensors(tmp_path / "run", other_model, other)
    assert_same(snapshot_of(other_model, other), snapshot_of(model, optimizer))


def test_files_of_the_library(tmp_path: Path) -> None:
    """It orders and pads as it likes."""
    from safetensors.torch import save_file

    model, optimizer = trained("single", STEPS)
    save_safetensors(tmp_path / "run", model, optimizer)
    with library.safe_open(tmp_path / "run", framework="pt") as file:
        tensors, metadata = {name: file.get_tensor(name) for name in reversed(file.keys())}, file.metadata()
    save_file(tensors, tmp_path / "again", metadata)
    assert (tmp_path / "again").read_bytes() != (tmp_path / "run").read_bytes()
    other_model, other = trained("single", 1)
    load_safetensors(tmp_path / "again", other_model, other)
    assert_same(snapshot_of(other_model, other), snapshot_of(model, optimizer))


def test_names_outlast_a_crash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is on the disk before it gets its name, and the folder afterwards."""
    model, optimizer = trained("single", 1)
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
    save_safetensors(tmp_path / "run", model, optimizer)
    assert done == ["file", "name", "folder"]


def failing_reads(good: int) -> Callable[..., int]:
    """``os.preadv`` that fails after so many reads."""
    left = iter(range(good))

    def preadv(*args: Any) -> int:
        if next(left, None) is None:
            raise OSError(errno.EIO, "Input/output error")
        return PREADV(*args)

    return preadv


PREADV = os.preadv


@pytest.mark.parametrize("dequantize", [False, True])
def test_a_read_that_fails_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dequantize: bool) -> None:
    """Whichever it is."""
    path = tmp_path / "run"
    save_safetensors(path, *trained("single", STEPS), dequantize=dequantize)
    reads = 2 + len(read(path)[0])
    model, optimizer = trained("single", 1)
    before, groups = in_full(model, optimizer), [dict(group) for group in optimizer.param_groups]
    for good in range(reads):
        monkeypatch.setattr(os, "preadv", failing_reads(good))
        with pytest.raises(CheckpointError, match=f"^{path}: cannot be read: Input/output error; save it again$"):
            load_safetensors(path, model, optimizer)
        assert_same(in_full(model, optimizer), before)
        assert [dict(group) for group in optimizer.param_groups] == groups
    monkeypatch.setattr(os, "preadv", failing_reads(reads))
    load_safetensors(path, model, optimizer)


def load_what_rank_1_cannot_read(way: str, path: Path, good: int) -> str:
    model, optimizer = trained(way, 1)
    before = in_full(model, optimizer)
    with pytest.MonkeyPatch.context() as patch:
        if torch.distributed.get_rank() == 1:
            patch.setattr(os, "preadv", failing_reads(good))
        with pytest.raises(CheckpointError) as raised:
            load_safetensors(path, model, optimizer)
    assert_same(in_full(model, optimizer), before)
    return str(raised.value)


@pytest.mark.parametrize("good", [0, 5, 30])
def test_a_read_that_fails_on_one_rank(ranks: Pool, tmp_path: Path, good: int) -> None:
    """Whole rows are coded by all ranks together: none may wait for the other."""
    path = tmp_path / "run"
    save_safetensors(path, *trained("single", STEPS), dequantize=True)
    messages = ranks.run(2, load_what_rank_1_cannot_read, "fsdp columns", path, good)
    assert messages[1] == f"{path}: cannot be read: Input/output error; save it again"
    assert messages[0].endswith(messages[1])
