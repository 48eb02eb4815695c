"""Options: what is refused, when they are given, misspelt, or changed by hand between steps."""

from __future__ import annotations

import re
import warnings
from collections import UserList
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import Parameter

import shardopt
from helpers import CASES, RULES, everything, through_a_file
from ranks.layouts import values
from ranks.offload import offload_from_cpu
from ranks.snapshot import assert_same
from shardopt import _C
from shardopt.optim import ShardedOptimizer
from shardopt.step import groups
from test_optimizers import SHAPES, advance, make

NAN, INF = float("nan"), float("inf")

#: Refusals: by the constructor, by add_param_group, and by the step after the option was put there by hand.
WRONG_OPTIONS: list[tuple[str, dict[str, Any], str]] = [
    ("adamw", {"codec": "log9"}, "codec: got 'log9', expected one of 'log8'"),
    ("adamw", {"maximize": "no"}, "maximize: got 'no', expected True or False"),
    ("adamw", {"nonfinite": "ignore"}, "nonfinite: got 'ignore', expected 'skip', 'raise' or 'propagate'"),
    ("adamw", {"master_weight_bits": 24.0}, "master_weight_bits: got 24.0, expected None, 24 or 32"),
    ("adamw", {"stochastic_rounding": 1}, "stochastic_rounding: got 1, expected True or False"),
    ("adamw", {"stochastic_rounding": True, "master_weight_bits": 24}, "got True and master_weight_bits=24, expected"),
    ("adamw", {"stochastic_rounding_seed": -1}, "stochastic_rounding_seed: got -1, expected a whole number"),
    ("adamw", {"offload": "disk"}, "offload: got 'disk', expected None, 'state' or 'step'"),
    ("adamw", {"amsgrad": 1}, "amsgrad: got 1, expected True or False"),
    ("adamw", {"lr": torch.tensor([1.0, 2.0])}, "lr: got a tensor of 2 elements"),
    ("adamw", {"lr": torch.tensor(1j)}, "lr: got 1j"),
    ("adamw", {"lr": "1e-3"}, "lr: got '1e-3', expected a number >= 0.0 that float32 can hold; this is text: in YAML"),
    ("adamw", {"lr": 1e39}, "lr: got 1e+39, expected a number >= 0.0 that float32 can hold"),
    ("adamw", {"weight_decay": -1.0}, "weight_decay: got -1.0, expected a number >= 0"),
    ("adamw", {"eps": NAN}, "eps: got nan, expected a number >= 0.0 that float32 can hold"),
    ("adamw", {"betas": 0.9}, "betas: got 0.9, expected 2 numbers"),
    ("adamw", {"betas": (1.0, 0.9)}, "betas[0]: got 1.0, expected a number in [0.0, 1.0)"),
    ("adamw", {"betas": (0.9, NAN)}, "betas[1]: got nan"),
    ("sgd", {"nesterov": True}, "nesterov: got"),
    ("sgd", {"nesterov": True, "momentum": 0.9, "dampening": 0.1}, "nesterov: got"),
    ("momentum", {"momentum": INF}, "momentum: got"),
    ("momentum", {"dampening": NAN}, "dampening: got"),
    ("prodigy", {"d0": 0.0}, "d0: got 0.0, expected a number above 0"),
    ("prodigy", {"d_coef": -1.0}, "d_coef: got -1.0, expected a number above 0"),
    ("prodigy", {"growth_rate": NAN}, "growth_rate: got nan, expected a number >= 1"),
    ("prodigy", {"beta3": 1.0}, "beta3: got 1.0, expected a number in [0.0, 1.0)"),
    ("prodigy", {"decouple": 1}, "decouple: got 1, expected True or False"),
    ("muon", {"ns_coefficients": (1.0, 2.0)}, "ns_coefficients: got (1.0, 2.0), expected three numbers"),
    ("muon", {"ns_coefficients": [(1, 2, 3), (1, 2)]}, "ns_coefficients: got"),
    ("muon", {"ns_coefficients": (1, INF, 3)}, "expected finite numbers"),
    ("muon", {"ns_steps": 0}, "ns_steps: got 0, expected a whole number from 1 to 99"),
    ("muon", {"normalize": "columns"}, "normalize: got 'columns', expected None or 'rows'"),
    ("muon", {"beta2": 1.0}, "beta2: got 1.0, expected a number in [0.0, 1.0)"),
    ("muon", {"eps": 0.0}, "eps: got 0 for Muon"),
    ("muon", {"momentum": 1.0}, "momentum: got 1.0, expected a number in [0.0, 1.0)"),
    ("muon", {"adjust_lr_fn": "rms"}, "adjust_lr_fn: got 'rms', expected None or one of 'original'"),
    ("muon", {"algorithm": "sgd"}, "algorithm: got 'sgd', expected 'muon', 'adamw' or 'lion'"),
    ("muon", {"split": 3}, "split: got 3, expected None, 'each', or the rows of each matrix"),
    ("muon", {"split": (10, 20)}, "got split=(10, 20) for a parameter of shape (64, 130), expected a sum of 64"),
    ("muon", {"split": "each"}, "got split='each' for a parameter of shape (64, 130), expected three dimensions"),
]
#: Refused before the first step only.
MADE: list[tuple[str, dict[str, Any], str]] = [
    ("muon", {"offload": "step"}, "offload: got 'step' for Muon, which multiplies matrices where the parameters are"),
    ("adamw", {"block_size": 100}, "block_size: got 100, expected a power of two from 16 to 4096"),
    ("adamw", {"min_quantized_numel": -1}, "min_quantized_numel: got -1"),
    ("adamw", {"differentiable": True}, "differentiable: got True"),
]
#: Refused between steps only.
CHANGED: list[tuple[str, dict[str, Any], str]] = [
    ("adamw", {"offload": "state"}, "offload: got 'state' in a param group that was stepped with None, expected no"),
]


def of_rule(rule: str, **options: Any) -> ShardedOptimizer:
    """Muon has no parameter but a matrix."""
    params = [Parameter(values(shape, 0)) for shape in (SHAPES[:1] if rule == "muon" else SHAPES)]
    return CASES[rule].optimizer(params, **{**CASES[rule].hyper, **options})


def ids(x: object) -> str:
    return str(x) if isinstance(x, dict) else ""


@pytest.mark.parametrize(("rule", "options", "message"), [*WRONG_OPTIONS, *MADE], ids=ids)
def test_wrong_options(rule: str, options: dict[str, Any], message: str) -> None:
    """In the constructor, and in a group added later."""
    with pytest.raises(ValueError, match=re.escape(message)):
        of_rule(rule, **options)
    optimizer = of_rule(rule)
    with pytest.raises(ValueError, match=re.escape(message)):
        optimizer.add_param_group({"params": [Parameter(torch.zeros(64, 130))], **options})
    assert len(optimizer.param_groups) == 1
    advance(optimizer, range(1))


@pytest.mark.parametrize(("rule", "options", "message"), [*WRONG_OPTIONS, *CHANGED], ids=ids)
def test_wrong_options_by_hand(rule: str, options: dict[str, Any], message: str) -> None:
    """Refused by the next step, and by the one after it; nothing is changed, and what was there before steps on."""
    optimizer, expected = of_rule(rule), of_rule(rule)
    advance(optimizer, range(2))
    advance(expected, range(3))
    before, old = everything(optimizer), {name: optimizer.param_groups[0].get(name) for name in options}
    optimizer.param_groups[0].update(options)
    for _ in range(2):
        with pytest.raises(ValueError, match=re.escape(message)):
            advance(optimizer, range(2, 3))
        assert_same(everything(optimizer), before)
    optimizer.param_groups[0].update(old)
    advance(optimizer, range(2, 3))
    assert_same(everything(optimizer), everything(expected))


def test_unknown_options_and_no_rule() -> None:
    with pytest.raises(TypeError, match="got an optimizer Bare without a rule, expected one; set only_rule"):
        type("Bare", (ShardedOptimizer,), {})([Parameter(torch.zeros(3))], {"lr": 1e-3}, {}).step()
    for given, nearest in {
        "blocksize": "'block_size'",
        "weigth_decay": "'weight_decay'",
        "amsgrd": "'amsgrad'",
        "quantum": "some of lr, betas, eps, weight_decay, amsgrad, .*, maximize, codec, .*, differentiable",
    }.items():
        with pytest.raises(TypeError, match=f"^got unknown option '{given}', expected {nearest}$"):
            make(**{given: 1})
    with pytest.raises(TypeError, match=r"'block_sise', 'codex', expected 'block_size', 'codec'$"):
        make(block_sise=64, codex="log8")


def test_hyper_parameters_at_the_ends_of_their_ranges() -> None:
    """Frameworks take steps with lr=0 to have state made; dampening may be below zero, as in torch."""
    largest = torch.finfo(torch.float32).max
    shardopt.AdamW8bit([Parameter(torch.zeros(3))], lr=0, betas=[0, 1 - 2.0**-53], eps=0.0, weight_decay=largest)
    shardopt.SGD8bit([Parameter(torch.zeros(3))], lr=largest, momentum=largest, dampening=-largest)


def test_a_learning_rate_on_a_device_is_not_read() -> None:
    lr = torch.tensor(NAN, device="meta")  # reading it would raise
    optimizer = make(lr=lr)
    assert optimizer.param_groups[0]["lr"] is lr
    with pytest.raises(ValueError, match="lr: got a tensor of 2 elements"):
        make(lr=lr.expand(2))


def test_wrong_values_put_in_place() -> None:
    """Into a tensor that the param group had before; what is read for the step is what is checked."""
    optimizer = make(lr=torch.tensor(0.01))
    advance(optimizer, range(1))
    lr, before = optimizer.param_groups[0]["lr"], everything(optimizer)
    for value in (NAN, INF):
        lr.fill_(value)
        with pytest.raises(ValueError, match=f"lr: got {value}, expected"):
            advance(optimizer, range(1))
        assert_same(everything(optimizer), before)
    lr.fill_(0.1)
    advance(optimizer, range(1))


def test_offload_changed_before_a_release() -> None:
    """Each released parameter has tables of its own, which have not seen the old value."""
    model = torch.nn.Linear(130, 64)
    with offload_from_cpu():
        optimizer = shardopt.AdamW8bit(model.parameters(), offload="state")
        model(torch.ones(1, 130)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        optimizer.param_groups[0]["offload"] = None
        with (
            shardopt.release_gradients(model, optimizer),
            pytest.raises(ValueError, match="offload: got None in a param"),
        ):
            model(torch.ones(1, 130)).sum().backward()


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("master_weights_bits", "master_weight_bits"),
        ("ofload", "offload"),
        ("beta", "betas"),
        ("weigt_decay", "weight_decay"),
    ],
)
def test_misspelt_options_in_param_groups(key: str, meant: str) -> None:
    optimizer = make()
    for add in (lambda group: shardopt.AdamW8bit([group]), optimizer.add_param_group):
        with pytest.raises(ValueError, match=f"got unknown option '{key}' in a param group, expected '{meant}'"):
            add({"params": [Parameter(torch.zeros(3))], key: 1})
    with pytest.raises(ValueError, match=r"got a param group of muon_groups.*; use Muon8bit, or param_groups"):
        shardopt.AdamW8bit(shardopt.muon_groups(torch.nn.Linear(64, 64)))
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize(
    ("dtype", "options", "group", "warns"),
    [
        (torch.bfloat16, {}, {}, True),
        (torch.float16, {}, {}, True),
        (torch.float32, {}, {}, False),
        (torch.bfloat16, {"master_weight_bits": 24}, {}, False),
        (torch.bfloat16, {"stochastic_rounding": True}, {}, False),
        (torch.bfloat16, {"master_weight_bits": None}, {}, False),
        (torch.bfloat16, {}, {"master_weight_bits": None}, False),
    ],
)
def test_lost_updates_are_warned_of_once(
    dtype: torch.dtype, options: dict[str, Any], group: dict[str, Any], warns: bool
) -> None:
    """By the first step, not by one that only makes state; frozen parameters do not count."""
    params = [Parameter(torch.ones(64, dtype=dtype)), Parameter(torch.ones(3, dtype=torch.bfloat16), False)]
    optimizer = shardopt.AdamW8bit([{"params": params, **group}], lr=torch.tensor(0.0), **options)
    said = []
    for value in (0.0, 1.0, 1.0):
        params[0].grad = torch.full_like(params[0], value)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            optimizer.step()
        said.append([str(warning.message) for warning in caught])
    assert said[::2] == [[], []]
    assert len(said[1]) == warns
    assert all(f"got 1 parameters of {dtype} without master" in x and "set master_weight_bits=24" in x for x in said[1])


def test_other_keys_in_param_groups_are_let_pass() -> None:
    """Of schedulers, of torch and of users, also those with an option's name in theirs."""
    foreign = ("name", "initial_lr", "max_lr", "lr_scale", "max_momentum", "no_weight_decay", "rank", "swa_lr")
    foreign += ("param_name", "lr_mult", "wd_mult", "pre_lr_mult", "is_decoupled_lr", "decoupled_weight_decay", "moe")
    group = {"params": [Parameter(torch.zeros(3))], "lr": 0.1, "offload": None, **dict.fromkeys(foreign, 1)}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer = shardopt.AdamW8bit([group])
        shardopt.SGD8bit([{**group, "nesterov": True, "momentum": 0.9}])
        shardopt.AdamW8bit([("weight", Parameter(torch.zeros(3)))])
    assert optimizer.param_groups[0].keys() >= set(foreign)


@pytest.mark.parametrize("names", [1.5, "weight", [1]])
def test_param_names_are_names(names: Any) -> None:
    with pytest.raises(ValueError, match=r"param_names: got .*, expected a list of the parameters' names"):
        shardopt.AdamW8bit([{"params": [Parameter(torch.ones(2))], "param_names": names}])


UNEVEN = ((3.0, -4.0, 2.0), (2.0, -1.5, 0.5))


@pytest.mark.parametrize(
    ("rule", "option", "value", "given"),
    [
        ("AdamW8bit", "betas", (0.5, 0.25), UserList([0.5, 0.25])),
        ("NAdam8bit", "betas", (0.5, 0.25), np.array([0.5, 0.25])),
        ("Prodigy8bit", "betas", (0.5, 0.25), (np.float32(0.5), np.float32(0.25))),
        ("AdEMAMix8bit", "betas", (0.5, 0.25, 0.75), torch.tensor([0.5, 0.25, 0.75])),
        ("Muon8bit", "split", (3, 5), np.array([3, 5])),
        ("Muon8bit", "ns_coefficients", UNEVEN[0], torch.tensor(UNEVEN[0])),
        ("NorMuon8bit", "ns_coefficients", UNEVEN, np.array(UNEVEN)),
        ("NorMuon8bit", "ns_coefficients", UNEVEN, UserList(UNEVEN)),
    ],
)
def test_a_sequence_of_any_class(rule: str, option: str, value: Any, given: Any) -> None:
    """As an argument, in a param group and between steps; the group keeps tuples of plain numbers."""
    param, kind = Parameter(torch.ones(8, 16)), getattr(shardopt, rule)
    for optimizer in (kind([param], **{option: given}), kind([{"params": [param], option: given}]), kind([param])):
        optimizer.param_groups[0][option] = given
        saved = through_a_file(optimizer.state_dict())
        assert saved["param_groups"][0][option] == value
        optimizer.param_groups[0][option] = given
        param.grad = torch.ones(8, 16)
        optimizer.step()
        assert optimizer.param_groups[0][option] == value
        saved["param_groups"][0][option] = given
        optimizer.load_state_dict(saved)
        assert optimizer.param_groups[0][option] == value


def test_sequences_of_any_class_elsewhere() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    groups = shardopt.param_groups(model, {pattern: {"betas": np.array([0.5, 0.25])} for pattern in ("0.*", "1.*")})
    assert [group["betas"] for group in groups] == [(0.5, 0.25)]
    optimizer = shardopt.AdamW8bit([{"params": [Parameter(torch.ones(2))], "param_names": UserList(["weight"])}])
    assert through_a_file(optimizer.state_dict())["param_groups"][0]["param_names"] == ["weight"]


def split_groups(kind: type[ShardedOptimizer]) -> ShardedOptimizer:
    """An optimizer with a param group for each matrix."""
    return kind([{"params": [Parameter(values((48, 64), seed))]} for seed in range(3)])


@pytest.mark.parametrize(
    "kind", [shardopt.AdamW8bit, shardopt.SGD8bit, shardopt.Muon8bit, shardopt.NorMuon8bit, shardopt.Prodigy8bit]
)
def test_new_learning_rates_of_some_groups_are_as_a_step_that_checks_everything(kind: type[ShardedOptimizer]) -> None:
    """Of rates that change in some groups or all, alone or beside an option, to a tensor and back."""
    assert all(rule["hyper"][0] == "lr" for rule in _C.rules.values())
    cached, fresh = split_groups(kind), split_groups(kind)
    for step in range(8):
        for optimizer in (cached, fresh):
            for index, group in enumerate(optimizer.param_groups):
                if kind is shardopt.Prodigy8bit:  # whose groups have one rate
                    group["lr"] = 1 / (step + 1)
                elif step % 4 == 1 or index == step % 3:
                    rate = 0.1 / (step + index + 1)
                    group["lr"] = torch.tensor(rate) if step == 3 else rate
            optimizer.param_groups[-1]["weight_decay"] = 0.1 * (step // 5)
            advance(optimizer, range(step, step + 1))
        fresh._internals.invalidate_steps()
    assert_same(everything(cached), everything(fresh))


def test_a_rate_on_a_gpu_that_becomes_a_float_is_no_longer_read_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels' table has the address of a rate on a GPU; this one is on the CPU."""
    monkeypatch.setattr(groups, "torch", SimpleNamespace(zeros=lambda *_, **__: torch.zeros(()), float32=None))
    optimizer, cuda = split_groups(shardopt.AdamW8bit), torch.device("cuda")
    first, second, third = (optimizer._internals.group_of(group) for group in optimizer.param_groups)
    tables = groups.GroupTables([first._replace(lr=torch.tensor(0.5)), second, third])
    assert (tables.rows_for(cuda)["lr"] != 0).tolist() == [True, False, False]
    assert tables.replace({}, {0: 0.25})
    assert tables.rows_for(cuda)["lr"].tolist() == [0, 0, 0]
    assert tables.rows_for(cuda)["hyper"][0, 0] == 0.25


@pytest.mark.parametrize("case", RULES)
def test_learning_rates_reach_rules_as_they_are(case: str) -> None:
    """Else a step after a new rate, which replaces it alone, would be wrong."""
    optimizer = make(case)
    (group,) = optimizer.param_groups
    first, second = (optimizer.hyper({**group, "lr": lr}) for lr in (0.25, 0.5))
    assert (first.pop("lr"), second.pop("lr")) == (0.25, 0.5)
    assert first == second


def test_a_rate_out_of_range_is_refused_and_nothing_changed() -> None:
    optimizer = split_groups(shardopt.AdamW8bit)
    advance(optimizer, range(1))
    before = everything(optimizer)
    for rate in (-1.0, NAN, INF, 1e39):
        optimizer.param_groups[1]["lr"] = rate
        with pytest.raises(ValueError, match="lr: got"):
            advance(optimizer, range(1, 2))
        assert_same(everything(optimizer), before)
