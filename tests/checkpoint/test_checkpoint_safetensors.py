"""One safetensors file has model and optimizer bit for bit, can be read by the library, and replaces another whole."""

from __future__ import annotations

import builtins
import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardopt
from helpers import EIGHT_BIT, everything
from overlap_problem import start, train
from ranks.layered import Layers
from ranks.models import make_net, named_parameters, set_gradients
from ranks.offload import offload_from_cpu, slow_steps
from ranks.pool import Pool
from ranks.runs import snapshot_of, step_with, trained
from ranks.snapshot import assert_same
from shardopt.checkpoint import CheckpointError
from shardopt.checkpoint.foreign import load_safetensors, safetensors_writer, save_safetensors

library = pytest.importorskip("safetensors")


STEPS = 2


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
