"""State that no step could go on from is refused by whatever loads it, by the parameter's name; nothing is changed."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import shardopt
from helpers import CODEC_NAMES, EIGHT_BIT, everything
from ranks.snapshot import assert_same
from shardopt.codec import CODECS
from test_state_dict import advance, made, params_of

NAN, INF = math.nan, math.inf
StateDict = dict[str, Any]
Change = Callable[[Any], object]

#: The quantized parameter that is damaged, and one with float32 state.
MATRIX, VECTOR = 0, 2


def saved(codec: str, **options: Any) -> StateDict:
    optimizer = made("adamw", codec=codec, **options)
    advance(optimizer, range(2))
    return copy.deepcopy(optimizer.state_dict())


def of_torch() -> StateDict:
    theirs = torch.optim.AdamW(params_of())
    advance(theirs, range(2))
    return copy.deepcopy(theirs.state_dict())


def put(entry: str, value: float, *at: Any) -> Change:
    """Puts a value into a state entry: at an index of its, or of its first element."""

    def change(state: StateDict) -> None:
        state[entry][at or (0,) * state[entry].dim()] = value

    return change


def replace(entry: str, new: Callable[[Tensor], object]) -> Change:
    def change(state: StateDict) -> None:
        state[entry] = new(state[entry])

    return change


def assert_refused(optimizer: torch.optim.Optimizer, state_dict: StateDict, message: str) -> None:
    before, groups = everything(optimizer), [dict(group) for group in optimizer.param_groups]
    with pytest.raises(ValueError, match=re.escape(message)):
        optimizer.load_state_dict(state_dict)
    assert_same(everything(optimizer), before)
    assert [dict(group) for group in optimizer.param_groups] == groups
    advance(optimizer, range(2, 3))


WRONG_NUMBERS = {False: (NAN, INF, -INF, -1.0), True: (NAN, INF, -INF)}  # by whether the moment is signed


@pytest.mark.parametrize("value", WRONG_NUMBERS[False])
@pytest.mark.parametrize("moment", ["exp_avg", "exp_avg_sq"])
@pytest.mark.parametrize("codec", EIGHT_BIT)
def test_scales(codec: str, moment: str, value: float) -> None:
    """No scale is below zero, of whatever moment."""
    state_dict = saved(codec)
    at = (5, 1, 0)[: state_dict["state"][MATRIX][f"{moment}_scales"].dim()]
    put(f"{moment}_scales", value, *at)(state_dict["state"][MATRIX])
    optimizer = made("adamw", codec=codec)
    advance(optimizer, range(2))
    assert_refused(optimizer, state_dict, f"parameter 0 of param group 0: got {moment}_codes with {moment}_scales")


@pytest.mark.parametrize("step", [NAN, INF, -1.0, 0.0, 1.5, 2e6])
def test_the_step_between_codes_of_log8(step: float) -> None:
    state_dict = saved("log8")
    put("exp_avg_sq_scales", step, 5, 1, 1)(state_dict["state"][MATRIX])
    optimizer = made("adamw")
    advance(optimizer, range(2))
    assert_refused(optimizer, state_dict, "parameter 0 of param group 0: got exp_avg_sq_codes with exp_avg_sq_scales")


def test_a_code_in_a_block_of_zeros_of_log8() -> None:
    """Such a code would decode to NaN."""
    state_dict = saved("log8")
    state = state_dict["state"][MATRIX]
    state["exp_avg_sq_codes"][5, 128:] = 0
    state["exp_avg_sq_scales"][5, 1] = torch.tensor([0.0, 1.0])
    made("adamw").load_state_dict(copy.deepcopy(state_dict))
    state["exp_avg_sq_codes"][5, 129] = 200
    optimizer = made("adamw")
    assert_refused(optimizer, state_dict, "parameter 0 of param group 0: got exp_avg_sq_codes with exp_avg_sq_scales")


def test_scales_whose_product_is_infinite() -> None:
    """log8 codes the first moment in units of the second one's root: each of the two scales is finite by itself."""
    state_dict = saved("log8")
    put("exp_avg_scales", 1e38, 5, 1)(state_dict["state"][MATRIX])
    put("exp_avg_sq_scales", 1e10, 5, 1, 0)(state_dict["state"][MATRIX])
    optimizer = made("adamw")
    advance(optimizer, range(2))
    message = (
        "parameter 0 of param group 0: got exp_avg_codes with exp_avg_scales and exp_avg_sq_scales that stands for"
    )
    assert_refused(optimizer, state_dict, message)


def test_scales_whose_product_no_element_has() -> None:
    """The largest first moment in units of the root may be beside a small root."""
    state_dict = of_torch()
    state = state_dict["state"][MATRIX]
    state["exp_avg"].zero_()
    state["exp_avg_sq"].fill_(1e10)
    state["exp_avg"][0, 0], state["exp_avg_sq"][0, 0] = 1e30, 1e-20
    optimizer = made("adamw")
    optimizer.load_state_dict(state_dict)
    own = optimizer.state[optimizer.param_groups[0]["params"][MATRIX]]
    assert (own["exp_avg_scales"][0, 0] * own["exp_avg_sq_scales"][0, 0, 0]).isinf()
    again = made("adamw")
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert all(entries["exp_avg"].isfinite().all() for entries in again.state_dict(dequantize=True)["state"].values())


@pytest.mark.parametrize(
    ("moment", "value"),
    [*(("exp_avg", x) for x in WRONG_NUMBERS[True]), *(("exp_avg_sq", x) for x in WRONG_NUMBERS[False])],
)
@pytest.mark.parametrize("source", ["own", "torch"])
@pytest.mark.parametrize("codec", CODEC_NAMES)
def test_moments_in_floats(codec: str, source: str, moment: str, value: float) -> None:
    """One NaN in a moment to be quantized would spoil its block."""
    for index in (MATRIX, VECTOR):
        state_dict = saved(codec) if source == "own" else of_torch()
        if moment not in state_dict["state"][index]:
            continue
        put(moment, value)(state_dict["state"][index])
        optimizer = made("adamw", codec=codec)
        advance(optimizer, range(2))
        assert_refused(optimizer, state_dict, f"parameter {index} of param group 0: got {moment} that stands for NaN")


def test_what_only_the_codec_cannot_hold() -> None:
    """bf16 ends before float32 does; log8's first moment is in units of the second one's root."""
    for codec, exp_avg, exp_avg_sq in (("bf16", 3.4e38, 1.0), ("log8", 3e38, 1e-45)):
        state_dict = of_torch()
        put("exp_avg", exp_avg)(state_dict["state"][MATRIX])
        put("exp_avg_sq", exp_avg_sq)(state_dict["state"][MATRIX])
        optimizer = made("adamw", codec=codec)
        assert_refused(optimizer, state_dict, "parameter 0 of param group 0: got exp_avg")
        made("adamw", codec="fp32").load_state_dict(state_dict)


WRONG_STEPS: dict[str, object] = {
    "nan": torch.tensor(NAN),
    "inf": torch.tensor(INF),
    "negative": torch.tensor(-5.0),
    "a fraction": torch.tensor(1.5),
    "beyond the kernels' integers": torch.tensor(1e30),
    "complex": torch.tensor(1j),
    "three": torch.ones(3),
    "none": torch.ones(0),
    "sparse": torch.ones(1).to_sparse(),
    "text": "3",
    "nothing": None,
    "a number that is negative": -5,
    "a large number": 10**400,
}


@pytest.mark.parametrize("name", WRONG_STEPS)
@pytest.mark.parametrize("source", ["own", "torch"])
def test_steps(source: str, name: str) -> None:
    state_dict = saved("log8") if source == "own" else of_torch()
    state_dict["state"][VECTOR]["step"] = WRONG_STEPS[name]
    optimizer = made("adamw")
    advance(optimizer, range(2))
    assert_refused(optimizer, state_dict, "parameter 2 of param group 0: got step as")


@pytest.mark.parametrize("step", [7, 7.0, torch.tensor([7]), torch.tensor(7, dtype=torch.float64), 0], ids=repr)
def test_steps_that_others_write(step: Any) -> None:
    state_dict = saved("log8")
    state_dict["state"][VECTOR]["step"] = step
    optimizer = made("adamw")
    optimizer.load_state_dict(state_dict)
    found = optimizer.state[optimizer.param_groups[0]["params"][VECTOR]]["step"]
    assert (found.shape, found.dtype, float(found)) == ((), torch.float32, float(step))
    advance(optimizer, range(2, 3))


OTHER_LAYOUTS: dict[str, Change] = {
    "sparse codes": replace("exp_avg_codes", Tensor.to_sparse),
    "sparse rows of codes": replace("exp_avg_codes", Tensor.to_sparse_csr),
    "sparse scales": replace("exp_avg_sq_scales", Tensor.to_sparse),
    "without memory": replace("exp_avg_codes", lambda x: x.to("meta")),
    "sparse low bits": replace("master_low_bits", Tensor.to_sparse),
}


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
@pytest.mark.parametrize("name", OTHER_LAYOUTS)
def test_layouts(name: str) -> None:
    optimizer = made("adamw", torch.bfloat16, master_weight_bits=24)
    advance(optimizer, range(2), torch.bfloat16)
    state_dict = copy.deepcopy(optimizer.state_dict())
    OTHER_LAYOUTS[name](state_dict["state"][MATRIX])
    before = everything(optimizer)
    with pytest.raises(ValueError, match=r"parameter 0 of param group 0: got \w+ (of layout|on the meta device)"):
        optimizer.load_state_dict(state_dict)
    assert_same(everything(optimizer), before)
    advance(optimizer, range(2, 3), torch.bfloat16)


STRIDES: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda x: x.transpose(0, -1).contiguous().transpose(0, -1),
    "every other": lambda x: torch.stack([x, x], -1)[..., 0],
}


@pytest.mark.parametrize("name", STRIDES)
@pytest.mark.parametrize("codec", CODEC_NAMES)
def test_dense_entries_may_have_any_strides(codec: str, name: str) -> None:
    """Loaded tensors are copied, so that the kernels can step them."""
    optimizer = made("adamw", torch.bfloat16, codec=codec, master_weight_bits=32)
    advance(optimizer, range(2), torch.bfloat16)
    state_dict = copy.deepcopy(optimizer.state_dict())
    for state in state_dict["state"].values():
        state.update({key: STRIDES[name](x) if x.dim() > 1 else x for key, x in state.items()})
    other = made("adamw", torch.bfloat16, codec=codec, master_weight_bits=32)
    other.load_state_dict(state_dict)
    for mine, theirs in zip(other.state.values(), optimizer.state.values(), strict=True):
        assert_same(mine, theirs)
        assert all(entry.is_contiguous() for entry in mine.values())
    advance(other, range(2, 3), torch.bfloat16)


def test_moments_of_integers() -> None:
    state_dict = of_torch()
    replace("exp_avg", Tensor.int)(state_dict["state"][MATRIX])
    assert_refused(made("adamw"), state_dict, "parameter 0 of param group 0: got exp_avg of torch.int32, expected")


@pytest.mark.parametrize(
    "options", [{"lr": NAN}, {"lr": "abc"}, {"betas": (2, 3)}, {"weight_decay": INF}, {"eps": None}], ids=str
)
def test_hyper_parameters(options: dict[str, Any]) -> None:
    state_dict = saved("log8")
    state_dict["param_groups"][0].update(options)
    (name,) = options
    assert_refused(made("adamw"), state_dict, f"param group 0: {name}")


def test_parameters_are_named_as_the_optimizer_knows_them() -> None:
    params = params_of()
    optimizer = shardopt.AdamW8bit([(f"layer.{index}", param) for index, param in enumerate(params)])
    state_dict = of_torch()
    put("exp_avg", NAN)(state_dict["state"][MATRIX])
    with pytest.raises(ValueError, match=r"^layer\.0: got exp_avg that stands for NaN"):
        optimizer.load_state_dict(state_dict)


def test_a_run_that_diverged_says_so() -> None:
    """With nonfinite="propagate" the state is as torch's would be: such a state is saved, and not loaded."""
    (param,) = params = [torch.nn.Parameter(torch.ones(7))]
    optimizer = shardopt.AdamW8bit(params, nonfinite="propagate")
    param.grad = torch.full((7,), NAN)
    optimizer.step()
    with pytest.raises(ValueError, match=r"the run had diverged when it was saved, .* load an earlier one"):
        shardopt.AdamW8bit(params).load_state_dict(optimizer.state_dict())


def test_every_moment_of_every_rule_is_looked_at() -> None:
    for rule, moment in (("lion", "exp_avg"), ("momentum", "momentum_buffer")):
        for codec in CODEC_NAMES:
            optimizer = made(rule, codec=codec)
            advance(optimizer, range(1))
            state_dict = copy.deepcopy(optimizer.state_dict())
            entry = f"{moment}_scales" if CODECS[codec].blockwise else moment
            put(entry, NAN)(state_dict["state"][MATRIX])
            with pytest.raises(ValueError, match=f"parameter 0 of param group 0: got {moment}"):
                optimizer.load_state_dict(state_dict)


NO_STATE_DICTS: dict[str, tuple[Change, str]] = {
    "entries as a list": (lambda s: s["state"].update({MATRIX: [1]}), "parameter 0 of param group 0: got its state as"),
    "entries by number": (lambda s: s["state"].update({MATRIX: {1: 2}}), "parameter 0 of param group 0: got its state"),
    "a nested tensor": (
        lambda s: s["state"][MATRIX].update(exp_avg_codes=torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])),
        "parameter 0 of param group 0: got ",
    ),
    "state as a list": (lambda s: s.update(state=[]), "got a state dict with state as list"),
    "no state": (lambda s: s.pop("state"), "got a state dict with state as NoneType"),
    "no param groups": (lambda s: s.pop("param_groups"), "got a state dict with"),
    "param groups as a text": (lambda s: s.update(param_groups="all"), "got a state dict with"),
    "a param group as a list": (lambda s: s.update(param_groups=[[0]]), "param group 0: got list, expected a dict"),
    "no params": (lambda s: s["param_groups"][0].pop("params"), "param group 0: got params as None"),
    "a number as params": (lambda s: s["param_groups"][0].update(params=3), "param group 0: got params as 3"),
    "lists as params": (lambda s: s["param_groups"][0].update(params=[[], []]), "param group 0: got params as"),
    "an option of two numbers": (
        lambda s: s["param_groups"][0].update(block_size=torch.tensor([128, 128])),
        "param group 0: got values that cannot be read (RuntimeError",
    ),
    "a tensor where there is a choice": (
        lambda s: s["param_groups"][0].update(nonfinite=torch.ones(2)),
        "param group 0: nonfinite: got tensor",
    ),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("name", NO_STATE_DICTS)
def test_no_state_dict(name: str) -> None:
    state_dict = saved("log8")
    change, message = NO_STATE_DICTS[name]
    change(state_dict)
    optimizer = made("adamw")
    advance(optimizer, range(2))
    assert_refused(optimizer, state_dict, message)


@pytest.mark.parametrize("state_dict", [None, [], "state"], ids=repr)
def test_something_that_is_no_dict(state_dict: Any) -> None:
    assert_refused(made("adamw"), state_dict, "got a state dict with state as NoneType")
