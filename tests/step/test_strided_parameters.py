"""Parameters and gradients that are not contiguous are stepped, saved and loaded as their contiguous copies are."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode

import shardopt
from helpers import ALL_RULES_AND_CODECS, CODEC_NAMES, RULES, everything
from live_bytes import LiveBytes
from ranks.layouts import values
from ranks.offload import late_transfers, offload_from_cpu
from ranks.snapshot import assert_same
from shardopt.optim import ShardedOptimizer
from slow_cases import slow
from step_problem import STRIDED_OPTIONS as OPTIONS
from step_problem import assert_equal_and_contiguous as assert_equal
from step_problem import make_strided as make
from step_problem import params_of, reversed_dims, run, set_gradients, tables_made
from weight_formats import BF16

STEPPED: list[tuple[str, dict[str, Any]]] = [
    *(("adamw", {"codec": codec}) for codec in CODEC_NAMES),
    ("lion", {"codec": "log8"}),
    ("nesterov", {"codec": "fp32"}),
    ("lamb", {"codec": "bf16", "grad_dtype": BF16}),
    ("prodigy", {"codec": "companded8"}),
    ("adamw", {"dtype": BF16, "master_weight_bits": 24}),
    ("lion", {"dtype": BF16, "master_weight_bits": 32, "grad_dtype": torch.float32}),
    ("adamw", {"dtype": BF16, "stochastic_rounding": True, "stochastic_rounding_seed": 3}),
    ("sgd", {"dtype": torch.float16, "master_weight_bits": 24}),
    ("muon_in_waves", {"codec": "fp32"}),
    ("muon", {"dtype": BF16, "master_weight_bits": 24, "grad_dtype": torch.float32}),
    ("muon", {"dtype": BF16, "stochastic_rounding": True}),
    ("muon_in_waves", {"codec": "log8", "grad_dtype": BF16}),
    ("adamw", {"offload": "state", "grad_dtype": BF16}),
    ("adamw", {"offload": "step", "dtype": BF16, "master_weight_bits": 24}),
]
SLOW = [(rule, {"codec": codec}) for rule, codec in ALL_RULES_AND_CODECS]


@pytest.mark.parametrize(("rule", "options"), [*STEPPED, *slow(SLOW, besides=STEPPED)], ids=str)
def test_as_the_contiguous_copies(rule: str, options: dict[str, Any]) -> None:
    """Offloaded in chunks smaller than a parameter, with copies that come as late as they may."""
    options = dict(options)
    grad_dtype, offload = options.pop("grad_dtype", None), options.pop("offload", None)
    with offload_from_cpu(8192, late_transfers(offload or "state")):
        optimizer = make(rule, offload=offload, **options)
        strides = [param.stride() for param in params_of(optimizer)]
        run(optimizer, grad_dtype=grad_dtype)
        assert_equal(optimizer, run(make(rule, strided=False, **options), grad_dtype=grad_dtype))
    assert [param.stride() for param in params_of(optimizer)] == strides


def test_what_lies_between_the_elements_stays() -> None:
    wide = torch.full((48, 60), 3.0)
    param = Parameter(wide[:, 7:53])
    optimizer = RULES["adamw"].make([param], **OPTIONS)
    for t in range(3):
        param.grad = values((48, 46), t)
        optimizer.step()
    assert (wide[:, :7] == 3).all()
    assert (wide[:, 53:] == 3).all()
    assert (wide[:, 7:53] != 3).any()


def test_tables_are_kept() -> None:
    """Through gradients that come, go, and lie in memory in another way."""
    with tables_made() as made:
        run(make(), range(8))
    assert len(made) == 1


@pytest.mark.parametrize("strided_gradients", [False, True])
def test_one_copy_at_a_time(strided_gradients: bool) -> None:
    """A step takes memory for the largest parameter that is not contiguous, and its gradient if that is not, either."""
    params = [Parameter(torch.zeros(width, 512).T) for width in (256, 300, 128)]
    params.append(Parameter(torch.zeros(512, 1024)))
    optimizer = RULES["adamw"].make(params)
    for param in params:
        param.grad = torch.zeros_like(param) if strided_gradients else torch.zeros(param.shape)
    optimizer.step()
    with LiveBytes() as live:
        optimizer.step()
    assert live.most == 512 * 300 * 4 * (2 if strided_gradients else 1)


class _Full(TorchDispatchMode):
    """Memory that has no room for copies of more bytes."""

    def __init__(self, room: int) -> None:
        super().__init__()
        self._room = room

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.clone.default and result.nbytes > self._room:
            raise torch.OutOfMemoryError(f"{result.nbytes} bytes")
        return result


def test_no_memory_for_the_largest_copy_in_bytes() -> None:
    """A parameter of more elements needs less, as those are of two bytes and its gradient is contiguous.

    Nothing was changed, and the next step goes well.
    """
    large, small = Parameter(torch.zeros(300, 512, dtype=torch.bfloat16).T), Parameter(torch.zeros(256, 512).T)
    optimizer = RULES["adamw"].make([large, small])
    for t in range(2):
        large.grad = torch.ones(large.shape, dtype=torch.bfloat16)
        small.grad = torch.ones_like(small)
        before = everything(optimizer)
        if t:
            with _Full(large.nbytes), pytest.raises(torch.OutOfMemoryError):
                optimizer.step()
            assert_same(everything(optimizer), before)
        optimizer.step()


@pytest.mark.parametrize("nonfinite", ["skip", "raise"])
def test_gradients_that_are_no_numbers(nonfinite: str) -> None:
    """Skipped and counted; or an error that leaves everything as it is."""
    got, expected = (run(make(strided=strided, nonfinite=nonfinite), range(2)) for strided in (True, False))
    for optimizer in (got, expected):
        set_gradients(optimizer, 3)
        params_of(optimizer)[3].grad[5, 7] = torch.nan
        if nonfinite == "raise":
            with pytest.raises(FloatingPointError, match=r"parameter 3 of param group 0 \(70, 130\): got a gradient"):
                optimizer.step()
        else:
            optimizer.step()
            assert optimizer.nonfinite_count == 1
    assert_equal(got, expected)


# Checkpoints and reports ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "strided", "options"),
    [
        ("checkpoint", True, {"dtype": BF16, "master_weight_bits": 24}),
        ("checkpoint", False, {}),
        ("state dict", True, {"codec": "fp32"}),
    ],
    ids=str,
)
def test_round_trip(tmp_path: Path, how: str, options: dict[str, Any], strided: bool) -> None:
    """Between models that lie in memory in different ways; weights in full, and steps, have the same bits."""
    saved, loaded = (run(make(strided=s, **options), range(n)) for s, n in ((strided, 2), (not strided, 1)))
    models = [nn.ParameterList(params_of(optimizer)) for optimizer in (saved, loaded)]
    if how == "checkpoint":
        shardopt.checkpoint.save(tmp_path / "saved", models[0], saved)
        shardopt.checkpoint.load(tmp_path / "saved", models[1], loaded)
    else:
        models[1].load_state_dict(models[0].state_dict())
        loaded.load_state_dict(saved.state_dict())
    assert_equal(loaded, saved)
    for optimizer, layout in ((saved, torch.clone), (loaded, reversed_dims)):
        weights = optimizer.full_precision_parameters()
        assert all(x.is_contiguous() for x in weights.values())
        optimizer.load_full_precision_parameters({param: layout(x * 1.01) for param, x in weights.items()})
    assert_equal(run(loaded, [7]), run(saved, [7]))
    uses = [shardopt.memory_report(optimizer).host for optimizer in (loaded, saved)]
    assert len({(use.state, use.scales, use.master_weights) for use in uses}) == 1


@pytest.mark.parametrize(
    ("codec", "load"),
    [
        ("log8", ShardedOptimizer.load_state_dict),
        ("log8", shardopt.checkpoint.import_state),
        ("fp32", ShardedOptimizer.load_state_dict),
    ],
)
def test_torch_state(codec: str, load: Callable[[ShardedOptimizer, Any], object]) -> None:
    """torch keeps moments laid out as the parameter is; and takes ours."""
    got, expected = (make(codec=codec) for _ in range(2))
    theirs = torch.optim.AdamW([{"params": group["params"]} for group in make().param_groups])
    run(theirs, range(2))
    assert not theirs.state[params_of(theirs)[0]]["exp_avg"].is_contiguous()
    contiguous = copy.deepcopy(theirs.state_dict())
    for state in contiguous["state"].values():
        state.update({key: value.contiguous() for key, value in state.items()})
    load(got, theirs.state_dict())
    load(expected, contiguous)
    assert_equal(got, expected)
    theirs.load_state_dict(got.state_dict(dequantize=True))
    run(theirs, [2])
