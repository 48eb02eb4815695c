"""Layouts x features: a sharded run has the bits of one process, whatever it does meanwhile.

A layout is one of the ``WAYS`` of ``ranks/models.py``, on some number of ranks; a feature is a function of a ``Run``.
All that ranks hold in the end, put together, is compared with the unsharded run, or with that of the same layout
without the feature. Each feature meets some layouts by default, and all among the slow tests.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

import shardopt
from helpers import CODEC_NAMES, through_a_file
from ranks.flat import is_flat, pieces
from ranks.models import (
    FSDP1_WAYS,
    MATRICES_WAYS,
    ODDS_WAYS,
    TOKENS,
    copy_weights,
    loss_of,
    make_batch,
    make_frozen,
    make_net,
)
from ranks.offload import late_transfers, offload_from_cpu, slow_steps
from ranks.pool import Pool
from ranks.runs import SMALL, Run, make_optimizer
from ranks.snapshot import Snapshot, assert_same
from slow_cases import slow
from weight_formats import FORMATS
from wrapped import ELEMENTWISE

STEPS = 3

#: The layouts that a world of so many ranks has.
LAYOUTS: dict[int, tuple[str, ...]] = {
    1: ("fsdp", "tp", "fsdp1", "fsdp1 flat"),
    2: ("fsdp offload", "fsdp bf16", "fsdp1 bf16", "fsdp1 bf16 flat"),
    3: (
        *("ddp", "fsdp", "fsdp columns", "tp", "hsdp of one", "zero"),
        *("fsdp1", "fsdp1 flat", "fsdp1 grad", "fsdp1 none flat", "fsdp1 nested flat"),
        *(*ODDS_WAYS, *MATRICES_WAYS),
    ),
    4: (
        *("fsdp tp", "fsdp columns tp", "hsdp", "hsdp columns"),
        *("fsdp1 hybrid", "fsdp1 hybrid flat", "fsdp1 nested", "fsdp1 grad flat", "fsdp1 none"),
        *(*ODDS_WAYS, *MATRICES_WAYS),
    ),
}
FSDP1 = {*FSDP1_WAYS, *ODDS_WAYS}
#: Layouts whose optimizer has one parameter for each of FSDP1's units.
BY_UNIT = {way for way in FSDP1 if "flat" in way}
WITHOUT_REPLICAS = {"fsdp", "fsdp columns", *(way for way in FSDP1 if "none" not in way and "hybrid" not in way)}
#: Layouts of something else than the small model.
OTHER_MODELS = {*ODDS_WAYS, *MATRICES_WAYS}


def stepped(run: Run, rule: str = "adamw", **options: Any) -> None:
    run.begin(rule, **options)
    run.steps(STEPS)


def _units(run: Run) -> dict[str, int]:
    """For each parameter the number of FSDP1's unit that has it under some layout."""
    heads = {name: name.rpartition(".")[0] for name in run.tensors()}
    unit = {
        name: head if head in ("up", "conv") or "units" in head else head and "rest" for name, head in heads.items()
    }
    numbers: dict[str, int] = {}
    return {name: numbers.setdefault(unit[name] or name, len(numbers)) for name in unit}


def codecs(run: Run) -> None:
    """A param group for each codec; a schedule of the first one's learning rate."""
    run.begin()
    groups: list[dict[str, Any]] = [{"codec": codec, "block_size": 32} for codec in CODEC_NAMES]
    own: list[dict[Tensor, None]] = [{} for _ in groups]
    tensors = run.tensors()
    for name, number in _units(run).items():
        own[number % len(groups)][tensors[name]] = None
    params = [{"params": [*each], **group} for each, group in zip(own, groups, strict=True) if each]
    run.optimizer = make_optimizer(run.way, run.model, params=params)
    for step in range(STEPS):
        run.optimizer.param_groups[0]["lr"] = 1e-2 / (1 + step)
        run.steps(1)


def _begin_named(
    run: Run, seed: int = 0, overrides: Any = None, no_decay: Sequence[str] = (), dtype: Any = None, **options: Any
) -> None:
    """Groups by names of the bare model, with its options."""
    run.begin(dtype=dtype, seed=seed)
    of_bare = shardopt.param_groups(run.bare(dtype=dtype), overrides or OF_UNITS, no_decay)
    groups = shardopt.param_groups(run.model, overrides or OF_UNITS, no_decay)
    assert {(p.names, p.shape) for p in groups.parameters} == {(p.names, p.shape) for p in of_bare.parameters}
    if run.way not in BY_UNIT:
        assert groups.table() == of_bare.table()
        assert [group["param_names"] for group in groups] == [group["param_names"] for group in of_bare]
    run.optimizer = make_optimizer(run.way, run.model, params=groups, **options)


def named(run: Run, **options: Any) -> None:
    _begin_named(run, **options)
    run.steps(2)


def in_turns(run: Run, rule: str = "adamw") -> None:
    """Gradients that are there in some steps only: of whole units, and of all."""
    run.begin(rule, block_size=32)
    units = _units(run)
    for step in range(5):
        run.set_gradients()
        for name, param in run.tensors().items():
            if (units[name] + step) % 3 == 0 or step == 3:
                param.grad = None
        run.step()


def frozen(run: Run) -> None:
    run.shard(make_frozen(0))
    run.optimizer = make_optimizer(run.way, run.model)
    run.steps(STEPS)


def clipped(run: Run, kind: float, late: bool, rule: str = "adamw") -> None:
    """late: the steps clip."""
    run.begin(rule)
    for step in range(STEPS):
        run.set_gradients()
        clips = run.optimizer if late and run.way != "zero" else None
        norm = shardopt.clip_grad_norm_(run.model.parameters(), 0.5, kind, optimizer=clips)
        assert norm > 0.5
        run.noted[f"norm {step}"] = norm
        run.step()


def _spoilt(number: int, place: int, whole: Tensor) -> Tensor:
    """A twentieth of the elements are NaN or infinite."""
    generator = torch.Generator().manual_seed(100 * number + place)
    chosen = torch.randperm(whole.numel(), generator=generator)[: max(whole.numel() // 20, 1)]
    whole.view(-1)[chosen] = torch.tensor([math.nan, math.inf, -math.inf], dtype=whole.dtype)[chosen % 3]
    return whole


def nonfinite(run: Run, policy: str, **options: Any) -> None:
    """Whatever shares a block with skipped elements is not harmed; ranks count those that they hold."""
    run.begin(nonfinite=policy, **options)
    for step in range(4):
        run.set_gradients(partial(_spoilt, step) if step in (0, 2) else lambda place, whole: whole)
        run.step()
    if policy == "skip" and (run.is_single or run.way in WITHOUT_REPLICAS):
        count = torch.tensor(run.inner.nonfinite_count)
        if not run.is_single:
            dist.all_reduce(count)
        assert count == 2 * sum(max(param.numel() // 20, 1) for param in run.bare().parameters())


def raising(run: Run, rule: str = "adamw") -> None:
    """All ranks raise, in the first step, too, and though one rank alone has the element; then all go on."""
    run.begin(rule, nonfinite="raise")

    def spoil(place: int, whole: Tensor) -> Tensor:
        if place == 1:
            whole.view(-1)[-1] = math.nan
        return whole

    for _ in range(2):
        for _ in range(2):
            run.set_gradients(spoil)
            with pytest.raises(FloatingPointError, match=r"got a gradient with NaN or Inf; nothing was changed"):
                run.optimizer.step()
            run.optimizer.zero_grad()
        run.steps(1)


def weighted(run: Run, weights: str, **options: Any) -> None:
    """Weights narrower than float32; where their low bits are kept they are given out in full, and taken again."""
    dtype, kept = FORMATS[weights]
    run.begin(dtype=dtype, **kept, **options)
    run.steps(2)
    if "master_weight_bits" in kept:
        found = run.inner.full_precision_parameters()
        run.noted |= {f"{name} in full precision": x for name, x in run.in_full(found).items()}
        for param, x in found.items() if run.is_tested else ():
            assert x.dtype == torch.float32
            assert type(x) is type(param.detach())
            param.data.mul_(2)
            if param in run.inner.state:  # a rank with none of its elements has not stepped it
                run.inner.state[param]["master_low_bits"].fill_(3)
        run.inner.load_full_precision_parameters(found)
    run.steps(1)


def _placements(run: Run) -> list[Any]:
    states = run.optimizer.state.values()
    return [(key, tuple(x.shape), getattr(x, "placements", None)) for state in states for key, x in state.items()]


def sleeping(run: Run, **options: Any) -> None:
    with offload_from_cpu():
        run.begin(**options)
        run.steps(1)
        before = _placements(run)
        for step in range(1, 4):
            if run.is_tested:
                run.optimizer.offload()
                assert _placements(run) == before
                if step == 2:
                    run.optimizer.load_state_dict(run.optimizer.state_dict())
                if step != 3:  # the step wakes the state itself
                    run.optimizer.reload()
                    assert _placements(run) == before
            run.steps(1)


def offloaded(run: Run, how: str, **options: Any) -> None:
    with offload_from_cpu(transfers=late_transfers(how)):
        run.begin(offload=how if run.is_tested else None, **options)
        run.steps(STEPS)
        run.optimizer.synchronize()
        if run.is_tested:
            params = [param for group in run.optimizer.param_groups for param in group["params"]]
            assert how in {run.optimizer._internals.residency.decide(param).offload for param in params}


def _another(run: Run, rule: str = "adamw", **options: Any) -> Run:
    """A run of the same layout with the same weights, and another optimizer."""
    other = Run(run.way, run.is_tested, run.path, run)
    other.begin(rule, seed=1, **options)
    with torch.no_grad():
        copy_weights(run.model, other.model)
    return other


def _becomes(run: Run, other: Run) -> None:
    run.model, run.optimizer = other.model, other.optimizer


def saved(run: Run, rule: str = "adamw", asleep: bool = False, **options: Any) -> None:
    """Through state_dict() and load_state_dict(), which leave the first one as it was."""
    with offload_from_cpu():
        run.begin(rule, **options)
        run.steps(2)
        if run.is_tested:
            other = _another(run, rule, **options)
            other.steps(int(asleep))
            with torch.no_grad():
                copy_weights(run.model, other.model)
            for each in (run, other) if asleep else ():
                each.optimizer.offload()
            state = run.optimizer.state_dict()
            other.optimizer.load_state_dict(through_a_file(state) if is_flat(run.model) else state)
            assert_same(other.results(), run.results())
            _becomes(run, other)
        run.steps(1)


#: Options of torch's functions.
OF_TORCH = {
    "sharded": {},
    "on the host": {"cpu_offload": True},
    "flattened": {"flatten_optimizer_state_dict": True},
    "full": {"full_state_dict": True},
    "from rank 0": {"full_state_dict": True, "cpu_offload": True, "broadcast_from_rank0": True},
}


def carried(run: Run, how: str, rule: str = "adamw", **options: Any) -> None:
    """Through torch's functions for optimizers' states."""
    run.begin(rule, **options)
    run.steps(2)
    if run.is_tested:
        given = OF_TORCH[how]
        asked = StateDictOptions(**{**given, "broadcast_from_rank0": False})
        state = get_optimizer_state_dict(run.model, run.optimizer, options=asked)
        other = _another(run, rule, **options)
        set_optimizer_state_dict(other.model, other.optimizer, state, options=StateDictOptions(**given))
        _becomes(run, other)
    run.steps(1)


def packed(run: Run, rule: str = "adamw", dtype: torch.dtype | None = None, **options: Any) -> None:
    """Through FSDP1's own functions, which leave the first optimizer's state as it was."""
    run.begin(rule, dtype=dtype, **options)
    run.steps(2)
    if run.is_tested:
        before = run.results()
        state = FullyShardedDataParallel.optim_state_dict(run.model, run.optimizer)
        assert_same(run.results(), before)
        assert all(key == "step" or key.startswith("packed_") for entries in state["state"].values() for key in entries)
        other = make_optimizer(run.way, run.model, rule, **options)
        loaded = FullyShardedDataParallel.optim_state_dict_to_load(run.model, other, copy.deepcopy(state))
        other.load_state_dict(loaded)
        run.optimizer = other
    run.steps(1)


def dequantized(run: Run, **other: Any) -> None:
    """Float32 state goes into an optimizer of another codec, and into torch's, which goes on."""
    run.begin()
    run.steps(2)
    state = run.optimizer.state_dict(dequantize=True)
    following = _another(run, **other)
    following.optimizer.load_state_dict(copy.deepcopy(state))
    if run.is_tested:
        theirs = torch.optim.AdamW(run.model.parameters())
        theirs.load_state_dict(state)
        run.set_gradients()
        theirs.step()
    _becomes(run, following)
    run.steps(1)


def from_torch(run: Run, rule: str, functions: bool, **options: Any) -> None:
    """State of torch's optimizer over the same shards is quantized when it is loaded."""
    run.begin(rule, **options)
    ours = run.optimizer
    theirs: Any = {"adamw": torch.optim.AdamW, "momentum": torch.optim.SGD}[rule]
    hyper = {
        key: value for key, value in ours.defaults.items() if key in ("lr", "weight_decay", "momentum", "dampening")
    }
    run.optimizer = theirs(run.model.parameters(), **hyper)
    run.steps(2)
    if functions and run.is_tested:
        set_optimizer_state_dict(run.model, ours, get_optimizer_state_dict(run.model, run.optimizer))
    else:
        ours.load_state_dict(copy.deepcopy(run.optimizer.state_dict()))
    run.optimizer = ours
    run.steps(1)


def first_state(run: Run, rule: str) -> None:
    """torch's functions take a step of zeros where there is no state yet: it is none, and changes no weights."""
    run.begin(rule)
    first = pieces(run.model)[0].of(pieces(run.model)[0].tensor) if is_flat(run.model) else next(run.model.parameters())
    with torch.no_grad():
        first.mul_(0.0)  # some zeros are negative now
    if run.is_tested:
        state = get_optimizer_state_dict(run.model, run.optimizer)
        set_optimizer_state_dict(run.model, run.optimizer, state)
    counts = {float(state["step"]) for state in run.inner.state.values() if state}
    assert counts == ({0.0} if run.is_tested else set())
    run.steps(2)


def portable(run: Run, asleep: bool = False, **options: Any) -> None:
    """Through a checkpoint, into a model of other weights whose optimizer has taken a step."""
    with offload_from_cpu():
        run.begin(**options)
        run.steps(2)
        if run.is_tested:
            if asleep:
                run.optimizer.offload()
            shardopt.checkpoint.save(run.path, run.model, run.optimizer)
            run.begin(seed=1, **options)
            run.steps(1)
            if asleep:
                run.optimizer.offload()
            assert shardopt.checkpoint.load(run.path, run.model, run.optimizer).converted == {}
            run.number = 2
        run.steps(1)


def _begin_embedded(run: Run, seed: int = 0) -> None:
    """A model with a StableEmbedding."""
    net = make_net(seed=seed)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        net.embed = shardopt.StableEmbedding(TOKENS, 66)
    run.shard(net)
    run.optimizer = make_optimizer(run.way, run.model)


def embedded(run: Run) -> None:
    """The state of a StableEmbedding's weight is float32."""
    _begin_embedded(run)
    run.steps(2)
    found = run.results()
    entries = {key.split("/")[1] for key in found if key.startswith("embed.weight/")}
    assert entries == {"step", "exp_avg", "exp_avg_sq"}
    assert found["up.weight/exp_avg_codes"].dtype == torch.uint8


def quantized(run: Run, name: str, **options: Any) -> None:
    """State of other packages' optimizers; through torch's functions, which call ``step()``, and through floats."""
    run.begin()

    def make() -> None:
        run.optimizer = shardopt.quantize_state(ELEMENTWISE[name](list(run.model.parameters())), **SMALL, **options)

    make()
    run.steps(2)
    if run.is_tested and name == QUANTIZED[0]:
        state = get_optimizer_state_dict(run.model, run.optimizer)
        make()
        set_optimizer_state_dict(run.model, run.optimizer, state)
    run.steps(1)
    run.optimizer.load_state_dict(run.optimizer.state_dict(dequantize=True))


def trained(run: Run, batches: int, clip: float | None = None) -> None:
    """Gradients of backward passes; under FSDP1 with evaluations between them."""
    run.begin()
    for step in range(STEPS):
        run.backward(batches)
        run.keep_gradients()
        if clip is not None:
            run.noted[f"norm {step}"] = shardopt.clip_grad_norm_(run.model.parameters(), clip)
        run.step()
        if run.way in FSDP1:  # FSDP2 keeps the root's weights gathered afterwards
            run.model.eval()
            with torch.no_grad():
                loss_of(run.model, make_batch(100 + step))
            run.model.train()


def scaled(run: Run, overflow: bool) -> None:
    """With a scaled loss; with an overflow, the last gradient is infinite: of one rank where it has no replica."""
    run.begin()
    kind = partial(ShardedGradScaler, process_group=dist.group.WORLD) if run.way in FSDP1 else torch.amp.GradScaler
    scaler = kind("cpu", init_scale=2.0**10, enabled=run.is_tested)
    for step in range(STEPS):
        scaler.scale(loss_of(run.model, make_batch(step, 0 if "tp" in run.way else dist.get_rank()))).backward()
        overflows = overflow and step == 2
        if overflows and run.is_tested and (dist.get_rank() == 1 or run.way not in WITHOUT_REPLICAS):
            gradients = [param.grad for param in run.model.parameters() if param.grad is not None]
            max((getattr(x, "_local_tensor", x) for x in gradients), key=torch.Tensor.numel).view(-1)[5] = torch.inf
        if step % 2:
            scaler.unscale_(run.optimizer)
        if not overflows or run.is_tested:
            scaler.step(run.optimizer)
        scaler.update()
        run.optimizer.zero_grad()
    assert scaler.get_scale() == (1.0 if not run.is_tested else 2.0**9 if overflow else 2.0**10)
    assert run.inner.nonfinite_count == 0


def _passes(run: Run, batches: int) -> int:
    """Backward passes that give a parameter a gradient: layouts that reduce gradients do so in the last pass only."""
    return batches if run.way == "tp" else 1


def released(run: Run, rule: str = "adamw", batches: int = 1, **options: Any) -> None:
    """Steps in the backward pass; the release ends, and another one begins."""
    run.begin(rule, **options)
    for step in range(5):
        if step in (0, 4) and run.is_tested:
            release = shardopt.release_gradients(run.model, run.optimizer, micro_batches=_passes(run, batches))
        run.backward(batches)
        gradients = [param.grad for param in run.model.parameters() if param.grad is not None]
        if run.is_tested and step != 3:
            assert len(gradients) <= 1, "but for a gradient of zeros that shows clipping"
        else:
            assert len(gradients) == len(list(run.model.parameters()))
        run.step()
        if step == 2 and run.is_tested:
            release.remove()


def held(run: Run, batches: int, clip: bool = True, rule: str = "adamw", **options: Any) -> None:
    """Gradients wait in the host's memory, and steps go on during the next forward pass."""
    with offload_from_cpu(), slow_steps(0.002):
        run.begin(rule, offload="step" if run.is_tested else None, **options)
        if run.is_tested:
            shardopt.release_gradients(
                run.model, run.optimizer, overlap_forward=True, waiting_gradients=3, micro_batches=_passes(run, batches)
            )
        for step in range(4):
            run.backward(batches)
            if clip:
                norm = shardopt.clip_grad_norm_(run.model.parameters(), 1e-3, optimizer=run.optimizer)
                run.noted[f"norm {step}"] = norm
            run.step()
        run.optimizer.synchronize()


def reset(run: Run, rows: bool, rule: str = "adamw", **options: Any) -> None:
    """Some rows of every parameter, or all of every third one, begin again; the single run overwrites its state."""
    run.begin(rule, **options)
    run.steps(2)
    shapes = {name: tuple(param.shape) for name, param in run.bare().named_parameters()}
    for place, (name, param) in enumerate(run.tensors().items()):
        mask = torch.arange(shapes[name][0]) % 3 == place % 3
        if run.is_tested and (rows or place % 3 == 0):
            chosen = name if run.way in BY_UNIT else param
            run.inner.reset_state(chosen, rows=(mask if place % 2 else mask.nonzero()[:, 0]) if rows else None)
        elif rows or place % 3 == 0:
            (group,) = (group for group in run.inner.param_groups if any(param is x for x in group["params"]))
            state, fresh = run.inner.state[param], run.inner._internals.state_of(param, group).new_state(param.device)
            fresh |= {"p0": param.detach().float()} if "p0" in fresh else {}
            for key in state.keys() - ({"master_low_bits", "step"} if rows else {"master_low_bits"}):
                where = ... if key == "step" or not rows else mask
                state[key][where] = fresh[key][where]
    run.steps(2)


class Feature(NamedTuple):
    """Something that a run does (``do``), and the layouts that lack it.

    With ``as_single`` the run is compared with one in one process, else with the same layout that leaves the feature
    out.
    """

    do: Callable[[Run], None]
    lacking: Collection[str] = ()
    as_single: bool = True


#: PyTorch's distribute_tensor asserts that no tensor is cut as deeply.
NOT_CARRIED = {"flattened": FSDP1, "full": {"deep dtensors"}}
MATRICES = {*MATRICES_WAYS}
ZERO = {"zero"}
#: Gradients of a backward pass need a model that has one.
UNTRAINED = {*OTHER_MODELS}
UNSCALED = {*UNTRAINED, "tp", "fsdp tp", "fsdp columns tp"}
#: Layouts whose columns cut blocks.
COLUMNS = {"tp", "fsdp columns", "fsdp tp", "fsdp columns tp", "hsdp columns"}
NOT_MUON = {*BY_UNIT, *ZERO}

#: Each rule and each codec; what is repaid has log4 here.
RULES_AND_CODECS = [
    *(("adamw", codec) for codec in ("log8", "dynamic8", "companded16")),
    *(("repaid_adamw", "companded8"), ("lion", "log8"), ("nesterov", "companded8"), ("momentum", "dynamic8")),
    *(("sgd", "log8"), ("ademamix", "bf16"), ("adan", "log8"), ("amsgrad", "log8"), ("nadam", "log8")),
    *(("adopt", "log8"), ("adamax", "log8"), ("centered_rmsprop_momentum", "log8"), ("adagrad", "dynamic8")),
    *(("lamb", "fp32"), ("lars", "dynamic8"), ("stable_adamw", "companded8"), ("cautious_adamw", "log8")),
    *(("cautious_lion", "log8"), ("prodigy", "log8")),
]
#: Codecs of one and two bytes, without scales, that share codes; one moment to three.
PACKED = [
    *(("adamw", "companded16"), ("adamw", "fp32"), ("repaid_adamw", "log4"), ("lion", "dynamic8")),
    *(("ademamix", "bf16"), ("prodigy", "log8")),
]
#: By names, options that are the same for all parameters of a unit of FSDP1's, and others.
OF_UNITS: dict[str, dict[str, Any]] = {"up.*": {"lr": 3e-2, "codec": "companded8"}, "conv.*": {"weight_decay": 0.0}}
OVERRIDES: dict[str, dict[str, Any]] = {"embed.*": {"codec": "fp32"}, "*.weight": {"lr": 3e-2}, "down.*": {"lr": 2e-2}}
NAMED = {"overrides": OVERRIDES, "no_decay": "auto"}
#: Groups whose parameters are in another order than the model's have the noise of the model's order.
NOISE: dict[str, Any] = {"dtype": torch.bfloat16, "stochastic_rounding": True, "stochastic_rounding_seed": 7}
#: Optimizers that step each element by itself.
QUANTIZED = ("torch AdamW foreach", "torch NAdam", "torch Adagrad", "torch SGD momentum")
NOT_QUANTIZED = {*COLUMNS, *FSDP1, *MATRICES, *ZERO, "fsdp offload"}
NOT_FSDP1 = {way for ways in LAYOUTS.values() for way in ways} - FSDP1
NOT_RELEASED = {*FSDP1, *UNTRAINED, *ZERO}

#: Arithmetic that depends on how tensors are cut, more than on what a model is.
ARITHMETIC: dict[str, Feature] = {
    **{f"{rule} {codec}": Feature(partial(stepped, rule=rule, codec=codec)) for rule, codec in RULES_AND_CODECS},
    **{
        f"{rule} {codec}": Feature(partial(stepped, rule=rule, codec=codec), NOT_MUON)
        for rule, codec in (("muon", "log8"), ("muon_in_waves", "companded8"), ("normuon", "dynamic8"))
    },
    "blocks of 16": Feature(partial(stepped, block_size=16)),
    "codecs": Feature(codecs),
    "in turns": Feature(in_turns),
    "frozen": Feature(frozen, {*BY_UNIT, *OTHER_MODELS}),
    "norm": Feature(partial(clipped, kind=2.0, late=False)),
    "norm in the step": Feature(partial(clipped, kind=2.0, late=True, rule="lamb")),
    "largest": Feature(partial(clipped, kind=math.inf, late=False)),
    "largest in the step": Feature(partial(clipped, kind=math.inf, late=True)),
    "skip": Feature(partial(nonfinite, policy="skip")),
    "propagate": Feature(partial(nonfinite, policy="propagate", codec="dynamic8")),
    "raise": Feature(raising, ZERO),
    **{weights: Feature(partial(weighted, weights=weights)) for weights in FORMATS},
    "bf16 24 lamb": Feature(partial(weighted, weights="bf16 24", rule="lamb", block_size=32)),
    "bf16 stochastic fp32": Feature(partial(weighted, weights="bf16 stochastic", codec="fp32")),
}
FEATURES: dict[str, Feature] = {
    **ARITHMETIC,
    "in turns, muon": Feature(partial(in_turns, rule="muon_in_waves"), NOT_MUON),
    "propagate, muon": Feature(partial(nonfinite, policy="propagate", rule="muon"), NOT_MUON),
    "raise, muon": Feature(partial(raising, rule="muon"), NOT_MUON),
    "asleep": Feature(sleeping, ZERO),
    "asleep, log4": Feature(partial(sleeping, codec="log4", repay=False), ZERO),
    "named": Feature(named, OTHER_MODELS),
    "named, of any unit": Feature(partial(named, **NAMED), {*BY_UNIT, *OTHER_MODELS}),
    "named, with noise": Feature(partial(named, **NOISE), OTHER_MODELS),
    "offload state": Feature(partial(offloaded, how="state"), ZERO),
    "offload step": Feature(partial(offloaded, how="step"), {*ZERO, *FSDP1}),
    "saved": Feature(saved, ZERO),
    "saved asleep": Feature(partial(saved, asleep=True), ZERO),
    "saved lion, bf16 24": Feature(
        partial(saved, rule="lion", codec="dynamic8", dtype=torch.bfloat16, **FORMATS["bf16 24"].options), ZERO
    ),
    "saved normuon": Feature(partial(saved, rule="normuon", codec="bf16"), NOT_MUON),
    **{f"carried {how}": Feature(partial(carried, how=how), {*ZERO, *NOT_CARRIED.get(how, ())}) for how in OF_TORCH},
    "carried bf16 32": Feature(
        partial(carried, how="sharded", dtype=torch.bfloat16, **FORMATS["bf16 32"].options), ZERO
    ),
    "carried normuon": Feature(partial(carried, how="sharded", rule="normuon"), NOT_MUON),
    "packed": Feature(packed, NOT_FSDP1),
    **{f"packed {rule} {codec}": Feature(partial(packed, rule=rule, codec=codec), NOT_FSDP1) for rule, codec in PACKED},
    **{
        f"packed {weights}": Feature(
            partial(packed, dtype=torch.bfloat16, block_size=16, **FORMATS[weights].options), NOT_FSDP1
        )
        for weights in ("bf16 24", "bf16 32")
    },
    "dequantized": Feature(partial(dequantized, codec="dynamic8", block_size=16), ZERO),
    "of torch AdamW": Feature(partial(from_torch, rule="adamw", functions=False), ZERO),
    "of torch AdamW by functions": Feature(partial(from_torch, rule="adamw", functions=True, codec="companded8"), ZERO),
    # PyTorch's own SGD rounds an element by its place in a row of memory: not of DTensors that are cut anywhere.
    "of torch SGD": Feature(partial(from_torch, rule="momentum", functions=False, codec="dynamic8"), ZERO | MATRICES),
    "first state": Feature(partial(first_state, rule="adamw"), ZERO),
    "first state prodigy": Feature(partial(first_state, rule="prodigy"), ZERO),
    "first state muon": Feature(partial(first_state, rule="muon"), NOT_MUON),
    "portable": Feature(portable),
    "portable asleep": Feature(partial(portable, asleep=True), ZERO),
    "portable normuon": Feature(partial(portable, rule="normuon"), NOT_MUON),
    "stable embedding": Feature(embedded, OTHER_MODELS),
    **{f"quantized {name}": Feature(partial(quantized, name=name), NOT_QUANTIZED) for name in QUANTIZED},
    "quantized companded8": Feature(partial(quantized, name=QUANTIZED[0], codec="companded8"), NOT_QUANTIZED),
    "trained": Feature(partial(trained, batches=1), UNTRAINED),
    "trained, accumulating": Feature(partial(trained, batches=2, clip=0.05), UNTRAINED),
    "scaled": Feature(partial(scaled, overflow=False), UNSCALED, False),
    "overflowing": Feature(partial(scaled, overflow=True), UNSCALED, False),
    "released": Feature(released, NOT_RELEASED, False),
    "released, accumulating": Feature(partial(released, batches=2), NOT_RELEASED, False),
    "released muon": Feature(partial(released, rule="muon"), NOT_RELEASED, False),
    "released lamb, bf16 24": Feature(
        partial(released, rule="lamb", dtype=torch.bfloat16, master_weight_bits=24), NOT_RELEASED, False
    ),
    "released lion, stochastic": Feature(
        partial(released, rule="lion", dtype=torch.bfloat16, stochastic_rounding=True), NOT_RELEASED, False
    ),
    "held": Feature(partial(held, batches=1), NOT_RELEASED, False),
    "held, accumulating": Feature(partial(held, batches=2), NOT_RELEASED, False),
    "held lamb": Feature(partial(held, batches=1, clip=False, rule="lamb"), NOT_RELEASED, False),
    **{
        f"rows reset {rule} {codec}": Feature(partial(reset, rows=True, rule=rule, codec=codec))
        for rule, codec in [*PACKED, ("adagrad", "companded8"), ("adamw", "log8")]
    },
    "rows reset normuon": Feature(partial(reset, rows=True, rule="normuon"), NOT_MUON),
    "reset": Feature(partial(reset, rows=False), BY_UNIT),
    "reset bf16 24": Feature(partial(reset, rows=False, dtype=torch.bfloat16, master_weight_bits=24), BY_UNIT),
    "rows reset bf16 32": Feature(partial(reset, rows=True, dtype=torch.bfloat16, master_weight_bits=32)),
}


def check(feature: str, ways: list[str], path: Path) -> None:
    """Under each of these layouts; the run in one process is that of rank 0."""
    do, _, as_single = FEATURES[feature]
    singles: dict[str, Snapshot] = {}
    for way in ways:
        try:
            run = Run(way, True, path / way)
            do(run)
            got = run.results(on_all=not as_single)
            if not as_single:
                reference = Run(way, False, path, run)
                do(reference)
                assert_same(got, reference.results())
            elif dist.get_rank() == 0:
                assert_same(got, _single(run, do, singles))
        except BaseException as error:
            error.add_note(f"{feature} under {way}")
            raise


def _single(run: Run, do: Callable[[Run], None], known: dict[str, Snapshot]) -> Snapshot:
    model = run.way if run.way in MATRICES_WAYS else "odds" if run.way in ODDS_WAYS else "net"
    if model not in known or run.has_own_gradients:
        single = Run("single", False, run.path, run)
        do(single)
        known[model] = single.results()
    return known[model]


def _few(feature: str, place: int, world_size: int, ways: list[str]) -> list[str]:
    """Layouts that a feature meets by default: its place among all features says which.

    The first one meets many. Arithmetic meets one on 3 ranks and one on 4, and other features one of the two.
    """
    if place == 0 and world_size > 1:
        return ways[::3]
    if world_size < 3:
        return ways[place % 18 :: 18] if world_size == 2 else []
    if feature not in ARITHMETIC:
        if world_size % 2 == place % 2:
            return []
        place //= 2
    return ways[place % len(ways) :: len(ways)]


def _cases() -> list[Any]:
    found = []
    for place, (feature, (_, lacking, _)) in enumerate(FEATURES.items()):
        ways = {size: [way for way in layouts if way not in lacking] for size, layouts in LAYOUTS.items()}
        few = {size: _few(feature, place, size, own) for size, own in ways.items()}
        more = {size: [way for way in own if way not in few[size]] for size, own in ways.items()}
        found += [(feature, few), *slow([(feature, more)])]
    return found


@pytest.mark.parametrize(("feature", "ways"), _cases(), ids=lambda x: x if isinstance(x, str) else "")
def test_bits(ranks: Pool, tmp_path: Path, feature: str, ways: Mapping[int, list[str]]) -> None:
    for world_size, of_world in ways.items():
        for start in range(0, len(of_world), 4):
            ranks.run(world_size, check, feature, of_world[start : start + 4], tmp_path / str(world_size))


def _begin(run: Run, seed: int = 0, **options: Any) -> None:
    run.begin(seed=seed, **options)


#: Features saved under one layout and loaded under others: how a run of it begins.
MOVED: dict[str, Callable[..., None]] = {
    **{f"adamw {codec}": partial(_begin, codec=codec) for codec in CODEC_NAMES},
    **{f"{rule} {codec}": partial(_begin, rule=rule, codec=codec) for rule, codec in RULES_AND_CODECS},
    **{name: partial(_begin, dtype=dtype, **options) for name, (dtype, options) in FORMATS.items()},
    "stable embedding": _begin_embedded,
    "offload": partial(_begin, offload="state"),
    "normuon": partial(_begin, rule="normuon"),
    "named": _begin_named,
}


def _tensors(run: Run, what: str) -> tuple[dict[str, Any], StateDictOptions]:
    """The state that torch.distributed.checkpoint saves and loads, with flattened names if the codec is not log8."""
    options = StateDictOptions(flatten_optimizer_state_dict="log8" not in what)
    state = get_optimizer_state_dict(run.model, run.optimizer, options=options)
    return {"model": get_model_state_dict(run.model), "optimizer": state}, options


def _save(by: str, what: str, way: str, path: Path) -> None:
    with offload_from_cpu():
        run = Run(way, True, path)
        MOVED[what](run)
        run.steps(2)
        if by == "shardopt":
            shardopt.checkpoint.save(path, run.model, run.optimizer)
        elif by == "dcp":
            dcp.save(_tensors(run, what)[0], checkpoint_id=path)
        else:
            state = FullyShardedDataParallel.optim_state_dict(run.model, run.optimizer)
            if dist.get_rank() == 0:
                torch.save(state, path / "optimizer")
            dist.barrier()


def _load(by: str, what: str, way: str, path: Path) -> None:
    """Into other weights, after a step; goes on as a run in one process. FSDP1's functions are of the state alone."""
    with offload_from_cpu():
        run = Run(way, True, path)
        MOVED[what](run, seed=int(by != "fsdp1"))
        run.steps(2 if by == "fsdp1" else 1)
        if by == "shardopt":
            assert shardopt.checkpoint.load(path, run.model, run.optimizer).converted == {}
        elif by == "dcp":
            tensors, options = _tensors(run, what)
            dcp.load(tensors, checkpoint_id=path)
            set_model_state_dict(run.model, tensors["model"])
            set_optimizer_state_dict(run.model, run.optimizer, tensors["optimizer"], options=options)
        else:
            run.optimizer.reset_state()
            state = torch.load(path / "optimizer")
            run.optimizer.load_state_dict(
                FullyShardedDataParallel.optim_state_dict_to_load(run.model, run.optimizer, state)
            )
        run.number = 2
        run.steps(1)
        run.optimizer.synchronize() if hasattr(run.optimizer, "synchronize") else None
        got = run.results(on_all=False)
        if dist.get_rank() == 0:
            single = Run("single", False, path, run)
            MOVED[what](single)
            single.steps(3)
            assert_same(got, single.results())


#: By what, a feature, the layout on 3 ranks that it is saved under, and those that it is loaded under.
MOVES = [
    ("shardopt", "bf16 24", "fsdp columns", [(3, "ddp"), (4, "fsdp1 flat"), (3, "zero")]),
    ("shardopt", "fp16 24", "fsdp1 flat", [(4, "fsdp tp"), (3, "fsdp columns")]),
    ("shardopt", "fp16 32", "tp", [(3, "fsdp1"), (4, "hsdp")]),
    ("shardopt", "bf16 stochastic", "fsdp", [(4, "fsdp tp"), (3, "tp")]),
    ("shardopt", "stable embedding", "fsdp1 flat", [(3, "ddp"), (3, "fsdp")]),
    ("shardopt", "offload", "fsdp", [(4, "hsdp"), (3, "fsdp1")]),
    ("shardopt", "named", "fsdp", [(2, "fsdp1"), (2, "fsdp1 flat")]),
    ("shardopt", "normuon", "fsdp1", [(2, "fsdp columns"), (3, "fsdp"), (4, "fsdp tp")]),
    *(
        ("shardopt", what, "fsdp1 flat", [(2, "fsdp columns")])
        for what in ("adamw companded8", "ademamix bf16", "centered_rmsprop_momentum log8")
    ),
    *(("shardopt", what, "fsdp columns", [(2, "fsdp1")]) for what in ("adamw dynamic8", "adamw fp32", "prodigy log8")),
    ("dcp", "adamw log8", "fsdp", [(1, "single"), (4, "fsdp"), (3, "tp")]),
    ("dcp", "adamw log8", "fsdp columns", [(1, "fsdp"), (4, "hsdp columns")]),
    ("dcp", "adamw log8", "tp", [(3, "fsdp columns"), (4, "fsdp tp")]),
    *(
        ("dcp", f"adamw {codec}", "fsdp columns", [(2, "fsdp columns")])
        for codec in ("dynamic8", "companded16", "bf16")
    ),
    ("dcp", "repaid_adamw companded8", "fsdp columns", [(4, "fsdp columns tp")]),
    ("dcp", "prodigy log8", "fsdp columns", [(1, "single")]),
    ("dcp", "adamw log8", "fsdp1 grad", [(4, "fsdp1 grad")]),
    ("fsdp1", "adamw log8", "fsdp1", [(2, "fsdp1 flat"), (4, "fsdp1 nested")]),
    ("fsdp1", "adamw dynamic8", "fsdp1 nested flat", [(4, "fsdp1 hybrid"), (1, "fsdp1")]),
    ("fsdp1", "ademamix bf16", "fsdp1 flat", [(1, "fsdp1 none flat")]),
    ("fsdp1", "normuon", "fsdp1", [(4, "fsdp1 nested")]),
]


@pytest.mark.parametrize(("by", "what", "way", "others"), MOVES, ids=lambda x: x if isinstance(x, str) else "")
def test_moves(ranks: Pool, tmp_path: Path, by: str, what: str, way: str, others: list[tuple[int, str]]) -> None:
    """Checkpoints between layouts; ``test_portable_checkpoint.py`` has all of them, of the usual state."""
    ranks.run(3, _save, by, what, way, tmp_path)
    for world_size, other in others:
        ranks.run(world_size, _load, by, what, other, tmp_path)
