"""The plan of a step: the parameters' properties that must be equal on all ranks that exchange data in the step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shardopt.layout import FlatShard, RankGroup
from shardopt.state.encoding import cut_quantized_blocks
from shardopt.state.names import param_name
from shardopt.state.slice_spec import SliceSpec
from shardopt.step.agreement import Line, StepPlan
from shardopt.step.groups import Group
from shardopt.step.inputs import Input, ParamGroups
from shardopt.step.over_all import OverAll


def plan_of(param_groups: ParamGroups, groups: Sequence[Group], inputs: Sequence[Input], *, single: bool) -> StepPlan:
    """Describes, per set of ranks that exchange data in the step, the parameters involved, for the ranks to compare.

    Args:
        param_groups: the optimizer's param groups.
        groups: the options of each param group.
        inputs: the descriptions of all parameters of the step.
        single: whether the step updates a single parameter, during the backward pass. Ranks may update parameters in
            different orders, so that they compare plans only where they exchange data.
    """
    sets: dict[RankGroup, list[Line]] = {}
    summed = (parameter.slices for parameter in inputs if groups[parameter.group].rule.totals)
    over_all = OverAll(slice_.shard.holders_for_sums() for slices in summed for slice_ in slices)
    stepped = set()
    for parameter in inputs:
        options, group = param_groups[parameter.group], groups[parameter.group]
        if parameter.gradient_on_host or options["params"][parameter.position].grad is not None:
            stepped.add(parameter.index)
        for slice_ in parameter.slices:
            for ranks, is_joint in _ranks_of(parameter, slice_, group).items():
                name = param_name(options, parameter.group, parameter.position) if options.get("param_names") else None
                sets.setdefault(ranks, []).append(_line(parameter, slice_, name, group, is_joint))
    return StepPlan(sets, stepped, over_all.refuse, single=single)


def _ranks_of(parameter: Input, slice_: SliceSpec, group: Group) -> dict[RankGroup, bool]:
    """The sets of ranks within which a step exchanges data of a slice, or would exchange data with other options.

    Returns:
        Per set of ranks, whether a gradient must exist on all ranks of the set or on none of them.
    """
    shard, rule = slice_.shard, group.rule
    found = {shard.row_owners: bool(shared_blocks(slice_))}
    if rule.totals:
        counted = shard.holders_for_sums()
        found[counted.ranks if counted else None] = True
    elif rule.sums:
        found[shard.make_part_group()] = True
    if rule.orthogonalized is not None:
        found[shard.make_part_group() or parameter.copies] = True
    return {ranks: is_joint for ranks, is_joint in found.items() if ranks is not None}


def _line(parameter: Input, slice_: SliceSpec, name: str | None, group: Group, is_joint: bool) -> Line:
    shard, rule, orthogonalized = slice_.shard, group.rule, group.rule.orthogonalized
    says: dict[str, Any] = {
        "name": slice_.name or name,
        "shape": list(shard.global_shape),
        "dtype": str(slice_.weights.dtype),
        "rule": rule.name if rule.has_sums else f"{rule.name} without sums",
        **group.table_format,
        "nonfinite='raise'": group.nonfinite == "raise",
    }
    if isinstance(shard, FlatShard):
        says["place in the flat parameter"] = str(shard.partition)
    if orthogonalized is not None:
        scale = orthogonalized.scale(shard.global_shape[0], shard.row_numel) if len(shard.global_shape) > 1 else None
        says["orthogonalization"] = [str(orthogonalized.newton_schulz), scale]
        says["split"] = orthogonalized.split
        says["normalization"] = orthogonalized.row_decay
    is_sized = slice_.has_column_cut_blocks
    is_held = is_sized or 0 not in parameter.shard.local_shape
    known_as = slice_.name or parameter.name
    return Line(parameter.index, parameter.device, known_as, says, is_sized, is_held, is_joint)
