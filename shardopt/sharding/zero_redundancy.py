"""Hooks into three methods of ZeroRedundancyOptimizer, whose inner optimizer on each rank steps some parameters only.

The inner optimizer gets the parameters' indices in the model, which seed stochastic rounding, and the ranks that step
the other parameters, for sums. ``param_names`` are dropped: each rank has another order. Loaded state is checked.
"""

from __future__ import annotations

import itertools
from types import ModuleType
from typing import Any

from shardopt.optim import ShardedOptimizer
from shardopt.optim.loading import as_value_error, checked_containers, checked_entries, merged_groups, reorder_groups
from shardopt.sharding.rank_group import TorchRankGroup
from shardopt.state.names import param_name


def install(module: ModuleType) -> None:
    """Hooks into ``torch.distributed.optim.zero_redundancy_optimizer``."""
    optimizer_class = module.ZeroRedundancyOptimizer
    make, add = optimizer_class._init_local_optimizer, optimizer_class.add_param_group
    load = optimizer_class.load_state_dict

    def _init_local_optimizer(self: Any) -> None:
        make(self)
        _set_indices_and_peers(self)

    def add_param_group(self: Any, param_group: dict[str, Any]) -> None:
        if isinstance(getattr(self, "optim", None), ShardedOptimizer):
            param_group.pop("param_names", None)
        add(self, param_group)
        _set_indices_and_peers(self)

    def load_state_dict(self: Any, state_dict: dict[str, Any]) -> None:
        load(self, _check_state_dict(self, state_dict))

    optimizer_class._init_local_optimizer = _init_local_optimizer
    optimizer_class.add_param_group = add_param_group
    optimizer_class.load_state_dict = load_state_dict


def _set_indices_and_peers(outer: Any) -> None:
    """Gives the inner optimizer all parameters' indices and the ranks that step them; drops ``param_names``."""
    inner = getattr(outer, "optim", None)  # None while the first param groups are added
    if isinstance(inner, ShardedOptimizer):
        for group in (*outer.param_groups, *inner.param_groups):
            group.pop("param_names", None)
        params = [param for group in outer.param_groups for param in group["params"]]
        inner._internals.model_indices.update((param, number) for number, param in enumerate(params))
        inner._internals.peers = TorchRankGroup((outer.process_group,), outer._default_device)


def _check_state_dict(outer: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Checks a state dict with all ranks' parameters; returns it with parameters in this optimizer's order.

    Raises ValueError if param groups are not for this optimizer or out of range, or entries do not fit or are damaged.
    """
    inner = getattr(outer, "optim", None)
    if not isinstance(inner, ShardedOptimizer):
        return state_dict
    saved, states = checked_containers(state_dict)
    saved = reorder_groups(saved, outer.param_groups)
    groups = merged_groups(inner, outer.param_groups, saved)
    may_lack_low_bits = all("master_weight_bits" not in group for group in saved)
    param_index = itertools.count()  # by which the state dict lists the state
    for number, (group, options) in enumerate(zip(outer.param_groups, groups, strict=True)):
        for position, param in enumerate(group["params"]):
            spec, name = inner._internals.state_of(param, options), param_name(group, number, position)
            entries = checked_entries(states.get(next(param_index)), name)
            if not entries:
                continue
            with as_value_error(name):
                spec.check_loaded(entries, name, may_lack_low_bits=may_lack_low_bits)
                if not spec.has_float_moments(entries):  # check_loaded has checked floats
                    spec.check_values(entries, name)
    return {**state_dict, "param_groups": saved}
