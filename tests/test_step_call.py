"""The tables of a step are kept from step to step, and any change of what they were made of is noticed.

After each kind of change an optimizer that keeps its tables must do, bit for bit, what one does that is copied before
every step and so makes them anew.
"""

from __future__ import annotations

import copy
import warnings
import weakref
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from helpers import RULES, everything, with_gradient
from ranks.layouts import values
from ranks.snapshot import assert_same
from shardopt.optim import ShardedOptimizer

SHAPES = ((64, 130), (300,), (40, 256), (7,), (7,))

#: What a change replaced stays allocated, so that stale addresses would do harm to it and not to the process.
kept: list[Any] = []


def make(rule: str = "adamw", dtype: torch.dtype = torch.float32, **options: Any) -> ShardedOptimizer:
    params = [Parameter(values(shape, i, dtype)) for i, shape in enumerate(SHAPES)]
    return RULES[rule].make([{"params": params[:3]}, {"params": params[3:], "weight_decay": 0.0}], **options)


def params_of(optimizer: ShardedOptimizer) -> list[Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def step(optimizer: ShardedOptimizer, t: int, without: tuple[int, ...] = (), grad_dtype: torch.dtype | None = None):
    for index, param in enumerate(params_of(optimizer)):
        gradient = values(tuple(param.shape), 100 * (t + 1) + index, param.dtype).to(grad_dtype or param.dtype)
        if index in without:
            param.grad = None
        else:
            with_gradient(param, gradient)
    optimizer.step()


def put(optimizer: ShardedOptimizer, index: int, key: str, change: Callable[[Tensor], Tensor]) -> None:
    """Puts another tensor in the place of a state entry."""
    state = optimizer.state[params_of(optimizer)[index]]
    kept.append(state[key])
    state[key] = change(state[key].clone())


def put_data(optimizer: ShardedOptimizer, index: int, key: str, change: Callable[[Tensor], Tensor]) -> None:
    """Gives a state entry other memory; the tensor is the same object."""
    tensor = optimizer.state[params_of(optimizer)[index]][key]
    kept.append(tensor.data)
    tensor.data = change(tensor.data.clone())


def replace_state(optimizer: ShardedOptimizer) -> None:
    state: defaultdict[Tensor, Any] = defaultdict(dict)
    for param, entries in optimizer.state.items():
        kept.append(entries)
        state[param] = {key: value.clone() for key, value in entries.items()}
    optimizer.state = state


def swap_state(optimizer: ShardedOptimizer) -> None:
    """Two moments of one parameter change places."""
    state = optimizer.state[params_of(optimizer)[1]]
    state["exp_avg"], state["exp_avg_sq"] = state["exp_avg_sq"], state["exp_avg"].abs()
    kept.append(dict(state))


def swap_names(optimizer: ShardedOptimizer) -> None:
    """The same tensors in the same order, under each other's names."""
    param = params_of(optimizer)[1]
    state = optimizer.state[param]
    names = {"exp_avg": "exp_avg_sq", "exp_avg_sq": "exp_avg"}
    optimizer.state[param] = {names.get(key, key): value.abs_() for key, value in state.items()}
    kept.append(state)


def swap_parameters(optimizer: ShardedOptimizer) -> None:
    """The same states in the same order, under other parameters."""
    *_, first, second = params_of(optimizer)
    others = {first: second, second: first}
    kept.append(optimizer.state)
    state: defaultdict[Tensor, Any] = defaultdict(dict)
    state.update({others.get(param, param): entries for param, entries in optimizer.state.items()})
    optimizer.state = state


def load(optimizer: ShardedOptimizer) -> None:
    other = copy.deepcopy(optimizer)
    step(other, 50)
    kept.append(dict(optimizer.state))
    optimizer.load_state_dict(other.state_dict())


def clear_state(optimizer: ShardedOptimizer) -> None:
    kept.extend(optimizer.state.values())
    optimizer.state.clear()


def clear_entries(optimizer: ShardedOptimizer) -> None:
    entries = optimizer.state[params_of(optimizer)[0]]
    kept.append(dict(entries))
    entries.clear()


def new_data(optimizer: ShardedOptimizer) -> None:
    param = params_of(optimizer)[0]
    kept.append(param.data)
    param.data = param.data * 2


def to_bfloat16(optimizer: ShardedOptimizer) -> None:
    for param in params_of(optimizer):
        kept.append(param.data)
        param.grad = None
        param.data = param.data.bfloat16()


def set_option(group: int, **options: Any) -> Callable[[ShardedOptimizer], None]:
    return lambda optimizer: optimizer.param_groups[group].update(options)


def set_format(**options: Any) -> Callable[[ShardedOptimizer], None]:
    """Changes an option on which the state depends; the state begins anew."""

    def change(optimizer: ShardedOptimizer) -> None:
        optimizer.param_groups[0].update(options)
        clear_state(optimizer)

    return change


def replace_param(optimizer: ShardedOptimizer) -> None:
    params = optimizer.param_groups[0]["params"]
    kept.append(params[1])
    params[1] = Parameter(values((300,), 77, torch.float32))


def share_memory(optimizer: ShardedOptimizer) -> None:
    """Moves all state in place."""
    for entries in optimizer.state.values():
        for tensor in entries.values():
            kept.append(tensor.detach().clone())
            tensor.share_memory_()


CHANGES: dict[str, Callable[[ShardedOptimizer], object]] = {
    "nothing": lambda optimizer: None,
    "add_param_group": lambda optimizer: optimizer.add_param_group(
        {"params": [Parameter(values((50, 128), 9, torch.float32))], "lr": 0.1}
    ),
    "group removed": lambda optimizer: kept.append(optimizer.param_groups.pop()),
    "group replaced": lambda optimizer: optimizer.param_groups.__setitem__(0, dict(optimizer.param_groups[0], lr=0.3)),
    "parameter removed": lambda optimizer: kept.append(optimizer.param_groups[0]["params"].pop(1)),
    "parameter appended": lambda optimizer: optimizer.param_groups[0]["params"].append(
        Parameter(values((60, 128), 9, torch.float32))
    ),
    "parameter replaced": replace_param,
    "parameters moved": lambda optimizer: optimizer.param_groups[1]["params"].append(
        optimizer.param_groups[0]["params"].pop()
    ),
    "parameters reversed": lambda optimizer: optimizer.param_groups[0]["params"].reverse(),
    "load_state_dict": load,
    "state replaced": replace_state,
    "state cleared": clear_state,
    "a parameter's state cleared": clear_entries,
    "a parameter's state popped": lambda optimizer: kept.append(optimizer.state.pop(params_of(optimizer)[2])),
    "codes replaced": lambda optimizer: put(optimizer, 0, "exp_avg_codes", lambda x: x.roll(1, 0)),
    "scales replaced": lambda optimizer: put(optimizer, 2, "exp_avg_sq_scales", lambda x: x.roll(1, 0)),
    "moment replaced": lambda optimizer: put(optimizer, 3, "exp_avg", lambda x: x * 3),
    "step replaced": lambda optimizer: put(optimizer, 1, "step", lambda x: x + 5),
    "moments swapped": swap_state,
    "names swapped": swap_names,
    "parameters swapped": swap_parameters,
    "data of codes": lambda optimizer: put_data(optimizer, 0, "exp_avg_codes", lambda x: x.roll(1, 0)),
    "data of scales": lambda optimizer: put_data(optimizer, 0, "exp_avg_scales", lambda x: x * 2),
    "data of step": lambda optimizer: put_data(optimizer, 2, "step", lambda x: x + 5),
    "state in shared memory": share_memory,
    "data of a parameter": new_data,
    "dtype of the parameters": to_bfloat16,
    "lr": set_option(0, lr=0.3),
    "betas": set_option(1, betas=(0.5, 0.6)),
    "eps": set_option(0, eps=0.1),
    "weight_decay": set_option(1, weight_decay=0.5),
    "maximize": set_option(0, maximize=True),
    "nonfinite": set_option(0, nonfinite="propagate"),
    "an option of its user": set_option(0, initial_lr=0.1),
    "block_size": set_format(block_size=64),
    "codec": set_format(codec="companded8"),
    "min_quantized_numel": set_format(min_quantized_numel=10**6),
}


def assert_noticed(change: Callable[[ShardedOptimizer], object], optimizer: ShardedOptimizer) -> None:
    """Changes the optimizer between steps, and another that makes its tables anew in every step alike."""
    anew = copy.deepcopy(optimizer)
    removed: list[tuple[Tensor, Tensor]] = []
    for t in range(6):
        if t == 3:
            before = params_of(optimizer)
            change(optimizer)
            change(anew)
            left = {id(param) for param in params_of(optimizer)}
            removed = [(param, param.detach().clone()) for param in before if id(param) not in left]
        anew = copy.deepcopy(anew)
        step(optimizer, t)
        step(anew, t)
        assert_same(everything(optimizer), everything(anew))
        for param, as_it_was in removed:
            assert torch.equal(param, as_it_was)


@pytest.mark.parametrize("name", CHANGES)
def test_changes_are_noticed(name: str) -> None:
    assert_noticed(CHANGES[name], make())


def test_a_changed_rule_is_noticed() -> None:
    """Without momentum SGD is another rule, and leaves the buffer alone."""
    for momentum in (0.0, 0.5):
        assert_noticed(set_option(0, momentum=momentum), make("momentum", dampening=0.0))


def test_values_that_change_in_place_are_noticed() -> None:
    def fill_lr(optimizer: ShardedOptimizer) -> None:
        optimizer.param_groups[0]["lr"].fill_(0.3)

    def set_beta(optimizer: ShardedOptimizer) -> None:
        optimizer.param_groups[0]["betas"][0] = 0.5

    assert_noticed(fill_lr, make(lr=torch.tensor(0.01)))
    assert_noticed(set_beta, make(betas=[0.9, 0.99]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_come_and_go(dtype: torch.dtype) -> None:
    """A parameter without a gradient is left alone, its step count too; also before its first gradient."""
    optimizer = make(dtype=dtype)
    anew = copy.deepcopy(optimizer)
    absent = [(2, 3), (), (0,), (0, 1), (), (3,), (0, 1, 2, 3, 4), (), (0,), ()]
    for t, without in enumerate(absent):
        anew = copy.deepcopy(anew)
        before = everything(optimizer)
        step(optimizer, t, without)
        step(anew, t, without)
        after = everything(optimizer)
        assert_same(after, everything(anew))
        for index in without:
            names = [name for name in after if name.split("/")[0] == str(index)]
            assert_same({name: after[name] for name in names}, {name: before[name] for name in names})
    assert [float(optimizer.state[p]["step"]) for p in params_of(optimizer)] == [6, 8, 8, 7, 9]


def test_dtypes_of_gradients_may_change() -> None:
    """The same values in a wider dtype make the same step."""
    optimizer, expected = (make(dtype=torch.bfloat16) for _ in range(2))
    for t, dtype in enumerate([torch.bfloat16, torch.float32, torch.float32, torch.bfloat16]):
        step(optimizer, t, grad_dtype=dtype)
        step(expected, t)
        assert_same(everything(optimizer), everything(expected))


def test_data_of_a_gradient() -> None:
    """The gradient is the same object with other memory, then with other values in the same memory."""
    optimizer = make()
    step(optimizer, 0)
    anew = copy.deepcopy(optimizer)
    for t in range(3):
        for index, param in enumerate(params_of(optimizer)):
            gradient, new = param.grad, values(tuple(param.shape), 10 * t + index, param.dtype)
            assert gradient is not None
            kept.append(gradient.data)
            if t == 1:
                gradient.copy_(new)
            else:
                gradient.data = new
        anew = copy.deepcopy(anew)
        for param, other in zip(params_of(optimizer), params_of(anew), strict=True):
            other.grad = param.grad.clone()
        optimizer.step()
        anew.step()
        assert_same(everything(optimizer), everything(anew))


BAD_GRADIENTS: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "sparse": (lambda g: g.to_sparse(), "got a sparse gradient"),
    "strided": (lambda g: g.T.contiguous().T, "got a gradient with strides"),
    "narrow": (lambda g: g.bfloat16(), "got a gradient of torch.bfloat16"),
}


@pytest.mark.parametrize("name", BAD_GRADIENTS)
def test_a_bad_gradient_changes_nothing_and_the_next_step_goes_well(name: str) -> None:
    make_bad, message = BAD_GRADIENTS[name]
    optimizer, expected = make(), make()
    for t in range(4):
        step(expected, t)
        step(optimizer, t)
        before = everything(optimizer)
        with_gradient(params_of(optimizer)[2], make_bad(values(SHAPES[2], 5, torch.float32)))
        with pytest.raises(RuntimeError, match=message):
            optimizer.step()
        assert_same(everything(optimizer), before)
    assert_same(everything(optimizer), everything(expected))


def test_a_gradient_that_shrank_is_not_stepped() -> None:
    optimizer = make()
    step(optimizer, 0)
    step(optimizer, 1)
    before = everything(optimizer)
    gradient = params_of(optimizer)[1].grad
    assert gradient is not None
    gradient.data = torch.zeros(5)
    with pytest.raises(RuntimeError, match=r"got a gradient of shape \(5,\) on cpu, expected \(300,\)"):
        optimizer.step()
    assert_same(everything(optimizer), before)


def test_nonfinite_gradients_raise_in_any_step() -> None:
    optimizer, expected = make(nonfinite="raise"), make()
    for t in range(4):
        step(expected, t)
        step(optimizer, t)
        before = everything(optimizer)
        gradient = params_of(optimizer)[1].grad
        assert gradient is not None
        gradient[17] = torch.nan
        with pytest.raises(FloatingPointError, match=r"parameter 1 of param group 0 \(300,\): got a gradient with NaN"):
            optimizer.step()
        assert_same(everything(optimizer), before)
    assert_same(everything(optimizer), everything(expected))


def test_nonfinite_gradients_raise_for_a_parameter_that_had_none() -> None:
    optimizer = make(nonfinite="raise")
    step(optimizer, 0)
    optimizer.load_state_dict(optimizer.state_dict())
    step(optimizer, 1, without=(1,))
    with_gradient(params_of(optimizer)[1], torch.full((300,), torch.inf))
    with pytest.raises(FloatingPointError, match=r"^parameter 1 of param group 0 \(300,\): got a gradient with NaN"):
        optimizer.step()


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


def plans(optimizer: ShardedOptimizer, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list that grows whenever the optimizer makes its tables anew."""
    made: list[int] = []
    original = optimizer._new_plan

    def new_plan(*args: Any) -> Any:
        made.append(len(made))
        return original(*args)

    monkeypatch.setattr(optimizer, "_new_plan", new_plan)
    return made


def test_tables_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Through new gradients, another learning rate, and gradients that come and go."""
    optimizer = make(dtype=torch.bfloat16)
    made = plans(optimizer, monkeypatch)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
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
