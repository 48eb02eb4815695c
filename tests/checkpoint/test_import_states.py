"""Other packages' states come in code by code where both have the same codes, and are coded anew elsewhere.

One table for state dicts made by hand in the other packages' forms, and for those of the packages themselves where they
are installed; then Muon, and sharded optimizers.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
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
    KINDS,
    MATRICES,
    OTHERS,
    SHAPES,
    SOURCES,
    STEP,
    WRAPPED,
    by_hand,
    made_up,
    ours_of,
    params_of,
    stepped,
)
from helpers import everything, through_a_file
from ranks.models import WAYS, make_net, named_parameters, set_gradients
from ranks.snapshot import assert_same, snapshot
from shardopt.checkpoint import import_state
from shardopt.optim import ShardedOptimizer


def outcome_of(source: str, codec: str, block_size: int, shape: tuple[int, ...]) -> str:
    """How an import treats the moments of a parameter."""
    native = SOURCES[source].native
    if not SOURCES[source].is_coded(math.prod(shape)):
        return "quantized" if shape in MATRICES and codec != "fp32" else "exact"
    if shape in OTHERS or codec == "fp32":
        return "as float32"
    has_same_codes = (codec, block_size) == native
    return "exact" if has_same_codes and shape in ALIGNED[block_size] else "requantized"


def moments_of(optimizer: ShardedOptimizer) -> list[dict[str, Tensor]]:
    """The moments of each parameter, decoded."""
    states = optimizer.state_dict(dequantize=True)["state"].values()
    return [{key: x for key, x in state.items() if key != "step"} for state in states]


def assert_imported(optimizer: ShardedOptimizer, source: str, decoded: list[list[Tensor]], outcomes: list[str]) -> None:
    """Demands the moments where nothing was coded anew, and elsewhere the state that load_state_dict makes of them.

    No entry keeps the memory of more than itself, which would be saved with it.
    """
    found = moments_of(optimizer)
    named = [dict(zip(names, moments, strict=True)) for names, moments in zip(found, decoded, strict=True)]
    step = {"step": torch.tensor(float(STEP))}
    again = copy.deepcopy(optimizer)
    again.load_state_dict({**again.state_dict(), "state": {i: step | moments for i, moments in enumerate(named)}})
    rows = zip(outcomes, optimizer.state.values(), again.state.values(), found, named, strict=True)
    for outcome, state, recoded, moments, expected in rows:
        assert torch.equal(state["step"], step["step"])
        assert all(entry.untyped_storage().nbytes() == entry.nbytes for entry in state.values())
        if source == "flashoptim":
            # Signed: q / 127 (which counts twice), 2 - t, the quotient, the product. Unsigned: 1 / 255, s and q times
            # it (which count twice), the square. And the expected value, float64's, is rounded.
            if outcome != "requantized":
                torch.testing.assert_close(moments, expected, rtol=8 * 2**-24, atol=0)
        elif outcome in ("exact", "as float32"):
            assert_same(moments, expected)
        else:
            assert_same(state, recoded)


def of_bitsandbytes(optimizer: torch.optim.Optimizer) -> list[list[Tensor]]:
    """The moments of each parameter, decoded by bitsandbytes."""
    dequantize = pytest.importorskip("bitsandbytes").functional.dequantize_blockwise
    found = []
    for state in optimizer.state.values():
        moments: list[Tensor] = []
        for i in (1, 2):
            if f"absmax{i}" in state:
                codes, absmax = state[f"state{i}"], state[f"absmax{i}"]
                moments.append(dequantize(codes, absmax=absmax, code=state[f"qmap{i}"], blocksize=256))
            elif f"state{i}" in state:
                moments.append(state[f"state{i}"])
        found.append(moments)
    return found


def of_torchao(optimizer: torch.optim.Optimizer) -> list[list[Tensor]]:
    """The moments of each parameter, decoded by torchao."""
    states = optimizer.state.values()
    moments = [(state["exp_avg"], state["exp_avg_sq"]) for state in states]
    return [[x.dequantize().float() if hasattr(x, "codes") else x for x in both] for both in moments]


def by_itself(name: str, source: str) -> tuple[dict[str, Any], list[list[Tensor]]]:
    """As :func:`by_hand`, by an optimizer of the package."""
    package = pytest.importorskip({BNB: BNB, "torchao": "torchao.optim"}[SOURCES[source].package])
    make = getattr(package.optim if SOURCES[source].package == BNB else package, name)
    theirs = make(params_of(), lr=0.5, weight_decay=0.25, **SOURCES[source].taken)
    stepped(theirs)
    decode = of_bitsandbytes if SOURCES[source].package == BNB else of_torchao
    return through_a_file(theirs.state_dict()) if "8bit" in name else theirs.state_dict(), decode(theirs)


@pytest.mark.filterwarnings("ignore:Paged")
@pytest.mark.parametrize(
    ("name", "source", "codec", "block_size"),
    [
        *(("", source, *(it.native or ("dynamic8", 256))) for source, it in SOURCES.items()),
        *(
            ("", "SGD", "log8", 128),
            ("", BNB, "fp32", 128),
        ),
        *((f"{SOURCES[kind].kind}8bit", kind, "dynamic8", 256) for kind in KINDS),
        *(
            ("PagedAdamW8bit", BNB, "fp32", 128),
            ("AdamW8bit", BNB, "dynamic8", 128),
            ("AdamW32bit", "32 bits", "dynamic8", 256),
        ),
        *(("AdamW8bit", "torchao", "dynamic8", 256), ("AdamW8bit", "torchao", "log8", 128)),
        *((name, "4 bits", "log8", 128) for name in ("AdamW4bit", "AdamWFp8")),
    ],
)
def test_every_source(monkeypatch: pytest.MonkeyPatch, name: str, source: str, codec: str, block_size: int) -> None:
    """The package's own state dict where its class is named; what it stands for, its hyper-parameters, and a report."""
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)  # half a minute for torchao's same arithmetic
    state_dict, decoded = by_itself(name, source) if name else by_hand(source)
    ours = ours_of(source, params_of(), codec=codec, block_size=block_size)
    report = import_state(ours, state_dict)
    outcomes = [outcome_of(source, codec, block_size, shape) for shape in SHAPES]
    expected = {f"parameter {index} of param group 0": outcome for index, outcome in enumerate(outcomes)}
    assert (report.source, report.parameters) == (SOURCES[source].package, expected)
    ignored = ("master_bytewidth=3 of param group 0", "quantize=True of param group 0")
    assert report.ignored == (ignored if source == "flashoptim" else ())
    assert_imported(ours, source, decoded, outcomes)
    (group,) = ours.param_groups
    assert {key: group[key] for key in SOURCES[source].taken} == SOURCES[source].taken
    assert (group["lr"], group["weight_decay"]) == (0.5, 0.25)
    assert isinstance(group["lr"], float)


@pytest.mark.parametrize("source", [BNB, "flashoptim"])
def test_load_state_dict_names_import_state(source: str) -> None:
    ours = ours_of(source, params_of())
    with pytest.raises(ValueError, match=r"shardopt.checkpoint.import_state takes the state of bitsandbytes"):
        ours.load_state_dict(by_hand(source)[0])
    assert not ours.state


#: Changes of a parameter's state that leave its meaning, with the source and the entry that is left out: not wrapped;
#: an older optimizer's with percentile_clipping; FlashOptim's low bits; FlashOptim's
#: scales beside bfloat16 parameters, which are float16's bits in tensors that say bfloat16.
FORMS: list[tuple[str, Callable[[dict[str, Any]], object], str]] = [
    (BNB, lambda state: state.update(state.pop(WRAPPED)), ""),
    ("SGD", lambda state: state[WRAPPED].update(gnorm_vec=torch.ones(1)), "gnorm_vec"),
    ("flashoptim", lambda state: state.update(error_bits=torch.ones(1)), "error_bits"),
    (
        "flashoptim",
        lambda state: state.update({k: x.view(torch.bfloat16) for k, x in state.items() if k.endswith("::scales")}),
        "",
    ),
]


@pytest.mark.parametrize(("source", "change", "left_out"), FORMS)
def test_other_forms(source: str, change: Callable[[dict[str, Any]], object], left_out: str) -> None:
    codec, block_size = SOURCES[source].native or ("", 0)
    plain, ours = (ours_of(source, params_of(), codec=codec, block_size=block_size) for _ in range(2))
    state_dict, _ = by_hand(source)
    of_groups = import_state(plain, state_dict).ignored
    for state in state_dict["state"].values():
        change(state)
    ignored = import_state(ours, state_dict).ignored
    assert_same(everything(ours), everything(plain))
    of_states = [f"{left_out} of parameter {index} of param group 0" for index in range(len(SHAPES))]
    assert ignored == (*of_groups, *(of_states if left_out else ()))


# --- hyper-parameters and options


def test_hyper_parameters_and_options() -> None:
    state_dict, _ = by_hand("flashoptim")
    state_dict["param_groups"][0] |= {"unheard_of": 7, "maximize": True}
    ours = shardopt.AdamW8bit(params_of(), lr=1.0, nonfinite="raise", block_size=64)
    report = import_state(ours, state_dict)
    group = ours.param_groups[0]
    assert (group["initial_lr"], group["nonfinite"], group["block_size"], group["maximize"]) == (1.0, "raise", 64, True)
    assert "unheard_of" not in group
    assert report.ignored[-1] == "unheard_of=7 of param group 0"
    assert str(report).startswith(f"imported the state of {len(SHAPES)} parameters from flashoptim: ")
    assert "ignored: " in str(report)


# --- Muon of Keller Jordan, DeepSpeed and dion

MATRIX, VECTOR = made_up((64, 96), 0), made_up((96,), 1)
MOMENTS = {"step": torch.tensor(3.0), "exp_avg": VECTOR.signed, "exp_avg_sq": VECTOR.unsigned}


def _keller_jordan() -> dict[str, Any]:
    """The state of Keller Jordan's and DeepSpeed's Muon: an average, and AdamW's moments under torch's names."""
    return {
        "state": {0: {"momentum_buffer": MATRIX.signed}, 1: dict(MOMENTS)},
        "param_groups": [
            {"params": [0], "lr": 0.02, "momentum": 0.75, "weight_decay": 0.0, "use_muon": True},
            {"params": [1], "lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-10, "weight_decay": 0.0, "use_muon": False},
        ],
    }


def _dion() -> dict[str, Any]:
    """The state of dion's: decayed sums of gradients, with mu=0.75 four times the average."""
    common = {"mu": 0.75, "beta1": 0.9, "beta2": 0.95, "epsilon": 1e-10, "step": 3, "weight_decay": 0.01}
    common |= {"flatten": False, "adjust_lr": "rms_norm", "nesterov": False}
    adamw_state = {"momentum": MOMENTS["exp_avg"], "variance": MOMENTS["exp_avg_sq"], "step_dev": MOMENTS["step"]}
    return {
        "state": {0: {"momentum": 4 * MATRIX.signed}, 1: adamw_state},
        "param_groups": [
            {"params": [0], "lr": 0.02, "algorithm": "muon", **common},
            {"params": [1], "lr": 3e-4, "algorithm": "adamw", **common},
        ],
    }


@pytest.mark.parametrize(
    ("state_dict", "package", "hyper"),
    [
        (_keller_jordan(), "torch.optim", {"nesterov": True, "adjust_lr_fn": None}),
        (_dion(), "dion", {"nesterov": False, "adjust_lr_fn": "match_rms_adamw"}),
    ],
    ids=["keller jordan", "dion"],
)
def test_muon(state_dict: dict[str, Any], package: str, hyper: dict[str, Any]) -> None:
    """Into Muon, and into NorMuon, whose second moments of rows begin with zeros: no package has them."""
    for make, codec in ((shardopt.Muon, "fp32"), (shardopt.NorMuon, "log8")):
        params = [Parameter(torch.ones(64, 96)), Parameter(torch.ones(96))]
        optimizer = make([{"params": params[:1]}, {"params": params[1:], "algorithm": "adamw"}], codec=codec)
        report = import_state(optimizer, state_dict)
        assert report.source == package
        muon, adamw = optimizer.state.values()
        assert_same(adamw, MOMENTS)
        if codec == "fp32":
            assert set(report.parameters.values()) == {"exact"}
            assert torch.equal(muon["momentum_buffer"], MATRIX.signed)
        else:
            assert not muon["second_momentum_buffer"].any()
            stepped(optimizer, 1)
            assert bool((muon["second_momentum_buffer"] > 0).all())
            assert muon["second_momentum_buffer"].shape == (64, 1)
        muon, adamw = optimizer.param_groups
        assert (muon["momentum"], muon["lr"], adamw["lr"], adamw["eps"]) == (0.75, 0.02, 3e-4, 1e-10)
        assert {key: muon[key] for key in hyper} == hyper
        assert (adamw["betas"], adamw["algorithm"]) == ((0.9, 0.95), "adamw")


# --- into sharded optimizers


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("world_size", "way", "source", "codec", "size"),
    [
        (3, "fsdp columns", BNB, "dynamic8", 256),
        (4, "fsdp tp", "flashoptim", "companded8", 32),
        (2, "fsdp offload", "torchao", "log8", 128),
    ],
)
def test_shards_take_their_parts(world_size: int, way: str, source: str, codec: str, size: int) -> None:
    """Rows of 66 and 192, columns cut within blocks: the import and the next step are as unsharded."""
    found = []
    for each in ("single", way):
        model = WAYS[each](make_net())
        names = named_parameters(model)
        ours = ours_of(source, names.values(), codec=codec, block_size=size, min_quantized_numel=64)
        report = import_state(ours, by_hand(source, [tuple(p.shape) for p in names.values()])[0], names=names)
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
