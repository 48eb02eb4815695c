"""Options: what is refused, when they are given, misspelt, or changed by hand between steps."""

from __future__ import annotations

import re
import warnings
from collections import UserList
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import Parameter

import shardopt
from helpers import everything, through_a_file
from ranks.offload import offload_from_cpu
from ranks.snapshot import assert_same
from shardopt.state.options import bytes_of
from test_optimizers import advance, give_gradients, make

NAN, INF = float("nan"), float("inf")
NUMBERS = ("lr", "eps", "weight_decay")

#: Refusals of any rule: by the constructor, by add_param_group, and by the step after it was put there by hand.
WRONG_OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"codec": ["log8"]}, "codec: got ['log8'], expected one of 'log8'"),
    ({"codec": "log9"}, "codec: got 'log9', expected one of 'log8'"),
    ({"block_size": 100}, "block_size: got 100, expected a power of two from 16 to 4096"),
    ({"block_size": 8192}, "block_size: got 8192"),
    ({"block_size": 128.0}, "block_size: got 128.0"),
    ({"min_quantized_numel": -1}, "min_quantized_numel: got -1"),
    ({"min_quantized_numel": True}, "min_quantized_numel: got True"),
    ({"maximize": "no"}, "maximize: got 'no', expected True or False"),
    ({"nonfinite": "ignore"}, "nonfinite: got 'ignore', expected 'skip', 'raise' or 'propagate'"),
    ({"master_weight_bits": 24.0}, "master_weight_bits: got 24.0, expected None, 24 or 32"),
    ({"stochastic_rounding": 1}, "stochastic_rounding: got 1, expected True or False"),
    ({"stochastic_rounding": True, "master_weight_bits": 24}, "got True and master_weight_bits=24, expected one of"),
    ({"stochastic_rounding_seed": -1}, "stochastic_rounding_seed: got -1, expected a whole number"),
    ({"offload": "disk"}, "offload: got 'disk', expected None, 'state' or 'step'"),
    ({"device_state_budget": "2GB"}, "device_state_budget: got '2GB', expected bytes"),
    ({"differentiable": True}, "differentiable: got True"),
    ({"amsgrad": 1}, "amsgrad: got 1, expected True or False"),
    ({"lr": torch.tensor([1.0, 2.0])}, "lr: got a tensor of 2 elements"),
    ({"betas": 0.9}, "betas: got 0.9, expected 2 numbers"),
    ({"betas": (0.9,)}, "betas: got (0.9,), expected 2 numbers"),
    ({"betas": (1.0, 0.9)}, r"betas[0]: got 1.0, expected a number in [0.0, 1.0)"),
    ({"betas": (0.9, NAN)}, "betas[1]: got nan"),
    ({"betas": ("0.9", 0.9)}, "betas[0]: got '0.9'"),
    *(({name: -1.0}, f"{name}: got -1.0, expected a number >= 0") for name in NUMBERS),
    *(({name: INF}, f"{name}: got inf, expected a number >= 0.0 that float32 can hold") for name in NUMBERS),
    *(({name: NAN}, f"{name}: got nan, expected a number >= 0.0 that float32 can hold") for name in NUMBERS),
    ({"lr": 1e39}, "lr: got 1e+39, expected a number >= 0.0 that float32 can hold"),
    ({"lr": 10**400}, "lr: got 1000"),
    ({"lr": torch.tensor(INF)}, "lr: got inf"),
    ({"lr": torch.tensor(1j)}, "lr: got 1j"),
    ({"weight_decay": "x"}, "weight_decay: got 'x', expected a number >= 0.0"),
    ({"eps": None}, "eps: got None, expected a number >= 0.0"),
]
#: Refused between steps only.
CHANGED: list[tuple[dict[str, Any], str]] = [
    ({"offload": "state"}, "offload: got 'state' in a param group that was stepped with None, expected no change"),
    ({"device_state_budget": 1}, "device_state_budget: got 1 in a param group that was stepped with 0"),
]
#: Fixed when the state is made, or no option of a group: between steps nothing reads them.
FIXED = ("block_size", "min_quantized_numel", "differentiable")


@pytest.mark.parametrize(("options", "message"), WRONG_OPTIONS, ids=lambda x: str(x) if isinstance(x, dict) else "")
def test_wrong_options(options: dict[str, Any], message: str) -> None:
    """In the constructor, and in a group added later."""
    with pytest.raises(ValueError, match=re.escape(message)):
        make(**options)
    optimizer = make()
    with pytest.raises(ValueError, match=re.escape(message)):
        optimizer.add_param_group({"params": [Parameter(torch.zeros(3))], **options})
    assert len(optimizer.param_groups) == 1
    advance(optimizer, range(1))


def test_unknown_options() -> None:
    with pytest.raises(TypeError, match="got unknown option 'blocksize', expected some of maximize, codec"):
        make(blocksize=64)
    with pytest.raises(TypeError, match=r"did you mean block_size, codec\?$"):
        make(block_sise=64, codex="log8")
    with pytest.raises(TypeError, match=r"differentiable$"):
        make(quantum=64)


@pytest.mark.parametrize(
    "hyper",
    [
        {"nesterov": True},
        {"nesterov": True, "momentum": 0.9, "dampening": 0.1},
        {"nesterov": "no", "momentum": 0.9},
        {"momentum": -0.1},
        {"momentum": INF},
        {"momentum": 0.9, "dampening": NAN},
    ],
    ids=str,
)
def test_wrong_momentum(hyper: dict[str, Any]) -> None:
    """At construction, and put there by hand."""
    with pytest.raises(ValueError, match=r"(nesterov|momentum|dampening): got"):
        shardopt.SGD8bit([Parameter(torch.zeros(3))], **hyper)
    optimizer = make("momentum", dampening=0.0)
    advance(optimizer, range(1))
    before = everything(optimizer)
    optimizer.param_groups[0].update({"momentum": 0.0, **hyper})
    with pytest.raises(ValueError, match=r"(nesterov|momentum|dampening): got"):
        advance(optimizer, range(1, 2))
    assert_same(everything(optimizer), before)


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


@pytest.mark.parametrize(
    ("options", "message"),
    [*CHANGED, *(case for case in WRONG_OPTIONS if not any(name in case[0] for name in FIXED))],
    ids=lambda x: str(x) if isinstance(x, dict) else "",
)
def test_wrong_options_by_hand(options: dict[str, Any], message: str) -> None:
    """Refused by the next step, and by the one after it; nothing is changed, and what was there before steps on."""
    optimizer, expected = make(), make()
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


@pytest.mark.parametrize("what", ["lr", "betas"])
def test_wrong_values_put_in_place(what: str) -> None:
    """Into a tensor or list that the param group had before; what is read for the step is what is checked."""
    optimizer = make(lr=torch.tensor(0.01), betas=[0.9, 0.99])
    group = optimizer.param_groups[0]
    for value in (NAN, 0.5, INF, 0.25):
        advance(optimizer, range(1))
        before = everything(optimizer)
        group["lr"].fill_(value) if what == "lr" else group["betas"].__setitem__(0, value)
        if value not in (0.5, 0.25):
            with pytest.raises(ValueError, match=f"{what}.*: got {value}, expected"):
                advance(optimizer, range(1))
            assert_same(everything(optimizer), before)
            group["lr"].fill_(0.1) if what == "lr" else group["betas"].__setitem__(0, 0.1)


def test_options_may_be_changed_before_the_first_step() -> None:
    optimizer = make()
    optimizer.param_groups[0]["offload"] = "state"
    with offload_from_cpu():
        advance(optimizer, range(1))
    assert optimizer._internals.residency.of(optimizer.param_groups[0]["params"][0]).offload == "state"


@pytest.mark.parametrize("now", [None, "step"])
def test_offload_changed_before_a_release(now: str | None) -> None:
    """Each released parameter has tables of its own, which have not seen the old value."""
    model = torch.nn.Linear(130, 64)
    with offload_from_cpu():
        optimizer = shardopt.AdamW8bit(model.parameters(), offload="state")
        model(torch.ones(1, 130)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        optimizer.param_groups[0]["offload"] = now
        with (
            shardopt.release_gradients(model, optimizer),
            pytest.raises(ValueError, match=f"offload: got {now!r} in a param group that was stepped with 'state'"),
        ):
            model(torch.ones(1, 130)).sum().backward()


def test_only_changed_options_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer = make()
    checked: list[object] = []
    monkeypatch.setattr("shardopt.step.stepper.check_options", checked.append)
    for step in range(4):
        optimizer.param_groups[0]["lr"] = 0.1 * step
        give_gradients(optimizer, step)
        optimizer.step()
    assert len(checked) == 1


@pytest.mark.parametrize(
    ("key", "meant"),
    [("master_weights_bits", "master_weight_bits"), ("ofload", "offload"), ("beta", "betas")],
)
def test_misspelt_options_in_param_groups(key: str, meant: str) -> None:
    message = f"got '{key}' in a param group, which is no option .*expected '{meant}'"
    with pytest.warns(UserWarning, match=message) as caught:
        shardopt.AdamW8bit([{"params": [Parameter(torch.zeros(3))], key: 1}])
    assert caught[0].filename == __file__


def test_other_keys_in_param_groups_are_let_pass() -> None:
    """Of schedulers, of torch and of users, also those with an option's name in theirs."""
    foreign = ("name", "initial_lr", "max_lr", "lr_scale", "max_momentum", "no_weight_decay", "rank", "swa_lr")
    group = {"params": [Parameter(torch.zeros(3))], "lr": 0.1, "offload": None, **dict.fromkeys(foreign, 1)}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer = shardopt.AdamW8bit([group])
        shardopt.SGD8bit([{**group, "nesterov": True, "momentum": 0.9}])
        shardopt.AdamW8bit([("weight", Parameter(torch.zeros(3)))])
    assert optimizer.param_groups[0].keys() >= set(foreign)


def test_sizes_in_bytes() -> None:
    for text, nbytes in {"0": 0, "1024": 1024, "2GiB": 2 << 30, "1.5 MiB": 3 << 19, ".5KiB": 512}.items():
        assert bytes_of(text) == nbytes
    assert bytes_of("9" * 400) > 1 << 1024, "beyond the largest float"


@pytest.mark.parametrize("names", [1.5, "weight", [1]])
def test_param_names_are_names(names: Any) -> None:
    with pytest.raises(ValueError, match=r"param_names: got .*, expected a list of the parameters' names"):
        shardopt.AdamW8bit([{"params": [Parameter(torch.ones(2))], "param_names": names}])


SEQUENCES: dict[str, Any] = {"UserList": UserList, "array": np.array, "float32": np.float32, "tensor": torch.tensor}


@pytest.mark.parametrize("made", SEQUENCES)
@pytest.mark.parametrize(
    ("rule", "option", "value"),
    [
        *((rule, "betas", (0.5, 0.25)) for rule in ("AdamW8bit", "Prodigy8bit", "NAdam8bit")),
        ("AdEMAMix8bit", "betas", (0.5, 0.25, 0.75)),
        ("Muon8bit", "split", (3, 5)),
        ("Muon8bit", "ns_coefficients", (3.0, -4.0, 2.0)),
        ("NorMuon8bit", "ns_coefficients", ((3.0, -4.0, 2.0), (2.0, -1.5, 0.5))),
    ],
)
def test_a_sequence_of_any_class(rule: str, option: str, value: Any, made: str) -> None:
    """As an argument, in a param group and between steps; the group keeps tuples of plain numbers."""
    given = tuple(map(np.float32, value)) if made == "float32" and option == "betas" else None
    given = SEQUENCES["array" if made == "float32" else made](value) if given is None else given
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
    for kind in (UserList, np.array):
        groups = shardopt.param_groups(model, {pattern: {"betas": kind([0.5, 0.25])} for pattern in ("0.*", "1.*")})
        assert [group["betas"] for group in groups] == [(0.5, 0.25)]
    optimizer = shardopt.AdamW8bit([{"params": [Parameter(torch.ones(2))], "param_names": UserList(["weight"])}])
    assert through_a_file(optimizer.state_dict())["param_groups"][0]["param_names"] == ["weight"]
