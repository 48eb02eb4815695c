"""The kinds of optimizer that bitsandbytes has: each comes in as what it is, and is told apart from all others.

From state dicts made by hand in bitsandbytes' form.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

import shardopt
from foreign_states import (
    ALIGNED,
    KINDS,
    SHAPES,
    STEP,
    assert_imported,
    bitsandbytes_ademamix,
    bitsandbytes_state,
    in_blocks,
    made_up,
    of_kind,
    params_of,
    specification,
    stepped,
)
from helpers import everything
from ranks.models import WAYS, make_net, named_parameters, set_gradients
from ranks.pool import Pool
from ranks.snapshot import assert_same, snapshot
from shardopt.checkpoint import import_state
from shardopt.optim import ShardedOptimizer

WRAPPED = "__bnb_optimizer_quant_state__"

#: Hyper-parameters without which an optimizer keeps other moments.
NEEDED: dict[str, dict[str, Any]] = {"SGD": {"momentum": 0.5}}

#: Optimizers that keep moments which none of bitsandbytes does.
WITHOUT_KIND: dict[str, Callable[[Any], ShardedOptimizer]] = {
    "SGD without momentum": shardopt.SGD8bit,
    "RMSprop with momentum": lambda params: shardopt.RMSprop8bit(params, momentum=0.9),
    "centered RMSprop": lambda params: shardopt.RMSprop8bit(params, centered=True),
    "amsgrad": lambda params: shardopt.AdamW8bit(params, amsgrad=True),
    "Adamax": shardopt.Adamax8bit,
    "Adan": shardopt.Adan8bit,
}


def ours_of(kind: str, params: Any, **options: Any) -> ShardedOptimizer:
    found: ShardedOptimizer = getattr(shardopt, f"{kind}8bit")(params, **NEEDED.get(kind, {}), **options)
    return found


@pytest.mark.parametrize(("codec", "block_size"), [("dynamic8", 256), ("log8", 128), ("bf16", 128), ("fp32", 128)])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind(kind: str, codec: str, block_size: int) -> None:
    state_dict, decoded = of_kind(kind)
    ours = ours_of(kind, params_of(), codec=codec, block_size=block_size)
    report = import_state(ours, state_dict)
    aligned = ALIGNED[256] if codec == "dynamic8" else set()
    exact = aligned if kind in ("AdamW", "Lion", "SGD") else set()
    if kind != "AdEMAMix" or not aligned:
        assert_imported(ours, decoded, exact)
    assert [outcome == "exact" for outcome in report.parameters.values()] == [
        shape in exact or shape in ((7,), ()) for shape in SHAPES
    ]
    (group,) = ours.param_groups
    assert {key: group[key] for key in KINDS[kind].taken} == KINDS[kind].taken
    assert (group["lr"], group["weight_decay"]) == (0.5, 0.25)
    assert report.ignored == ()


def test_only_the_slow_average_of_ademamix_is_coded_anew() -> None:
    state_dict, decoded = of_kind("AdEMAMix")
    ours = ours_of("AdEMAMix", params_of(), codec="dynamic8", block_size=256)
    import_state(ours, state_dict)
    for index, param in enumerate(ours.param_groups[0]["params"]):
        spec, state = specification(ours, param), ours.state[param]
        expected = spec.encode({m.name: x for m, x in zip(spec.moments, decoded[index], strict=True)})
        if tuple(param.shape) in ALIGNED[256]:
            saved = state_dict["state"][index][WRAPPED]
            for name, codes, scales in (
                ("exp_avg_fast", saved["state1"][0], saved["absmax1"][0]),
                ("exp_avg_sq", saved["state2"], saved["absmax2"]),
            ):
                expected |= {f"{name}_codes": codes, f"{name}_scales": scales}
            slow = decoded[index][1]
            error = in_blocks(spec.decode(state)["exp_avg_slow"] - slow, 256).abs().amax(1)
            assert (error > 0).all()
            assert (error <= 2**-15 * in_blocks(slow, 256).abs().amax(1)).all()
        found = {key: value for key, value in state.items() if key != "step"}
        assert_same(found, {key: expected[key].view(found[key].shape) for key in expected})


@pytest.mark.parametrize("codec", ["dynamic8", "fp32"])
def test_entries_keep_no_other_memory(codec: str) -> None:
    """A view of one of two stacked averages would be saved with both."""
    state_dict, _ = of_kind("AdEMAMix")
    ours = ours_of("AdEMAMix", params_of(), codec=codec, block_size=256)
    import_state(ours, state_dict)
    for state in ours.state.values():
        for key, entry in state.items():
            assert entry.untyped_storage().nbytes() == entry.nbytes, key


@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.parametrize("shape", [(33, 130), (16, 512)])
def test_scales_of_ademamix_on_cuda(shape: tuple[int, ...], zero: bool) -> None:
    """bitsandbytes puts the slow average's scales at ``(numel + element) // 256``, as if the last block were whole.

    With a slow average that is zero at the end, whose last scales are zero in both layouts.
    """
    x = made_up(shape, 1)
    if zero:
        x.signed.view(-1)[:700] = 0  # the slow average's end
    state, _ = bitsandbytes_ademamix(x)
    on_cuda = copy.deepcopy(state)
    scales, blocks = on_cuda[WRAPPED]["absmax1"].view(-1), -(-math.prod(shape) // 256)
    first = math.prod(shape) // 256
    slow = scales[blocks:].clone()
    scales[blocks:] = 0
    scales[first : first + blocks] = slow
    is_shared = first != blocks
    found = []
    for each in (state, on_cuda):
        ours = shardopt.AdEMAMix([Parameter(torch.zeros(shape))], codec="fp32")
        import_state(ours, {"state": {0: each}, "param_groups": [{"params": [0], **KINDS["AdEMAMix"].group}]})
        found.append(next(iter(ours.state.values())))
    if is_shared:  # the fast average's last block has the scale of the slow one's first
        last = slice(256 * (blocks - 1), None)
        for entries in found:
            entries["exp_avg_fast"].view(-1)[last] = 0
    assert_same(*found)


def test_older_forms() -> None:
    """Not wrapped, and in blocks of 2048."""
    x = made_up((4, 4096), 1)
    state, decoded = bitsandbytes_state(x, size=2048)
    ours = shardopt.AdamW8bit([Parameter(torch.zeros(4, 4096))], codec="dynamic8", block_size=2048)
    group = {"params": [0], "betas": (0.9, 0.99)}
    report = import_state(ours, {"state": {0: {"step": STEP, **state[WRAPPED]}}, "param_groups": [group]})
    assert report.counts == {"exact": 1}
    assert_imported(ours, [decoded], {(4, 4096)})


def assert_refused(ours: ShardedOptimizer, state_dict: Any, message: str) -> None:
    """Demands an error of one line, and that nothing was changed."""
    stepped(ours, 1)
    before, groups = everything(ours), [dict(group) for group in ours.param_groups]
    with pytest.raises(ValueError, match=message) as error:
        import_state(ours, state_dict)
    assert "\n" not in str(error.value)
    assert_same(everything(ours), before)
    assert [dict(group) for group in ours.param_groups] == groups


@pytest.mark.parametrize("kind", KINDS)
def test_kinds_are_told_apart(kind: str) -> None:
    for other in KINDS.keys() - {kind}:
        message = "another optimizer of bitsandbytes|expected the state of an optimizer with"
        assert_refused(ours_of(kind, params_of()), of_kind(other)[0], message)


@pytest.mark.parametrize("name", WITHOUT_KIND)
def test_optimizers_that_bitsandbytes_does_not_have(name: str) -> None:
    for kind in KINDS:
        assert_refused(WITHOUT_KIND[name](params_of()), of_kind(kind)[0], "as bitsandbytes has none with")


def in_group(kind: str, **hyper: Any) -> dict[str, Any]:
    state_dict, _ = of_kind(kind)
    state_dict["param_groups"][0].update(hyper)
    return state_dict


@pytest.mark.parametrize(
    ("kind", "hyper", "message"),
    [
        ("RMSprop", {"eps": 0.0}, "another optimizer"),  # SGD's, too
        ("RMSprop", {"betas": (0.0, 0.9)}, "another optimizer"),
        ("Lion", {"betas": (0.9, 0)}, "another optimizer"),
        ("Lion", {"betas": ()}, "another optimizer"),
        ("SGD", {"betas": (0.9, 0.1)}, "another optimizer"),  # Lion's, too
        ("SGD", {"betas": (0.0, 0)}, "make the optimizer keep no mom"),
        ("AdamW", {"betas": None}, "another optimizer"),
        ("AdamW", {"eps": "1e-8"}, "another optimizer"),
        ("AdEMAMix", {"betas": (0.9, 0.99, 2.0)}, "betas"),
        ("AdEMAMix", {"t_alpha": 0.5}, "alpha_steps: got 0.5"),
        ("Adagrad", {"eps": -1.0}, "eps"),
    ],
)
def test_hyper_parameters_of_another_kind(kind: str, hyper: dict[str, Any], message: str) -> None:
    assert_refused(ours_of(kind, params_of()), in_group(kind, **hyper), message)


def test_momentum_that_rmsprop_never_applied() -> None:
    ours = ours_of("RMSprop", params_of())
    report = import_state(ours, in_group("RMSprop", betas=(0.7, 0.9)))
    assert (ours.param_groups[0]["alpha"], ours.param_groups[0]["momentum"]) == (0.7, 0.0)
    assert report.ignored == ("betas=(0.7, 0.9) of param group 0",)


def test_adagrad_without_eps() -> None:
    ours = ours_of("Adagrad", params_of(), lr_decay=0.5)
    import_state(ours, in_group("Adagrad", eps=0.0))
    assert (ours.param_groups[0]["eps"], ours.param_groups[0]["lr_decay"]) == (0.0, 0.0)


# --- LAMB and LARS: their state is Adam's and SGD's with a norm that only parameters without codes use


def with_norms(kind: str, key: str = "unorm_vec") -> dict[str, Any]:
    state_dict, _ = of_kind(kind)
    for state in state_dict["state"].values():
        state[WRAPPED][key] = torch.ones(1)
    return state_dict


@pytest.mark.parametrize("key", ["unorm_vec", "gnorm_vec"])
@pytest.mark.parametrize("kind", ["AdamW", "SGD"])
def test_norms_are_left_out(kind: str, key: str) -> None:
    """The state of LAMB8bit or LARS8bit, and of an older optimizer with percentile_clipping."""
    plain, ours = ours_of(kind, params_of()), ours_of(kind, params_of())
    import_state(plain, of_kind(kind)[0])
    report = import_state(ours, with_norms(kind, key))
    assert_same(everything(ours), everything(plain))
    assert report.ignored == tuple(f"{key} of parameter {index} of param group 0" for index in range(len(SHAPES)))


@pytest.mark.parametrize("kind", ["AdamW", "SGD"])
def test_lamb_and_lars_in_32_bits(kind: str) -> None:
    state_dict = with_norms(kind)
    for index, state in state_dict["state"].items():
        x = made_up(SHAPES[index], index)
        state[WRAPPED] = {"state1": x.signed, "unorm_vec": torch.ones(1)} | (
            {"state2": x.unsigned} if kind == "AdamW" else {}
        )
    assert_refused(ours_of(kind, params_of()), state_dict, "got state with unorm_vec and without codes, of LAMB")


# --- damaged states

DAMAGED: dict[str, tuple[str, Callable[[dict[str, Any]], object], str]] = {
    "one average": ("AdEMAMix", lambda s: s.update(state1=s["state1"][0]), r"expected two averages \(2, \.\.\.\)"),
    "three averages": ("AdEMAMix", lambda s: s.update(state1=s["state1"][[0, 1, 0]]), "expected two averages"),
    "averages of another shape": (
        "AdEMAMix",
        lambda s: s.update(state1=s["state1"].view(2, 32, 256)),
        r"got exp_avg_fast of shape \(32, 256\), expected \(16, 512\)",
    ),
    "averages in a list": ("AdEMAMix", lambda s: s.update(state1=[*s["state1"]]), "got list, expected two"),
    "scales of one average": ("AdEMAMix", lambda s: s.update(absmax1=s["absmax1"][0]), "expected two averages"),
    "too few scales": ("AdEMAMix", lambda s: s.update(absmax1=s["absmax1"][:, 1:]), "got scales of shape"),
    "no scales": ("AdEMAMix", lambda s: s.pop("absmax1"), "with qmap1 and absmax1"),
    "no second moment": ("AdEMAMix", lambda s: s.pop("state2"), "got state1, expected the state of"),
    "scale of nan of the slow average": (
        "AdEMAMix",
        lambda s: s["absmax1"].__setitem__((1, 0), torch.nan),
        "scales with NaN",
    ),
    "no codes": ("RMSprop", lambda s: s.update(state1=s["state1"].int()), "got torch.int32"),
    "squares below zero": ("RMSprop", lambda s: s["state1"].fill_(0), "square_avg"),
    "sums below zero": ("Adagrad", lambda s: s["state1"].fill_(0), "sum"),
    "second moment of RMSprop": ("RMSprop", lambda s: s.update(state2=s["state1"]), "got state1, state2, expected"),
    "scale per tensor": ("Adagrad", lambda s: s.update(max1=torch.ones(1)), "scale per tensor"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_states(name: str) -> None:
    kind, change, message = DAMAGED[name]
    state_dict, _ = of_kind(kind)
    change(state_dict["state"][0][WRAPPED])
    assert_refused(ours_of(kind, params_of()), state_dict, message)


def test_a_damaged_average_in_float() -> None:
    state_dict, _ = of_kind("AdEMAMix")
    state_dict["state"][6][WRAPPED]["state1"][1, 0] = torch.nan
    assert_refused(ours_of("AdEMAMix", params_of()), state_dict, "exp_avg_slow")


# --- into sharded optimizers


def import_sharded(way: str, kind: str, codec: str) -> None:
    """Imports into a sharded model, and compares it and its next step with the unsharded one."""
    found = []
    for each in ("single", way):
        model = WAYS[each](make_net())
        names = named_parameters(model)
        ours = ours_of(kind, names.values(), codec=codec, block_size=256, min_quantized_numel=64)
        states = {i: KINDS[kind].state(made_up(tuple(p.shape), i))[0] for i, p in enumerate(names.values())}
        group = {"lr": 0.5, "weight_decay": 0.25, **copy.deepcopy(KINDS[kind].group), "params": list(states)}
        report = import_state(ours, {"state": states, "param_groups": [group]}, names=names)
        imported: dict[str, Tensor] = snapshot(names, ours)
        set_gradients(model, 1)
        ours.step()
        found.append((report, imported, snapshot(names, ours)))
    whole, parts = found
    assert parts[0] == whole[0]
    assert_same(parts[1], whole[1])
    assert_same(parts[2], whole[2])


@pytest.mark.parametrize("kind", ["AdEMAMix", "RMSprop"])
@pytest.mark.parametrize(("world_size", "way"), [(2, "fsdp"), (3, "fsdp columns")])
def test_shards_take_their_parts(ranks: Pool, world_size: int, way: str, kind: str) -> None:
    for codec in ("dynamic8", "log8"):
        ranks.run(world_size, import_sharded, way, kind, codec)


def test_averages_of_a_parameter_of_two_rows() -> None:
    """The parameter's own first dimension is not taken for the two averages."""
    state, decoded = bitsandbytes_ademamix(made_up((2, 4096), 1))
    ours = shardopt.AdEMAMix8bit([Parameter(torch.zeros(2, 4096))], codec="fp32")
    import_state(ours, {"state": {0: state}, "param_groups": [{"params": [0], **KINDS["AdEMAMix"].group}]})
    assert_imported(ours, [decoded], {(2, 4096)})
    state[WRAPPED]["state1"] = state[WRAPPED]["state1"][0]
    state[WRAPPED]["absmax1"] = state[WRAPPED]["absmax1"][0].view(2, -1)
    group = {"params": [0], **KINDS["AdEMAMix"].group}
    assert_refused(ours, {"state": {0: state}, "param_groups": [group]}, r"of shape \(4096,\), expected \(2, 4096\)")
