"""Hooks that have torch's own functions for FSDP1 optimizer state carry quantized state, bit for bit.

``FullyShardedDataParallel.optim_state_dict`` gathers flat tensors of the parameters' shapes and of one dtype; scales
have other shapes, and ranks may share blocks. State of shardopt's optimizers is therefore packed when it is saved
(:mod:`shardopt.state.packed`), for any number of ranks. State in torch.optim's format passes unchanged.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FullyShardedDataParallel

from shardopt.layout import all_reduce_any
from shardopt.optim import ShardedOptimizer
from shardopt.optim.loading import HELD_ELEMENTS, PACKED_MOMENTS, packed_moments
from shardopt.report.memory import owner_of
from shardopt.sharding.rank_group import rank_group_of
from shardopt.state.options import is_shardopt
from shardopt.state.packed import is_packed, pack, words_per_element
from shardopt.state.slice_spec import ROW_MOMENTS
from shardopt.state.tensor_spec import TensorSpec
from shardopt.state.warn import warn_user


def hook_fsdp1(module: Any) -> None:
    """Wraps FSDP1's functions that save and load optimizer state: packs saved state, refuses unpacked state to load.

    A PyTorch version without these private functions is left alone: state is then neither packed nor refused.
    """
    fsdp = module.FullyShardedDataParallel
    save = getattr(fsdp, "_optim_state_dict_impl", None)
    load = getattr(fsdp, "_optim_state_dict_to_load_impl", None)
    if save is None or load is None:
        return

    saving, loading = inspect.signature(save), inspect.signature(load)

    @functools.wraps(save)
    def _optim_state_dict_impl(*args: Any, **kwargs: Any) -> Any:
        call = saving.bind(*args, **kwargs)
        arguments = call.arguments
        _check_row_moments(arguments["optim_state_dict"], arguments["optim"])
        if _is_from_shardopt(arguments["optim_state_dict"]):
            owner = owner_of(arguments["optim"])
            if isinstance(owner, ShardedOptimizer):
                arguments["optim_state_dict"] = _pack_state_dict(owner, arguments["optim_state_dict"])
            devices = {unit.compute_device for unit in FullyShardedDataParallel.fsdp_modules(arguments["model"])}
            if "cpu_offload" in saving.parameters and torch.device("cpu") in devices:
                arguments["cpu_offload"] = False  # else torch returns one buffer for all entries instead of copies
        return save(*call.args, **call.kwargs)

    @functools.wraps(load)
    def _optim_state_dict_to_load_impl(*args: Any, **kwargs: Any) -> Any:
        call = loading.bind(*args, **kwargs)
        arguments = call.arguments
        saved, rank0_only = arguments["optim_state_dict"], arguments.get("rank0_only", False)
        _check_loading(arguments.get("optim"), saved, rank0_only, lambda: arguments.get("group"))
        groups = (saved or {}).get("param_groups")
        if groups:  # torch leaves names in their order, but renumbers parameters
            unnamed = [{key: x for key, x in group.items() if key != "param_names"} for group in groups]
            arguments["optim_state_dict"] = {**saved, "param_groups": unnamed}
        return load(*call.args, **call.kwargs)

    fsdp._optim_state_dict_impl = staticmethod(_optim_state_dict_impl)
    fsdp._optim_state_dict_to_load_impl = staticmethod(_optim_state_dict_to_load_impl)


def hook_state_dict(module: Any) -> None:
    """Wraps functions of ``torch.distributed.checkpoint.state_dict``: refuses unsupported state before torch steps.

    To create state, torch steps an optimizer that has none. If torch lacks these functions, FSDP's refuse it: too late.
    """
    save, load = getattr(module, "_get_optim_state_dict", None), getattr(module, "_load_optim_state_dict", None)
    if save is None or load is None:
        return
    group_of = getattr(module, "_get_fsdp_process_group", lambda model, info: None)

    @functools.wraps(save)
    def _get_optim_state_dict(model: Any, optimizers: Any, info: Any) -> Any:
        for optimizer in optimizers:
            _drop_empty_entries(optimizer)
            if info.flatten_optimizer_state_dict and _has_flat_shards(optimizer):
                raise RuntimeError(
                    "got flatten_optimizer_state_dict=True for shardopt's state under FSDP1, expected False, as torch "
                    "could not load it again: it looks for the optimizer's entries, and they are packed; leave the "
                    "option out"
                )
        return save(model, optimizers, info)

    @functools.wraps(load)
    def _load_optim_state_dict(model: Any, optimizers: Any, state_dict: Any, info: Any) -> Any:
        rank0_only = info.full_state_dict and (info.cpu_offload or info.broadcast_from_rank0)
        for optimizer in optimizers:
            _check_loading(optimizer, state_dict, rank0_only, lambda: group_of(model, info))
            _drop_empty_entries(optimizer)
            _warn_of_frozen(optimizer, state_dict, info)
        return load(model, optimizers, state_dict, info)

    module._get_optim_state_dict = _get_optim_state_dict
    module._load_optim_state_dict = _load_optim_state_dict


def _drop_empty_entries(optimizer: Any) -> None:
    """Deletes the empty entries that reading ``optimizer.state[param]`` makes: torch would take them for state."""
    if isinstance(optimizer, ShardedOptimizer):
        for param in [param for param, entries in optimizer.state.items() if entries == {}]:
            del optimizer.state[param]


def _warn_of_frozen(optimizer: Any, state_dict: Mapping[str, Any] | None, info: Any) -> None:
    """Warns that torch does not load the saved state of parameters that are frozen now."""
    if not isinstance(owner_of(optimizer), ShardedOptimizer):
        return
    state_dict, names_of = state_dict or {}, getattr(info, "fqn_param_mapping", {})
    # Flattened by torch, the state has the keys state.<name>.<entry>.
    flattened = {key.removeprefix("state.").rpartition(".")[0] for key in state_dict}
    saved = state_dict.get("state", flattened)
    frozen = [param for group in optimizer.param_groups for param in group["params"] if not param.requires_grad]
    lost = sorted(name for param in frozen for name in names_of.get(param, ()) if name in saved)
    if lost:
        warn_user(
            f"got saved state of {', '.join(lost[:4])}, which requires no gradient: torch's set_optimizer_state_dict "
            "leaves it out; set requires_grad before loading, or use shardopt.checkpoint",
            UserWarning,
        )


def _pack_state_dict(optimizer: ShardedOptimizer, state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of the optimizer's state dict in which the state of FSDP1's parameters is packed, for any number of ranks.

    Param groups get ``packed_moments`` in place of this rank's ``held_elements``. Without any state, trainable
    parameters get initial state: torch.distributed.checkpoint loads into the tensors of an existing state dict.
    """
    specs = _flattened_specs(optimizer)
    words = words_per_element(spec for _, spec in specs.values())
    unpacked = state_dict["state"]
    state = dict(unpacked)
    for index, (param, spec) in specs.items():
        if not unpacked and param.requires_grad:
            state[index] = pack(spec, spec.new_state(param.device), words)
        elif unpacked.get(index):
            state[index] = pack(spec, unpacked[index], words)
    groups = [{key: x for key, x in group.items() if key != HELD_ELEMENTS} for group in state_dict["param_groups"]]
    for saved, group in zip(groups, optimizer.param_groups, strict=True):
        saved[PACKED_MOMENTS] = packed_moments(optimizer._internals.state_of(param, group) for param in group["params"])
    return {**state_dict, "state": state, "param_groups": groups}


def _flattened_specs(optimizer: ShardedOptimizer) -> dict[int, tuple[Tensor, TensorSpec]]:
    """An optimizer's parameters of FSDP1 and the descriptions of their state, by their indices in state dicts."""
    listed = [(param, group) for group in optimizer.param_groups for param in group["params"]]
    return {
        index: (param, optimizer._internals.state_of(param, group))
        for index, (param, group) in enumerate(listed)
        if _is_flattened(param)
    }


def _check_row_moments(state_dict: Mapping[str, Any], optimizer: Any) -> None:
    """Raises RuntimeError on every rank if dequantized state of FSDP1's parameters has second moments of rows."""
    owner = owner_of(optimizer)
    if _is_from_shardopt(state_dict) or not isinstance(owner, ShardedOptimizer):
        return
    if any(ROW_MOMENTS in spec.entries for _, spec in _flattened_specs(owner).values()):
        raise RuntimeError(
            f"got dequantized state with {ROW_MOMENTS} for torch's optim_state_dict of FSDP1, which carries state of "
            "the parameters' shapes only, expected the optimizer's own state, which is packed; leave dequantize out"
        )


def _check_loading(optimizer: Any, state_dict: Any, rank0_only: bool, group: Callable[[], Any]) -> None:
    """Raises on every rank, before any change, if torch is to shard shardopt's state for FSDP1 and it is not packed.

    ``optimizer`` is None if torch does not know it. With ``rank0_only`` torch uses the state dict of rank 0 of the
    ranks that ``group`` returns.
    """
    if optimizer is not None and not _has_flat_shards(optimizer):
        return
    is_refused = False
    if _is_from_shardopt(state_dict):  # torch can shard it if it is packed, or has step counts only
        states = [entries for entries in state_dict.get("state", {}).values() if isinstance(entries, Mapping)]
        has_steps_only = all(key == "step" for entries in states for key in entries)
        is_refused = "state" not in state_dict or not (has_steps_only or any(map(is_packed, states)))
    if rank0_only:  # other ranks would wait for rank 0
        ranks = rank_group_of(group())
        is_refused = all_reduce_any([ranks], ranks.rank == 0 and is_refused)
    if is_refused:
        raise RuntimeError(
            "got shardopt's state in codes and scales for torch's optim_state_dict_to_load of FSDP1, which cuts state "
            "of the parameters' shapes only, expected what optim_state_dict gave under FSDP1, not flattened, or "
            "shardopt.checkpoint.load(path, model, optimizer) of a checkpoint that shardopt.checkpoint.save wrote"
        )


def _has_flat_shards(optimizer: Any) -> bool:
    """Whether an optimizer is shardopt's, or a wrapper of one, and has parameters that FSDP1 flattened."""
    return any(is_shardopt(group) and any(map(_is_flattened, group["params"])) for group in optimizer.param_groups)


def _is_from_shardopt(state_dict: Mapping[str, Any] | None) -> bool:
    """Whether a state dict, perhaps flattened by torch, is shardopt's own: not of ``state_dict(dequantize=True)``."""
    state_dict = state_dict or {}
    if "param_groups" in state_dict:
        return any(is_shardopt(group) for group in state_dict["param_groups"])
    options = {key.rpartition(".")[2] for key in state_dict if key.startswith("param_groups.")}
    return is_shardopt(options)


def _is_flattened(param: Tensor) -> bool:
    """Whether FSDP1 has flattened a parameter."""
    return getattr(param, "_fsdp_flattened", False)
