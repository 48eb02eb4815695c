"""Imports another package's optimizer state, code by code if both packages store the same codes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardopt.checkpoint.groups import merged
from shardopt.checkpoint.peers import OTHERS, TORCH, package_of
from shardopt.checkpoint.peers.base import Moments, Peer
from shardopt.checkpoint.peers.coded import CodedMoment, ScaledMoment
from shardopt.checkpoint.peers.structure import are_floats, check_structure, is_dense
from shardopt.checkpoint.wording import few, kind_of, named, shown
from shardopt.codec import Moment
from shardopt.kernels.autograd import without_autograd
from shardopt.layout import BlockGrid, FlatBuffer, FlatShard, Shard, shard_of
from shardopt.optim import ShardedOptimizer
from shardopt.optim.loading import by_name
from shardopt.state.agreement import agreeing, all_or_none
from shardopt.state.loaded_entries import check_dense, check_moment, checked_step
from shardopt.state.names import listed_name
from shardopt.state.options import DEFAULTS
from shardopt.state.rule import Rule
from shardopt.state.slice_spec import ROW_MOMENTS, SliceSpec, StateDict
from shardopt.state.tensor_state import TensorState, tensor_state_of

#: Options of shardopt that other packages have as hyper-parameters, too.
_SHARED_OPTIONS = {"maximize"}


#: "exact": the same codes and scales, or float32 as float32. "requantized": a moment was decoded, then encoded anew.
#: "quantized": encoded from float32. "as float32": decoded, and kept in float32.
Outcome = Literal["exact", "requantized", "quantized", "as float32"]


@dataclass(frozen=True)
class ImportReport:
    """The result of :func:`shardopt.checkpoint.import_state`. ``print(report)`` prints a summary.

    Attributes:
        source: the package whose state was imported.
        parameters: the outcome of each parameter's moments, by name, without parameters that had no state.
        ignored: the source's entries and hyper-parameters that shardopt does not have.
    """

    source: str
    parameters: Mapping[str, Outcome]
    ignored: tuple[str, ...]

    @property
    def counts(self) -> dict[Outcome, int]:
        """The number of parameters with each outcome, without outcomes that no parameter had."""
        return dict(Counter(self.parameters.values()))

    def __str__(self) -> str:
        total = ", ".join(f"{count} {outcome}" for outcome, count in self.counts.items())
        lines = [f"imported the state of {len(self.parameters)} parameters from {self.source}: {total}"]
        for outcome in self.counts:
            names = [name for name, of_name in self.parameters.items() if of_name == outcome]
            lines.append(f"  {outcome}: {', '.join(names)}")
        if self.ignored:
            lines.append(f"  ignored: {', '.join(self.ignored)}")
        return "\n".join(lines)


class _Source(NamedTuple):
    """A param group of the source, with its states in the order of the optimizer's parameters."""

    group: Mapping[str, Any]
    states: list[Mapping[str, Any]]  # one per parameter; empty for a parameter without state


class _Imported(NamedTuple):
    """A parameter and its state in the source."""

    name: str
    spec: TensorState
    moments: Moments
    step: Mapping[str, Any]  # empty if the source counts no steps


class _Imports(NamedTuple):
    """The content of an import.

    Attributes:
        package: the package of the source.
        groups: param groups with the hyper-parameters that are taken over.
        states: the states of parameters, by the parameters' numbers.
        ignored: the entries and hyper-parameters that are left out, in words.
    """

    package: str
    groups: list[dict[str, Any]]
    states: dict[int, _Imported]
    ignored: list[str]


@without_autograd
def import_state(
    optimizer: ShardedOptimizer, state_dict: Mapping[str, Any], *, names: Mapping[str, Tensor] | None = None
) -> ImportReport:
    """Loads the ``state_dict()`` of another package's optimizer.

    Reads state of bitsandbytes (all but LAMB and LARS in 32 bits), torchao (8-bit, 4-bit, fp8), flashoptim (compressed
    or not), the Muon of dion, and torch.optim, also in the form of
    ``torch.distributed.checkpoint.state_dict.get_optimizer_state_dict``; the Muon of Keller Jordan and of DeepSpeed is
    as torch's. Copies codes and scales unchanged if the
    optimizer's codec has the same codes and scales and no block crosses a row: from bitsandbytes and torchao with
    ``codec="dynamic8", block_size=256`` and rows that are multiples of 256, from flashoptim with
    ``codec="companded8", block_size=32`` and rows that are multiples of 32. Decodes other moments to float32, and
    encodes them anew if the optimizer quantizes the parameter: always those of bitsandbytes' RMSprop and Adagrad, whose
    map is the signed one, and the slow average of its AdEMAMix, which has 16 bits here.
    A second moment that the source has rounded to 0 stays 0; with log8 that element's first moment becomes 0, too.

    Takes over the hyper-parameters that the optimizer has; options such as ``codec`` stay. Does not import low bits of
    master weights: master weights begin with the parameters' values.

    A sharded optimizer (DTensor parameters) takes its part; all ranks call this with the same state dict, of whole
    tensors. Needs, beside the new state, memory for a few float32 copies of one parameter's moments at a time.

    Args:
        optimizer: the optimizer, with the same param groups of the same parameters in the same order.
        state_dict: the state dict of the other optimizer.
        names: parameters by their fully qualified names, for the report and errors, and to find the parameters of a
            state dict that has such names.

    Returns:
        The outcome of each parameter's moments, and the entries and hyper-parameters that were left out.

    Raises:
        ValueError: the state has no known form, is damaged, or is of other parameters or another kind of optimizer; a
            hyper-parameter is out of range; or the optimizer's parameters are flat. Nothing was changed.
    """
    _check_not_flat(optimizer)
    exchanges = agreeing(param for group in optimizer.param_groups for param in group["params"])
    imports = all_or_none(exchanges, lambda: _read(optimizer, state_dict, names))
    state: dict[int, StateDict] = {}
    parameters: dict[str, Outcome] = {}
    for index, (name, spec, moments, step) in imports.states.items():
        entries, parameters[name] = _converted(spec, moments, name)
        of_rows = spec.entries.get(ROW_MOMENTS)  # no package has those of ours: they begin with zeros
        if of_rows is not None:
            entries[ROW_MOMENTS] = spec.like(ROW_MOMENTS, of_rows.new(torch.device("cpu")))
        state[index] = {**entries, **step}

    def check_values() -> None:
        for index, (name, spec, *_) in imports.states.items():
            spec.check_local(state[index], name)

    all_or_none(exchanges, check_values)
    optimizer.load_state_dict({"state": state, "param_groups": imports.groups})
    return ImportReport(imports.package, parameters, tuple(imports.ignored))


def _read(optimizer: ShardedOptimizer, state_dict: Mapping[str, Any], names: Mapping[str, Tensor] | None) -> _Imports:
    """The content of the import, checked as far as one rank can."""
    sources = list(_sources(optimizer, state_dict, names))
    peer = _recognized([state for source in sources for state in source.states])
    imports = _Imports(peer.name, [], {}, [])
    known = {id(param): name for name, param in (names or {}).items()}
    number, unwrapped = 0, []
    for index, (group, source) in enumerate(zip(optimizer.param_groups, sources, strict=True)):
        taken, left_out = taken_hyper(optimizer, group, source.group, peer)
        imports.ignored.extend(f"{named(key)}={shown(value)} of param group {index}" for key, value in left_out.items())
        ids = list(range(number, number + len(group["params"])))
        number += len(ids)
        imports.groups.append({**taken, "params": ids})
        expected = _expected(optimizer.rule(group), peer)
        for position, (param, state) in enumerate(zip(group["params"], source.states, strict=True)):
            if not state:
                continue
            name = known.get(id(param)) or listed_name(group, index, position)
            state = peer.unwrapped(state, source.group, name)
            unwrapped.append(state)
            moments = peer.moments(state, expected, name)
            spec = tensor_state_of(param, group, expected)
            _check_layout(spec, param, moments, name)
            _check_floats(spec, moments, name)
            checked_step(state, name)
            step = {"step": state["step"]} if "step" in state else {}
            imports.states[ids[position]] = _Imported(name, spec, moments, step)
            imports.ignored.extend(f"{key} of {name}" for key in sorted(peer.extra & state.keys()))
    peer.check_together(unwrapped)
    return imports


def _expected(rule: Rule, peer: Peer) -> tuple[Moment, ...]:
    """The moments of a rule.

    Raises:
        ValueError: one is an average of other numbers than gradients, which no package has under its name.
    """
    for moment in rule.moments:
        if moment.own_units:
            raise ValueError(
                f"got the state of {peer.name}, whose averages are of gradients, expected {moment.name} in units of "
                f"its own, as {rule.name} keeps it; begin with new state"
            )
    return rule.moments


def _sources(
    optimizer: ShardedOptimizer, state_dict: Mapping[str, Any], names: Mapping[str, Tensor] | None
) -> Iterator[_Source]:
    """The source's param groups in the order of the optimizer's."""
    known_options = {key for group in optimizer.param_groups for key in group if key != "params"}
    check_structure(state_dict, known_options | {"amsgrad", "initial_lr"})
    saved, groups = state_dict["param_groups"], optimizer.param_groups
    are_named = names is not None and any(isinstance(key, str) for group in saved for key in group["params"])
    known = {id(param): name for name, param in (names or {}).items()}
    named = [[known.get(id(param)) for param in group["params"]] for group in groups]
    saved = by_name(saved, [{"param_names": ours, **group} for ours, group in zip(named, groups, strict=True)])
    for index, (saved_group, group) in enumerate(zip(saved, groups, strict=True)):
        keys = list(saved_group["params"])
        if are_named:
            ours = [known.get(id(param), listed_name(group, index, at)) for at, param in enumerate(group["params"])]
            if set(ours) != set(keys):
                raise ValueError(
                    f"param group {index}: got a state dict of {few(keys)}, expected {few(ours)}; make "
                    "the optimizer with the same param groups, of the same model"
                )
            keys = ours
        states = [_without_none(state_dict["state"].get(key, {})) for key in keys]
        yield _Source({k: v for k, v in saved_group.items() if k not in ("params", "param_names")}, states)


def _without_none(state: Mapping[str, Any]) -> Mapping[str, Any]:
    return {key: value for key, value in state.items() if value is not None}


def _recognized(states: Sequence[Mapping[str, Any]]) -> Peer:
    """Finds the package that wrote the state."""
    given = [state for state in states if state]
    for state in given:
        if not any(peer.recognizes(state) for peer in (*OTHERS, TORCH)):
            forms = "; ".join(f"{peer.name} has {peer.form}" for peer in (*OTHERS, TORCH))
            raise ValueError(
                f"got the state of an unknown optimizer, with {few(state)}, expected a known one: "
                f"{forms}. Load shardopt's own with load_state_dict"
            )
    if not given:
        raise ValueError("got no state at all, expected that of an optimizer which has taken a step")
    return package_of(given)


def taken_hyper(
    optimizer: ShardedOptimizer, group: Mapping[str, Any], saved: Mapping[str, Any], peer: Peer
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The hyper-parameters of a param group that are taken over, and those that are not."""
    rule = optimizer.rule(group)
    names = [moment.name for moment in rule.moments]
    hyper = {key: _number(value) for key, value in peer.hyper(saved, names).items()}
    usable = (group.keys() - DEFAULTS.keys() - {"params", "param_names"}) | _SHARED_OPTIONS | {"initial_lr"}
    kept = merged(optimizer, group, {key: value for key, value in hyper.items() if key in usable})
    taken = {key: kept[key] for key in hyper if key in usable}
    optimizer.check_group({**hyper, **kept})
    if optimizer.rule(kept).moments != rule.moments:
        changed = {key: value for key, value in taken.items() if group.get(key) != value}
        raise ValueError(
            f"got {changed}, which make the optimizer keep "
            f"{', '.join(m.name for m in optimizer.rule(kept).moments) or 'no moments'}, expected "
            f"{', '.join(m.name for m in rule.moments) or 'none'}; make the optimizer with such hyper-parameters"
        )
    used = {*taken, "decoupled_weight_decay"}  # the latter is checked by check_group
    left_out = {k: v for k, v in hyper.items() if k not in used and v is not None and v is not False}
    return taken, left_out


def _number(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value


def _check_layout(spec: TensorState, param: Tensor, moments: Moments, name: str) -> None:
    """Checks that the moments are whole, or float DTensors sharded as the parameter is.

    Raises:
        ValueError: one is neither, or not of the parameter's shape.
    """
    for key, value in moments.items():
        tensor = _stored(value)
        if not (is_dense(tensor) if isinstance(value, CodedMoment) else are_floats(tensor)):
            raise ValueError(f"{name}: got {key} as {kind_of(tensor)}, expected a dense tensor of floats")
        if tuple(tensor.shape) != spec.shard.global_shape:
            raise ValueError(
                f"{name}: got {key} of shape {tuple(tensor.shape)}, expected {spec.shard.global_shape}; give the "
                "optimizer the parameters of the saved run, in its order"
            )
        if isinstance(tensor, DTensor):
            plain = tensor is value and type(tensor.to_local()) is Tensor
            if not (plain and isinstance(param, DTensor) and _placed(tensor) == _placed(param)):
                raise ValueError(
                    f"{name}: got {key} as a DTensor on {_placed(tensor)}, expected whole tensors, or float moments "
                    "sharded as the parameter is; gather them with StateDictOptions(full_state_dict=True)"
                )


def _stored(moment: Tensor | CodedMoment | ScaledMoment) -> Tensor:
    """The tensor of the parameter's shape that stands for a moment."""
    if isinstance(moment, CodedMoment):
        return moment.codes
    return moment.floats if isinstance(moment, ScaledMoment) else moment


def _check_floats(spec: TensorState, moments: Moments, name: str) -> None:
    """Checks the values of moments in floats, this rank's part where they are DTensors.

    Raises:
        ValueError: one is not finite, or below zero though it is not signed.
    """
    for moment in spec.moments:
        value = moments[moment.name]
        if not isinstance(value, CodedMoment):
            floats = _stored(value)
            local = floats.to_local() if isinstance(floats, DTensor) else floats
            check_dense(local, moment.name, name)
            check_moment(local, moment.name, name, signed=moment.signed)


def _placed(tensor: DTensor) -> tuple[Any, ...]:
    return tensor.device_mesh, tensor.placements


def _converted(spec: TensorState, moments: Moments, name: str) -> tuple[StateDict, Outcome]:
    """The state entries for one parameter's moments, and what it took.

    Raises:
        ValueError: what codes stand for is not finite, or below zero though it is not signed: on all ranks, which are
            given the same ones.
    """
    first = spec.slices[0].spec
    coded = {key: value for key, value in moments.items() if isinstance(value, CodedMoment)}
    taken: StateDict = {}
    for moment in spec.moments:
        if moment.name in coded and is_ours(first, moment, coded[moment.name]):
            taken |= _entries(first, moment, coded[moment.name])
    if all(first.codes_name(moment) in taken for moment in spec.moments):
        return taken, "exact"
    values = {k: v if isinstance(v, Tensor) else v.values() for k, v in moments.items()}
    for moment in spec.moments:
        if moment.name in coded:
            check_moment(values[moment.name], moment.name, name, signed=moment.signed)
    in_parts = {k: v if isinstance(v, DTensor) else _sharded(spec.shard, v.float()) for k, v in values.items()}
    if first.codec.name != "fp32":
        return spec.encode(in_parts) | taken, "requantized" if coded else "quantized"
    return spec.encode(in_parts), "as float32" if coded else "exact"


def is_ours(spec: SliceSpec, moment: Moment, coded: CodedMoment) -> bool:
    """Whether codes and scales of another package are those of a state of this form."""
    return coded.codec == moment.codec(spec.codec).name and coded.is_laid_out_as(spec.grid)


def _entries(spec: SliceSpec, moment: Moment, coded: CodedMoment) -> StateDict:
    """The state entries with these codes and scales."""
    scales = coded.scales.reshape(spec.grid.rows, spec.grid.blocks_per_row)
    return {
        spec.codes_name(moment): _sharded(spec.shard, coded.codes),
        spec.scales_name(moment): _sharded(spec.shard, scales, spec.grid),
    }


def _check_not_flat(optimizer: ShardedOptimizer) -> None:
    """Checks that the parameters are whole or DTensors.

    Raises:
        ValueError: a parameter is flat, as FSDP1's are.
    """
    params = [param for group in optimizer.param_groups for param in group["params"]]
    if any(
        hasattr(param, "_fsdp_flattened") or isinstance(shard_of(param), FlatShard | FlatBuffer) for param in params
    ):
        raise ValueError(
            "got flat parameters, as those of FullyShardedDataParallel, expected whole ones or DTensors; do this with "
            "an optimizer of the bare model, and go on from there with shardopt.checkpoint.save and load"
        )


def _sharded(shard: Shard, whole: Tensor, scales_of: BlockGrid | None = None) -> Tensor:
    """This rank's part of a whole tensor, in the form of a state entry: wrapped as the parameter is.

    Args:
        shard: the shard of the parameter.
        whole: a tensor of the parameter's shape, possibly with trailing dimensions; the same on all ranks.
        scales_of: the block grid, if `whole` has the scales of a grid's blocks instead.
    """
    if scales_of is None:
        return shard.like_parameter(_apart(shard.part(whole)))
    return shard.like_scales(_apart(shard.scales_part(whole, scales_of)), scales_of)


def _apart(part: Tensor) -> Tensor:
    """A part as a tensor that does not keep the memory of anything larger."""
    part = part.contiguous()
    return part.clone() if part.untyped_storage().nbytes() > part.nbytes else part
