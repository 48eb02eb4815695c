"""The plan of a step: the parameters' properties that must be equal on all ranks that exchange data in the step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from shardopt.layout import FlatShard, RankGroup
from shardopt.state.encoding import cut_quantized_blocks
from shardopt.state.names import param_name
from shardopt.state.slice_spec import SliceSpec
from shardopt.step.agreement import PlanEntry, StepPlan
from shardopt.step.groups import Group
from shardopt.step.inputs import ParamGroups, StepParameter


def plan_of(
    param_groups: ParamGroups, groups: Sequence[Group], parameters: Sequence[StepParameter], *, is_single: bool
) -> StepPlan:
    """Describes, per set of ranks that exchange data in the step, the parameters involved, for the ranks to compare.

    Makes process groups where the exchange needs new ones: all ranks that hold a parameter must call this.
    ``is_single`` says whether the step updates a single parameter, during the backward pass. Ranks may step such
    parameters in different orders, so that they compare plans only where they exchange data.
    """
    sets: dict[RankGroup, list[PlanEntry]] = {}
    with_gradient = set()
    for parameter in parameters:
        options, group = param_groups[parameter.group], groups[parameter.group]
        if parameter.gradient_on_host or options["params"][parameter.position].grad is not None:
            with_gradient.add(parameter.index)
        for slice_ in parameter.slices:
            for ranks, needs_all_gradients in _exchanging_ranks(parameter, slice_, group).items():
                entry = _entry(parameter, slice_, options, group, needs_all_gradients)
                sets.setdefault(ranks, []).append(entry)
    return StepPlan(sets, with_gradient, is_single=is_single)


def _exchanging_ranks(parameter: StepParameter, slice_: SliceSpec, group: Group) -> dict[RankGroup, bool]:
    """The sets of ranks within which a step exchanges data of a slice, or would exchange data with other options.

    Per set of ranks, whether a gradient must exist on all ranks of the set or on none of them.
    """
    shard, rule = slice_.shard, group.rule
    # Blocks that flat shards cut are exchanged in every step, and those of column shards only with a gradient.
    found = {shard.row_owners: bool(cut_quantized_blocks(slice_))}
    if rule.has_totals:  # sums over all parameters
        holders = shard.holders_for_sums()
        found[None if holders is None else holders.ranks] = True
    elif rule.sum_count:  # sums over this parameter
        found[shard.make_part_group()] = True
    if rule.orthogonalized is not None:  # the ranks with parts of Muon's matrices, or that divide the work on copies
        found[shard.make_part_group() or parameter.replica_ranks] = True
    # The key None stands for this rank alone.
    return {ranks: needs_all_gradients for ranks, needs_all_gradients in found.items() if ranks is not None}


def _entry(
    parameter: StepParameter, slice_: SliceSpec, options: Mapping[str, Any], group: Group, needs_all_gradients: bool
) -> PlanEntry:
    """The entry of a slice in the plan, with the properties that ranks compare; ``options`` are its param group's."""
    shard, rule, orthogonalized = slice_.shard, group.rule, group.rule.orthogonalized
    name = param_name(options, parameter.group, parameter.position) if options.get("param_names") else None
    properties: dict[str, Any] = {
        "name": slice_.name or name,
        "shape": list(shard.global_shape),
        "dtype": str(slice_.weights.dtype),
        "rule": rule.name if rule.has_sums else f"{rule.name} without sums",
        **group.table_format,
        "nonfinite='raise'": group.nonfinite == "raise",
    }
    if isinstance(shard, FlatShard):
        properties["place in the flat parameter"] = str(shard.partition)
    if orthogonalized is not None:
        scale = orthogonalized.scale(shard.global_shape[0], shard.row_numel) if len(shard.global_shape) > 1 else None
        properties["orthogonalization"] = [str(orthogonalized.newton_schulz), scale]
        properties["split"] = orthogonalized.split
        properties["normalization"] = orthogonalized.row_decay
    return PlanEntry(
        parameter.index,
        parameter.device,
        slice_.name or parameter.name,
        properties,
        sizes_messages=slice_.has_column_cut_blocks,
        # A rank without columns has a gradient without elements, with which it joins the exchange of scales.
        may_have_gradient=slice_.has_column_cut_blocks or 0 not in parameter.shard.local_shape,
        needs_all_gradients=needs_all_gradients,
    )
