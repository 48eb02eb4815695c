"""No tensor of the package lies on the user's default device: meta tensors, which have no memory, would show it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._device import _device_constructors

import shardopt
import shardopt.checkpoint
from helpers import CASES
from kernel_problem import gradients, make, start
from ranks.models import WAYS, make_net, set_gradients
from ranks.offload import offload_from_cpu
from ranks.pool import Pool
from ranks.runs import make_optimizer, single, snapshot_of
from ranks.snapshot import Snapshot, assert_same, snapshot

ROOT = Path(__file__).resolve().parents[2]
SHAPES = ((97, 130), (70, 33), (9, 257), (257,))
META = torch.device("meta")


def _calls_without_device(tree: ast.AST) -> Iterator[ast.AST]:
    """Uses of torch's functions that make tensors on the default device if they get no ``device``."""
    names = {function.__name__ for function in _device_constructors()}
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    told = [node for node in calls if any(keyword.arg == "device" for keyword in node.keywords)]
    right = {id(part) for node in told for part in (node.func, *node.args)}  # partial(torch.empty, device=...), too
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "torch":
            if node.attr in names and id(node) not in right:
                yield node
        elif isinstance(node, ast.ImportFrom) and node.module == "torch" and names & {x.name for x in node.names}:
            yield node


def test_every_new_tensor_has_a_device() -> None:
    """``device=None`` says that the user's default is meant."""
    for line in ("x = torch.zeros(3)", "f = partial(torch.empty, 3)", "from torch import tensor"):
        assert len(list(_calls_without_device(ast.parse(line)))) == 1, line
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in sorted((ROOT / "shardopt").rglob("*.py"))
        for node in _calls_without_device(ast.parse(path.read_text(encoding="utf-8")))
    ]
    assert not found


def _run(rule: str, codec: str, device: torch.device, **options: Any) -> Snapshot:
    """First steps, cached ones, with other gradients, with skipped elements; and one of a loaded optimizer."""
    options = {"codec": codec, "min_quantized_numel": 0, **options}
    params, optimizer = make(rule, initial=start(torch.bfloat16, SHAPES), **options)
    for t in range(1, 6):
        of_step = gradients(t, torch.bfloat16, SHAPES)
        for i, (name, param) in enumerate(params.items()):
            param.grad = None if i == t - 2 else of_step[name].clone()
        with device:
            if t == 5:
                state, optimizer = (
                    optimizer.state_dict(),
                    CASES[rule].make(list(params.values()), **options),
                )
                optimizer.load_state_dict(state)
            optimizer.step()
            optimizer.synchronize()
            shardopt.memory_report(optimizer)
    return snapshot(params, optimizer)


@pytest.mark.filterwarnings("ignore:.*gradient elements:RuntimeWarning")
@pytest.mark.parametrize(
    ("rule", "options"),
    [
        ("prodigy", {"offload": "state", "stochastic_rounding": True}),
        ("muon", {}),
        ("adamw", {"offload": "step", "master_weight_bits": 24}),
    ],
)
def test_step(rule: str, options: dict[str, Any]) -> None:
    with offload_from_cpu():
        found, expected = (_run(rule, "log8", device, **options) for device in (META, torch.device("cpu")))
    assert_same(found, expected)


def _sharded(way: str, rule: str, path: str) -> None:
    model = WAYS[way](make_net())
    optimizer = make_optimizer(way, model, rule)
    for step in range(3):
        set_gradients(model, step)
        with META:
            optimizer.step()
            optimizer.zero_grad()
    with META:
        shardopt.checkpoint.save(path, model, optimizer)
        shardopt.checkpoint.async_save(path + "-async", model, optimizer).result()
        shardopt.checkpoint.load(path, model, optimizer)
        shardopt.checkpoint.load(path + "-async", model, optimizer)
    got = snapshot_of(model, optimizer)
    if dist.get_rank() == 0:
        assert_same(got, single(3, rule))


@pytest.mark.parametrize(("way", "rule"), [("fsdp1", "adamw"), ("fsdp columns", "muon")])
def test_sharded(ranks: Pool, tmp_path: Path, way: str, rule: str) -> None:
    ranks.run(3, _sharded, way, rule, str(tmp_path / "saved"))
