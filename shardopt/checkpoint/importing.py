"""Imports another package's optimizer state, without decoding if both packages use the same codes and scales."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardopt.checkpoint.groups import options_after_load
from shardopt.checkpoint.peers import DERIVED, CodedMoment, Peer, are_floats, is_dense, package_of
from shardopt.checkpoint.wording import few, kind_of, named, one_line, shown
from shardopt.kernels.autograd import without_autograd
from shardopt.layout import FlatBuffer, FlatShard, all_or_none, meet, shard_of
from shardopt.optim import ShardedOptimizer
from shardopt.optim.loading import as_value_error, checked_containers, checked_entries, loading_ranks, reorder_groups
from shardopt.state.encoding import encode_loaded
from shardopt.state.loaded_entries import check_moment, checked_step
from shardopt.state.names import param_name
from shardopt.state.options import DEFAULTS
from shardopt.state.slice_spec import ROW_MOMENTS, StateDict
from shardopt.state.tensor_spec import TensorSpec, tensor_spec_of

#: "exact": the same codes and scales, or float32 as float32. "requantized": a moment was decoded and encoded again.
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


_MOST_CHARACTERS = 800  # characters of an error's text


class _SavedGroup(NamedTuple):
    """A param group of the other optimizer: its options, and each parameter's name and state, which may be empty."""

    options: Mapping[str, Any]
    states: list[tuple[str, Mapping[str, Any]]]


class _SavedState(NamedTuple):
    """One parameter's state as it was read: its moments and step, and the format ``spec`` to convert it to."""

    name: str
    spec: TensorSpec
    moments: Mapping[str, Tensor | CodedMoment]
    step: float


class _Source(NamedTuple):
    """The state to import, read and validated.

    Attributes:
        package: the name of the package that it is from.
        groups: the new param groups, in the form of a state dict.
        states: the state of each parameter that has some, by the parameter's number in these groups.
        ignored: descriptions of the entries and hyper-parameters that are left out.
    """

    package: str
    groups: list[dict[str, Any]]
    states: dict[int, _SavedState]
    ignored: list[str]


@without_autograd
def import_state(
    optimizer: ShardedOptimizer, state_dict: Mapping[str, Any], *, names: Mapping[str, Tensor] | None = None
) -> ImportReport:
    """Loads the ``state_dict()`` of another package's optimizer.

    Takes state of torch.optim, bitsandbytes (Adam, Lion and SGD with momentum), torchao (8-bit, 4-bit, fp8), flashoptim
    (compressed or not) and the Muon of dion; that of Keller Jordan and of DeepSpeed is as torch's. Also in the form of
    ``torch.distributed.checkpoint.state_dict.get_optimizer_state_dict``. ``docs/moving_over.md`` shows how to read the
    files of such runs.

    Copies codes and scales unchanged if the optimizer's codec has the same ones and no block crosses a row: from
    bitsandbytes and torchao with ``codec="dynamic8", block_size=256`` and rows that are multiples of 256, from
    flashoptim with ``codec="companded8", block_size=32`` and rows that are multiples of 32. Decodes other moments to
    float32, and encodes them again if the optimizer quantizes the parameter. A second moment that the source has
    rounded to 0 stays 0; with log8 that element's first moment becomes 0, too.

    Takes over the hyper-parameters that the optimizer has; options such as ``codec`` stay. Does not import low bits of
    master weights: master weights begin with the parameters' values.

    A sharded optimizer (DTensor parameters) takes its part; all ranks call this with the same state dict, of whole
    tensors or of DTensors sharded as the parameters are. Besides the new state this needs memory for a few float32
    copies of one parameter's moments; for the momenta of dion's Muon and torchao's 4-bit and fp8 state, of all.

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
    params = [param for group in optimizer.param_groups for param in group["params"]]
    if any(hasattr(p, "_fsdp_flattened") or isinstance(shard_of(p), FlatShard | FlatBuffer) for p in params):
        raise ValueError(
            "got flat parameters, as those of FullyShardedDataParallel, expected whole ones or DTensors; do this with "
            "an optimizer of the bare model, and go on from there with shardopt.checkpoint.save and load"
        )
    names_by_id = {id(param): name for name, param in (names or {}).items()}

    def read() -> _Source:
        try:
            with as_value_error("the state dict"):
                return _read(optimizer, state_dict, names_by_id)
        except ValueError as error:
            raise ValueError(one_line(error, _MOST_CHARACTERS)) from None

    rank_groups = loading_ranks(params)
    meet(rank_groups, "import_state")
    source = all_or_none(rank_groups, read)
    state: dict[int, StateDict] = {}
    parameters: dict[str, Outcome] = {}
    for number, (name, spec, moments, step) in source.states.items():
        entries, parameters[name] = _converted(spec, moments, name)
        row_moments = spec.entries.get(ROW_MOMENTS)  # state that no other package has: begins with zeros
        if row_moments is not None:
            entries[ROW_MOMENTS] = spec.wrap_local(ROW_MOMENTS, row_moments.allocate(torch.device("cpu")))
        state[number] = {**entries, "step": step}
    optimizer.load_state_dict({"state": state, "param_groups": source.groups})
    return ImportReport(source.package, parameters, tuple(source.ignored))


def _read(optimizer: ShardedOptimizer, state_dict: Mapping[str, Any], names: Mapping[int, str]) -> _Source:
    """Reads and validates the state to import, without collectives; ``names`` has names by the parameters' ids."""
    saved_groups = _matched_groups(optimizer, state_dict, names)
    peer = package_of([state for group in saved_groups for _, state in group.states if state])
    source = _Source(peer.name, [], {}, [])
    count = 0  # parameters in the groups before
    for index, (group, saved) in enumerate(zip(optimizer.param_groups, saved_groups, strict=True)):
        options, left_out = _divided_options(optimizer, group, saved.options, peer)
        source.ignored.extend(f"{named(key)}={shown(value)} of param group {index}" for key, value in left_out.items())
        numbers = range(count, count + len(saved.states))
        count = numbers.stop
        source.groups.append({**options, "params": [*numbers]})
        rule = optimizer.rule(group)
        if any(moment.name == "exp_avg" and moment.own_units for moment in rule.moments):
            raise ValueError(
                f"got the state of {peer.name}, whose averages are of gradients, expected exp_avg in units of its own, "
                f"as {rule.name} keeps it; begin with new state"
            )
        expected = [moment.name for moment in rule.moments]
        for number, param, (name, state) in zip(numbers, group["params"], saved.states, strict=True):
            if not state:
                continue
            entries = peer.read(state, saved.options, rule.moments, name)
            if (got := entries.keys() - {"step", *DERIVED, *peer.ignored}) != set(expected):
                raise ValueError(
                    f"{name}: got state with {few(got) or 'no moments'}, expected {', '.join(expected) or 'none'}; "
                    "choose the optimizer of the same kind"
                )
            spec = tensor_spec_of(param, group, rule.moments)
            moments = {key: entries[key] for key in expected}
            _check_moments(spec, param, moments, name)
            source.states[number] = _SavedState(name, spec, moments, checked_step(entries, name))
            source.ignored.extend(f"{key} of {name}" for key in sorted(peer.ignored & entries.keys()))
    return source


def _matched_groups(
    optimizer: ShardedOptimizer, state_dict: Mapping[str, Any], names: Mapping[int, str]
) -> list[_SavedGroup]:
    """A state dict's param groups, with each parameter's state, in the order of the optimizer's groups and parameters.

    Parameters are matched by name if the state dict has names in place of numbers, and ``names`` has theirs.
    """
    groups = optimizer.param_groups
    saved_groups, states = _containers(state_dict)
    has_names = any(isinstance(key, str) for group in saved_groups for key in group["params"])
    present = [{"param_names": [names.get(id(param)) for param in group["params"]], **group} for group in groups]
    matched: list[_SavedGroup] = []
    for index, (saved, group) in enumerate(zip(reorder_groups(saved_groups, present), groups, strict=True)):
        listed = [names.get(id(param)) or param_name(group, index, at) for at, param in enumerate(group["params"])]
        keys = listed if names and has_names else saved["params"]
        if set(keys) != set(saved["params"]):
            raise ValueError(
                f"param group {index}: got a state dict of {few(saved['params'])}, expected {few(listed)}; make "
                "the optimizer with the same param groups, of the same model"
            )
        options = {key: value for key, value in saved.items() if key not in ("params", "param_names")}
        matched.append(_SavedGroup(options, []))
        for key, name in zip(keys, listed, strict=True):
            entries = checked_entries(states.get(key), name) or {}
            state = {entry: value for entry, value in entries.items() if value is not None}
            matched[-1].states.append((name, state))
    return matched


def _containers(state_dict: Any) -> tuple[Sequence[Mapping[str, Any]], Mapping[Any, Any]]:
    """Splits a state dict into its param groups and states; for a path or another dict, the error says what to pass."""
    if isinstance(state_dict, str | os.PathLike):
        remedy = "read it with torch.load, torch.distributed.checkpoint.load or safetensors.torch.load_file first"
        raise ValueError(f"got a path, expected a state dict with state and param_groups; {remedy}")
    if isinstance(state_dict, Mapping) and not {"state", "param_groups"} <= state_dict.keys():
        remedy = "pass what an optimizer's state_dict() or get_optimizer_state_dict() gives, not flattened"
        remedy = "pass its entry 'optimizer'" if "optimizer" in state_dict else remedy
        raise ValueError(
            f"got a state dict with {few(state_dict)}, expected a state dict with state and param_groups; {remedy}"
        )
    return checked_containers(state_dict)


def _divided_options(
    optimizer: ShardedOptimizer, group: Mapping[str, Any], saved: Mapping[str, Any], peer: Peer
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Divides a saved group's hyper-parameters into those that the optimizer takes over and those it does not have."""
    rule = optimizer.rule(group)
    hyper = {
        key: value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
        for key, value in peer.hyper_parameters(saved, [moment.name for moment in rule.moments]).items()
    }
    if "initial_lr" in hyper:  # of a learning-rate schedule: the optimizer does not check it
        hyper["initial_lr"] = float(hyper["initial_lr"])
    usable = (group.keys() - DEFAULTS.keys() - {"params", "param_names"}) | {"maximize", "initial_lr"}
    new = options_after_load(optimizer, group, {key: value for key, value in hyper.items() if key in usable})
    taken = {key: new[key] for key in hyper if key in usable}
    optimizer.check_group({**hyper, **new})  # also what is not taken: the rule refuses options of other updates
    if optimizer.rule(new).moments != rule.moments:
        changed = {key: value for key, value in taken.items() if group.get(key) != value}
        raise ValueError(
            f"got {changed}, which make the optimizer keep "
            f"{', '.join(m.name for m in optimizer.rule(new).moments) or 'no moments'}, expected "
            f"{', '.join(m.name for m in rule.moments) or 'none'}; make the optimizer with such hyper-parameters"
        )
    known = {*taken, "decoupled_weight_decay"}  # the latter is checked by check_group
    left_out = {k: v for k, v in hyper.items() if k not in known and v is not None and v is not False}
    return taken, left_out


def _check_moments(spec: TensorSpec, param: Tensor, moments: Mapping[str, Tensor | CodedMoment], name: str) -> None:
    """Checks that moments are whole tensors or, in float, DTensors sharded as the parameter is; checks float values."""
    for moment in spec.moments:
        key, value = moment.name, moments[moment.name]
        is_coded = isinstance(value, CodedMoment)
        tensor = value.codes if isinstance(value, CodedMoment) else value
        if not (is_dense(tensor) if is_coded else are_floats(tensor)):
            raise ValueError(f"{name}: got {key} as {kind_of(tensor)}, expected a dense tensor of floats")
        if tuple(tensor.shape) != spec.shard.global_shape:
            raise ValueError(
                f"{name}: got {key} of shape {tuple(tensor.shape)}, expected {spec.shard.global_shape}; give the "
                "optimizer the parameters of the saved run, in its order"
            )
        if isinstance(tensor, DTensor):
            is_plain = not is_coded and type(tensor.to_local()) is Tensor
            if not (is_plain and isinstance(param, DTensor) and _sharding(tensor) == _sharding(param)):
                raise ValueError(
                    f"{name}: got {key} as a DTensor on {_sharding(tensor)}, expected whole tensors, or float moments "
                    "sharded as the parameter is; gather them with StateDictOptions(full_state_dict=True)"
                )
        if not is_coded:
            check_moment(tensor.to_local() if isinstance(tensor, DTensor) else tensor, key, name, signed=moment.signed)


def _sharding(tensor: DTensor) -> tuple[Any, ...]:
    """The device mesh and the placements."""
    return tensor.device_mesh, tensor.placements


def _converted(spec: TensorSpec, moments: Mapping[str, Tensor | CodedMoment], name: str) -> tuple[StateDict, Outcome]:
    """Converts a parameter's moments to the optimizer's state entries; also returns how exact the conversion was.

    Raises a ValueError if decoded moments are out of range: on all ranks, as all have the same codes.
    """
    slice_ = spec.slices[0]  # the only one: parameters are not flat
    grid = slice_.grid
    coded = {key: value for key, value in moments.items() if isinstance(value, CodedMoment)}
    if len(coded) == len(moments) and all(coded[m.name].is_same_as(m.codec(slice_.codec), grid) for m in spec.moments):
        state: StateDict = {}
        for moment in spec.moments:
            codes_key, scales_key, source = slice_.codes_name(moment), slice_.scales_name(moment), coded[moment.name]
            scales = source.scales.reshape(grid.rows, grid.blocks_per_row)
            state[codes_key] = _local_entry(spec, codes_key, source.codes)
            state[scales_key] = _local_entry(spec, scales_key, scales)
        return state, "exact"
    floats: dict[str, Tensor] = {}
    for moment in spec.moments:
        value = moments[moment.name]
        if isinstance(value, CodedMoment):
            value = value.decoded()
            check_moment(value, moment.name, name, signed=moment.signed)
        is_local = isinstance(value, DTensor)  # sharded as the parameter is
        floats[moment.name] = value if is_local else _local_entry(spec, moment.name, value.float())
    (encoded,) = encode_loaded([spec], [floats], [name], ())
    if slice_.codec.name != "fp32":
        return dict(encoded or {}), "requantized" if coded else "quantized"
    return dict(encoded or {}), "as float32" if coded else "exact"


def _local_entry(spec: TensorSpec, key: str, whole: Tensor) -> Tensor:
    """Cuts this rank's part from a whole tensor, and makes it the state entry ``key``, sharded as the parameter is."""
    grid = spec.slices[0].grid_of(key)
    part = (spec.shard if grid is None else spec.shard.scales(grid)).part(whole).contiguous()
    if part.untyped_storage().nbytes() > part.nbytes:  # a state entry must not keep the memory of the whole tensor
        part = part.clone()
    return spec.wrap_local(key, part)
