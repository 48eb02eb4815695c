"""ZeroRedundancyOptimizer: three of its methods are hooked into.

Stochastic rounding depends on a parameter's number among all parameters, which the optimizer inside does not see: it is
told where that optimizer is made, and in ``add_param_group``. ``load_state_dict`` puts entries straight into the state
of the optimizer inside: they are checked before.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from shardopt.optim import ShardedOptimizer
from shardopt.optim.planning import listed_name
from shardopt.optim.state import ParameterState


def install(module: ModuleType) -> None:
    """Hooks into ``torch.distributed.optim.zero_redundancy_optimizer``."""
    optimizer_class = module.ZeroRedundancyOptimizer
    make, add = optimizer_class._init_local_optimizer, optimizer_class.add_param_group
    load = optimizer_class.load_state_dict

    def _init_local_optimizer(self: Any) -> None:
        make(self)
        _tell_places(self)

    def add_param_group(self: Any, param_group: dict[str, Any]) -> None:
        add(self, param_group)
        _tell_places(self)

    def load_state_dict(self: Any, state_dict: dict[str, Any]) -> None:
        _check_entries(self, state_dict)
        load(self, state_dict)

    optimizer_class._init_local_optimizer = _init_local_optimizer
    optimizer_class.add_param_group = add_param_group
    optimizer_class.load_state_dict = load_state_dict


def _tell_places(outer: Any) -> None:
    inner = getattr(outer, "optim", None)  # not there yet while the first param groups are added
    if isinstance(inner, ShardedOptimizer):
        params = [param for group in outer.param_groups for param in group["params"]]
        inner.numbers.update((param, number) for number, param in enumerate(params))


def _check_entries(outer: Any, state_dict: dict[str, Any]) -> None:
    """Checks the state of all parameters: each rank is given all of it, so that every rank refuses what is damaged.

    Raises:
        ValueError: see :meth:`StateSpec.check_loaded` and :meth:`StateSpec.check_local`.
    """
    inner = getattr(outer, "optim", None)
    if not isinstance(inner, ShardedOptimizer):
        return
    of_torch = all("master_weight_bits" not in group for group in state_dict["param_groups"])
    index = 0
    for number, group in enumerate(outer.param_groups):
        for position, param in enumerate(group["params"]):
            entries = state_dict["state"].get(index)
            index += 1
            if not entries:
                continue
            spec, name = inner.state_spec(param, group), listed_name(group, number, position)
            spec.check_loaded(entries, name, of_torch=of_torch)
            is_coded = isinstance(spec, ParameterState) and all(spec.codes_name(m) in entries for m in spec.moments)
            if is_coded:  # anything else the next step refuses
                spec.check_local(entries, name)
