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
from helpers import everything
from ranks.snapshot import assert_same
from test_state_dict import advance, made, params_of

NAN, INF = math.nan, math.inf
StateDict = dict[str, Any]
Change = Callable[[Any], object]

#: The quantized parameter that is damaged, and one with float32 state.
MATRIX, VECTOR = 0, 2
MATRIX_GOT, VECTOR_GOT = "parameter 0 of param group 0: got ", "parameter 2 of param group 0: got "


def saved(codec: str, **options: Any) -> StateDict:
    optimizer = made("adamw", codec=codec, **options)
    advance(optimizer, range(2))
    return copy.deepcopy(optimizer.state_dict())


def of_torch() -> StateDict:
    theirs = torch.optim.AdamW(params_of())
    advance(theirs, range(2))
    return copy.deepcopy(theirs.state_dict())


def put(entry: str, value: float, *at: Any) -> Change:
    """Puts a value into a state entry of the matrix: at an index of its, or of its first element."""

    def change(state_dict: StateDict) -> None:
        tensor = state_dict["state"][MATRIX][entry]
        tensor[at or (0,) * tensor.dim()] = value

    return change


def assert_refused(optimizer: torch.optim.Optimizer, state_dict: Any, message: str) -> None:
    before, groups = everything(optimizer), [dict(group) for group in optimizer.param_groups]
    with pytest.raises(ValueError, match=re.escape(message)):
        optimizer.load_state_dict(state_dict)
    assert_same(everything(optimizer), before)
    assert [dict(group) for group in optimizer.param_groups] == groups


def code_in_a_block_of_zeros(state_dict: StateDict) -> None:
    """Such a code would decode to NaN."""
    state = state_dict["state"][MATRIX]
    state["exp_avg_sq_codes"][5, 128:] = 0
    state["exp_avg_sq_scales"][5, 1] = torch.tensor([0.0, 1.0])
    made("adamw").load_state_dict(copy.deepcopy(state_dict))
    state["exp_avg_sq_codes"][5, 129] = 200


def infinite_product(state_dict: StateDict) -> None:
    """log8 codes the first moment in units of the second one's root: each of the two scales is finite by itself."""
    put("exp_avg_scales", 1e38, 5, 1)(state_dict)
    put("exp_avg_sq_scales", 1e10, 5, 1, 0)(state_dict)


SQ_SCALES = MATRIX_GOT + "exp_avg_sq_codes with exp_avg_sq_scales"
#: Codecs, changes of a state dict, and what loading it says.
DAMAGE: list[tuple[str, Change, str]] = [
    ("log8", put("exp_avg_scales", NAN, 5, 1), MATRIX_GOT + "exp_avg_codes with exp_avg_scales"),
    ("dynamic8", put("exp_avg_sq_scales", INF, 5, 1), SQ_SCALES),
    *(("log8", put("exp_avg_sq_scales", step, 5, 1, 1), SQ_SCALES) for step in (NAN, 0.0, 1.5, 2e6)),
    ("log8", code_in_a_block_of_zeros, SQ_SCALES),
    ("log8", infinite_product, MATRIX_GOT + "exp_avg_codes with exp_avg_scales and exp_avg_sq_scales that stands for"),
    ("fp32", put("exp_avg", NAN), MATRIX_GOT + "exp_avg that stands for NaN"),
    (
        "log8",
        lambda s: s["state"][VECTOR].update(exp_avg=torch.full((300,), -INF)),
        VECTOR_GOT + "exp_avg that stands for NaN",
    ),
    ("log8", lambda s: s["state"].update({MATRIX: [1]}), MATRIX_GOT + "its state as"),
    (
        "log8",
        lambda s: s["state"][MATRIX].update(exp_avg_codes=torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])),
        MATRIX_GOT + "values that cannot be read",
    ),
    ("log8", lambda s: s.update(state=[]), "got a state dict with state as list"),
    ("log8", lambda s: s.pop("param_groups"), "got a state dict with"),
    ("log8", lambda s: s.update(param_groups=[[0]]), "param group 0: got list, expected a dict"),
    ("log8", lambda s: s["param_groups"][0].update(params=[[], []]), "param group 0: got params as"),
    (
        "log8",
        lambda s: s["param_groups"][0].update(block_size=torch.tensor([128, 128])),
        "param group 0: got values that cannot be read (RuntimeError",
    ),
    (
        "log8",
        lambda s: s["param_groups"][0].update(nonfinite=torch.ones(2)),
        "param group 0: nonfinite: got tensor",
    ),
    ("log8", lambda s: s["param_groups"][0].update(lr=NAN), "param group 0: lr"),
]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(("codec", "change", "message"), DAMAGE)
def test_own_state_is_refused(codec: str, change: Change, message: str) -> None:
    state_dict, optimizer = saved(codec), made("adamw", codec=codec)
    advance(optimizer, range(2))
    change(state_dict)
    assert_refused(optimizer, state_dict, message)
    advance(optimizer, range(2, 3))


@pytest.mark.parametrize(
    ("codec", "changes", "message"),
    [
        ("log8", [put("exp_avg", INF)], "exp_avg that stands for NaN"),  # would spoil its block
        ("companded8", [put("exp_avg_sq", NAN)], "exp_avg_sq that stands for NaN"),
        ("bf16", [put("exp_avg", 3.4e38)], "exp_avg"),  # ends before float32 does
        ("log8", [put("exp_avg", 3e38), put("exp_avg_sq", 1e-45)], "exp_avg"),  # in units of the second one's root
        ("fp32", [lambda s: s["state"][MATRIX].update(exp_avg=torch.ones(64, 130).int())], "exp_avg of torch.int32"),
    ],
)
def test_state_of_torch_is_refused(codec: str, changes: list[Change], message: str) -> None:
    state_dict = of_torch()
    for change in changes:
        change(state_dict)
    assert_refused(made("adamw", codec=codec), state_dict, MATRIX_GOT + message)


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


WRONG_STEPS: dict[str, object] = {
    "nan": torch.tensor(NAN),
    "a fraction": torch.tensor(1.5),
    "beyond the kernels' integers": torch.tensor(1e30),
    "complex": torch.tensor(1j),
    "sparse": torch.ones(1).to_sparse(),
    "nothing": None,
    "a large number": 10**400,
}


@pytest.mark.parametrize("source", ["own", "torch"])
def test_steps(source: str) -> None:
    state_dict, optimizer = saved("log8") if source == "own" else of_torch(), made("adamw")
    advance(optimizer, range(2))
    for step in WRONG_STEPS.values():
        state_dict["state"][VECTOR]["step"] = step
        assert_refused(optimizer, state_dict, VECTOR_GOT + "step as")
    for step in (7, 7.0, torch.tensor([7]), torch.tensor(7, dtype=torch.float64), 0):  # as others write them
        state_dict["state"][VECTOR]["step"] = step
        optimizer.load_state_dict(state_dict)
        found = optimizer.state[optimizer.param_groups[0]["params"][VECTOR]]["step"]
        assert (found.shape, found.dtype, float(found)) == ((), torch.float32, float(step))
    advance(optimizer, range(2, 3))


OTHER_LAYOUTS: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = {
    "sparse codes": ("exp_avg_codes", Tensor.to_sparse),
    "sparse rows of codes": ("exp_avg_codes", Tensor.to_sparse_csr),
    "without memory": ("exp_avg_codes", lambda x: x.to("meta")),
    "sparse low bits": ("master_low_bits", Tensor.to_sparse),
}


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
def test_layouts() -> None:
    optimizer = made("adamw", torch.bfloat16, master_weight_bits=24)
    advance(optimizer, range(2), torch.bfloat16)
    for entry, change in OTHER_LAYOUTS.values():
        state_dict = copy.deepcopy(optimizer.state_dict())
        state_dict["state"][MATRIX][entry] = change(state_dict["state"][MATRIX][entry])
        assert_refused(optimizer, state_dict, MATRIX_GOT + entry)
    advance(optimizer, range(2, 3), torch.bfloat16)


def test_a_run_that_diverged_says_so() -> None:
    """With nonfinite="propagate" the state is as torch's would be: such a state is saved, and not loaded."""
    (param,) = params = [torch.nn.Parameter(torch.ones(7))]
    optimizer = shardopt.AdamW8bit(params, nonfinite="propagate")
    param.grad = torch.full((7,), NAN)
    optimizer.step()
    with pytest.raises(ValueError, match=r"the run had diverged when it was saved, .* load an earlier one"):
        shardopt.AdamW8bit(params).load_state_dict(optimizer.state_dict())
