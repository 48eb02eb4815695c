"""Steps by chunks are those of the bare optimizer, bit for bit, where no state is quantized."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from shardopt import quantize_state
from shardopt.wrapper.entries import WEIGHT_COPIES
from shardopt.wrapper.tested import KINDS, Kind, full_name, kind_of
from wrapped import BY_PARAMETER, ELEMENTWISE, SEPARABLE, TOGETHER, Make, parameters, set_gradients, train_mode

STEPS = 7
NEVER = 2**40


def is_installed(package: str, name: str) -> bool:
    return find_spec(package) is not None and (package != "torch" or hasattr(torch.optim, name))


def skip_unless_installed(name: str) -> None:
    """Skips the test of an optimizer that is not there."""
    package, optimizer = name.split()[:2]
    if package != "torch":
        pytest.importorskip({"timm": "timm.optim"}.get(package, package))
    elif not is_installed(package, optimizer):
        pytest.skip(f"torch.optim.{optimizer} comes with a newer PyTorch")


def equal(x: Any, y: Any) -> bool:
    if isinstance(x, Tensor):
        return isinstance(y, Tensor) and x.dtype == y.dtype and torch.equal(x, y)
    if isinstance(x, dict):
        return x.keys() == y.keys() and all(equal(x[key], y[key]) for key in x)
    if isinstance(x, list | tuple):
        return len(x) == len(y) and all(map(equal, x, y))
    return bool(x == y)


def trained(optimizer: Optimizer, params: list[torch.nn.Parameter]) -> None:
    train_mode(optimizer)
    torch.manual_seed(0)
    for step in range(STEPS):
        set_gradients(params, step)
        optimizer.step()


def assert_as_bare(make: Make, **options: Any) -> None:
    bare_params, params = parameters(), parameters()
    bare = make(bare_params)
    wrapped = quantize_state(make(params), min_quantized_numel=NEVER, **options)
    before = [id(group) for group in wrapped.param_groups]
    lists = [id(group["params"]) for group in wrapped.param_groups]
    trained(bare, bare_params)
    trained(wrapped, params)
    assert equal(params, bare_params)
    assert equal(wrapped.state_dict(dequantize=True), bare.state_dict())
    assert [id(group) for group in wrapped.param_groups] == before
    assert [id(group["params"]) for group in wrapped.param_groups] == lists


@pytest.mark.parametrize("name", SEPARABLE)
def test_one_parameter_at_a_time(name: str) -> None:
    skip_unless_installed(name)
    assert_as_bare(SEPARABLE[name], working_memory=0)


@pytest.mark.parametrize("name", ["torch AdamW foreach", "torch NAdam", "schedulefree AdamW", "timm Adan"])
def test_some_parameters_at_a_time(name: str) -> None:
    skip_unless_installed(name)
    assert_as_bare(SEPARABLE[name], working_memory=32 * (40 * 130 + 64))


@pytest.mark.parametrize("name", TOGETHER)
def test_all_parameters_together(name: str) -> None:
    skip_unless_installed(name)
    assert_as_bare(TOGETHER[name], working_memory=None)
    with pytest.raises(ValueError, match="working_memory=None"):
        quantize_state(TOGETHER[name](parameters()))


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *((name, Kind.ELEMENTWISE) for name in ELEMENTWISE),
        *((name, Kind.BY_PARAMETER) for name in BY_PARAMETER),
        *((name, Kind.TOGETHER) for name in TOGETHER),
    ],
)
def test_kinds(name: str, kind: Kind) -> None:
    skip_unless_installed(name)
    assert kind_of(SEPARABLE.get(name, TOGETHER.get(name))(parameters())) is kind  # type: ignore[misc]


def test_the_tables_have_what_is_tested() -> None:
    """Of packages that are installed: each class in the tables is tested, and each tested one is in them."""

    def public(name: str) -> str:
        """The name in those versions of torch in which the module is private, too."""
        return name.replace("._adafactor", "").replace("._muon", "")

    every = {**SEPARABLE, **TOGETHER}
    made = [every[name](parameters()) for name in every if is_installed(*name.split()[:2])]
    listed = [name for name in KINDS if is_installed(name.split(".")[0], name.split(".")[-1])]
    assert {public(name) for name in listed} == {public(full_name(optimizer)) for optimizer in made}


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_elementwise_optimizers_step_parts_alike(name: str) -> None:
    """Rows of a parameter step as parameters of their own do, which stepping local shards relies on."""
    skip_unless_installed(name)
    whole = parameters()
    parts = [torch.nn.Parameter(x.detach().clone()) for p in whole for x in p.detach().chunk(3)]
    trained(ELEMENTWISE[name](whole), whole)
    optimizer = ELEMENTWISE[name](parts)
    train_mode(optimizer)
    again = parameters()
    for step in range(STEPS):
        set_gradients(again, step)
        gradients = [g for p in again for g in ([None] * 3 if p.grad is None else p.grad.chunk(3))]
        for part, gradient in zip(parts, gradients, strict=False):
            part.grad = None if gradient is None else gradient.clone()
        optimizer.step()
    assert torch.equal(
        torch.cat([p.detach().reshape(-1) for p in parts]), torch.cat([p.detach().reshape(-1) for p in whole])
    )


@pytest.mark.parametrize("name", [*SEPARABLE, *TOGETHER])
def test_copies_of_weights_are_known_by_name(name: str) -> None:
    """Entries that begin as copies of the weights: nothing looks for them in tested optimizers."""
    skip_unless_installed(name)
    params = parameters()
    optimizer = {**SEPARABLE, **TOGETHER}[name](params)
    train_mode(optimizer)
    before = [param.detach().clone() for param in params]
    set_gradients(params, 0)
    optimizer.step()
    for param, old in zip(params, before, strict=True):
        for entry, x in optimizer.state[param].items():
            if isinstance(x, Tensor) and x.shape == param.shape and (torch.equal(x, old) or torch.equal(x, param)):
                assert entry in WEIGHT_COPIES
