"""DeepSpeed's checkpoints: views of the state for DeepSpeed's tools, and loading of universal checkpoints.

An engine saves codes and scales as :class:`MomentView`, and loads them bit for bit on an unchanged number of ranks.
DeepSpeed's ``ds_to_universal`` makes whole float32 moments of these views. When DeepSpeed loads a universal checkpoint,
of any optimizer, it puts this rank's ranges of moments into the optimizer's state, where they are quantized at once.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from shardopt.layout import FlatBuffer
from shardopt.optim import ShardedOptimizer
from shardopt.optim.loading import HELD
from shardopt.sharding.deepspeed.moment_view import SavedBuffer, SavedState, native
from shardopt.state.agreement import agreeing, on_any_rank
from shardopt.state.options import STATE_FORMAT
from shardopt.state.slice_spec import StateDict

#: The moments in a universal checkpoint.
_MOMENTS = ("exp_avg", "exp_avg_sq")


def read_natively(optimizer: ShardedOptimizer) -> None:
    """Has an optimizer load its own state from a :class:`SavedState`."""
    optimizer.register_load_state_dict_pre_hook(_natively)


@contextmanager
def saving(engine: Any) -> Iterator[None]:
    """Inside, the optimizer's state dict shows its moments as float32 tensors."""
    hook = engine.basic_optimizer.register_state_dict_post_hook(_with_views)
    try:
        yield
    finally:
        hook.remove()


@contextmanager
def loading_universal(engine: Any, folder: str) -> Iterator[None]:
    """Inside, DeepSpeed loads a universal checkpoint; afterwards its moments are quantized and no float32 is left.

    The engine's options of the state's format (codec, block size) stay; the other options of the param groups are the
    checkpoint's.

    Args:
        engine: the DeepSpeedEngine.
        folder: the checkpoint.

    Raises:
        ValueError: the checkpoint is of another optimizer or of other param groups: nothing was changed. Or the state
            of single parameters is not Adam's: parameters may have been loaded.
    """
    optimizer: ShardedOptimizer = engine.basic_optimizer
    saved_groups = _saved_groups(engine, folder)
    state_before, groups_before = dict(optimizer.state), [dict(group) for group in optimizer.param_groups]
    optimizer.state.clear()
    try:
        yield
        loaded = dict(optimizer.state)
        optimizer.state.clear()
        _put_back(optimizer, groups_before)
        if loaded:
            with stepped_groups(engine) as params:
                groups = [
                    {key: value for key, value in group.items() if key not in (*STATE_FORMAT, HELD, "params")}
                    for group in saved_groups
                ]
                optimizer.load_state_dict(_as_torch(params, loaded, groups))
        else:
            optimizer.state.update(state_before)
    except BaseException:
        optimizer.state.clear()
        optimizer.state.update(state_before)
        _put_back(optimizer, groups_before)
        raise
    finally:
        for param in engine.module.parameters():
            mapping = getattr(param, "_hp_mapping", None)
            if mapping is not None:
                mapping.optim_fragment = None  # would keep float32 moments alive


@contextmanager
def stepped_groups(engine: Any) -> Iterator[list[list[Tensor]]]:
    """The tensors that the optimizer steps, by param group. Outside of steps, ZeRO 3 hides them unless inside here."""
    wrapper = engine.optimizer
    hidden = hasattr(wrapper, "_set_fp32_optimizer_param_groups")
    if hidden:
        wrapper._set_fp32_optimizer_param_groups()
    try:
        yield [group["params"] for group in engine.basic_optimizer.param_groups]
    finally:
        if hidden:
            wrapper._clear_fp32_optimizer_param_groups()


def _natively(optimizer: Optimizer, state_dict: StateDict) -> StateDict:
    """A load-state-dict pre-hook."""
    return {**state_dict, "state": {index: native(entries) for index, entries in state_dict["state"].items()}}


def _with_views(optimizer: Optimizer, state_dict: StateDict) -> StateDict:
    """A state-dict post-hook."""
    assert isinstance(optimizer, ShardedOptimizer)
    state = dict(state_dict["state"])
    params = [(group, param) for group in optimizer.param_groups for param in group["params"]]
    for index, (group, param) in enumerate(params):
        spec = optimizer._internals.state_of(param, group)
        if index in state and isinstance(spec.shard, FlatBuffer) and spec.moments:
            state[index] = SavedState.of(SavedBuffer.of(spec, group, state[index]))
    return {**state_dict, "state": state}


def _saved_groups(engine: Any, folder: str) -> list[dict[str, Any]]:
    """The param groups of a universal checkpoint, after all checks that are possible before loading."""
    optimizer: ShardedOptimizer = engine.basic_optimizer
    for index, group in enumerate(optimizer.param_groups):
        moments = tuple(moment.name for moment in optimizer.rule(group).moments)
        if moments != _MOMENTS:
            raise ValueError(
                f"param group {index}: got {type(optimizer).__name__} with {', '.join(moments) or 'no moments'} for a "
                f"universal checkpoint, expected an optimizer with {', '.join(_MOMENTS)}; use Adam8bit or AdamW8bit, "
                "or shardopt.checkpoint"
            )
    with stepped_groups(engine) as params:
        for group, group_params in zip(optimizer.param_groups, params, strict=True):
            if any(optimizer._internals.state_of(param, group).weights.low_bits for param in group_params):
                raise ValueError(
                    f"got master_weight_bits={group['master_weight_bits']} for a universal checkpoint, which has no "
                    "place for low bits, expected DeepSpeed's float32 masters; leave bf16_master_weights_and_grads "
                    "out, or use shardopt.checkpoint"
                )
    path = os.path.join(folder, "zero", "optimizer_state.pt")
    # The file has DeepSpeed's objects, and DeepSpeed unpickles it next: the user must trust it anyway.
    saved: list[dict[str, Any]] = torch.load(path, map_location="cpu", mmap=True, weights_only=False)["param_groups"]
    if len(saved) != len(optimizer.param_groups):
        raise ValueError(
            f"{path}: got {len(saved)} param groups, expected {len(optimizer.param_groups)}; give the engine the "
            "groups that were saved"
        )
    return saved


def _put_back(optimizer: ShardedOptimizer, groups: list[dict[str, Any]]) -> None:
    """Gives the param groups their former options."""
    for group, before in zip(optimizer.param_groups, groups, strict=True):
        params = group["params"]
        group.clear()
        group.update({**before, "params": params})


def _as_torch(
    params: list[list[Tensor]],
    loaded: Mapping[Tensor, Mapping[str, Any]],
    groups: list[dict[str, Any]],
) -> StateDict:
    """torch.optim's state dict of the state that DeepSpeed loaded.

    Raises:
        ValueError: some parameter's state is not Adam's, on any rank.
    """
    flats = [param for group_params in params for param in group_params]
    wrong = [index for index, flat in enumerate(flats) if loaded.get(flat, {}).keys() != {"step", *_MOMENTS}]
    if on_any_rank(agreeing(flats), bool(wrong)):  # all ranks must know, as they would wait for one that gives up
        index = wrong[0] if wrong else None
        got = "another rank's state" if index is None else ", ".join(sorted(loaded.get(flats[index], {}))) or "nothing"
        raise ValueError(
            f"flat parameter {index}: got {got} in the universal checkpoint, expected step, {', '.join(_MOMENTS)}; "
            "save the state of Adam or AdamW after its first step"
        )
    numbers = iter(range(len(flats)))
    return {
        "state": {index: loaded[flat] for index, flat in enumerate(flats)},
        "param_groups": [
            {**group, "params": [next(numbers) for _ in group_params]}
            for group, group_params in zip(groups, params, strict=True)
        ],
    }
