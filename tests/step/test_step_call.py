"""The tables of a step are kept from step to step, and any change of what they were made of is noticed.

After each kind of change an optimizer that keeps its tables must do, bit for bit, what one does that is copied before
every step and so makes them anew.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import Parameter

import shardopt
from helpers import everything
from ranks.layouts import values
from ranks.snapshot import assert_same
from shardopt.layout import FlatShard, assign
from shardopt.optim import AdamW8bit
from step_changes import CHANGES, resized, with_data
from step_problem import assert_noticed, make, params_of, set_option, step, tables_made


@pytest.mark.parametrize("name", CHANGES)
def test_changes_are_noticed(name: str) -> None:
    assert_noticed(CHANGES[name], make())


@pytest.mark.parametrize("shape", [(2, 8, 4, 4, 4, 10), (256, 40)])
def test_changes_of_six_dimensions_are_noticed(shape: tuple[int, ...]) -> None:
    """Sizes and strides that do not fit into torch's description of a tensor itself."""
    optimizer = make()
    with_data(lambda x: x.view(4, 4, 4, 4, 4, 10))(optimizer)
    assert_noticed(with_data(lambda x: x.view(shape)), optimizer)


def test_a_changed_rule_is_noticed() -> None:
    """Without momentum SGD is another rule, and leaves the buffer alone."""
    for momentum in (0.0, 0.5):
        assert_noticed(set_option(0, momentum=momentum), make("momentum", dampening=0.0))


def test_values_that_change_in_place_are_noticed() -> None:
    assert_noticed(lambda optimizer: optimizer.param_groups[0]["lr"].fill_(0.3), make(lr=torch.tensor(0.01)))


def test_state_of_a_wrong_kind_is_not_stepped() -> None:
    """Put there by hand: the kernels would write past its end."""
    optimizer = make()
    step(optimizer, 0)
    state = optimizer.state[params_of(optimizer)[0]]
    for wrong in (torch.zeros(5, dtype=torch.uint8), torch.zeros(64, 130), torch.zeros(130, 64, dtype=torch.uint8).T):
        saved, state["exp_avg_codes"] = state["exp_avg_codes"], wrong
        with pytest.raises(RuntimeError, match=r"parameter 0 of param group 0 .*got state exp_avg_codes as"):
            step(optimizer, 1)
        state["exp_avg_codes"] = saved
    codes = state["exp_avg_codes"]
    saved, codes.data = codes.data, codes.data.view(-1)[:5]  # at the same address
    with pytest.raises(RuntimeError, match=r"got state exp_avg_codes as a contiguous tensor of 5 elements"):
        step(optimizer, 1)
    codes.data = saved
    assert state["step"] == 1
    step(optimizer, 1)
    assert state["step"] == 2


def test_what_was_skipped_is_counted_over_all_tables() -> None:
    optimizer = make()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        for t, without in enumerate([(), (1,), (), (3,), (1, 3)]):
            for index, param in enumerate(params_of(optimizer)):
                gradient = values(tuple(param.shape), t + index, param.dtype)
                gradient.view(-1)[2] = torch.nan
                param.grad = None if index in without else gradient
            optimizer.step()
        assert optimizer.nonfinite_count == 5 + 4 + 5 + 4 + 3
        optimizer.load_state_dict(optimizer.state_dict())
        assert optimizer.nonfinite_count == 21
        optimizer.step()
    assert optimizer.nonfinite_count == 24


def test_tables_are_kept() -> None:
    """Through new gradients, another learning rate, and gradients that come and go."""
    optimizer = make(dtype=torch.bfloat16)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    with tables_made() as made:
        for t, without in enumerate([(), (), (1,), (2,), (), (0, 1, 2, 3, 4), ()]):
            step(optimizer, t, without, torch.float32 if t % 2 else torch.bfloat16)
            schedule.step()
    assert len(made) == 1


def test_tables_keep_no_memory() -> None:
    """Neither gradients, nor state that was replaced (an offload between steps is to free it), nor the parameters."""
    optimizer = make()
    step(optimizer, 0)
    step(optimizer, 1)
    param = params_of(optimizer)[0]
    assert param.grad is not None
    gone = [weakref.ref(param.grad.untyped_storage()), weakref.ref(param.grad)]
    param.grad = None
    for entries in optimizer.state.values():
        for key, value in entries.items():
            if key != "step":
                gone.append(weakref.ref(value))
                entries[key] = value.clone()
        del value
    optimizer.param_groups[0]["params"].remove(param)
    del optimizer.state[param]
    gone.append(weakref.ref(param))
    del param
    assert [ref() for ref in gone] == [None] * len(gone)


def test_another_flat_shard_is_noticed() -> None:
    param = Parameter(torch.ones(64))
    optimizer = AdamW8bit([param], min_quantized_numel=0, block_size=32)
    with tables_made() as made:
        for first in (0, -64):
            shard = FlatShard((4, 64), first, 64)
            assign(param, shard)
            for _ in range(2):
                param.grad = torch.ones(64)
                optimizer.step()
    assert len(made) == 2


# Autograd ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"master_weight_bits": 24}])
def test_a_backward_pass_through_a_graph_of_before_the_step(options: dict[str, Any]) -> None:
    """Autograd notices a step: a backward pass through values of before it raises, as with torch.optim."""
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64)).bfloat16()
    optimizer = AdamW8bit(model.parameters(), **options)
    for _ in range(3):
        loss = model(torch.ones(2, 64, dtype=torch.bfloat16)).square().mean()
        loss.backward(retain_graph=True)
        loss.backward(retain_graph=True)
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        optimizer.zero_grad()


def test_parameters_that_are_not_stepped_keep_their_versions() -> None:
    """Versions stay without a gradient, and of all parameters where a step raises."""
    optimizer = make(nonfinite="raise")
    params = params_of(optimizer)
    for t, without in enumerate([(), (1,), (0, 3), (0, 1, 2, 3, 4), ()]):
        before = [param._version for param in params]
        step(optimizer, t, without)
        changed = {index for index, param in enumerate(params) if param._version != before[index]}
        assert changed == {0, 1, 2, 3, 4} - set(without)
    before = [param._version for param in params]
    params[2].grad[0, 0] = torch.nan
    with pytest.raises(FloatingPointError):
        optimizer.step()
    assert [param._version for param in params] == before


# Memory that was freed, cut or is shared -----------------------------------------------------------------------------


@pytest.mark.parametrize(("fresh", "freed"), [(True, False), (False, False), (False, True)])
def test_a_gradient_that_is_a_part_of_a_cut_buffer(fresh: bool, freed: bool) -> None:
    """None has a null address; its bytes, or a strided one's elements, would fit into the rest of the buffer."""
    param = Parameter(torch.ones(64, 70))
    optimizer = shardopt.AdamW8bit([param])
    buffer = torch.ones(10_000 + 2 * 64 * 70)
    for part in (buffer[10_000 : 10_000 + 64 * 70].view(64, 70), buffer[10_000:].view(128, 70)[::2]):
        param.grad = part
        for _ in range(2):
            optimizer.step()
        before = everything(optimizer)
        with resized(buffer, 0 if freed else buffer.nbytes - 4 * 64 * 70 - 4):
            if fresh:
                param.grad = part.view_as(part)
            message = r"^parameter 0 of param group 0 .*: got a gradient whose storage has \d+ bytes, expected \d+: "
            with pytest.raises(RuntimeError, match=message):
                optimizer.step()
        assert_same(everything(optimizer), before)
        optimizer.step()


@pytest.mark.parametrize("key", ["", "exp_avg_codes", "step"])
def test_a_parameter_without_a_gradient_may_be_freed(key: str) -> None:
    """As an offload between uses does, or its state; it is stepped again when its memory is back."""
    optimizer, expected = (make(dtype=torch.bfloat16) for _ in range(2))
    param = params_of(optimizer)[0]
    for t, without in enumerate([(), (0,), (0,), (), (0,), ()]):
        step(expected, t, without)
        with resized(optimizer.state[param][key] if key else param, 0) if without else nullcontext():
            step(optimizer, t, without)
    assert_same(everything(optimizer), everything(expected))


#: Lists of parameters of which the first and the last share memory.
SHARED: dict[str, Callable[[Tensor], list[Tensor]]] = {
    "twice": lambda w: [p := Parameter(w), p],
    "tied": lambda w: [p := Parameter(w), Parameter(p.detach())],
    "transposed": lambda w: [Parameter(w), Parameter(w.t())],
    "parts": lambda w: [Parameter(w[:40]), Parameter(torch.zeros(64, 64)), Parameter(w[39:])],
    "columns": lambda w: [Parameter(w[:, :33]), Parameter(w[:, 32:])],
    "one dtype within another": lambda w: [Parameter(w), Parameter(w.view(torch.bfloat16)[5:6])],
}


@pytest.mark.parametrize(
    ("kind", "way"), [*((kind, "constructor") for kind in SHARED), ("tied", "appended"), ("columns", "between steps")]
)
@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate parameters")
def test_parameters_that_share_memory_are_refused(kind: str, way: str) -> None:
    params = SHARED[kind](values((64, 64), 0))
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer = shardopt.AdamW8bit(params if way == "constructor" else params[:-1], min_quantized_numel=64)
    if way == "between steps":
        optimizer.step()
        optimizer.param_groups[0]["params"] = params
    elif way == "appended":
        optimizer.param_groups.append({**optimizer.param_groups[0], "params": params[-1:]})
    before = [param.detach().clone() for param in params]
    last = "0 of param group 1" if way == "appended" else f"{len(params) - 1} of param group 0"
    for _ in range(2):
        with pytest.raises(RuntimeError, match=rf"parameter {last}.* shares with parameter 0 of param group 0"):
            optimizer.step()
    assert all(torch.equal(param, expected) for param, expected in zip(params, before, strict=True))


def test_views_that_share_nothing_are_stepped() -> None:
    whole = values((64, 96), 0)
    parts = (whole[:, :32], whole[:, 32:64], whole[::2, 64:], whole[1::2, 64:], whole[0:0])
    apart, shared = ([Parameter(part.clone() if copied else part) for part in parts] for copied in (True, False))
    optimizers = [shardopt.AdamW8bit(params, min_quantized_numel=64) for params in (apart, shared)]
    for t in range(2):
        for optimizer in optimizers:
            step(optimizer, t)
    assert_same(*map(everything, optimizers))


def test_state_that_two_parameters_share_is_refused() -> None:
    optimizer = make("adamw", min_quantized_numel=0)
    step(optimizer, 0)
    first, second = params_of(optimizer)[:2]
    optimizer.state[second]["step"] = optimizer.state[first]["step"]
    with pytest.raises(RuntimeError, match=r"state step: got memory .* shares with parameter 0.* state step"):
        step(optimizer, 1)
