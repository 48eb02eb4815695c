"""DeepSpeed's ZeRO 0 to 3 x features: masters, codes and scales are those of the unsharded optimizer.

As ``test_layouts.py`` for the layouts of torch. Gradients are given; checkpoints are DeepSpeed's own and portable ones.
"""

from __future__ import annotations

from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardopt
from ranks.deepspeed import (
    ALL_OFFLOAD,
    BF16,
    BF16_OPTIMIZER,
    HYPER,
    OFFLOAD,
    PINNED,
    ROUND_ROBIN,
    STEPS,
    SUB_GROUPS,
    WITHOUT_MASTERS,
    assert_as_whole,
    config,
    engine_snapshot,
    goes_on_as_whole,
    groups_of,
    import_deepspeed,
    load,
    make_engine,
    make_whole,
    model_parameters,
    runs_as_whole,
    save,
    step_engine,
    step_whole,
    stepped_engine,
    stepped_whole,
    twins,
    whole_snapshot,
)
from ranks.layouts import values
from ranks.models import TOKENS, loss_of, make_batch, make_frozen, make_net
from ranks.offload import offload_from_cpu
from ranks.pool import Pool
from ranks.snapshot import Snapshot, assert_same, entries
from shardopt.checkpoint import CheckpointError
from slow_cases import slow

Zero = dict[str, Any]

#: Of bf16 models whose masters are the parameters: the state has the bits that a parameter lacks of a master.
MASTERS = {"bf16": WITHOUT_MASTERS, "params": {"master_weight_bits": 24}}
THRESHOLD = {"stage3_param_persistence_threshold": 0}

#: A stage, options of ZeRO and sections of a config.
LAYOUTS: dict[str, tuple[int, Zero, dict[str, Any]]] = {
    "0": (0, {}, {}),
    "1": (1, {}, {}),
    "1 round robin": (1, ROUND_ROBIN, {}),
    "2": (2, {}, {}),
    "2 round robin": (2, ROUND_ROBIN, {}),
    "2 all-reduce": (2, {"overlap_comm": True, "contiguous_gradients": False, "reduce_scatter": False}, {}),
    "2 offload": (2, {**OFFLOAD, **ROUND_ROBIN}, {}),
    "2 pinned": (2, PINNED, {}),
    "3": (3, {}, {}),
    "3 sub-groups": (3, SUB_GROUPS, {}),
    "3 threshold": (3, {**THRESHOLD, "reduce_bucket_size": 5000}, {}),
    "3 all offload": (3, {**ALL_OFFLOAD, **SUB_GROUPS}, {}),
    "0 bf16": (0, {}, BF16),
    "1 bf16": (1, ROUND_ROBIN, BF16),
    "1 bf16 optimizer": (1, {}, BF16_OPTIMIZER),
    "2 bf16": (2, ROUND_ROBIN, BF16),
    "2 bf16 offload": (2, {**OFFLOAD, **ROUND_ROBIN}, BF16),
    "3 bf16": (3, SUB_GROUPS, BF16),
    "3 bf16 offload": (3, {**PINNED, **SUB_GROUPS}, BF16),
    "3 bf16 all offload": (3, {**PINNED, "offload_param": PINNED["offload_optimizer"], **THRESHOLD}, BF16),
    "1 masters": (1, ROUND_ROBIN, MASTERS),
    "2 masters": (2, ROUND_ROBIN, {**MASTERS, "params": {"master_weight_bits": 32}}),
    # The flag says how DeepSpeed's Adam keeps its moments; the codec says how ours are kept.
    "2 masters offload": (2, OFFLOAD, {**MASTERS, "bf16": {"enabled": True, "bf16_master_weights_and_grads": True}}),
    "3 masters": (3, SUB_GROUPS, MASTERS),
    "3 masters all offload": (3, {**ALL_OFFLOAD, **SUB_GROUPS}, MASTERS),
}
#: Every stage, with the options by which its partitions are hardest to follow.
WORST = ("0", "1 round robin", "2 round robin", "3 sub-groups")


def _config(layout: str, kind: str = "AdamW8bit", **options: Any) -> dict[str, Any]:
    stage, zero, sections = LAYOUTS[layout]
    params = {**sections.get("params", {}), **options.pop("params", {})}
    return config(stage, kind, zero=zero, **{**sections, **options, "params": params})


def _ranks(layout: str) -> int:
    """A third of a gradient is not exact in bf16."""
    return 3 if LAYOUTS[layout][2] == {} else 2


@pytest.mark.parametrize(
    ("layout", "world_size", "grouped"),
    [
        *((layout, _ranks(layout), _ranks(layout) == 3) for layout in LAYOUTS),
        *slow((layout, world_size, True) for layout in WORST for world_size in (1, 4)),
    ],
)
def test_given_gradients(deepspeed_ranks: Pool, layout: str, world_size: int, grouped: bool) -> None:
    deepspeed_ranks.run(world_size, runs_as_whole, twins(_config(layout), grouped=grouped))


@pytest.mark.deepspeed_ranks(3)
@pytest.mark.parametrize(
    ("layout", "kind", "params"),
    [
        ("3 sub-groups", "Lion8bit", {"lr": 1e-3, "codec": "companded8", "block_size": 32, "cautious": True}),
        ("2 round robin", "SGD8bit", {"momentum": 0.9, "codec": "dynamic8"}),
        ("3 sub-groups", "adamw4bit", {}),
        ("2 round robin", "AdEMAMix8bit", {"alpha_steps": 3, "beta3_steps": 4}),
        ("2 round robin", "LAMB8bit", {"weight_decay": 0.1}),
        ("1 round robin", "ADAMW8BIT", {"codec": "fp32", "amsgrad": True}),
    ],
)
def test_rules_and_codecs(layout: str, kind: str, params: dict[str, Any]) -> None:
    """By a type in any letter case."""
    runs_as_whole(twins(_config(layout, kind, params=params)))


@pytest.mark.deepspeed_ranks(2)
@pytest.mark.parametrize("layout", WORST[::2])
def test_scheduled_and_accumulated(layout: str) -> None:
    schedule = {"type": "WarmupLR", "params": {"warmup_min_lr": 1e-4, "warmup_max_lr": 1e-2, "warmup_num_steps": 3}}
    settings = _config(layout, scheduler=schedule, gradient_accumulation_steps=2)
    engine = stepped_engine(settings, 0)
    whole, optimizer = make_whole(settings)
    lrs = []
    for step in range(4):
        lrs += engine.get_lr()
        optimizer.param_groups[0]["lr"] = lrs[-1]
        step_engine(engine, step)
        step_whole(whole, optimizer, step, micro_steps=2)
    assert len(set(lrs)) > 2
    assert_as_whole(engine, whole, optimizer)


@pytest.mark.deepspeed_ranks(2)
@pytest.mark.parametrize("layout", WORST[1::2])
def test_gradient_clipping(layout: str) -> None:
    """The norm is summed in another order than elsewhere, so gradients equal up to rounding; SGD shows their size."""
    params = {"momentum": 0.9, "codec": "fp32", "weight_decay": 0.0}
    settings = _config(layout, "SGD8bit", params=params, gradient_clipping=1.0)
    engine = stepped_engine(settings, STEPS)
    clipped, optimizer = make_whole(settings)
    for step in range(STEPS):
        step_whole(clipped, optimizer, step, clip=1.0)
    free, _ = stepped_whole(settings, STEPS)
    got = model_parameters(engine)
    for name, param in clipped.named_parameters():
        assert got[name].numpy() == pytest.approx(param.detach().numpy(), rel=1e-5, abs=1e-6)
    assert any((got[name] - param).abs().max() > 1e-4 for name, param in free.named_parameters())


@pytest.mark.deepspeed_ranks(2)
@pytest.mark.parametrize(
    ("stage", "zero", "called"), [(0, {}, False), (1, ROUND_ROBIN, True), (2, OFFLOAD, False), (3, OFFLOAD, True)]
)
def test_optimizer_instead_of_type(stage: int, zero: Zero, called: bool) -> None:
    settings = config(stage, None, zero=zero)
    model = make_net()
    if called:
        engine = stepped_engine(settings, STEPS, model, optimizer=lambda params: shardopt.AdamW8bit(params, **HYPER))
    else:
        optimizer = shardopt.AdamW8bit(groups_of(model), **HYPER)
        engine = stepped_engine(settings, STEPS, model, optimizer=optimizer, model_parameters=None)
        assert engine.basic_optimizer is optimizer
    assert_as_whole(engine, *stepped_whole(settings, STEPS, grouped=not called))


def _embedded() -> nn.Module:
    net = make_net()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net.embed = shardopt.StableEmbedding(TOKENS, 66)
    return net


@pytest.mark.deepspeed_ranks(2)
@pytest.mark.parametrize(
    ("layout", "options", "init"),
    [
        *(("0 bf16", {}, False), ("2 round robin", {}, False), ("3 sub-groups", {}, True)),
        ("3 masters", {"stochastic_rounding": True, "stochastic_rounding_seed": 7, "master_weight_bits": None}, False),
    ],
)
def test_param_groups_and_stable_embedding(layout: str, options: dict[str, Any], init: bool) -> None:
    """ZeRO flattens each group by itself; noise follows the model; a StableEmbedding's state is float32.

    Under ``zero.Init``, too, where parameters are in parts from the beginning.
    """
    settings = _config(layout, params=options)
    with import_deepspeed().zero.Init(config_dict_or_path=settings) if init else nullcontext():
        model = _embedded()
    overrides = {"up.*": {"lr": 3e-2, "codec": "companded8"}}
    groups = shardopt.param_groups(model, overrides, ("*.bias", "norm.*"))
    assert {part.shape for part in groups.parameters if part.names == ("embed.weight",)} == {(TOKENS, 66)}
    engine = stepped_engine(settings, STEPS, model, model_parameters=groups)
    whole, _ = make_whole(settings, _embedded())
    groups = shardopt.param_groups(whole, overrides, ("*.bias", "norm.*"))
    optimizer = shardopt.AdamW8bit(groups, **settings["optimizer"]["params"])
    for step in range(STEPS):
        step_whole(whole, optimizer, step)
    found = engine_snapshot(engine)
    assert_same(found, whole_snapshot(whole, optimizer))
    assert not any("_codes" in key for key in found if "embed.weight/" in key)


MUON = {"adamw_lr": 3e-3, "no_decay": ("*.bias",)}


def _muon_groups(model: nn.Module) -> list[dict[str, Any]]:
    return shardopt.muon_groups(model, lr=HYPER["lr"], adamw_lr=MUON["adamw_lr"], no_decay=MUON["no_decay"])


@pytest.mark.deepspeed_ranks
@pytest.mark.parametrize(
    ("kind", "stage", "zero", "world_size", "by_config"),
    [
        ("Muon8bit", 0, {}, 2, True),
        ("Muon8bit", 1, ROUND_ROBIN, 3, False),
        ("Muon8bit", 3, SUB_GROUPS, 2, True),
        ("NorMuon8bit", 2, OFFLOAD, 3, True),
        ("NorMuon8bit", 3, OFFLOAD, 3, False),
        *slow(("Muon8bit", *stage, 4, True) for stage in [(1, ROUND_ROBIN), (2, OFFLOAD), (3, SUB_GROUPS)]),
    ],
)
def test_muon(kind: str, stage: int, zero: Zero, world_size: int, by_config: bool) -> None:
    if by_config:
        engine = stepped_engine(config(stage, kind, zero=zero, params=MUON), STEPS)
    else:
        model = make_net()
        engine = stepped_engine(config(stage, kind, zero=zero), STEPS, model, model_parameters=_muon_groups(model))
    whole = make_net()
    optimizer = getattr(shardopt, kind)(_muon_groups(whole), **HYPER)
    for step in range(STEPS):
        step_whole(whole, optimizer, step)
    assert_as_whole(engine, whole, optimizer)


@pytest.mark.deepspeed_ranks(2)
@pytest.mark.parametrize("stage", [1, 3])
def test_muon_by_marks_of_deepspeed(stage: int) -> None:
    """DeepSpeed would orthogonalize the gradients of marked parameters for any optimizer with such a name."""
    snapshots = []
    for marks in (True, False):
        model = make_net()
        for name, param in model.named_parameters():
            if marks:
                param.use_muon = name.startswith(("up.weight", "down.weight"))
        excluded = {"exclude": ["conv.*", "gate.*"]} if not marks else {}
        settings = config(stage, "Muon8bit", params={"adamw_lr": 3e-3, **excluded})
        snapshots.append(engine_snapshot(stepped_engine(settings, STEPS, model)))
    assert_same(*snapshots)


#: With an L2 penalty, which all gradients have in common, so that the estimate grows.
PRODIGY = {"lr": 1.0, "d0": 1e-3, "d_coef": 20.0, "weight_decay": 2.0, "decouple": False}


@pytest.mark.parametrize(("stage", "zero", "own"), [(1, ROUND_ROBIN, True), (3, {}, False)])
def test_sums_over_all_parameters(deepspeed_ranks: Pool, tmp_path: Path, stage: int, zero: Zero, own: bool) -> None:
    """Prodigy's estimate, which checkpoints have, too."""
    of = twins(config(stage, "Prodigy8bit", zero=zero, params=PRODIGY))
    deepspeed_ranks.run(3, save, tmp_path, of, own)
    deepspeed_ranks.run(3, load, tmp_path, of, own)


@pytest.mark.parametrize(
    "layout",
    [
        *("0", "1 round robin", "2 offload", "3 bf16 offload", "1 bf16 optimizer", "2 bf16", "3 masters all offload"),
        *slow((layout,) for layout in ("2 round robin", "2 masters offload", "3 all offload", "3 masters")),
    ],
)
def test_own_checkpoint(deepspeed_ranks: Pool, tmp_path: Path, layout: str) -> None:
    of = twins(_config(layout), grouped=True)
    deepspeed_ranks.run(2, save, tmp_path, of, True)
    deepspeed_ranks.run(2, load, tmp_path, of, True, 2)


@pytest.mark.parametrize(
    ("saved", "loaded", "steps"),
    [
        (("1 round robin", 2), ("2 round robin", 3), 1),
        (("2 round robin", 3), ("3 sub-groups", 2), 1),
        (("3 sub-groups", 2), ("0", 3), 0),
        (("0", 3), ("1", 1), 0),
        (("1 bf16", 2), ("2 bf16", 4), 1),
        (("3 bf16 offload", 2), ("1 bf16", 2), 1),
        (("2 masters offload", 4), ("3 masters all offload", 2), 1),
        (("3 masters", 2), ("1 masters", 4), 1),
        *slow(((a, 4), (b, 3), 0) for a in WORST[1:] for b in WORST[1:]),
    ],
    ids=str,
)
def test_portable_checkpoint(
    deepspeed_ranks: Pool, tmp_path: Path, saved: tuple[str, int], loaded: tuple[str, int], steps: int
) -> None:
    """Between pairs of a layout and a number of ranks, into an engine that has taken so many steps.

    Float32 masters are saved in the place of the model's weights.
    """
    for (layout, size), work, more in ((saved, save, ()), (loaded, load, (steps,))):
        of = twins(_config(layout), grouped="masters" not in layout)
        deepspeed_ranks.run(size, work, tmp_path, of, False, *more)


def _addresses(engine: Any) -> set[int]:
    states = engine.basic_optimizer.state.values()
    return {x.data_ptr() for state in states for key, x in state.items() if key != "step" and x.numel()}


@pytest.mark.deepspeed_ranks(2)
@pytest.mark.parametrize(
    ("layout", "what"),
    [
        *((layout, "everything") for layout in ("1 round robin", "3 sub-groups")),
        *(("2 masters", "optim_states"), ("2", "by the optimizer"), ("3", "by the optimizer")),
    ],
)
def test_states_go_and_come_back(layout: str, what: str) -> None:
    """``engine.offload_states()`` and ``reload_states()``: the bits of a run that never moved anything.

    And by the optimizer's own methods, though ZeRO 3 shows the optimizer no parameters between steps.
    """
    import_deepspeed()
    from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum

    of = twins(_config(layout))
    include = None if what == "everything" else [OffloadStateTypeEnum.optim_states]
    with offload_from_cpu():
        engine = of.engine(STEPS)
        before = _addresses(engine)
        if what == "by the optimizer":
            engine.basic_optimizer.offload()
            assert before.isdisjoint(_addresses(engine))
            goes_on_as_whole(engine, of)
            engine.basic_optimizer.reset_state()
            assert not engine.basic_optimizer.state
            return
        for _ in range(2):
            engine.offload_states(include=include, pin_memory=False)
            if layout.startswith("3"):  # the others move by DeepSpeed's own copies, of which there are none on the CPU
                assert before.isdisjoint(_addresses(engine))
            engine.reload_states()
        assert all("buffer" not in key for state in engine.basic_optimizer.state.values() for key in state)
        goes_on_as_whole(engine, of)


@pytest.mark.deepspeed_ranks(2)
@pytest.mark.parametrize("layout", ["1 round robin", "2 masters offload", "3 sub-groups"])
def test_rows_are_reset(layout: str) -> None:
    """By names: an engine's optimizer has flat tensors, under ZeRO 3 in steps only."""
    of = twins(_config(layout))
    engine, (model, optimizer) = of.engine(STEPS), of.whole(STEPS)
    engine.basic_optimizer.reset_state(["embed.*", "head.*"], rows=range(10, 30))
    optimizer.reset_state([model.embed.weight, *model.head.parameters()], rows=range(10, 30))
    assert_as_whole(engine, model, optimizer)
    with pytest.raises(ValueError, match="which are one flat tensor with one step count"):
        engine.basic_optimizer.reset_state("embed.*")
    step_engine(engine, STEPS)
    step_whole(model, optimizer, STEPS)
    assert_as_whole(engine, model, optimizer)


@pytest.mark.deepspeed_ranks(2)
@pytest.mark.parametrize(("stage", "zero"), [(2, ROUND_ROBIN), (3, THRESHOLD)])
def test_frozen_parameters(tmp_path: Path, stage: int, zero: Zero) -> None:
    """From an engine to no engine, and back to another."""
    settings = config(stage, zero=zero)
    engine, other = (make_engine(make_frozen(seed), settings, model_parameters=None) for seed in (0, 1))
    engine.backward(loss_of(engine, make_batch(0)))
    engine.step()
    shardopt.checkpoint.save(tmp_path / "first", engine)
    whole = make_frozen(2)
    optimizer = shardopt.AdamW8bit([param for param in whole.parameters() if param.requires_grad], **HYPER)
    shardopt.checkpoint.load(tmp_path / "first", whole, optimizer)
    expected = {name: param.detach() for name, param in whole.named_parameters()}
    assert torch.equal(expected["embed.weight"], make_net().embed.weight)
    assert_same(model_parameters(engine), expected)
    shardopt.checkpoint.save(tmp_path / "second", whole, optimizer)
    shardopt.checkpoint.load(tmp_path / "second", other)
    assert_same(model_parameters(other), expected)


@pytest.mark.deepspeed_ranks(2)
@pytest.mark.parametrize("stage", [0, 3])
def test_the_bare_model_stands_for_its_engine(tmp_path: Path, stage: int) -> None:
    """Hugging Face's Trainer hands bare models to callbacks; the engine's own optimizer may be given."""
    engine, other = stepped_engine(_config(WORST[stage]), STEPS), stepped_engine(_config(WORST[stage]), 1, seed=1)
    shardopt.checkpoint.save(tmp_path, engine.module, engine.basic_optimizer if stage else None)
    shardopt.checkpoint.load(tmp_path, other.module, other.optimizer)
    goes_on_as_whole(other, twins(_config(WORST[stage])))


@pytest.mark.deepspeed_ranks(1)
def test_another_optimizer_is_refused(tmp_path: Path) -> None:
    engine = stepped_engine(_config("2"), 0)
    other = shardopt.AdamW8bit(make_net().parameters())
    for call in (shardopt.checkpoint.save, shardopt.checkpoint.load):
        with pytest.raises(TypeError, match="got an optimizer beside a DeepSpeed engine that is not the engine's"):
            call(tmp_path, engine, other)


def _evaluated(path: Path, *settings: dict[str, Any]) -> None:
    """Trains engines, evaluates, saves the first one, loads into the second, and goes on with both."""
    engines = []
    for seed, each in enumerate(settings):
        engine = make_engine(make_frozen(seed), each, model_parameters=None)
        for step in (10, 11):
            engine.backward(loss_of(engine, make_batch(step, dist.get_rank())))
            engine.step()
        engine.eval()
        with torch.no_grad():
            loss_of(engine, make_batch(99))  # not followed by a step, which would forget what was gathered
        engine.train()
        is_held_twice = each["zero_optimization"].get("zero_hpz_partition_size", 1) > 1
        assert all((param.ds_secondary_tensor is not None) == is_held_twice for param in engine.module.parameters())
        (shardopt.checkpoint.load if engines else shardopt.checkpoint.save)(path, engine)
        engines.append(engine)
    for step in (0, 1):
        losses = [loss_of(engine, make_batch(step, dist.get_rank())) for engine in engines]
        assert torch.equal(*losses)
        for engine, loss in zip(engines, losses, strict=True):
            engine.backward(loss)
            engine.step()
    assert_same(*map(model_parameters, engines))


@pytest.mark.deepspeed_ranks(2)
def test_after_evaluation(tmp_path: Path) -> None:
    """Weights that a forward pass without a step has gathered are not computed with again."""
    _evaluated(tmp_path, *[config(3, zero={**THRESHOLD, **OFFLOAD})] * 2)


def _other_codec(path: Path, settings: dict[str, Any]) -> None:
    """Converting codes the moments again, cut blocks included."""
    engine = stepped_engine(settings, 0)
    with pytest.raises(CheckpointError, match="convert=True"):
        shardopt.checkpoint.load(path, engine)
    assert shardopt.checkpoint.load(path, engine, convert=True).converted
    whole, optimizer = make_whole(settings)
    shardopt.checkpoint.load(path, whole, optimizer, convert=True)
    assert_same(engine_snapshot(engine), whole_snapshot(whole, optimizer))


def test_other_codec(deepspeed_ranks: Pool, tmp_path: Path) -> None:
    deepspeed_ranks.run(2, save, tmp_path, twins(_config("1 round robin")), False)
    settings = _config("3 sub-groups", params={"codec": "companded8", "block_size": 64})
    deepspeed_ranks.run(3, _other_codec, tmp_path, settings)


@pytest.mark.slow
def test_second_copies(tmp_path: Path) -> None:
    """Loading makes old the parts of parameters that zero_hpz_partition_size has a node's ranks hold a second time.

    The backward pass gathers them, as each layer gives its parameters up as soon as it is done.
    """
    pytest.importorskip("deepspeed")
    at_once = dict.fromkeys(("max_reuse_distance", "max_live_parameters", "prefetch_bucket_size"), 0)
    zero = {**THRESHOLD, **{f"stage3_{key}": value for key, value in at_once.items()}}
    settings = [config(3, zero={**zero, "zero_hpz_partition_size": per_node}) for per_node in (1, 2)]
    with closing(Pool()) as pool:  # of its own, as DeepSpeed keeps the first groups of a node's ranks for good
        pool.run(4, _evaluated, tmp_path, *settings)


WIDTH, EXPERTS = 40, 4
EXPERT = "moe.deepspeed_moe.experts.deepspeed_experts.{}.0.weight"


class Mixture(nn.Module):
    """A layer before a layer of experts, on ``parallel`` ranks."""

    def __init__(self, parallel: int, seed: int) -> None:
        super().__init__()
        from deepspeed.moe.layer import MoE

        expert = nn.Sequential(nn.Linear(WIDTH, 64), nn.ReLU(), nn.Linear(64, WIDTH))
        self.before = nn.Linear(WIDTH, WIDTH)
        options = {"num_experts": EXPERTS, "ep_size": parallel, "min_capacity": 8}
        self.moe = MoE(WIDTH, expert, **options)
        local = EXPERTS // parallel
        first = dist.get_rank() % parallel * local
        for name, param in self.named_parameters():
            head, experts, tail = name.partition("deepspeed_experts.")
            number = first + int(tail[0]) if experts else 0
            place = sum(map(ord, head + tail[1:]))
            param.data = values(tuple(param.shape), seed + 1000 * number + place) * 0.1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, loss, _ = self.moe(self.before(x))
        return y.square().mean() + loss


def _moe_engine(parallel: int, stage: int, steps: int, seed: int = 0) -> Any:
    import_deepspeed()
    from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer as split

    model = Mixture(parallel, seed)
    groups = split({"params": list(model.parameters()), "name": "all"})
    engine = make_engine(model, config(stage), model_parameters=groups)
    for step in range(steps):
        engine.backward(engine(values((4, 8, WIDTH), 10 * step + dist.get_rank())))
        engine.step()
    return engine


def _experts(parallel: int, stage: int, steps: int, loaded: Path | None, saved: Path) -> Snapshot:
    """Weights of experts by their numbers in the whole model, on one rank with all state; what is loaded is stepped."""
    engine = _moe_engine(parallel, stage, steps, seed=5 if loaded else 0)
    if loaded is not None:
        shardopt.checkpoint.load(loaded, engine)
    shardopt.checkpoint.save(saved, engine)
    assert [group["name"] for group in engine.basic_optimizer.param_groups] == ["all", f"ep_size_{parallel}"]
    params = dict(engine.module.named_parameters())
    if parallel == 1:
        return entries(params, engine.basic_optimizer)
    first = dist.get_rank() % parallel * EXPERTS // parallel
    own = {EXPERT.format(first + i): params[EXPERT.format(i)].detach().clone() for i in range(EXPERTS // parallel)}
    engine.backward(engine(values((4, 8, WIDTH), 7)))
    engine.step()
    return own


def test_experts(deepspeed_ranks: Pool, tmp_path: Path) -> None:
    """From a rank that has all experts to 2 ranks, to 4, and back to one: all bits, each expert by its number."""
    one, two, four, last = (tmp_path / name for name in ("one", "two", "four", "last"))
    (expected,) = deepspeed_ranks.run(1, _experts, 1, 0, 2, None, one)
    assert not torch.equal(expected[EXPERT.format(0)], expected[EXPERT.format(EXPERTS - 1)])
    for world_size, stage, loaded, saved in ((2, 0, one, two), (4, 2, two, four)):
        for own in deepspeed_ranks.run(world_size, _experts, 2, stage, 1, loaded, saved):
            assert_same(own, {name: expected[name] for name in own})
    assert_same(*deepspeed_ranks.run(1, _experts, 1, 0, 0, four, last), expected)
