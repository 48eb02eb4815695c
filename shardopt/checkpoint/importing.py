"""Imports another package's optimizer state, without decoding if both packages use the same codes and scales."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardopt.checkpoint.groups import merged
from shardopt.checkpoint.peers import package_of
from shardopt.checkpoint.peers.base import DERIVED, CodedMoment, Peer, are_floats, is_dense
from shardopt.checkpoint.wording import few, kind_of, line, named, shown
from shardopt.kernels.autograd import without_autograd
from shardopt.layout import FlatBuffer, FlatShard, all_or_none, shard_of
from shardopt.optim import ShardedOptimizer
from shardopt.optim.loading import by_name, checked_containers, checked_entries, loading_groups, reading
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


#: A param group of the other optimizer: its options, and for each parameter the name and the state (may be empty).
_SavedGroup = tuple[Mapping[str, Any], list[tuple[str, Mapping[str, Any]]]]

_MOST_CHARACTERS = 800  # characters of an error's text


class _Found(NamedTuple):
    """One parameter's state as it was read: its moments and step, and the format ``spec`` to convert it to."""

    name: str
    spec: TensorSpec
    moments: Mapping[str, Tensor | CodedMoment]
    step: float


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
    package, groups, imported, ignored = all_or_none(
        loading_groups(params),
        lambda: _read(optimizer, state_dict, {id(param): name for name, param in (names or {}).items()}),
    )
    state: dict[int, StateDict] = {}
    parameters: dict[str, Outcome] = {}
    for index, (name, spec, moments, step) in imported.items():
        entries, parameters[name] = _converted(spec, moments, name)
        of_rows = spec.entries.get(ROW_MOMENTS)  # state that no other package has: begins with zeros
        if of_rows is not None:
            entries[ROW_MOMENTS] = spec.wrap_local(ROW_MOMENTS, of_rows.allocate(torch.device("cpu")))
        state[index] = {**entries, "step": step}
    optimizer.load_state_dict({"state": state, "param_groups": groups})
    return ImportReport(package, parameters, tuple(ignored))


@contextmanager
def _in_one_line() -> Iterator[None]:
    """Turns errors inside the block, except lack of memory, into a ValueError of one line."""
    try:
        with reading("the state dict"):
            yield
    except ValueError as error:
        raise ValueError(line(error, _MOST_CHARACTERS)) from error


@_in_one_line()
def _read(
    optimizer: ShardedOptimizer, state_dict: Mapping[str, Any], names: Mapping[int, str]
) -> tuple[str, list[dict[str, Any]], dict[int, _Found], list[str]]:
    """Reads and validates the state to import, without collectives; ``names`` has names by the parameters' ids.

    Returns:
        The package's name, the new param groups in the form of a state dict, the state of each parameter that has some
        by its number in these groups, and descriptions of the entries and hyper-parameters that are left out.
    """
    sources = _sources(optimizer, state_dict, names)
    states = [state for _, of_group in sources for _, state in of_group if state]
    peer = package_of(states)
    groups: list[dict[str, Any]] = []
    imported: dict[int, _Found] = {}
    ignored: list[str] = []
    first = 0
    for index, (group, (saved, of_group)) in enumerate(zip(optimizer.param_groups, sources, strict=True)):
        taken, left_out = _taken_hyper(optimizer, group, saved, peer)
        ignored += [f"{named(key)}={shown(value)} of param group {index}" for key, value in left_out.items()]
        numbers = range(first, first + len(of_group))
        first = numbers.stop
        groups.append({**taken, "params": [*numbers]})
        rule = optimizer.rule(group)
        if any(moment.name == "exp_avg" and moment.own_units for moment in rule.moments):
            raise ValueError(
                f"got the state of {peer.name}, whose averages are of gradients, expected exp_avg in units of its own, "
                f"as {rule.name} keeps it; begin with new state"
            )
        expected = [moment.name for moment in rule.moments]
        for number, param, (name, state) in zip(numbers, group["params"], of_group, strict=True):
            if not state:
                continue
            entries = peer.read(state, saved, rule.moments, name)
            if (got := entries.keys() - {"step", *DERIVED, *peer.extra}) != set(expected):
                raise ValueError(
                    f"{name}: got state with {few(got) or 'no moments'}, expected {', '.join(expected) or 'none'}; "
                    "choose the optimizer of the same kind"
                )
            spec = tensor_spec_of(param, group, rule.moments)
            moments = {key: entries[key] for key in expected}
            _check_moments(spec, param, moments, name)
            imported[number] = _Found(name, spec, moments, checked_step(entries, name))
            ignored += [f"{key} of {name}" for key in sorted(peer.extra & entries.keys())]
    return peer.name, groups, imported, ignored


def _sources(optimizer: ShardedOptimizer, state_dict: Mapping[str, Any], names: Mapping[int, str]) -> list[_SavedGroup]:
    """Matches a state dict's param groups and states to the optimizer's: the same groups and order of parameters.

    The state of a parameter without state is an empty dict.
    """
    groups = optimizer.param_groups
    saved, states = _containers(state_dict)
    are_named = names and any(isinstance(key, str) for group in saved for key in group["params"])
    ours = [{"param_names": [names.get(id(param)) for param in group["params"]], **group} for group in groups]
    sources: list[_SavedGroup] = []
    for index, (saved_group, group) in enumerate(zip(by_name(saved, ours), groups, strict=True)):
        listed = [names.get(id(param)) or param_name(group, index, at) for at, param in enumerate(group["params"])]
        keys = listed if are_named else saved_group["params"]
        if set(keys) != set(saved_group["params"]):
            raise ValueError(
                f"param group {index}: got a state dict of {few(saved_group['params'])}, expected {few(listed)}; make "
                "the optimizer with the same param groups, of the same model"
            )
        entries = [checked_entries(states.get(key), name) or {} for key, name in zip(keys, listed, strict=True)]
        present = [{k: v for k, v in of_param.items() if v is not None} for of_param in entries]
        options = {key: value for key, value in saved_group.items() if key not in ("params", "param_names")}
        sources.append((options, list(zip(listed, present, strict=True))))
    return sources


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


def _taken_hyper(
    optimizer: ShardedOptimizer, group: Mapping[str, Any], saved: Mapping[str, Any], peer: Peer
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Divides a saved group's hyper-parameters into those that the optimizer takes over and those it does not have."""
    rule = optimizer.rule(group)
    names = [moment.name for moment in rule.moments]
    hyper = {
        key: value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
        for key, value in peer.hyper(saved, names).items()
    }
    if "initial_lr" in hyper:  # of a learning-rate schedule: the optimizer does not check it
        hyper["initial_lr"] = float(hyper["initial_lr"])
    usable = (group.keys() - DEFAULTS.keys() - {"params", "param_names"}) | {"maximize", "initial_lr"}
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


def _check_moments(spec: TensorSpec, param: Tensor, moments: Mapping[str, Tensor | CodedMoment], name: str) -> None:
    """Checks that moments are whole tensors or, in float, DTensors sharded as the parameter is; checks float values."""
    for moment in spec.moments:
        key, value = moment.name, moments[moment.name]
        coded = isinstance(value, CodedMoment)
        tensor = value.codes if isinstance(value, CodedMoment) else value
        if not (is_dense(tensor) if coded else are_floats(tensor)):
            raise ValueError(f"{name}: got {key} as {kind_of(tensor)}, expected a dense tensor of floats")
        if tuple(tensor.shape) != spec.shard.global_shape:
            raise ValueError(
                f"{name}: got {key} of shape {tuple(tensor.shape)}, expected {spec.shard.global_shape}; give the "
                "optimizer the parameters of the saved run, in its order"
            )
        if isinstance(tensor, DTensor):
            plain = not coded and type(tensor.to_local()) is Tensor
            if not (plain and isinstance(param, DTensor) and _placed(tensor) == _placed(param)):
                raise ValueError(
                    f"{name}: got {key} as a DTensor on {_placed(tensor)}, expected whole tensors, or float moments "
                    "sharded as the parameter is; gather them with StateDictOptions(full_state_dict=True)"
                )
        if not coded:
            check_moment(tensor.to_local() if isinstance(tensor, DTensor) else tensor, key, name, signed=moment.signed)


def _placed(tensor: DTensor) -> tuple[Any, ...]:
    return tensor.device_mesh, tensor.placements


def _converted(spec: TensorSpec, moments: Mapping[str, Tensor | CodedMoment], name: str) -> tuple[StateDict, Outcome]:
    """Converts a parameter's moments to the optimizer's state entries; also returns how exact the conversion was.

    Raises:
        ValueError: decoded moments are not finite, or negative for a moment that has no sign; raised on all ranks, as
            all have the same codes.
    """
    first = spec.slices[0]
    coded = {key: found for key, found in moments.items() if isinstance(found, CodedMoment)}
    if len(coded) == len(moments) and all(coded[m.name].is_of(m.codec(first.codec), first.grid) for m in spec.moments):
        state: StateDict = {}
        for moment in spec.moments:
            codes, scales, found = first.codes_name(moment), first.scales_name(moment), coded[moment.name]
            state[codes] = _own(spec, codes, found.codes)
            state[scales] = _own(spec, scales, found.scales.reshape(first.grid.rows, first.grid.blocks_per_row))
        return state, "exact"
    values: dict[str, Tensor] = {}
    for moment in spec.moments:
        value = moments[moment.name]
        if isinstance(value, CodedMoment):
            value = value.values()
            check_moment(value, moment.name, name, signed=moment.signed)
        values[moment.name] = value if isinstance(value, DTensor) else _own(spec, moment.name, value.float())
    (encoded,) = encode_loaded([spec], [values], [name], ())
    if first.codec.name != "fp32":
        return dict(encoded or {}), "requantized" if coded else "quantized"
    return dict(encoded or {}), "as float32" if coded else "exact"


def _own(spec: TensorSpec, key: str, whole: Tensor) -> Tensor:
    """Cuts this rank's part from a whole tensor, and makes it the state entry ``key``, sharded as the parameter is."""
    grid = spec.slices[0].grid_of(key)
    part = (spec.shard if grid is None else spec.shard.scales(grid)).part(whole).contiguous()
    if part.untyped_storage().nbytes() > part.nbytes:  # a state entry must not keep the memory of the whole tensor
        part = part.clone()
    return spec.wrap_local(key, part)
