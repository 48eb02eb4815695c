"""Parameters that nobody trains are warned of: frozen, cut off, or replaced; and replaced ones that are assigned."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.nn import Parameter
from torch.testing._internal.distributed.fake_pg import FakeStore

import shardopt
from ranks.layouts import values
from shardopt.optim import ShardedOptimizer


def test_a_first_step_without_gradients_warns_once() -> None:
    optimizer = shardopt.AdamW8bit(torch.nn.Linear(64, 64).parameters())
    with pytest.warns(
        RuntimeWarning, match=r"no gradient in any of 2 parameters.*make the optimizer after fully_shard"
    ):
        optimizer.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()
    frozen = torch.nn.Linear(64, 64).requires_grad_(False)
    with pytest.warns(RuntimeWarning, match="the first step found all 2 parameters frozen"):
        shardopt.AdamW8bit(frozen.parameters()).step()


def test_steps_of_a_release_are_steps() -> None:
    model = torch.nn.Linear(64, 64)
    optimizer = shardopt.AdamW8bit(model.parameters())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with shardopt.release_gradients(model, optimizer):
            model(torch.ones(1, 64)).sum().backward()
        optimizer.step()


def test_a_rank_that_holds_nothing_does_not_warn() -> None:
    """The rank is not part of the parameter's mesh."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        mesh = DeviceMesh("cpu", [1])
        param = torch.nn.Parameter(DTensor.from_local(torch.empty(0), mesh, [Shard(0)], shape=(8, 8), stride=(8, 1)))
        assert param.numel() == 64
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            shardopt.AdamW8bit([param]).step()
    finally:
        dist.destroy_process_group()


class Net(torch.nn.Module):
    """A model of which a pass may skip a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(50, 64)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in range(3))
        self.spare = torch.nn.Linear(64, 64)

    def set_gradients(self, t: int, skips: Callable[[int, int], bool]) -> None:
        for name, param in self.named_parameters():
            is_skipped = name.startswith("layers.") and skips(t, int(name.split(".")[1]))
            param.grad = torch.ones_like(param) if param.requires_grad and not is_skipped else None


def _warned(
    steps: int, skips: Callable[[int, int], bool] = lambda t, index: False, *, at: int = 0, act: object = None
) -> list[str]:
    """The warnings of some steps, before one of which ``act`` changes the model."""
    model = Net()
    model.spare.requires_grad_(False)
    optimizer = shardopt.AdamW8bit(model.named_parameters(), min_quantized_numel=64)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for t in range(steps):
            if t == at and callable(act):
                act(model)
            model.set_gradients(t, skips)
            optimizer.step()
            optimizer.zero_grad()
    return [str(warning.message) for warning in seen]


def _resize(model: Net) -> None:
    model.embed = torch.nn.Embedding(60, 64)


def _assign(model: Net) -> None:
    model.load_state_dict({name: x.clone() for name, x in model.state_dict().items()}, assign=True)


def _shard(model: Net) -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    fully_shard(model, mesh=DeviceMesh("cpu", [0, 1]))


@pytest.mark.parametrize("act", [_shard, _assign], ids=["fully_shard", "assign"])
def test_an_optimizer_made_too_early_ends_in_its_second_step(act: Callable[[Net], None]) -> None:
    model = Net()
    optimizer = shardopt.AdamW8bit(model.parameters())
    old = [param.detach().clone() for param in optimizer.param_groups[0]["params"]]
    try:
        act(model)
        model.set_gradients(0, lambda t, index: False)
        with pytest.warns(RuntimeWarning, match="the first step found no gradient in any of 9 parameters"):
            optimizer.step()
        with pytest.raises(RuntimeError, match=r"no module that has any of the optimizer's 9.*after fully_shard"):
            optimizer.step()
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    assert not optimizer.state
    assert all(map(torch.equal, optimizer.param_groups[0]["params"], old))


@pytest.mark.parametrize("case", ["a stage without a pass", "plain", "replaced later", "masters", "temperatures"])
def test_steps_without_gradients_may_be_right(case: str) -> None:
    """While another model of the same shapes has gradients."""
    model, other = Net(), Net()
    make = torch.Tensor.requires_grad_ if case == "plain" else Parameter
    params = [make(param.detach().clone()) for param in model.parameters()]
    if case == "masters":
        params = [Parameter(param.detach().double()) for param in params]
    if case == "temperatures":
        params = [param for param in params if param.dim() < 2]
    optimizer = shardopt.AdamW8bit(model.parameters() if "stage" in case else params)
    if case == "replaced later":
        for param in params:
            param.grad = torch.ones_like(param)
        optimizer.step()
        optimizer.zero_grad()
    other.set_gradients(0, lambda t, index: False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(4):
            optimizer.step()


@pytest.mark.parametrize("at", [0, 40])
def test_replaced_parameters_are_named_once(at: int) -> None:
    (message,) = _warned(at + 50, at=at, act=_resize)
    assert message.startswith(
        "embed.weight (50, 64): got no gradient in 3 steps, and no module has the parameter; expected"
    )
    assert _warned(at + 2, at=at, act=_resize) == []
    if at:
        (message,) = _warned(at + 50, at=at, act=_assign)  # of all parameters
        assert message.startswith("each of 3 steps found no gradient in any of 7 parameters and changed nothing")


DRAWS = torch.rand(100, 3, generator=torch.Generator().manual_seed(0))
#: Steps, which of three layers are skipped in which of them, and how the only warning begins, if there is one.
SKIPS: dict[str, tuple[int, Callable[[int, int], bool], str]] = {
    "at random": (100, lambda t, index: bool(DRAWS[t, index] < 0.6), ""),
    "but every 30th time": (100, lambda t, index: index == 1 and t % 30 > 0, ""),
    "a rare expert": (320, lambda t, index: index == 0 and t % 40 > 0, ""),
    "not for long yet": (31, lambda t, index: index == 1, ""),
    "soon after the start": (100, lambda t, index: index == 1 and t > 5, ""),
    "later, not for long yet": (178, lambda t, index: t > 50 and index == 0, ""),
    "from the start": (
        100,
        lambda t, index: index != 1,
        "layers.0.weight (64, 64), layers.0.bias (64,), layers.2.weight (64, 64), layers.2.bias (64,): got no gradient "
        "in 32 steps in which others had one; expected gradients",
    ),
    "later": (
        320,
        lambda t, index: t > 50 and index == 1,
        "layers.1.weight (64, 64), layers.1.bias (64,): got no gradient in 128 steps in which",
    ),
}


@pytest.mark.parametrize("how", SKIPS)
def test_parts_that_are_cut_off_are_named_once(how: str) -> None:
    """Also while the steps that go on have the same gradients, and are not looked at. Skipped parts are no noise."""
    steps, skips, beginning = SKIPS[how]
    found = _warned(steps, skips)
    assert len(found) == bool(beginning)
    assert all(message.startswith(beginning) for message in found)


def test_parts_that_are_frozen_later_are_no_noise() -> None:
    assert _warned(100, at=5, act=lambda model: model.embed.requires_grad_(False)) == []


# Parameters that are put into the param groups by assignment ----------------------------------------------------------


OPTIONS = {"stochastic_rounding": True, "min_quantized_numel": 64}


def _model() -> nn.Module:
    model = nn.Sequential(nn.Linear(64, 33), nn.Linear(33, 64)).bfloat16()
    for index, param in enumerate(model.parameters()):
        param.data = values(tuple(param.shape), index, torch.bfloat16)
    return model


def _step(model: nn.Module, optimizer: ShardedOptimizer, t: int) -> None:
    for index, param in enumerate(model.parameters()):
        param.grad = values(tuple(param.shape), 10 * t + index, torch.bfloat16)
    optimizer.step()


def test_assigned_parameters_are_rounded_by_their_numbers() -> None:
    models = [_model(), _model()]
    for assigns, model in enumerate(models):
        table = [{"params": [param]} for group in shardopt.param_groups(model) for param in group["params"][::-1]]
        optimizer = shardopt.AdamW8bit(table[:1] if assigns else table, lr=1e-2, **OPTIONS)
        if assigns:
            optimizer.param_groups = [{**optimizer.param_groups[0], **group} for group in table]
        for t in range(3):
            _step(model, optimizer, t)
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("all_of_them", "steps_before", "message"),
    [
        (False, 1, "2 of .*: got 1"),
        (True, 0, "0 of .*: got 2"),
        (True, 1, "0 of .*: got 2"),
    ],
)
def test_new_parameters_in_place_of_numbered_ones_warn(all_of_them: bool, steps_before: int, message: str) -> None:
    model = _model()
    kept = [] if all_of_them else [*model[0].parameters()]
    optimizer = shardopt.AdamW8bit([*kept, *model[1].parameters()], lr=1e-2, **OPTIONS)
    optimizer.attach(model)
    for t in range(steps_before):
        _step(model, optimizer, t)
    for name in ("weight", "bias") if all_of_them else ("weight",):
        setattr(model[1], name, Parameter(getattr(model[1], name).detach().clone()))
    optimizer.param_groups[0]["params"] = [*kept, *model[1].parameters()]
    with pytest.warns(RuntimeWarning, match=f"parameter {message} parameters without a number in the model"):
        _step(model, optimizer, 1)
    optimizer.attach(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _step(model, optimizer, 2)
