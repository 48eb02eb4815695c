"""FullyShardedDataParallel (FSDP1): every FSDP unit's parameters are flattened together and cut into equal ranges.

Reads the private metadata of ``FlatParamHandle`` (torch/distributed/fsdp/_flat_param.py) when an optimizer first needs
a shard, and compares the shards with FSDP's own account. The constructor of ``FullyShardedDataParallel`` is hooked:
parameters remember the outermost module that was wrapped, which gives their names and numbers.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from types import ModuleType
from typing import Any

import torch
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn import Module

from shardopt.layout import FlatBuffer, FlatShard, Segment, Shard, UnknownShardError, assign
from shardopt.layout.names import canonical_modules
from shardopt.layout.partition import rank_spacing
from shardopt.layout.shard import assign_later
from shardopt.optim.stable_embedding import StableEmbedding
from shardopt.sharding.rank_group import TorchRankGroup

#: A parameter before FSDP1 flattened it: its index in the model, and its full name.
_Original = tuple[int, str]


def install(module: ModuleType) -> None:
    """Hooks FSDP1's constructor, so that parameters find the wrapped model once a step needs their shards."""
    wrap = module.FullyShardedDataParallel.__init__

    @functools.wraps(wrap)
    def __init__(self: Module, *args: Any, **kwargs: Any) -> None:
        wrap(self, *args, **kwargs)
        flattened = [param for param in self.parameters() if getattr(param, "_fsdp_flattened", False)]
        assign_later(flattened, functools.partial(_read_if_alive, weakref.ref(self)))

    module.FullyShardedDataParallel.__init__ = __init__


def _read_if_alive(reference: weakref.ref[Module]) -> None:
    """Assigns shards to a model's parameters. The reference is weak: parameters must not keep their model alive."""
    if (model := reference()) is not None:
        read_fsdp1(model)


def read_fsdp1(model: Module) -> None:
    """Assigns shards to the parameters of all FSDP units in a model, which may be one itself.

    Raises UnknownShardError if parameters are DTensors or not contiguous, or metadata differ from FSDP's account.
    """
    units = [m for m in model.modules() if isinstance(m, FullyShardedDataParallel) and m._handle is not None]
    if not units:
        return
    originals = _originals(model, [unit._handle for unit in units])
    prefixes: dict[int, list[str]] = {}
    for prefix, module in canonical_modules(model, all_names=True):
        prefixes.setdefault(id(module), []).append(prefix)
    for unit in units:
        handle: Any = unit._handle
        of_unit = [originals[id(module), name] for name, module, _ in handle.flat_param._param_infos]
        _check_unit(handle, of_unit)
        shards = _shards_of_unit(unit)
        if handle._use_orig_params:
            for param, shape, shard in zip(handle.flat_param._params, handle.flat_param._shapes, shards, strict=True):
                # With NO_SHARD, parameters are ordinary tensors of their shapes.
                assign(param, shard if handle.uses_sharded_strategy else Shard(tuple(shape)))
        else:
            assign(handle.flat_param, _flat_buffer(handle, of_unit, shards, prefixes))


def _originals(model: Module, handles: list[Any]) -> dict[tuple[int, str], _Original]:
    """The parameters of the model before FSDP1 flattened some, by ``(id(module), name in the module)``."""
    flattened: dict[int, list[str]] = {}
    for handle in handles:
        for name, module, _ in handle.flat_param._param_infos:
            flattened.setdefault(id(module), []).append(name)
    flat_params = {id(handle.flat_param) for handle in handles}
    originals: dict[tuple[int, str], _Original] = {}
    for prefix, module in canonical_modules(model):
        params = module._parameters.items()
        others = [name for name, param in params if param is not None and id(param) not in flat_params]
        # With use_orig_params, flattened parameters are among the module's parameters, too.
        for name in dict.fromkeys([*others, *flattened.get(id(module), [])]):
            originals[id(module), name] = len(originals), prefix + name
    return originals


def _check_unit(handle: Any, originals: list[_Original]) -> None:
    """Raises UnknownShardError if FSDP1 flattened DTensors, or tensors that were not contiguous."""
    flat = handle.flat_param
    if any(extension is not None for extension in flat._param_extensions):
        raise UnknownShardError(
            f"got FSDP1 around {', '.join(name for _, name in originals)}, whose parameters are DTensors, expected "
            "plain parameters; use fully_shard (FSDP2) with tensor parallel"
        )
    for (_, name), shape, strides in zip(originals, flat._shapes, flat._strides, strict=True):
        if not torch.empty_strided(shape, strides, device="meta").is_contiguous():
            raise UnknownShardError(
                f"got {name} {tuple(shape)} with strides {tuple(strides)} when FSDP1 flattened it, expected a "
                "contiguous tensor, as FSDP1 keeps the order of memory; wrap the model before it is made channels_last"
            )


def _flat_buffer(
    handle: Any, originals: list[_Original], shards: list[FlatShard], prefixes: dict[int, list[str]]
) -> FlatBuffer:
    """A unit's flat parameter (``use_orig_params=False``); ``prefixes`` has those of parameters' names by module id."""
    flat = handle.flat_param
    segments = []
    for (number, name), shard, owners in zip(originals, shards, _owners(flat), strict=True):
        if any(isinstance(module, StableEmbedding) and key == "weight" for module, key in owners):
            shard = shard.with_float32_state()
        names = [prefix + key for module, key in owners for prefix in prefixes[id(module)]]
        aliases = tuple(other for other in names if other != name)
        segments.append(Segment(name, number, shard, shard.buffer_offset, aliases))
    return FlatBuffer(flat._sharded_size.numel() if handle.uses_sharded_strategy else flat.numel(), segments)


def _owners(flat: Any) -> list[list[tuple[Module, str]]]:
    """For each original parameter, all pairs of a module and the parameter's name in the module: several if shared."""
    owners = {(id(module), name): [(module, name)] for name, module, _ in flat._param_infos}
    for name, module, _, first_name, first_module, _ in flat._shared_param_infos:
        of_param = owners[id(first_module), first_name]
        if (module, name) not in of_param:
            of_param.append((module, name))
    return list(owners.values())


def _replicas(unit: Any) -> TorchRankGroup | None:
    """The ranks with copies of this shard under HYBRID_SHARD; None without copies or if ranks are not evenly spaced."""
    across_nodes, handle = getattr(unit, "_inter_node_pg", None), unit._handle
    if across_nodes is None or not handle.uses_sharded_strategy or across_nodes.size() == 1:
        return None
    replicas, shards = (TorchRankGroup((group,), handle.device) for group in (across_nodes, handle.process_group))
    # FlatShard.holders_for_sums computes the other shards' copies from the distances between ranks.
    if any(rank_spacing(group.global_ranks, len(group.global_ranks)) is None for group in (replicas, shards)):
        return None
    return replicas


def _shards_of_unit(unit: Any) -> list[FlatShard]:
    """The shards of an FSDP unit's original parameters, checked against FSDP's own account of this rank's shard."""
    handle = unit._handle
    flat = handle.flat_param
    if not handle.uses_sharded_strategy:
        whole = zip(flat._shapes, _offsets(flat), strict=True)
        return [FlatShard(tuple(shape), first, flat.numel()) for shape, first in whole]
    size, replicas = flat._sharded_size.numel(), _replicas(unit)
    ranks = TorchRankGroup((handle.process_group,), handle.device)
    shards = []
    for first, shape, info in zip(_offsets(flat), flat._shapes, flat._shard_param_infos, strict=True):
        shard = FlatShard(tuple(shape), first, size, ranks)
        shard.replicas = replicas
        known = (info.intra_param_start_idx, info.intra_param_end_idx + 1) if info.in_shard else (0, 0)
        expected = (shard.start, shard.end) if shard.numel else (0, 0)
        if known != expected:
            raise UnknownShardError(
                f"got an FSDP1 shard with elements {known} of a parameter of shape {tuple(shape)}, expected "
                f"{expected}; PyTorch {torch.__version__} shards in a way that shardopt does not know"
            )
        shards.append(shard)
    return shards


def _offsets(flat: Any) -> list[int]:
    """The offsets of the original parameters in the unsharded flat parameter, which contains padding."""
    offsets = [0, *itertools.accumulate(flat._numels_with_padding)]
    return [offset for offset, is_padding in zip(offsets, flat._is_padding_mask, strict=False) if not is_padding]
