"""Steps during the backward pass: the bits of ordinary steps, few gradients at once, errors for what excludes it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim.lr_scheduler import ExponentialLR
from torch.utils.checkpoint import checkpoint

import shardopt
from helpers import RULES, everything
from ranks.models import loss_of, make_batch, make_net
from ranks.snapshot import assert_same
from shardopt.optim import ShardedOptimizer
from step_problem import tables_made

STEPS = 4
BF16 = torch.bfloat16


def optimizer_of(model: nn.Module, rule: str = "adamw", **options: Any) -> ShardedOptimizer:
    """Two param groups with options of their own."""
    params = list(model.parameters())
    groups = [{"params": params[:5]}, {"params": params[5:], "weight_decay": 0.03, "lr": 2e-3, "block_size": 32}]
    return RULES[rule].make(groups, **{"min_quantized_numel": 64, **options})


class Pair:
    """One model twice, with an optimizer each: one whose gradients are released, and one with ordinary steps."""

    def __init__(self, model: nn.Module, rule: str = "adamw", **options: Any) -> None:
        self.models = (model, copy.deepcopy(model))
        self.released, self.ordinary = (optimizer_of(m, rule, **copy.deepcopy(options)) for m in self.models)
        self.schedules = [ExponentialLR(o, 0.8) for o in (self.released, self.ordinary)]
        self.release = shardopt.release_gradients(self.models[0], self.released)

    def step(self, number: int, loss: Any = loss_of, left: tuple[str, ...] | None = ()) -> None:
        """One turn of the usual loop for each. Gradients of parameters in ``left``, if known, live until ``step()``."""
        for model, optimizer, schedule in zip(self.models, (self.released, self.ordinary), self.schedules, strict=True):
            loss(model, make_batch(number)).backward()
            if optimizer is self.released and left is not None:
                assert tuple(name for name, param in model.named_parameters() if param.grad is not None) == left
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()

    def run(self, steps: int = STEPS, **how: Any) -> None:
        for number in range(steps):
            self.step(number, **how)
            self.compare()

    def compare(self) -> None:
        assert_same(everything(self.released), everything(self.ordinary))


@pytest.mark.parametrize(
    ("rule", "dtype", "options"),
    [
        ("adamw", torch.float32, {}),
        ("adamw", torch.float32, {"codec": "fp32", "lr": torch.tensor(1e-2)}),
        ("lion", torch.float32, {"codec": "dynamic8"}),
        ("nesterov", torch.float32, {"codec": "dynamic8"}),
        ("ademamix", torch.float32, {}),
        ("adopt", torch.float32, {"codec": "fp32"}),
        ("lamb", torch.float32, {}),
        ("adamw", BF16, {"master_weight_bits": 24}),
        ("adamw", BF16, {"master_weight_bits": 32}),
        ("lion", BF16, {"stochastic_rounding": True, "stochastic_rounding_seed": 3}),
    ],
    ids=str,
)
def test_as_ordinary_steps(rule: str, dtype: torch.dtype, options: dict[str, Any]) -> None:
    """Noise, too, which depends on a parameter's place among all."""
    Pair(make_net(dtype), rule, **options).run()


def test_tables_are_kept() -> None:
    """One plan per parameter, through new learning rates."""
    pair = Pair(make_net())
    with tables_made() as made:
        for number in range(3):
            loss_of(pair.models[0], make_batch(number)).backward()
            pair.released.step()
            pair.schedules[0].step()
    assert made == [1] * len(list(pair.models[0].parameters()))


def test_removed() -> None:
    """``step()`` changes and counts nothing when every gradient was stepped already."""
    pair = Pair(make_net())
    pair.run(2)
    before = everything(pair.released)
    pair.released.step()
    assert_same(everything(pair.released), before)
    pair.release.remove()
    pair.release.remove()
    assert not any(param._post_accumulate_grad_hooks for param in pair.models[0].parameters())
    assert not pair.models[0]._forward_pre_hooks
    names = tuple(name for name, _ in pair.models[0].named_parameters())
    pair.run(1, left=names)
    with shardopt.release_gradients(pair.models[0], pair.released) as release:
        assert isinstance(release, shardopt.GradientRelease)
        pair.run(2)
    inner = pair.models[0].conv  # and with parameters left over
    with shardopt.release_gradients(inner, pair.released):
        pair.run(2, left=tuple(name for name in names if not name.startswith("conv")))


class Tied(nn.Module):
    """One weight used as embedding, as its transpose and twice more."""

    def __init__(self, recompute: bool | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = Parameter(torch.randn(97, 64) / 8)
        self.mix = nn.Linear(64, 64)
        self.recompute = recompute  # None: without; else whether reentrant

    def forward(self, tokens: Tensor) -> Tensor:
        x = nn.functional.embedding(tokens, self.weight)
        for _ in range(2):
            x = x + self._mixed(x)
        return x @ self.weight.t()

    def _mixed(self, x: Tensor) -> Tensor:
        if self.recompute is None:
            return self._mix(x)
        mixed: Tensor = checkpoint(self._mix, x, use_reentrant=self.recompute)
        return mixed

    def _mix(self, x: Tensor) -> Tensor:
        return self.mix(torch.tanh(x @ self.weight.t() @ self.weight))


@pytest.mark.parametrize("recompute", [None, False])
def test_parameters_used_several_times_are_stepped_once(recompute: bool | None) -> None:
    pair = Pair(Tied(recompute))
    pair.run()
    assert pair.released.state[pair.models[0].weight]["step"] == STEPS
    assert not any(module._forward_pre_hooks for module in pair.models[0].children()), "counted in the first step only"


@pytest.mark.parametrize("evaluated", [False, True])
def test_gradients_in_parts_are_stepped_once_complete(evaluated: bool) -> None:
    """A reentrant checkpoint accumulates a shared parameter's gradient in several inner backward passes."""
    pair = Pair(Tied(recompute=True))
    if evaluated:
        with torch.no_grad():
            pair.models[0](make_batch(0))
    pair.run(left=("weight", "mix.weight", "mix.bias"))


class Dropped(nn.Module):
    """A layer that forward passes run in so many checkpoints each, as a module or, if not ``is_called``, a function."""

    def __init__(self, times: tuple[int, ...], *, reentrant: bool = True, is_called: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.layer = nn.Embedding(97, 64), nn.Linear(64, 64)
        self.last = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 97))
        self.times, self.reentrant, self.is_called, self.passes = times, reentrant, is_called, 0

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.first(tokens)
        for _ in range(self.times[self.passes % len(self.times)]):
            x = checkpoint(self.layer if self.is_called else self.layer.forward, x, use_reentrant=self.reentrant)
        self.passes += 1
        return self.last(x)


@pytest.mark.parametrize(
    ("times", "is_called"), [((0, 2, 1, 3), True), ((1, 2, 0, 2), True), ((2, 1, 3, 3), True), ((1, 2, 0, 2), False)]
)
def test_checkpoints_whose_number_changes(times: tuple[int, ...], is_called: bool) -> None:
    """Also if the first step has none, or one."""
    Pair(Dropped(times, is_called=is_called)).run(left=None)


class Layers(nn.Module):
    """Layers in a reentrant checkpoint each, one of which is also called without gradients, as a teacher is."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            teacher = self.layers[1](x)
        for layer in self.layers:
            x = x + checkpoint(layer, torch.tanh(x), use_reentrant=True)
        return x - teacher


def test_whole_gradients_of_reentrant_checkpoints_are_stepped_at_once() -> None:
    """From the second step on, such gradients are stepped at once; the first step counts their parts."""
    pair = Pair(Layers())

    def loss(model: nn.Module, tokens: Tensor) -> Tensor:
        x = torch.sin(tokens.sum() + torch.arange(64.0)).requires_grad_()
        return torch.as_tensor(model(x)).square().mean()

    for number in range(STEPS):
        pair.step(number, loss, () if number else ("layers.1.weight",))
        pair.compare()


def test_nonfinite_elements_are_counted() -> None:
    """And warned of by ``step()``; the count stays when the release ends."""
    pair = Pair(make_net())
    for model in pair.models:
        model.up.weight.register_hook(lambda g: g.index_fill(0, torch.tensor([3]), torch.nan))
    for number in range(2):
        with pytest.warns(RuntimeWarning, match="skipped 66 gradient elements") as caught:
            pair.step(number)
        assert {each.filename for each in caught} == {__file__}
        pair.compare()
        assert pair.released.nonfinite_count == pair.ordinary.nonfinite_count == 66 * (number + 1)
    loss_of(pair.models[0], make_batch(3)).backward()
    pair.release.remove()
    assert pair.released.nonfinite_count == 3 * 66
    with shardopt.release_gradients(pair.models[0], pair.released):
        assert pair.released.nonfinite_count == 3 * 66


def test_few_gradients_live_at_once() -> None:
    """A user's hook sees one gradient at a time, its own parameter's."""
    model = nn.Sequential(*(layer for _ in range(12) for layer in (nn.Linear(64, 64), nn.ReLU())))
    live: list[int] = []
    for param in model.parameters():
        param.register_post_accumulate_grad_hook(
            lambda _: live.append(sum(p.grad is not None for p in model.parameters()))
        )
    with shardopt.release_gradients(model, shardopt.AdamW8bit(model.parameters())):
        model(torch.randn(2, 64)).sum().backward()
    assert live == [1] * 24
    model(torch.randn(2, 64)).sum().backward()
    assert live[24:] == list(range(1, 25))


def test_values_that_the_backward_pass_still_needs() -> None:
    """A parameter that is stepped too early for another use of it is an error of autograd's, not a wrong gradient."""
    torch.manual_seed(0)
    model = nn.Linear(64, 64, bias=False)
    optimizer = shardopt.AdamW8bit(model.parameters())
    shardopt.release_gradients(model, optimizer)
    x = torch.randn(2, 64, requires_grad=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        model(torch.tanh(x @ model.weight.detach())).sum().backward()


def test_other_parameters_are_left_alone() -> None:
    """Parameters of the model that the optimizer has not, and of the optimizer that the model has not."""
    model, apart = make_net(), Parameter(torch.ones(3))
    frozen = [model.conv.weight, model.conv.bias]
    model.conv.requires_grad_(False)
    held = [param for name, param in model.named_parameters() if not name.startswith("head")]
    optimizer = RULES["adamw"].make([{"params": held}, {"params": [apart]}])
    shardopt.release_gradients(model, optimizer)
    (loss_of(model, make_batch(0)) + apart.sum()).backward()
    assert model.head.weight.grad is not None
    assert apart.grad is not None
    assert model.up.weight.grad is None
    assert torch.equal(apart, torch.ones(3))
    optimizer.step()
    assert not torch.equal(apart, torch.ones(3))
    assert optimizer.state[model.up.weight]["step"] == optimizer.state[apart]["step"] == 1
    optimizer.zero_grad()
    for param in frozen:
        param.requires_grad_(True)
    loss_of(model, make_batch(1)).backward()
    assert all(param.grad is not None for param in frozen)
    optimizer.step()
    assert [int(optimizer.state[param]["step"]) for param in (*frozen, model.up.weight)] == [1, 1, 2]


def test_state_dicts() -> None:
    """Saved and loaded between steps; loading does not end the release."""
    pair = Pair(make_net())
    pair.step(0)
    for optimizer in (pair.released, pair.ordinary):
        saved = copy.deepcopy(optimizer.state_dict())
        optimizer.load_state_dict(saved)
    pair.run()


def test_a_copy_is_not_released() -> None:
    pair = Pair(make_net())
    other = copy.deepcopy(pair.released)
    param = other.param_groups[0]["params"][0]
    before = param.detach().clone()
    param.grad = torch.ones_like(param)
    other.step()
    assert not torch.equal(param, before)
