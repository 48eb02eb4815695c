"""The plan of a step: all that ranks which hold parts of the same parameters must have in common."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from shardopt.layout import Exchange, FlatBuffer, FlatShard
from shardopt.state.names import listed_name
from shardopt.state.options import TABLE_FORMAT
from shardopt.state.tensor_state import Slice
from shardopt.step.agreement import Line, Plan
from shardopt.step.inputs import Input, ParamGroups
from shardopt.step.rows import Group


def plan_of(param_groups: ParamGroups, groups: Sequence[Group], inputs: Sequence[Input]) -> Plan:
    """The plan of a step, by the gradients of now.

    Args:
        param_groups: the optimizer's.
        groups: one per param group.
        inputs: one per parameter.
    """
    lines: dict[Exchange, list[Line]] = {}
    stepped = set()
    for index, parameter in enumerate(inputs):
        options = param_groups[parameter.group]
        if options["params"][parameter.position].grad is not None:
            stepped.add(index)
        for each in parameter.spec.slices if parameter.spec is not None else ():
            name = listed_name(options, parameter.group, parameter.position) if options.get("param_names") else None
            line = _line(index, parameter, each, name, groups[parameter.group])
            for ranks in dict.fromkeys(_ranks_of(parameter, each, groups[parameter.group])):
                lines.setdefault(ranks, []).append(line)
    return Plan(lines, stepped)


def _ranks_of(parameter: Input, each: Slice, group: Group) -> Iterator[Exchange]:
    """The ranks with which a step exchanges something of a slice, or would with other options."""
    shard = each.spec.shard
    found = [shard.row_owners]
    if group.rule.sums:
        found.append(shard.parts)
    if group.rule.orthogonalized is not None:
        division = shard.division
        found.append(division.ranks if division else parameter.copies.ranks if parameter.copies else None)
    for ranks in found:
        if ranks is not None:
            yield ranks


def _line(index: int, parameter: Input, each: Slice, name: str | None, group: Group) -> Line:
    shard, rule, orthogonalized = each.spec.shard, group.rule, group.rule.orthogonalized
    is_flat = isinstance(shard, FlatShard)
    says: dict[str, Any] = {
        "name": each.name or name,
        "shape": list(shard.global_shape),
        "dtype": str(each.spec.weights.dtype),
        "rule": rule.name if rule.has_sums else f"{rule.name} without sums",
        **dict(zip(TABLE_FORMAT, group.table_format, strict=True)),
        "nonfinite='raise'": group.nonfinite == "raise",
    }
    if isinstance(shard, FlatShard):
        says["place in the flat parameter"] = str((shard.partition and shard.partition.partition) or shard.cuts)
    if orthogonalized is not None:
        scale = orthogonalized.scale(shard.global_shape[0], shard.row_numel) if len(shard.global_shape) > 1 else None
        says["orthogonalization"] = [str(orthogonalized.newton_schulz), orthogonalized.memory, scale]
        says["split"] = orthogonalized.split
    is_sized = not is_flat and each.spec.exchanges_columns
    is_buffer = isinstance(parameter.shard, FlatBuffer)
    is_held = is_sized or (0 not in (parameter.shard if is_buffer else shard).local_shape)
    return Line(index, each.name or parameter.name, says, is_sized, is_held)
