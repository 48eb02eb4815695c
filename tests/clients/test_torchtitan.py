"""torchtitan's container of optimizers, whose config names ours."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import shardopt
from needed import needs
from ranks.models import WAYS, make_net, set_gradients
from ranks.pool import Pool
from ranks.snapshot import assert_same, snapshot

pytestmark = needs("torchtitan")
STEPS, OPTIONS = 3, {"lr": 1e-2, "min_quantized_numel": 64}


def groups_config() -> Any:
    """AdamW8bit in two param groups, and Lion8bit."""
    from shardopt.clients.torchtitan import container_config, param_group

    return container_config(
        param_group(r"bias|norm", "AdamW8bit", **OPTIONS),
        param_group(r"embed|head|output", "Lion8bit", **OPTIONS),
        param_group(r".*", "AdamW8bit", **OPTIONS, weight_decay=0.1),
    )


def train(model: torch.nn.Module, container: Any, first: int, last: int) -> None:
    for step in range(first, last):
        set_gradients(model, step)
        container.step()
        container.zero_grad()


def parameters_and_state(model: torch.nn.Module, container: Any) -> dict[str, torch.Tensor]:
    found = {}
    named = dict(model.named_parameters())
    for optimizer in container.optimizers:
        own = {param for group in optimizer.param_groups for param in group["params"]}
        found |= snapshot({name: param for name, param in named.items() if param in own}, optimizer)
    return dict(sorted(found.items()))


Build = Callable[[int], torch.nn.Module]


def save(folder: Path, build: Build) -> None:
    model = build(0)
    container = groups_config().build(model_parts=[model])
    assert {type(optimizer) for optimizer in container} == {shardopt.AdamW8bit, shardopt.Lion8bit}
    container.state_dict()  # makes state by a dummy step, which must not count
    train(model, container, 0, STEPS)
    state = container.state_dict()
    assert any(name.endswith(".exp_avg_codes") for name in state)
    dcp.save({"model": model.state_dict(), "optimizer": state}, checkpoint_id=folder)


def load_and_compare(folder: Path, build: Build, unsharded: Build) -> None:
    """Loads in place, as torchtitan's CheckpointManager does, and goes on like one process that never stopped."""
    model = build(1)
    container = groups_config().build(model_parts=[model])
    state = {"model": model.state_dict(), "optimizer": container.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    model.load_state_dict(state["model"])
    container.load_state_dict(state["optimizer"])
    train(model, container, STEPS, 2 * STEPS)
    whole = unsharded(0)
    expected = groups_config().build(model_parts=[whole])
    train(whole, expected, 0, 2 * STEPS)
    assert_same(parameters_and_state(model, container), parameters_and_state(whole, expected))


def net(sharded: bool, seed: int) -> torch.nn.Module:
    return WAYS["fsdp"](make_net(seed=seed)) if sharded else make_net(seed=seed)


def test_flat_state_is_resharded(client_ranks: Pool, tmp_path: Path) -> None:
    client_ranks.run(2, save, tmp_path, partial(net, True))
    for world_size, sharded in ((4, True), (1, True), (1, False)):
        client_ranks.run(world_size, load_and_compare, tmp_path, partial(net, sharded), partial(net, False))


@pytest.mark.client_ranks(1)
def test_names() -> None:
    """torchtitan's configs stay theirs beside ours, and its users may write ours so: a name of both is torchtitan's."""
    from torchtitan.components.optimizer import ParamGroupConfig

    from shardopt.clients.torchtitan import OptimizersContainer, adamw8bit, container_config, param_group

    def theirs(pattern: str, name: str) -> Any:
        return ParamGroupConfig(pattern=pattern, optimizer_name=name, optimizer_kwargs={"lr": 1e-3, "fused": False})

    plain = OptimizersContainer.Config(
        param_groups=[theirs("bias", "AdamW"), theirs(".*", "AdamW8bit")], implementation="for-loop"
    )
    mixed = container_config(theirs("bias", "AdamW"), param_group(".*", "AdamW", lr=1e-3))
    for config, ours in ((plain, shardopt.AdamW8bit), (mixed, shardopt.AdamW)):
        built = config.build(model_parts=[make_net()])
        assert [type(optimizer) for optimizer in built] == [torch.optim.AdamW, ours]
    (optimizer,) = adamw8bit(lr=1e-3).build(model_parts=[make_net()])
    assert type(optimizer) is shardopt.AdamW8bit
    assert (optimizer.defaults["codec"], optimizer.param_groups[0]["lr"]) == ("log8", 1e-3)
    unknown = OptimizersContainer.Config(param_groups=[theirs(".*", "NoSuchOptimizer")])
    with pytest.raises(ValueError, match="NoSuchOptimizer"):
        unknown.build(model_parts=[make_net()])
    for name in ("NoSuchOptimizer", "memory_report"):
        with pytest.raises(ValueError, match=name):
            param_group(".*", name, lr=1e-3)


LAYOUTS = {
    "FSDP2": (1, 4, 1),
    "HSDP": (2, 2, 1),
    "FSDP2 and tensor parallel": (1, 2, 2),
    "HSDP of one shard and tensor parallel": (2, 1, 2),
}
"""Ranks that replicate, that share by FSDP2, and that share by tensor parallelism: torchtitan's three degrees."""


def llama(degrees: tuple[int, int, int] | None, seed: int) -> torch.nn.Module:
    """Two layers of torchtitan's debug Llama 3, sharded by its own functions; equal values in each layout."""
    from torchtitan.config import CompileConfig
    from torchtitan.distributed import parallel_dims
    from torchtitan.models.llama3.config_registry import llama3_debugmodel

    config = llama3_debugmodel()
    config.model_spec.model.layers = config.model_spec.model.layers[:2]
    with torch.device("meta"):
        model = config.model_spec.model.build()
    if degrees is not None:
        parallel_dims.device_type = "cpu"
        parallelism = config.parallelism
        parallelism.spmd_backend = "partial_dtensor"
        parallelism.data_parallel_replicate_degree, parallelism.data_parallel_shard_degree = degrees[:2]
        parallelism.tensor_parallel_degree = degrees[2]
        dims = parallel_dims.ParallelDims.from_config(parallelism, math.prod(degrees))
        dims.build_mesh()
        model = config.model_spec.parallelize_fn(
            model,
            parallel_dims=dims,
            training=config.training,
            parallelism=parallelism,
            compile_config=CompileConfig(enable=False),
            ac_config=None,
            dump_folder="",
        )
    model.to_empty(device="cpu")
    set_gradients(model, 7 + seed)
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(param.grad)
    model.zero_grad()
    return model


@needs("triton")  # which all models of torchtitan import
def test_layouts_of_its_trainer(client_ranks: Pool, tmp_path: Path) -> None:
    """torchtitan's FSDP2, HSDP and tensor parallelism on CPU ranks: each one's checkpoint goes on in the next.

    Gradients are given: its attention has no backward pass on the CPU. Parameters are DTensors
    (``spmd_backend="partial_dtensor"``): FSDP2 of torch 2.13 refuses those of ``"spmd_types"``.
    """
    layouts = list(LAYOUTS.values())
    for index, (saved, loaded) in enumerate(zip(layouts, layouts[1:] + layouts[:1], strict=True)):
        client_ranks.run(4, save, tmp_path / str(index), partial(llama, saved))
        client_ranks.run(4, load_and_compare, tmp_path / str(index), partial(llama, loaded), partial(llama, None))


@pytest.mark.ranks(2)
def test_clipped_by_the_exact_norm() -> None:
    from torchtitan.distributed import utils

    from shardopt.clients.torchtitan import clip_grad_norm_

    norms = []
    for shard in (WAYS["fsdp"], WAYS["single"]):
        model = shard(make_net())
        set_gradients(model, 0)
        with pytest.MonkeyPatch.context() as monkeypatch:
            monkeypatch.setattr(utils, "clip_grad_norm_", clip_grad_norm_)
            norms.append(
                utils.clip_grad_norm_(list(model.parameters()), 1.0, foreach=True, pp_mesh=None, ep_enabled=False)
            )
    assert torch.equal(norms[0], norms[1])
    with pytest.raises(ValueError, match="got pipeline parallelism"):
        clip_grad_norm_(model.parameters(), 1.0, pp_mesh="mesh")
