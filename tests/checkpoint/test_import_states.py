"""Other packages' states come in code by code where both have the same codes, and are coded anew elsewhere.

From state dicts made by hand in the other packages' forms; every kind of optimizer that bitsandbytes has, and Muon.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.distributed.tensor import DTensor
from torch.nn import Parameter

import shardopt
from foreign_states import (
    ALIGNED,
    BNB,
    MATRICES,
    OTHERS,
    SHAPES,
    SOURCES,
    STEP,
    WRAPPED,
    assert_imported,
    bitsandbytes_ademamix,
    bitsandbytes_state,
    by_hand,
    flashoptim_state,
    from_blocks,
    in_blocks,
    made_up,
    moments_of,
    ours_of,
    params_of,
    stepped,
)
from helpers import everything
from ranks.layouts import values
from ranks.models import WAYS, make_net, named_parameters, set_gradients
from ranks.snapshot import assert_same, snapshot
from shardopt.checkpoint import import_state
from shardopt.optim import ShardedOptimizer
from slow_cases import slow


def outcome_of(source: str, codec: str, shape: tuple[int, ...]) -> str:
    """How an import treats the moments of a parameter."""
    numel, of_torchao = math.prod(shape), source == "torchao"
    if numel < 4096 or (of_torchao and numel % 256):  # float32 there
        return "quantized" if shape in MATRICES and codec != "fp32" else "exact"
    if shape in OTHERS or codec == "fp32":
        return "as float32"
    has_same_codes = codec == "dynamic8" and SOURCES[source].kind in ("AdamW", "Lion", "SGD")
    return "exact" if has_same_codes and shape in ALIGNED[256] else "requantized"


@pytest.mark.parametrize(
    ("source", "codec", "block_size"),
    [
        *((source, "dynamic8", 256) for source in SOURCES if source != "flashoptim"),
        *(("SGD", "log8", 128), ("RMSprop", "bf16", 128), (BNB, "fp32", 128), ("AdEMAMix", "fp32", 128)),
    ],
)
def test_every_source(source: str, codec: str, block_size: int) -> None:
    state_dict, decoded = by_hand(source)
    ours = ours_of(source, params_of(), codec=codec, block_size=block_size)
    report = import_state(ours, state_dict)
    outcomes = [outcome_of(source, codec, shape) for shape in SHAPES]
    assert (report.source, report.ignored, list(report.parameters.values())) == (SOURCES[source].package, (), outcomes)
    if (source, codec) != ("AdEMAMix", "dynamic8"):
        assert_imported(
            ours, decoded, {shape for shape, found in zip(SHAPES, outcomes, strict=True) if found == "exact"}
        )
    (group,) = ours.param_groups
    assert {key: group[key] for key in SOURCES[source].taken} == SOURCES[source].taken
    assert (group["lr"], group["weight_decay"]) == (0.5, 0.25)
    assert isinstance(group["lr"], float)


def test_companded_codes_are_taken_over() -> None:
    state_dict, decoded = by_hand("flashoptim")
    ours = shardopt.AdamW8bit(params_of(), codec="companded8", block_size=32)
    report = import_state(ours, state_dict)
    found = moments_of(ours)
    for index, (shape, state) in enumerate(zip(SHAPES, ours.state.values(), strict=True)):
        exact, saved = shape in ALIGNED[32], state_dict["state"][index]
        outcome = "exact" if exact else "requantized" if shape in MATRICES else "as float32"
        assert report.parameters[f"parameter {index} of param group 0"] == outcome
        for name, moment, expected in zip(found[index], found[index].values(), decoded[index], strict=True):
            if exact:
                assert torch.equal(state[f"{name}_codes"], saved[f"{name}::quantized"].view(torch.uint8))
                assert torch.equal(state[f"{name}_scales"].flatten(), saved[f"{name}::scales"].float())
            if outcome != "requantized":
                # Signed: q / 127 (which counts twice), 2 - t, the quotient, the product. Unsigned: 1 / 255, s and q
                # times it (which count twice), the square. And the expected value, float64's, is rounded.
                torch.testing.assert_close(moment, expected, rtol=8 * 2**-24, atol=0)


def test_scales_of_flashoptim_beside_bfloat16_parameters() -> None:
    """FlashOptim's scales are float16's bits in tensors that say bfloat16."""
    x = made_up((16, 512), 0)
    states = [flashoptim_state(x, bfloat16)[0] for bfloat16 in (False, True)]
    found = []
    for state in states:
        ours = shardopt.AdamW8bit([Parameter(torch.zeros(16, 512))], codec="companded8", block_size=32)
        import_state(ours, {"state": {0: state}, "param_groups": [{"params": [0]}]})
        found.append(everything(ours))
    assert_same(*found)


def test_another_map_is_no_codec_of_ours() -> None:
    x = made_up((16, 512), 1)
    state, _ = bitsandbytes_state(x)
    inner = state[WRAPPED]
    table = inner["qmap1"] = inner["qmap1"].clone()
    table[200] = torch.nextafter(table[200], torch.tensor(1.0))
    ours = shardopt.AdamW8bit([Parameter(torch.zeros(16, 512))], codec="dynamic8", block_size=256)
    report = import_state(ours, {"state": {0: state}, "param_groups": [{"params": [0], "betas": (0.9, 0.99)}]})
    assert report.counts == {"requantized": 1}
    decoded = [
        from_blocks(
            inner[f"qmap{i}"][in_blocks(inner[f"state{i}"], 256).int()] * inner[f"absmax{i}"][:, None], x.signed
        )
        for i in (1, 2)
    ]
    assert_imported(ours, [decoded], set())


# --- hyper-parameters, names, reports


def test_hyper_parameters_and_options() -> None:
    state_dict, _ = by_hand("flashoptim")
    state_dict["param_groups"][0] |= {"unheard_of": 7, "maximize": True}
    ours = shardopt.AdamW8bit(params_of(), lr=1.0, nonfinite="raise", block_size=64)
    report = import_state(ours, state_dict)
    group = ours.param_groups[0]
    assert (group["lr"], group["betas"], group["eps"], group["weight_decay"]) == (0.5, (0.8, 0.99), 1e-7, 0.25)
    assert (group["initial_lr"], group["nonfinite"], group["block_size"], group["maximize"]) == (1.0, "raise", 64, True)
    assert "unheard_of" not in group
    ignored = ("master_bytewidth=3", "quantize=True", "unheard_of=7")
    assert report.ignored == tuple(f"{each} of param group 0" for each in ignored)
    assert str(report).startswith(f"imported the state of {len(SHAPES)} parameters from flashoptim: ")
    assert "ignored: " in str(report)


def test_low_bits_begin_anew() -> None:
    state, _ = flashoptim_state(made_up((16, 512), 1))
    state["error_bits"] = torch.ones(16, 512, dtype=torch.bfloat16)
    param = Parameter(values((16, 512), 1, torch.bfloat16))
    ours = shardopt.AdamW8bit([param], codec="companded8", block_size=32, master_weight_bits=24)
    report = import_state(ours, {"state": {0: state}, "param_groups": [{"params": [0]}]}, names={"w": param})
    assert report.ignored == ("error_bits of w",)
    assert report.parameters == {"w": "exact"}
    assert not ours.state[param]["master_low_bits"].any()


def test_torch() -> None:
    """As by load_state_dict, which tests/state/test_torch_state.py compares for every rule."""
    hyper = {"momentum": 0.9, "centered": True}
    theirs = torch.optim.RMSprop(params_of(), alpha=0.8, **hyper)
    stepped(theirs)
    other, loaded = (shardopt.RMSprop8bit(params_of(), **hyper) for _ in range(2))
    report = import_state(other, theirs.state_dict())
    loaded.load_state_dict(theirs.state_dict())
    assert_same(everything(other), everything(loaded))
    assert (report.source, report.ignored, other.param_groups[0]["alpha"]) == ("torch.optim", (), 0.8)
    assert report.counts == {"quantized": len(MATRICES), "exact": len(OTHERS)}


# --- the kinds of optimizer of bitsandbytes


def test_only_the_slow_average_of_ademamix_is_coded_anew() -> None:
    state_dict, decoded = by_hand("AdEMAMix")
    ours = ours_of("AdEMAMix", params_of(), codec="dynamic8", block_size=256)
    import_state(ours, state_dict)
    found, states = moments_of(ours), list(ours.state.values())
    for index, shape in enumerate(SHAPES):
        fast, slow, squares = decoded[index]
        if shape in ALIGNED[256]:
            saved, state = state_dict["state"][index][WRAPPED], states[index]
            assert torch.equal(state["exp_avg_fast_codes"], saved["state1"][0])
            assert torch.equal(state["exp_avg_sq_codes"], saved["state2"])
            assert_same({**found[index], "exp_avg_fast": fast, "exp_avg_sq": squares}, found[index])
            assert all(entry.untyped_storage().nbytes() == entry.nbytes for entry in state.values())
            error = in_blocks(found[index]["exp_avg_slow"] - slow, 256).abs().amax(1)
            assert (error > 0).all()
            assert (error <= 2**-15 * in_blocks(slow, 256).abs().amax(1)).all()


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
        import_state(ours, {"state": {0: each}, "param_groups": [{"params": [0], **SOURCES["AdEMAMix"].group}]})
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


def test_hyper_parameters_that_bitsandbytes_never_applied() -> None:
    """RMSprop's momentum is left out. Adagrad may have no eps."""
    rmsprop, adagrad = ours_of("RMSprop", params_of()), ours_of("Adagrad", params_of(), lr_decay=0.5)
    state_dict, _ = by_hand("RMSprop")
    state_dict["param_groups"][0]["betas"] = (0.7, 0.9)
    assert import_state(rmsprop, state_dict).ignored == ("betas=(0.7, 0.9) of param group 0",)
    assert (rmsprop.param_groups[0]["alpha"], rmsprop.param_groups[0]["momentum"]) == (0.7, 0.0)
    state_dict, _ = by_hand("Adagrad")
    state_dict["param_groups"][0]["eps"] = 0.0
    import_state(adagrad, state_dict)
    assert (adagrad.param_groups[0]["eps"], adagrad.param_groups[0]["lr_decay"]) == (0.0, 0.0)


@pytest.mark.parametrize(("kind", "key"), [(BNB, "unorm_vec"), ("SGD", "gnorm_vec")])
def test_norms_are_left_out(kind: str, key: str) -> None:
    """The state of LAMB8bit or LARS8bit, and of an older optimizer with percentile_clipping."""
    plain, ours = ours_of(kind, params_of()), ours_of(kind, params_of())
    import_state(plain, by_hand(kind)[0])
    state_dict, _ = by_hand(kind)
    for state in state_dict["state"].values():
        state[WRAPPED][key] = torch.ones(1)
    report = import_state(ours, state_dict)
    assert_same(everything(ours), everything(plain))
    assert report.ignored == tuple(f"{key} of parameter {index} of param group 0" for index in range(len(SHAPES)))


def test_averages_of_a_parameter_of_two_rows() -> None:
    """The parameter's own first dimension is not taken for the two averages."""
    state, decoded = bitsandbytes_ademamix(made_up((2, 4096), 1))
    group = {"params": [0], **SOURCES["AdEMAMix"].group}
    ours = shardopt.AdEMAMix8bit([Parameter(torch.zeros(2, 4096))], codec="fp32")
    import_state(ours, {"state": {0: state}, "param_groups": [group]})
    assert_imported(ours, [decoded], {(2, 4096)})
    state[WRAPPED]["state1"] = state[WRAPPED]["state1"][0]
    state[WRAPPED]["absmax1"] = state[WRAPPED]["absmax1"][0].view(2, -1)
    with pytest.raises(ValueError, match=r"of shape \(4096,\), expected \(2, 4096\)"):
        import_state(ours, {"state": {0: state}, "param_groups": [group]})


# --- Muon of Keller Jordan, DeepSpeed and dion

MATRIX, VECTOR = made_up((64, 96), 0), made_up((96,), 1)
MOMENTS = {"step": torch.tensor(3.0), "exp_avg": VECTOR.signed, "exp_avg_sq": VECTOR.unsigned}


def _muon(make: Any = shardopt.Muon, codec: str = "fp32") -> ShardedOptimizer:
    matrix, vector = Parameter(torch.ones(64, 96)), Parameter(torch.ones(96))
    optimizer: ShardedOptimizer = make([{"params": [matrix]}, {"params": [vector], "algorithm": "adamw"}], codec=codec)
    return optimizer


def _assert_muon(optimizer: ShardedOptimizer, momentum: Tensor) -> None:
    muon, adamw = optimizer.state.values()
    assert_same({"momentum_buffer": muon["momentum_buffer"]}, {"momentum_buffer": momentum})
    assert_same(adamw, MOMENTS)


def _keller_jordan() -> dict[str, Any]:
    """The state of Keller Jordan's and DeepSpeed's Muon: an average, and AdamW's moments under torch's names."""
    return {
        "state": {0: {"momentum_buffer": MATRIX.signed}, 1: dict(MOMENTS)},
        "param_groups": [
            {"params": [0], "lr": 0.02, "momentum": 0.9, "weight_decay": 0.0, "use_muon": True},
            {"params": [1], "lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-10, "weight_decay": 0.0, "use_muon": False},
        ],
    }


def test_keller_jordan_and_deepspeed() -> None:
    optimizer = _muon()
    report = import_state(optimizer, _keller_jordan())
    assert set(report.parameters.values()) == {"exact"}
    _assert_muon(optimizer, MATRIX.signed)
    muon, adamw = optimizer.param_groups
    assert (muon["momentum"], muon["lr"], adamw["eps"]) == (0.9, 0.02, 1e-10)


def test_second_moments_of_rows_begin_with_zeros() -> None:
    """No package's state has ours: a run of Muon goes on as NorMuon."""
    optimizer = _muon(shardopt.NorMuon, "log8")
    import_state(optimizer, _keller_jordan())
    moments = next(iter(optimizer.state.values()))["second_momentum_buffer"]
    assert moments.shape == (64, 1)
    assert not moments.any()
    stepped(optimizer, 1)
    assert bool((moments > 0).all())


def test_dion() -> None:
    """dion keeps decayed sums of gradients: with mu=0.75, four times the average."""
    common = {"mu": 0.75, "beta1": 0.9, "beta2": 0.95, "epsilon": 1e-8, "step": 3, "weight_decay": 0.01}
    common |= {"flatten": False, "adjust_lr": "rms_norm", "nesterov": False}
    adamw_state = {"momentum": MOMENTS["exp_avg"], "variance": MOMENTS["exp_avg_sq"], "step_dev": MOMENTS["step"]}
    saved = {
        "state": {0: {"momentum": 4 * MATRIX.signed}, 1: adamw_state},
        "param_groups": [
            {"params": [0], "lr": 0.02, "algorithm": "muon", **common},
            {"params": [1], "lr": 3e-4, "algorithm": "adamw", **common},
        ],
    }
    optimizer = _muon()
    assert import_state(optimizer, saved).source == "dion"
    _assert_muon(optimizer, MATRIX.signed)
    muon, adamw = optimizer.param_groups
    assert (muon["momentum"], muon["nesterov"], muon["adjust_lr_fn"]) == (0.75, False, "match_rms_adamw")
    assert (adamw["betas"], adamw["eps"], adamw["algorithm"]) == ((0.9, 0.95), 1e-8, "adamw")


# --- into sharded optimizers


FEW = [
    (3, "fsdp columns", "AdEMAMix", "dynamic8", 256),
    (4, "fsdp tp", "flashoptim", "companded8", 32),
    (2, "fsdp offload", "torchao", "log8", 128),
]
WORLDS = [(3, "fsdp columns"), (2, "hsdp of one")]
ALL = [(*world, source, *SOURCES[source].native) for world in WORLDS for source in SOURCES]


@pytest.mark.ranks
@pytest.mark.parametrize(("world_size", "way", "source", "codec", "size"), [*FEW, *slow(ALL, besides=FEW)])
def test_shards_take_their_parts(world_size: int, way: str, source: str, codec: str, size: int) -> None:
    """Rows of 66 and 192, columns cut within blocks: the import and the next step are as unsharded."""
    found = []
    for each in ("single", way):
        model = WAYS[each](make_net())
        names = named_parameters(model)
        ours = ours_of(source, names.values(), codec=codec, block_size=size, min_quantized_numel=64)
        states = {i: SOURCES[source].state(made_up(tuple(p.shape), i))[0] for i, p in enumerate(names.values())}
        group = {"lr": 0.5, "weight_decay": 0.25, **copy.deepcopy(SOURCES[source].group), "params": list(states)}
        report = import_state(ours, {"state": states, "param_groups": [group]}, names=names)
        imported = snapshot(names, ours)
        set_gradients(model, 1)
        ours.step()
        found.append((report, imported, snapshot(names, ours)))
    whole, parts = found
    assert parts[0] == whole[0]
    assert_same(parts[1], whole[1])
    assert_same(parts[2], whole[2])


@pytest.mark.ranks(3)
def test_torch_into_shards() -> None:
    """A state dict of torch.optim, sharded as the parameters are."""
    way = "fsdp columns"
    theirs_model, ours_model, single = WAYS[way](make_net()), WAYS[way](make_net()), make_net()
    theirs = torch.optim.AdamW(theirs_model.parameters(), lr=0.1)
    set_gradients(theirs_model, 0)
    theirs.step()
    state_dict = get_optimizer_state_dict(theirs_model, theirs)
    assert any(isinstance(x, DTensor) for s in state_dict["state"].values() for x in s.values())
    names = named_parameters(ours_model)
    ours = shardopt.AdamW8bit(list(names.values())[::-1], min_quantized_numel=64)
    report = import_state(ours, state_dict, names=names)  # parameters are found by name, in whatever order
    assert list(report.parameters) == list(names)[::-1]
    with pytest.raises(ValueError, match="same param groups, of the same model"):
        import_state(ours, state_dict, names={f"x.{name}": param for name, param in names.items()})
    expected = shardopt.AdamW8bit(single.parameters(), min_quantized_numel=64)
    whole = get_optimizer_state_dict(theirs_model, theirs, options=StateDictOptions(full_state_dict=True))
    assert import_state(expected, whole, names=named_parameters(single)).parameters == report.parameters
    assert_same(snapshot(names, ours), snapshot(named_parameters(single), expected))
    with pytest.raises(ValueError, match="expected whole tensors"):
        import_state(expected, state_dict)
