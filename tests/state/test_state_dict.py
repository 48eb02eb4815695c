"""State dicts of shardopt itself: state, master bits and noise come back bit for bit; a wrong one changes nothing."""

from __future__ import annotations

import copy
import math
import re
import warnings
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.nn import Parameter

import shardopt
from helpers import CODEC_NAMES, EIGHT_BIT, RULES, everything, step, through_a_file
from ranks.layouts import values
from ranks.snapshot import assert_same
from shardopt.codec import CODECS
from shardopt.optim import ShardedOptimizer
from slow_cases import slow
from step_problem import assert_noticed, set_option
from step_problem import make as make_groups
from weight_formats import ALL, BF16, FP16, FP32

#: Quantized with a short last block, exactly, and not at all.
SHAPES = ((64, 130), (32, 128), (300,), (3, 3), ())


def params_of(dtype: torch.dtype = torch.float32) -> list[Parameter]:
    return [Parameter(values(shape, seed, dtype)) for seed, shape in enumerate(SHAPES)]


def advance(optimizer: torch.optim.Optimizer, steps: range, dtype: torch.dtype = torch.float32) -> None:
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for t in steps:
        named = {str(i): param for i, param in enumerate(params)}
        step(optimizer, named, {name: values(p.shape, 100 * t + int(name), dtype) for name, p in named.items()})


def made(rule: str, dtype: torch.dtype = torch.float32, **options: Any) -> ShardedOptimizer:
    return RULES[rule].make(params_of(dtype), **options)


def trained(rule: str = "adamw", steps: int = 3, dtype: torch.dtype = FP32, **options: Any) -> ShardedOptimizer:
    optimizer = made(rule, dtype, **options)
    advance(optimizer, range(steps), dtype)
    return optimizer


def with_weights_of(optimizer: ShardedOptimizer, rule: str, **options: Any) -> ShardedOptimizer:
    """A new optimizer over copies of the parameters of another."""
    return RULES[rule].make([p.detach().clone() for g in optimizer.param_groups for p in g["params"]], **options)


#: By rule and codec, one of the formats of weights in :data:`ALL`.
ROUND_TRIPS = [
    ("adamw", "log8", "bf16 24"),
    ("adamw", "companded8", "fp16 32"),
    ("adamw", "dynamic8", "fp32"),
    ("adamw", "companded16", "bf16 stochastic"),
    ("adamw", "bf16", "bf16 32"),
    ("adamw", "fp32", "fp16 24"),
    ("lion", "log8", "fp16"),
    ("momentum", "bf16", "bf16"),
    ("sgd", "log8", "bf16 24"),
]
ALL_ROUND_TRIPS = product(["adamw", "lion", "momentum", "sgd"], CODEC_NAMES, ALL)


@pytest.mark.parametrize(("rule", "codec", "weights"), [*ROUND_TRIPS, *slow(ALL_ROUND_TRIPS, besides=ROUND_TRIPS)])
def test_round_trip(rule: str, codec: str, weights: str) -> None:
    dtype, options = ALL[weights]
    optimizer = trained(rule, dtype=dtype, codec=codec, **options)
    other = with_weights_of(optimizer, rule, codec=codec, **options)
    if "stochastic_rounding" in options:
        other.param_groups[0]["stochastic_rounding_seed"] = 0  # comes with the state
    other.load_state_dict(through_a_file(optimizer.state_dict()))
    assert_same(everything(other), everything(optimizer))
    for each in (optimizer, other):
        advance(each, range(3, 6), dtype)
    assert_same(everything(other), everything(optimizer))


@pytest.mark.parametrize("codec", CODEC_NAMES)
def test_names_dtypes_and_shapes(codec: str) -> None:
    """Of state for bf16 parameters, made, loaded from a file, and loaded from torch's state."""
    optimizer, loaded, adopted = (made("adamw", BF16, codec=codec) for _ in range(3))
    advance(optimizer, range(1), BF16)
    loaded.load_state_dict(through_a_file(optimizer.state_dict()))
    theirs = torch.optim.AdamW(params_of(BF16))
    advance(theirs, range(1), BF16)
    adopted.load_state_dict(theirs.state_dict())
    unit = () if CODECS[codec].scales(signed=False) == 1 else (CODECS[codec].scales(signed=False),)
    for each in (optimizer, loaded, adopted):
        for param, state in each.state.items():
            actual = {name: (value.dtype, tuple(value.shape)) for name, value in state.items()}
            shape = tuple(param.shape)
            expected = {"step": (torch.float32, ())}
            if CODECS[codec].blockwise and param.numel() >= 4096:
                blocks = (shape[0], -(-shape[1] // 128))
                for moment, last in (("exp_avg", ()), ("exp_avg_sq", unit)):
                    expected[f"{moment}_codes"] = (torch.uint8, shape if codec in EIGHT_BIT else (*shape, 2))
                    expected[f"{moment}_scales"] = (torch.float32, (*blocks, *last))
            else:
                dtype = BF16 if codec == "bf16" and param.numel() >= 4096 else FP32
                expected |= dict.fromkeys(("exp_avg", "exp_avg_sq"), (dtype, shape))
            assert actual == expected


def test_hooks_of_users_are_called() -> None:
    optimizer, called = trained(), []
    optimizer.register_state_dict_pre_hook(lambda o: called.append("save pre"))
    optimizer.register_state_dict_post_hook(lambda o, state_dict: called.append("save post"))
    optimizer.register_load_state_dict_pre_hook(
        lambda o, state_dict: {**state_dict, "param_groups": [{**g, "lr": 7.0} for g in state_dict["param_groups"]]}
    )
    optimizer.register_load_state_dict_post_hook(lambda o: called.append("load post"))
    for _ in range(2):  # the optimizer's own hook does not pile up or stay
        optimizer.load_state_dict(optimizer.state_dict())
    assert called == ["save pre", "save post", "load post"] * 2
    assert optimizer.param_groups[0]["lr"] == 7.0
    assert len(optimizer._optimizer_load_state_dict_pre_hooks) == 1


@pytest.mark.parametrize(
    ("rule", "off"),
    [
        ("amsgrad", {"amsgrad": False}),
        ("centered_rmsprop_momentum", {"centered": False, "momentum": 0.0}),
        ("momentum", {"momentum": 0.0, "dampening": 0.0}),
    ],
)
def test_state_of_a_moment_that_is_switched_off_is_left_out(rule: str, off: dict[str, Any]) -> None:
    """As in torch.optim, whose state dicts are loaded then, too."""
    optimizer = trained(rule, 1)
    optimizer.param_groups[0].update(off)
    loaded = with_weights_of(optimizer, rule, **off)
    loaded.load_state_dict(optimizer.state_dict())
    for each in (optimizer, loaded):
        advance(each, range(1, 3))
    for param, own in loaded.state.items():
        assert own.keys() == loaded._internals.state_of(param, loaded.param_groups[0]).entries.keys()
    kept = everything(loaded)
    assert_same(kept, {key: value for key, value in everything(optimizer).items() if key in kept})


@pytest.mark.parametrize(
    ("group", "options"),
    [(1, {"master_weight_bits": None, "stochastic_rounding": True}), (0, {"stochastic_rounding_seed": 3})],
)
def test_changed_weight_formats_are_noticed(group: int, options: dict[str, Any]) -> None:
    assert_noticed(set_option(group, **options), make_groups(dtype=BF16, master_weight_bits=24))


USES: dict[str, Callable[[ShardedOptimizer], object]] = {
    "step": lambda optimizer: advance(optimizer, range(1), optimizer.param_groups[0]["params"][0].dtype),
    "state_dict": lambda optimizer: optimizer.state_dict(),
    "load": lambda optimizer: optimizer.load_state_dict(through_a_file(optimizer.state_dict())),
    "full precision": lambda optimizer: optimizer.full_precision_parameters(),
}


@pytest.mark.parametrize(
    ("use", "before", "after"),
    [
        *((use, BF16, FP16) for use in USES),
        ("step", BF16, FP32),
        ("load", BF16, FP32),
        ("state_dict", FP32, BF16),
        ("state_dict", FP16, BF16),
    ],
)
def test_low_bits_of_weights_that_were_cast(before: torch.dtype, after: torch.dtype, use: str) -> None:
    """Low bits are dropped, and the run is that of an optimizer that gets the weights and moments after the cast."""
    optimizer = trained(dtype=before, master_weight_bits=24)
    for param in optimizer.param_groups[0]["params"]:
        param.data = param.data.to(after)
    with pytest.warns(UserWarning, match=f"got weights that were cast to {after} after steps"):
        USES[use](optimizer)
    assert all(("master_low_bits" in state) == (after != FP32) for state in optimizer.state.values())
    if use == "step":
        return
    for state in optimizer.state.values():
        assert not state.get("master_low_bits", torch.zeros(1)).any()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        other = with_weights_of(optimizer, "adamw", master_weight_bits=24)
        other.load_state_dict(through_a_file(optimizer.state_dict()))
        for each in (optimizer, other):
            advance(each, range(3, 5), after)
    assert_same(everything(other), everything(optimizer))


# Damage --------------------------------------------------------------------------------------------------------------


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


def may_lack_low_bits() -> StateDict:
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
    ("log8", lambda s: s["state"][MATRIX].pop("exp_avg_sq_scales"), "expected step, exp_avg_codes"),
    ("log8", lambda s: s["state"].update({MATRIX: [1]}), MATRIX_GOT + "its state as"),
    (
        "log8",
        lambda s: s["state"][MATRIX].update(exp_avg_codes=torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])),
        MATRIX_GOT + "values that cannot be read",
    ),
    ("log8", lambda s: s.update(state=[]), "got a state dict with state as list"),
    ("log8", lambda s: s.pop("param_groups"), "got a state dict with"),
    ("log8", lambda s: s.update(param_groups=[[0]]), "param group 0: got a list with params None"),
    ("log8", lambda s: s["param_groups"][0].update(params=[[], []]), "param group 0: got a dict with params [[], []]"),
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


@pytest.mark.parametrize(
    ("rule", "options", "message"),
    [
        ("adamw", {"codec": "dynamic8"}, "codec='dynamic8', expected 'log8'"),
        ("adamw", {"block_size": 64}, "block_size=64, expected 128"),
        ("adamw", {"min_quantized_numel": 1}, "min_quantized_numel=1, expected 4096"),
        ("adamw", {"master_weight_bits": None}, "master_weight_bits=None, expected 24"),
        ("adamw", {"master_weight_bits": 32}, "master_weight_bits=32, expected 24"),
        ("lion", {}, "saved by another optimizer"),
    ],
)
def test_another_format_is_refused(rule: str, options: dict[str, Any], message: str) -> None:
    optimizer = trained(dtype=BF16, master_weight_bits=24)
    state_dict = trained(rule, 1, BF16, **{"master_weight_bits": 24, **options}).state_dict()
    assert_refused(optimizer, state_dict, message)
    if options.get("master_weight_bits", 24) is None:
        with pytest.raises(ValueError, match="master_weight_bits=24, expected None"):
            trained(dtype=BF16).load_state_dict(optimizer.state_dict())


def test_state_of_other_parameters_is_refused() -> None:
    optimizer = trained()
    short, few = ([Parameter(p.detach()[:1]) if p.ndim else p for p in params_of()], params_of()[:2])
    for params, message in ((short, "got exp_avg"), (few, "parameters per param group")):
        other = RULES["adamw"].make(params)
        advance(other, range(1))
        assert_refused(optimizer, other.state_dict(), message)


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
    state_dict = may_lack_low_bits()
    for change in changes:
        change(state_dict)
    assert_refused(made("adamw", codec=codec), state_dict, MATRIX_GOT + message)


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
    state_dict, optimizer = saved("log8") if source == "own" else may_lack_low_bits(), made("adamw")
    advance(optimizer, range(2))
    for count in WRONG_STEPS.values():
        state_dict["state"][VECTOR]["step"] = count
        assert_refused(optimizer, state_dict, VECTOR_GOT + "step as")
    for count in (7, 7.0, torch.tensor([7]), torch.tensor(7, dtype=torch.float64), 0):  # as others write them
        state_dict["state"][VECTOR]["step"] = count
        optimizer.load_state_dict(state_dict)
        found = optimizer.state[optimizer.param_groups[0]["params"][VECTOR]]["step"]
        assert (found.shape, found.dtype, float(found)) == ((), torch.float32, float(count))
    advance(optimizer, range(2, 3))


OTHER_LAYOUTS: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = {
    "sparse codes": ("exp_avg_codes", Tensor.to_sparse),
    "sparse rows of codes": ("exp_avg_codes", Tensor.to_sparse_csr),
    "without memory": ("exp_avg_codes", lambda x: x.to("meta")),
    "sparse low bits": ("master_low_bits", Tensor.to_sparse),
    "floats as codes": ("exp_avg_codes", Tensor.float),
    "low bits of another width": ("master_low_bits", Tensor.short),
    "some rows of low bits": ("master_low_bits", lambda x: x[:5]),
}


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
def test_layouts() -> None:
    optimizer = made("adamw", torch.bfloat16, master_weight_bits=24)
    advance(optimizer, range(2), torch.bfloat16)
    for entry, change in OTHER_LAYOUTS.values():
        state_dict = copy.deepcopy(optimizer.state_dict())
        state_dict["state"][MATRIX][entry] = change(state_dict["state"][MATRIX][entry])
        assert_refused(optimizer, state_dict, MATRIX_GOT + entry)
    del state_dict["state"][1]["master_low_bits"]
    state_dict["state"][MATRIX] = copy.deepcopy(optimizer.state_dict())["state"][MATRIX]
    assert_refused(optimizer, state_dict, "master_low_bits; was it saved")
    advance(optimizer, range(2, 3), torch.bfloat16)


def test_a_run_that_diverged_says_so() -> None:
    """With nonfinite="propagate" the state is as torch's would be: such a state is saved, and not loaded."""
    (param,) = params = [torch.nn.Parameter(torch.ones(7))]
    optimizer = shardopt.AdamW8bit(params, nonfinite="propagate")
    param.grad = torch.full((7,), NAN)
    optimizer.step()
    with pytest.raises(ValueError, match=r"the run had diverged when it was saved, .* load an earlier one"):
        shardopt.AdamW8bit(params).load_state_dict(optimizer.state_dict())


# Names ---------------------------------------------------------------------------------------------------------------


def named(order: str, *, kind: str = "own", prefix: str = "") -> tuple[dict[str, Parameter], torch.optim.Optimizer]:
    """Parameters of one shape by name, and an optimizer that has them in this order, with names."""
    params = {name: Parameter(values((64, 96), seed)) for seed, name in enumerate("abc")}
    listed = [(prefix + name, params[name]) for name in order]
    if kind == "wrapped":
        return params, shardopt.quantize_state(torch.optim.AdamW(listed))
    return params, shardopt.AdamW8bit(listed) if kind == "own" else torch.optim.AdamW(listed)


def step_named(params: dict[str, Parameter], optimizer: torch.optim.Optimizer) -> None:
    step(optimizer, params, {name: values((64, 96), 10 + seed) for seed, name in enumerate(params)})


@pytest.mark.parametrize("form", ["as it is", "torch's functions", "dequantized", "imported"])
@pytest.mark.parametrize(("kind", "prefix"), [("own", "module."), ("wrapped", ""), ("wrapped", "module.")])
def test_named_state_in_another_order(kind: str, form: str, prefix: str) -> None:
    """State finds its parameter by name, and saved names are not taken over."""
    dequantize = {"dequantize": True} if form == "dequantized" else {}
    params, optimizer = named("abc", kind="torch" if form == "imported" else kind)
    step_named(params, optimizer)
    others, other = named("cab", kind=kind, prefix=prefix)
    if form == "torch's functions":
        model, its_model = nn.ParameterDict(params), nn.ParameterDict(others)
        set_optimizer_state_dict(its_model, other, get_optimizer_state_dict(model, optimizer))
    elif form == "imported" and kind == "own":
        shardopt.checkpoint.import_state(other, optimizer.state_dict())
    else:
        other.load_state_dict(through_a_file(optimizer.state_dict(**dequantize)))
    assert other.param_groups[0]["param_names"] == [prefix + name for name in "cab"]
    expected = named("abc", kind=kind)[1]
    expected.load_state_dict(optimizer.state_dict(**dequantize))
    for name, param in zip("abc", expected.param_groups[0]["params"], strict=True):
        assert_same(other.state[others[name]], expected.state[param])


@pytest.mark.parametrize("kind", ["own", "wrapped"])
def test_names_of_other_parameters_are_refused(kind: str) -> None:
    params, optimizer = named("abc", kind=kind)
    step_named(params, optimizer)
    saved = optimizer.state_dict()
    others, other = named("abc", kind=kind, prefix="x.")
    with pytest.raises(ValueError, match=r"param group 0: got state of a, b, c, expected x\.a, x\.b, x\.c; make the"):
        other.load_state_dict(saved)
    assert not any(other.state.values())
    del saved["param_groups"][0]["param_names"]
    other.load_state_dict(saved)
    assert_same(other.state[others["a"]], optimizer.state[params["a"]])


@pytest.mark.parametrize("kind", ["own", "wrapped"])
def test_a_key_of_no_group_is_told(kind: str) -> None:
    params, optimizer = named("abc", kind=kind)
    step_named(params, optimizer)
    optimizer.state[Parameter(torch.zeros(3))] = {"step": torch.tensor(1.0)}
    for dequantize in (False, True):
        with pytest.raises(RuntimeError, match=r"got state of a tensor of shape \(3,\) that is in no param group"):
            optimizer.state_dict(dequantize=dequantize)


def test_empty_entries_are_no_state() -> None:
    """Such as reading ``optimizer.state[param]`` makes."""
    params, optimizer = named("abc")
    _, expected = named("abc")
    assert not any(optimizer.state[param] for param in params.values())
    assert optimizer.state_dict(dequantize=True)["state"] == optimizer.state_dict()["state"] == {}
    expected.load_state_dict(optimizer.state_dict())
    assert get_optimizer_state_dict(nn.ParameterDict(params), optimizer)["state"].keys() == set("abc")


def test_the_state_of_some_parameters_is_reset() -> None:
    params, optimizer = named("abc")
    step_named(params, optimizer)
    fresh, expected = named("abc")
    step_named(fresh, expected)
    for given, rows, message in (
        ([params["a"], Parameter(torch.ones(2))], None, "params: got a tensor that is in no param group"),
        (["a", "d*"], None, r"got pattern 'd\*', which matches no parameter, expected one for names such as a, b, c"),
        (None, [64], r"rows: got \[64\] for a parameter of shape"),
        *(
            ("?", rows, r"for a parameter of shape \(64, 96\), expected the numbers of its rows, or a bool for each")
            for rows in ([64], [-65], [0.5], torch.ones(63, dtype=torch.bool), torch.ones(64))
        ),
    ):
        before = copy.deepcopy(optimizer.state[params["a"]])
        with pytest.raises(ValueError, match=message):
            optimizer.reset_state(given, rows=rows)
        assert_same(optimizer.state[params["a"]], before)
    unnamed = shardopt.AdamW8bit([Parameter(torch.ones(2))])
    with pytest.raises(ValueError, match=r"expected one for names such as those of model\.named_parameters"):
        unnamed.reset_state("*")
    addresses = {key: x.data_ptr() for key, x in optimizer.state[params["a"]].items()}
    optimizer.reset_state("b", rows=[])
    optimizer.reset_state(iter([params["a"], "c"]))
    assert {key: x.data_ptr() for key, x in optimizer.state[params["a"]].items()} == addresses
    one = shardopt.AdamW8bit([fresh["a"], fresh["c"]])
    for _ in range(2):
        step_named(params, optimizer)
        for name, of in (("a", one), ("c", one), ("b", expected)):
            fresh[name].grad = values((64, 96), 10 + "abc".index(name))
            of.param_groups[0]["lr"] = 1e-3
        one.step()
        fresh["a"].grad = fresh["c"].grad = None
        expected.step()
        for name, param in params.items():
            assert torch.equal(param, fresh[name])
            assert_same(optimizer.state[param], (expected if name == "b" else one).state[fresh[name]])


@pytest.mark.parametrize(("codec", "rows"), [("dynamic8", 80), ("log4", 50)])
def test_state_goes_on_after_embeddings_are_resized(codec: str, rows: int) -> None:
    """By the function of docs/reset_state.md: old rows keep their bits, and new ones are a new optimizer's."""
    page = (Path(__file__).parents[2] / "docs" / "reset_state.md").read_text()
    (code,) = re.findall(r"^```python\n(import torch\n+def load_resized.*?)^```$", page, re.MULTILINE | re.DOTALL)
    exec(code, names := {})

    def made(rows: int) -> tuple[dict[str, Parameter], ShardedOptimizer]:
        shapes = {"embed": (rows, 96), "norm": (96,), "scale": ()}
        params = {name: Parameter(values(shape, 7, torch.bfloat16)) for name, shape in shapes.items()}
        return params, shardopt.AdamW8bit(params.items(), codec=codec, master_weight_bits=24)

    (params, old), (resized, new) = made(64), made(rows)
    for seed in range(2):
        step(old, params, {name: values(tuple(p.shape), seed, p.dtype) for name, p in params.items()})
    expected = copy.deepcopy(old.state_dict()["state"])
    names["load_resized"](new, old)
    kept, state = min(rows, 64), new.state[resized["embed"]]
    fresh = new._internals.state_of(resized["embed"], new.param_groups[0]).new_state(torch.device("cpu"))
    for key, x in fresh.items():
        if key == "step":
            assert state[key] == 2
        else:
            assert torch.equal(state[key], torch.cat([expected[0][key][:kept], x[kept:]]))
    for number, name in ((1, "norm"), (2, "scale")):
        assert_same(new.state[resized[name]], expected[number])


def test_torch_leaves_out_the_state_of_frozen_parameters() -> None:
    """pytorch#192202: with a warning, nested or flat."""
    params, optimizer = named("abc")
    step_named(params, optimizer)
    model = nn.ParameterDict(params)
    for options in (StateDictOptions(), StateDictOptions(flatten_optimizer_state_dict=True)):
        saved = get_optimizer_state_dict(model, optimizer, options=options)
        params["b"].requires_grad = False
        with pytest.warns(UserWarning, match="got saved state of b, which requires no gradient"):
            set_optimizer_state_dict(model, optimizer, saved, options=options)
        params["b"].requires_grad = True
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            set_optimizer_state_dict(model, optimizer, saved, options=options)
