"""torchtitan's container of optimizers, whose config names ours."""

from __future__ import annotations

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


def container_config() -> Any:
    """AdamW8bit in two param groups, and Lion8bit."""
    from torchtitan.components.optimizer import ParamGroupConfig

    from shardopt.clients.torchtitan import OptimizersContainer

    return OptimizersContainer.Config(
        param_groups=[
            ParamGroupConfig(pattern=r"bias|norm", optimizer_name="AdamW8bit", optimizer_kwargs=OPTIONS),
            ParamGroupConfig(pattern=r"embed|head", optimizer_name="Lion8bit", optimizer_kwargs=OPTIONS),
            ParamGroupConfig(
                pattern=r".*", optimizer_name="AdamW8bit", optimizer_kwargs={**OPTIONS, "weight_decay": 0.1}
            ),
        ]
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


def save(folder: Path) -> None:
    model = WAYS["fsdp"](make_net())
    container = container_config().build(model_parts=[model])
    assert [type(each) for each in container] == [shardopt.AdamW8bit, shardopt.Lion8bit]
    train(model, container, 0, STEPS)
    state = container.state_dict()
    assert "state.up.weight.exp_avg_codes" in state
    dcp.save({"model": model.state_dict(), "optimizer": state}, checkpoint_id=folder)


def load_and_compare(folder: Path, sharded: bool) -> None:
    """Loads in place, as torchtitan's CheckpointManager does, and goes on like one process that never stopped."""
    model = make_net(seed=1)
    model = WAYS["fsdp"](model) if sharded else model
    container = container_config().build(model_parts=[model])
    state = {"model": model.state_dict(), "optimizer": container.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    model.load_state_dict(state["model"])
    container.load_state_dict(state["optimizer"])
    train(model, container, STEPS, 2 * STEPS)
    whole = make_net()
    expected = container_config().build(model_parts=[whole])
    train(whole, expected, 0, 2 * STEPS)
    assert_same(parameters_and_state(model, container), parameters_and_state(whole, expected))


def test_flat_state_is_resharded(client_ranks: Pool, tmp_path: Path) -> None:
    client_ranks.run(2, save, tmp_path)
    for world_size, sharded in ((2, True), (4, True), (1, True), (1, False)):
        client_ranks.run(world_size, load_and_compare, tmp_path, sharded)


def build_and_refuse() -> None:
    from torchtitan.components import optimizer as theirs

    from shardopt.clients.torchtitan import OptimizersContainer

    def config(name: str) -> Any:
        group = theirs.ParamGroupConfig(pattern=".*", optimizer_name=name, optimizer_kwargs={"lr": 1e-3})
        return OptimizersContainer.Config(param_groups=[group], implementation="for-loop")

    (optimizer,) = config("AdamW").build(model_parts=[make_net()])
    assert type(optimizer) is torch.optim.AdamW
    for name in ("NoSuchOptimizer", "memory_report"):
        with pytest.raises(NotImplementedError, match=name):
            config(name).build(model_parts=[make_net()])


def test_names(client_ranks: Pool) -> None:
    """Names of torchtitan's stay theirs; what is no optimizer of anybody's is refused as they do."""
    client_ranks.run(1, build_and_refuse)


def build_train_config() -> None:
    from torchtitan.models.llama3.config_registry import llama3_debugmodel

    from shardopt.clients.torchtitan import adamw8bit

    config = llama3_debugmodel()
    config.optimizer = adamw8bit(lr=1e-3)
    with torch.device("meta"):
        model = config.model_spec.model.build()
    container = config.optimizer.build(model_parts=[model])
    (optimizer,) = container
    assert type(optimizer) is shardopt.AdamW8bit
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(list(model.parameters()))
    assert (optimizer.defaults["codec"], optimizer.param_groups[0]["lr"]) == ("log8", 1e-3)


@needs("triton")  # which all models of torchtitan import
def test_train_config(client_ranks: Pool) -> None:
    client_ranks.run(1, build_train_config)


def clip_as_its_trainer() -> None:
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


def test_clipped_by_the_exact_norm(ranks: Pool) -> None:
    ranks.run(2, clip_as_its_trainer)
