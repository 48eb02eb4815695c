"""Engines of DeepSpeed on the CPU, given gradients to step with, and what all ranks hold of them, put together.

Gradients go DeepSpeed's whole way, from ``backward`` over the averaging to the flat partitions, and come out exact.
"""

from __future__ import annotations

import gc
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardopt
from ranks import flat as parts
from ranks.layouts import Shape, values
from ranks.models import make_net
from ranks.snapshot import Snapshot, assert_same, snapshot
from shardopt.layout import FlatBuffer, assigned
from shardopt.optim import OPTIMIZERS, ShardedOptimizer

#: Steps that most tests take.
STEPS = 3
#: Options of every optimizer here.
HYPER = {"lr": 1e-2, "weight_decay": 0.1, "min_quantized_numel": 64}
#: The ``bf16`` section of a config with which DeepSpeed keeps no float32 masters.
WITHOUT_MASTERS = {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
#: Sections of a config.
BF16: dict[str, Any] = {"bf16": {"enabled": True}}
BF16_OPTIMIZER: dict[str, Any] = {**BF16, "data_types": {"grad_accum_dtype": "fp32"}}
#: Options of ZeRO.
ROUND_ROBIN: dict[str, Any] = {"round_robin_gradients": True}
SUB_GROUPS: dict[str, Any] = {"sub_group_size": 20000}
OFFLOAD: dict[str, Any] = {"offload_optimizer": {"device": "cpu"}}
ALL_OFFLOAD: dict[str, Any] = {**OFFLOAD, "offload_param": {"device": "cpu"}}
PINNED: dict[str, Any] = {"offload_optimizer": {"device": "cpu", "pin_memory": True}}


def import_deepspeed() -> Any:
    """DeepSpeed on its CPU accelerator. From here on nothing may be compiled in this process."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    if dist.is_initialized():
        os.environ.update(RANK=str(dist.get_rank()), LOCAL_RANK=str(dist.get_rank()))
        os.environ.update(WORLD_SIZE=str(dist.get_world_size()))
    first = "deepspeed" not in sys.modules
    import deepspeed
    import torch.utils.cpp_extension

    if first:
        gc.freeze()  # collections need not look at the modules' objects: 0.2 s each
        for name in ("stage3", "utils"):  # each engine of ZeRO 3 collects garbage, which would take 0.06 s still
            sys.modules[f"deepspeed.runtime.zero.{name}"].gc = SimpleNamespace(collect=lambda: 0)  # type: ignore[attr-defined]
    # Not "import deepspeed.comm.torch": the attribute of that name is torch.
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # type: ignore[attr-defined]
    torch.utils.cpp_extension.load = _refuse_to_compile
    deepspeed.utils.logger.setLevel("ERROR")
    warnings.filterwarnings("ignore", category=FutureWarning)  # what DeepSpeed uses of torch
    return deepspeed


def _refuse_to_compile(*args: Any, **kwargs: Any) -> None:
    raise AssertionError(f"got a compilation of {args} {kwargs}, expected none")


def config(stage: int, optimizer: str | None = "AdamW8bit", **options: Any) -> dict[str, Any]:
    """A DeepSpeed config for a stage of ZeRO, with the config type of an optimizer, or without one (None).

    Further arguments are sections of the config: ``zero`` that of ZeRO, and ``params`` of the optimizer.
    """
    zero, params = options.pop("zero", {}), options.pop("params", {})
    sections = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage, **zero},
    }
    if optimizer is not None:
        sections["optimizer"] = {"type": optimizer, "params": {**HYPER, **params}}
    return {**sections, **options}


def make_engine(model: nn.Module, settings: dict[str, Any], **given: Any) -> Any:
    """A DeepSpeedEngine of a model; further arguments are those of ``deepspeed.initialize``."""
    bare = {name: tuple(getattr(param, "ds_shape", param.shape)) for name, param in model.named_parameters()}
    given.setdefault("model_parameters", model.parameters())
    engine, *_ = import_deepspeed().initialize(model=model, config=settings, **given)
    engine.bare_shapes = bare
    return engine


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """Decay for matrices, none and another learning rate for the rest."""
    params = list(model.named_parameters())
    matrix = {name: len(getattr(param, "ds_shape", param.shape)) > 1 for name, param in params}
    return [
        {"params": [param for name, param in params if matrix[name]]},
        {"params": [param for name, param in params if not matrix[name]], "weight_decay": 0.0, "lr": 3e-2},
    ]


def gradient_of(shape: Shape, place: int, step: int) -> Tensor:
    """Few enough bits that a multiple of it divided again is itself."""
    return values(shape, 100 * step + place).bfloat16().float()


def taking_gradients(model: nn.Module) -> nn.Module:
    """Makes the model, wherever it is called with gradients by place, give a loss of which these are the gradients."""
    places = {name: place for place, (name, _) in enumerate(model.named_parameters())}
    places_of = {
        module: [places[f"{prefix}.{name}"] for name, _ in module.named_parameters(recurse=False)]
        for prefix, module in model.named_modules()
        if any(True for _ in module.parameters(recurse=False))
    }

    def forward(gradients: list[Tensor]) -> Tensor:
        loss = torch.zeros(())
        for module, of_module in places_of.items():
            loss = module(loss, [gradients[place] for place in of_module])
        return loss

    for module in places_of:
        module.forward = partial(_add_products, module)
    model.forward = forward
    return model


def _add_products(module: nn.Module, loss: Tensor, gradients: list[Tensor]) -> Tensor:
    for param, gradient in zip(module.parameters(recurse=False), gradients, strict=True):
        loss = loss + (param * gradient.to(param.dtype)).float().sum()
    return loss


def step_engine(engine: Any, step: int) -> None:
    """Takes a step with given gradients: one rank, another in each step, has the average times the number of ranks."""
    world_size = dist.get_world_size()
    factor = float(world_size) if dist.get_rank() == step % world_size else 0.0
    micro_steps = engine.gradient_accumulation_steps()
    for micro in range(micro_steps):
        shapes = enumerate(engine.bare_shapes.values())
        given = [factor * gradient_of(shape, place, step * micro_steps + micro) for place, shape in shapes]
        engine.backward(engine(given))
        engine.step()


def step_whole(
    model: nn.Module, optimizer: torch.optim.Optimizer, step: int, *, micro_steps: int = 1, clip: float | None = None
) -> None:
    """Steps as :func:`step_engine` does, without DeepSpeed: by the mean of so many gradients, clipped to a norm."""
    for place, param in enumerate(model.parameters()):
        numbers = range(step * micro_steps, (step + 1) * micro_steps)
        mean = sum(gradient_of(tuple(param.shape), place, number) for number in numbers) / micro_steps
        param.grad = mean.to(param.dtype)
    if clip is not None:
        nn.utils.clip_grad_norm_(model.parameters(), clip)
    optimizer.step()
    optimizer.zero_grad()


def stepped_engine(
    settings: dict[str, Any],
    steps: int,
    model: nn.Module | None = None,
    *,
    seed: int = 0,
    grouped: bool = False,
    **given: Any,
) -> Any:
    """An engine that took some steps with given gradients.

    By default of the tests' model, in the dtype of the tensors that DeepSpeed steps; ``grouped`` asks for the param
    groups of :func:`groups_of`. Further arguments are those of ``deepspeed.initialize``.
    """
    model = taking_gradients(make_net(_stepped_dtype(settings), seed) if model is None else model)
    if grouped:
        given["model_parameters"] = groups_of(model)
    engine = make_engine(model, settings, **given)
    for step in range(steps):
        step_engine(engine, step)
    return engine


def _stepped_dtype(settings: dict[str, Any]) -> torch.dtype:
    return torch.bfloat16 if settings.get("bf16", {}).get("bf16_master_weights_and_grads") else torch.float32


def make_whole(
    settings: dict[str, Any], model: nn.Module | None = None, *, grouped: bool = False
) -> tuple[nn.Module, ShardedOptimizer]:
    """Model and optimizer that a config describes, without DeepSpeed; parameters are the masters.

    Weights are rounded to the dtype that the config's engine computes in.
    """
    model = make_net() if model is None else model
    if settings.get("bf16", {}).get("enabled"):
        model = model.bfloat16()
    model = model.to(_stepped_dtype(settings))
    section = settings.get("optimizer", {"type": "AdamW8bit", "params": HYPER})
    params: Iterable[Any] = groups_of(model) if grouped else model.parameters()
    return model, OPTIMIZERS[section["type"].lower()](params, **section["params"])


def stepped_whole(
    settings: dict[str, Any], steps: int, model: nn.Module | None = None, *, grouped: bool = False
) -> tuple[nn.Module, ShardedOptimizer]:
    """Counterpart of :func:`stepped_engine` without DeepSpeed, by :func:`make_whole`."""
    model, optimizer = make_whole(settings, model, grouped=grouped)
    for step in range(steps):
        step_whole(model, optimizer, step, micro_steps=settings.get("gradient_accumulation_steps", 1))
    return model, optimizer


class Twins(NamedTuple):
    """Makers of a run under DeepSpeed and one without after so many steps, which must have the same bits.

    With ``seed=`` the engine's weights are others.
    """

    engine: Callable[..., Any]
    whole: Callable[[int], tuple[nn.Module, ShardedOptimizer]]


def twins(settings: dict[str, Any], *, grouped: bool = False) -> Twins:
    """The runs of a config with the tests' model."""
    return Twins(partial(stepped_engine, settings, grouped=grouped), partial(stepped_whole, settings, grouped=grouped))


def assert_as_whole(engine: Any, model: nn.Module, optimizer: ShardedOptimizer) -> None:
    """Demands the bits of the run without DeepSpeed: masters, state, weights and Prodigy's estimate."""
    dtype = next(engine.module.parameters()).dtype
    assert_same(engine_snapshot(engine), whole_snapshot(model, optimizer))
    assert_same(model_parameters(engine), {name: p.detach().to(dtype) for name, p in model.named_parameters()})
    estimates = [{group.get("d") for group in each.param_groups} for each in (engine.basic_optimizer, optimizer)]
    assert estimates[0] == estimates[1]


def runs_as_whole(of: Twins) -> None:
    """Demands that both runs have the same bits after some steps."""
    assert_as_whole(of.engine(STEPS), *of.whole(STEPS))


def goes_on_as_whole(engine: Any, of: Twins, more: int = 2) -> None:
    """Demands that an engine is as after ``STEPS`` steps, and stays so in some more."""
    model, optimizer = of.whole(STEPS)
    assert_as_whole(engine, model, optimizer)
    for step in range(STEPS, STEPS + more):
        step_engine(engine, step)
        step_whole(model, optimizer, step)
    assert_as_whole(engine, model, optimizer)


def save(path: Path, of: Twins, own: bool) -> None:
    """Saves DeepSpeed's own checkpoint, or a portable one, after ``STEPS`` steps."""
    if own:
        of.engine(STEPS).save_checkpoint(str(path), client_state={"epoch": 7})
    else:
        shardopt.checkpoint.save(path, of.engine(STEPS), epoch=7)


def load(path: Path, of: Twins, own: bool, steps: int = 1) -> None:
    """Loads what :func:`save` saved into an engine of other weights that took some steps, and goes on."""
    engine = of.engine(steps, seed=1)
    if own:
        tag, extra = engine.load_checkpoint(str(path))
        assert tag is not None
    else:
        loaded = shardopt.checkpoint.load(path, engine)
        extra = loaded.extra
        assert loaded.converted == {}
    assert extra["epoch"] == 7
    goes_on_as_whole(engine, of)


def whole_snapshot(model: nn.Module, optimizer: ShardedOptimizer) -> Snapshot:
    """Counterpart of :func:`engine_snapshot` without DeepSpeed."""
    return snapshot(dict(model.named_parameters()), optimizer)


def masters(engine: Any) -> list[tuple[Tensor, dict[str, Any]]]:
    """The flat tensors that DeepSpeed steps, each with its param group."""
    wrapper, optimizer = engine.optimizer, engine.basic_optimizer
    if hasattr(wrapper, "fp32_partitioned_groups_flat"):
        of = wrapper.sub_group_to_group_id
        return [(flat, optimizer.param_groups[of[i]]) for i, flat in enumerate(wrapper.fp32_partitioned_groups_flat)]
    return [(param, group) for group in optimizer.param_groups for param in group["params"]]


def engine_snapshot(engine: Any) -> Snapshot:
    """Masters and state in full, in the form of :func:`ranks.snapshot.snapshot`; all ranks must call this."""
    optimizer = engine.basic_optimizer
    held = masters(engine)
    if all(assigned(flat) is None for flat, _ in held):  # stage 0: with bf16, other tensors than the model's
        wrapper = engine.optimizer
        master_of = {param: param for param, _ in held}
        if wrapper is not optimizer:
            for of_model, of_optimizer in zip(wrapper.fp16_groups, wrapper.fp32_groups, strict=True):
                master_of.update(zip(of_model, of_optimizer, strict=True))
        return snapshot({name: master_of[param] for name, param in engine.module.named_parameters()}, optimizer)
    pieces: list[tuple[parts.Piece, Mapping[str, Any]]] = []
    for flat, group in held:
        buffer = assigned(flat)
        assert isinstance(buffer, FlatBuffer)
        for index, (name, _, shard, offset, _) in enumerate(buffer.segments):
            piece = parts.Piece(name, shard.global_shape, flat, offset, shard.start, shard.numel, index)
            pieces.append((piece, group))
    return parts.assembled(engine.bare_shapes, optimizer, pieces)


def model_parameters(engine: Any) -> Snapshot:
    """Weights that the model computes with, in full; all ranks must call this."""
    import deepspeed

    params = dict(engine.module.named_parameters())
    with deepspeed.zero.GatheredParameters(list(params.values())):
        return {name: param.detach().clone() for name, param in params.items()}
