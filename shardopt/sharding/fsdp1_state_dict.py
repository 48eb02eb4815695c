"""Hooks by which torch's own gathering of optimizer state under FSDP1 refuses codes and scales, which it cannot carry.

``FullyShardedDataParallel.optim_state_dict`` puts state together from flat tensors of the parameters' shapes and of one
dtype; scales have other shapes, and blocks may be cut. torch.optim's state passes in both directions:
``state_dict(dequantize=True)``, and state that torch's own optimizer saved.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist

from shardopt.report.memory import owner_of
from shardopt.state.options import is_own
from shardopt.wrapper.loading import is_quantized
from shardopt.wrapper.optimizer import QuantizedState


def hook_fsdp1(module: Any) -> None:
    """Hooks into the two functions of ``torch.distributed.fsdp`` by which all optimizer state is converted.

    In a version without these functions the state is not refused.
    """
    fsdp = module.FullyShardedDataParallel
    save = getattr(fsdp, "_optim_state_dict_impl", None)
    load = getattr(fsdp, "_optim_state_dict_to_load_impl", None)
    if save is None or load is None:
        return

    @functools.wraps(save)
    def _optim_state_dict_impl(model: Any, optim: Any, optim_state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        if _is_ours(optim_state_dict):
            _refuse_saving(optim)
        return save(model, optim, optim_state_dict, *args, **kwargs)

    parameters = inspect.signature(load)

    @functools.wraps(load)
    def _optim_state_dict_to_load_impl(*args: Any, **kwargs: Any) -> Any:
        given = parameters.bind(*args, **kwargs).arguments
        rank0_only = given.get("rank0_only", False)
        _refuse_loading(given.get("optim"), given["optim_state_dict"], rank0_only, lambda: given.get("group"))
        return load(*args, **kwargs)

    fsdp._optim_state_dict_impl = staticmethod(_optim_state_dict_impl)
    fsdp._optim_state_dict_to_load_impl = staticmethod(_optim_state_dict_to_load_impl)


def hook_state_dict(module: Any) -> None:
    """Hooks into ``torch.distributed.checkpoint.state_dict``, which steps an optimizer without state, then asks FSDP.

    In a version without the two functions the step is taken, and only FSDP's functions refuse.
    """
    save, load = getattr(module, "_get_optim_state_dict", None), getattr(module, "_load_optim_state_dict", None)
    if save is None or load is None:
        return
    group_of = getattr(module, "_get_fsdp_process_group", lambda model, info: None)

    @functools.wraps(save)
    def _get_optim_state_dict(model: Any, optimizers: Any, info: Any) -> Any:
        for optimizer in optimizers:
            _refuse_saving(optimizer)
        return save(model, optimizers, info)

    @functools.wraps(load)
    def _load_optim_state_dict(model: Any, optimizers: Any, state_dict: Any, info: Any) -> Any:
        rank0_only = info.full_state_dict and (info.cpu_offload or info.broadcast_from_rank0)
        for optimizer in optimizers:
            _refuse_loading(optimizer, state_dict, rank0_only, lambda: group_of(model, info))
        return load(model, optimizers, state_dict, info)

    module._get_optim_state_dict = _get_optim_state_dict
    module._load_optim_state_dict = _load_optim_state_dict


def _refuse_saving(optimizer: Any) -> None:
    """Raises on every rank if an optimizer of ours has parameters of FSDP1. Nothing was changed."""
    if _has_flat_shards(optimizer):
        raise RuntimeError(
            "got an optimizer of shardopt for torch's optim_state_dict of FSDP1, which carries state of the "
            "parameters' shapes only, expected shardopt.checkpoint.save(path, model, optimizer); in Hugging Face's "
            "Trainer use FSDP2, whose state torch carries, or save_only_model=True and a callback that calls "
            "shardopt.checkpoint.save"
        )


def _refuse_loading(optimizer: Any, state_dict: Any, rank0_only: bool, group: Callable[[], Any]) -> None:
    """Raises on every rank if torch is to cut shardopt's state for FSDP1. Nothing was changed.

    Args:
        optimizer: the optimizer that is to load the state; None if torch does not know it.
        state_dict: the whole state.
        rank0_only: whether only the state of the group's rank 0 counts.
        group: returns the ranks among which torch shares the state; called only if needed.
    """
    if optimizer is not None and not _has_flat_shards(optimizer):
        return
    is_ours = [_is_ours(state_dict)]
    if rank0_only:  # other ranks would wait for rank 0
        dist.broadcast_object_list(is_ours, group=group(), group_src=0)
    if is_ours[0]:
        raise RuntimeError(
            "got shardopt's state for torch's optim_state_dict_to_load of FSDP1, which cuts state of the parameters' "
            "shapes only, expected shardopt.checkpoint.load(path, model, optimizer) of a checkpoint that "
            "shardopt.checkpoint.save wrote"
        )


def _has_flat_shards(optimizer: Any) -> bool:
    """Whether an optimizer is one of ours, or a wrapper of one, and has parameters of FSDP1."""
    is_wrapped = isinstance(owner_of(optimizer), QuantizedState)
    return any(
        (is_wrapped or is_own(group)) and any(getattr(param, "_fsdp_flattened", False) for param in group["params"])
        for group in optimizer.param_groups
    )


def _is_ours(state_dict: Mapping[str, Any] | None) -> bool:
    """Whether a state dict, maybe flattened by torch (``param_groups.<name>.<option>``), is of shardopt."""
    state_dict = state_dict or {}
    if "param_groups" in state_dict:
        return any(is_own(group) or is_quantized(group) for group in state_dict["param_groups"])
    options = {key.rpartition(".")[2] for key in state_dict if key.startswith("param_groups.")}
    return is_own(options) or is_quantized(options)
