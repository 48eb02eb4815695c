"""Forms of states by the optimizer's class and options, and states encoded anew."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from shardopt import optim
from shardopt.checkpoint.convert.stream import Checkpoint, LazyTensor, State, part_of_form, state_of_tensors
from shardopt.checkpoint.errors import CheckpointError
from shardopt.checkpoint.groups import OF_THE_RUN, SavedGroup
from shardopt.checkpoint.items import described
from shardopt.checkpoint.owner import is_of_quantize_state
from shardopt.checkpoint.wording import few, line, named, shown
from shardopt.layout import Shard
from shardopt.optim import ShardedOptimizer
from shardopt.state.loaded_entries import checked_step, step_on
from shardopt.state.options import DEFAULTS, STATE_FORMAT
from shardopt.state.slice_spec import SliceSpec, StateDict

_CPU = torch.device("cpu")

#: Options of state that is float32 throughout.
FLOAT32 = {**{key: dict(DEFAULTS)[key] for key in STATE_FORMAT}, "codec": "fp32"}

#: Classes that are named before others which would read the same state in the same way.
_FIRST = ("AdamW", "SGD", "Lion")

#: Entries of a checkpoint, by parameter and name.
Entries = Mapping[str, Mapping[str, LazyTensor]]


def class_named(name: object, path: str) -> type[ShardedOptimizer]:
    """The optimizer of this name.

    Raises:
        CheckpointError: there is none.
    """
    known = {key.lower(): key for key in optim.__all__ if key != "ShardedOptimizer"}
    key = known.get(name.lower()) if isinstance(name, str) else None
    if key is None:
        raise CheckpointError(
            f"{path}: got the state of {named(name)}, expected one of {', '.join(sorted(known.values()))}; name the "
            "class with --optimizer"
        )
    kind: type[ShardedOptimizer] = getattr(optim, key)
    return kind


def made_optimizer(
    kind: type[ShardedOptimizer], groups: Sequence[SavedGroup], checkpoint: Checkpoint
) -> ShardedOptimizer:
    """An optimizer with a checkpoint's options, of parameters without memory; the constructor checks the options.

    Raises:
        CheckpointError: an option is not allowed.
    """
    with reading(checkpoint.path):
        made = []
        for group in groups:
            tensors = [checkpoint.parameter(name) for name in group["parameters"]]
            params = [torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") for tensor in tensors]
            options = {key: value for key, value in group["options"].items() if key not in OF_THE_RUN or key == "repay"}
            lists = {key: tuple(value) for key, value in options.items() if isinstance(value, list)}
            made.append({**options, **lists, "params": params})
        return kind(made)  # type: ignore[call-arg]  # subclasses have defaults


def forms(checkpoint: Checkpoint, groups: Sequence[SavedGroup], names: Sequence[str]) -> dict[str, SliceSpec]:
    """The form of the state of each named parameter, if param groups have these options.

    Raises:
        CheckpointError: an option is not allowed, or a parameter is in no param group.
    """
    optimizer = made_optimizer(class_named(checkpoint.optimizer, checkpoint.path), groups, checkpoint)
    specs: dict[str, SliceSpec] = {}
    wanted = set(names)
    for group, made_group in zip(groups, optimizer.param_groups, strict=True):
        with reading(checkpoint.path):
            moments = optimizer.rule(made_group).moments
            for name in wanted.intersection(group["parameters"]):
                parameter = checkpoint.parameter(name)
                shard = Shard(parameter.shape, parameter.shape)
                # State has the same entries with repay and without.
                specs[name] = SliceSpec.of(shard, parameter.dtype, {**made_group, "repay": False}, moments)
    if wanted - specs.keys():
        raise CheckpointError(
            f"{checkpoint.path}: got state of {few(wanted - specs.keys())} in no param group, expected each in one; "
            "load another checkpoint"
        )
    return {name: specs[name] for name in names}


def class_of_entries(checkpoint: Checkpoint, entries: Entries) -> str:
    """The class whose options a checkpoint's param groups have, and whose state has these entries.

    Classes that would read the state in the same way count as one: the first of them is named.

    Raises:
        CheckpointError: there is none, or there are several that would read it differently.
    """
    keys: set[str] = set().union(*(group["options"].keys() for group in checkpoint.groups)) - DEFAULTS.keys()
    readings: dict[str, Any] = {}  # how a class would read the state
    rules = [kind for kind in optim.OPTIMIZERS.values() if kind.default_codec == "fp32"]
    for kind in sorted(rules, key=lambda kind: (kind.__name__ not in _FIRST, kind.__name__)):
        if keys - {"initial_lr"} != class_defaults(kind).keys() - DEFAULTS.keys():
            continue
        trial = Checkpoint(checkpoint.path, kind.__name__, checkpoint.groups, tensors=checkpoint.tensors)
        try:
            of_class = forms(trial, checkpoint.groups, list(entries))
        except CheckpointError:
            continue
        if all(form.entries.keys() == entries[key].keys() for key, form in of_class.items()):
            readings[kind.__name__] = {key: (form.moments, form.codec) for key, form in of_class.items()}
    if not readings or any(reading != next(iter(readings.values())) for reading in readings.values()):
        raise CheckpointError(
            f"{checkpoint.path}: got the state of {few(readings) or 'an unknown optimizer'}, whose class the "
            "checkpoint does not name, expected one that its options and entries tell; name the class with --optimizer"
        )
    return next(iter(readings))


def class_defaults(kind: type[ShardedOptimizer]) -> dict[str, Any]:
    """The options of a class, with their defaults."""
    made = kind([torch.empty(1, 1, device="meta")])  # type: ignore[call-arg]  # subclasses have defaults
    return made.defaults


@contextmanager
def reading(path: str) -> Iterator[None]:
    """Raises an error that options or shapes from outside lead to as a CheckpointError that names where they are."""
    try:
        yield
    except (CheckpointError, MemoryError):
        raise
    except Exception as error:  # of values that no optimizer has, of any type
        raise CheckpointError(f"{path}: {line(error)}") from error


def add_states(checkpoint: Checkpoint, entries: Entries) -> None:
    """Takes the state entries of a checkpoint, which has parameters and param groups already.

    Raises:
        CheckpointError: the entries are not those of the optimizer and its options.
    """
    if is_of_quantize_state(checkpoint.optimizer):
        for name, of_name in entries.items():
            checkpoint.tensors.update({f"optimizer.{name}.{entry}": tensor for entry, tensor in of_name.items()})
        return
    for name, form in forms(checkpoint, checkpoint.groups, list(entries)).items():
        saved = {entry: (tensor.dtype, tensor.shape) for entry, tensor in entries[name].items()}
        expected = {entry: (entry_format.dtype, entry_format.shape) for entry, entry_format in form.entries.items()}
        if saved != expected:
            entry = min(key for key in saved.keys() | expected.keys() if saved.get(key) != expected.get(key))
            raise CheckpointError(
                f"{checkpoint.path}: got {_kind(saved.get(entry))} for {named(entry)} of {named(name)}, expected "
                f"{_kind(expected.get(entry))} of {checkpoint.optimizer} with its options; name another class "
                "with --optimizer, or load another checkpoint"
            )
        tensors = {entry: tensor for entry, tensor in entries[name].items() if entry != "step"}
        step = entries[name]["step"].whole()
        checkpoint.states[name] = checked(
            state_of_tensors(form, checked_step_count(step, name, checkpoint.path), tensors), name, checkpoint.path
        )


def checked_step_count(step: object, name: str, path: str) -> Tensor:
    """A step count as states have it.

    Raises:
        CheckpointError: it is no single whole number.
    """
    try:
        return step_on(_CPU, checked_step({"step": step}, name))
    except ValueError as error:
        raise CheckpointError(f"{path}: {line(error)}") from error


def checked(state: State, name: str, path: str) -> State:
    """A state whose values are checked when they are read, as a load does.

    Reading raises a CheckpointError if a step could not go on from them.
    """

    def read(first: int, end: int) -> StateDict:
        entries = state.read(first, end)
        _check(part_of_form(state.form, first, end), entries, name, path)
        return entries

    return state._replace(read=read)


def recoded(checkpoint: Checkpoint, options: Mapping[str, Any]) -> tuple[Checkpoint, dict[str, str]]:
    """A checkpoint with other codecs or block sizes.

    Moments are decoded and encoded anew where the form of a parameter's state is not that of its options, by the
    functions that ``load(..., convert=True)`` uses; all else is as it was.

    Args:
        checkpoint: the checkpoint.
        options: some of ``codec`` and ``block_size``, or none.

    Returns:
        The checkpoint, and the conversion of each parameter whose state is encoded anew.

    Raises:
        CheckpointError: the checkpoint has no optimizer, or its optimizer does not take the options.
    """
    if checkpoint.optimizer is None or is_of_quantize_state(checkpoint.optimizer):
        if not options:
            return checkpoint, {}
        raise CheckpointError(
            f"{checkpoint.path}: got {few(options)} for a checkpoint of {checkpoint.optimizer or 'no optimizer'}, "
            "expected one of an optimizer of shardopt; leave out --codec and --block-size"
        )
    groups = [{**group, "options": {**group["options"], **options}} for group in checkpoint.groups]
    states, converted = dict(checkpoint.states), {}
    for name, form in forms(checkpoint, groups, list(states)).items():
        old = states[name]
        before, after = described(old.form), described(form)
        if old.coded is not None and described(old.coded.form) == after:
            states[name] = checked(old.coded, name, checkpoint.path)
        elif old.form.moments and before != after:
            converted[name] = f"{old.stored or before} state for {after}"
            states[name] = _encoded_anew(old, form, name, checkpoint.path)
        else:
            states[name] = old._replace(form=form)
    return replace(checkpoint, groups=groups, states=states), converted


def _encoded_anew(state: State, form: SliceSpec, name: str, path: str) -> State:
    def read(first: int, end: int) -> StateDict:
        old, new = part_of_form(state.form, first, end), part_of_form(form, first, end)
        entries = state.read(first, end)
        kept = {key: x for key, x in entries.items() if key not in old.moment_entries}
        return {**kept, **new.encode_local(old.decode(entries))}

    return checked(State(form, state.step, read), name, path)


def _check(form: SliceSpec, entries: StateDict, name: str, path: str) -> None:
    try:
        form.check_moments(entries, name)
    except ValueError as error:
        raise CheckpointError(f"{path}: {line(error)}") from error


def _kind(tensor: tuple[torch.dtype, tuple[int, ...]] | None) -> str:
    return "nothing" if tensor is None else f"{str(tensor[0]).removeprefix('torch.')} {shown(tensor[1])}"


def of_names(tensors: Mapping[str, LazyTensor]) -> dict[str, dict[str, LazyTensor]]:
    """State entries by parameter and name, of tensors named ``optimizer.<name>.<entry>``."""
    entries: dict[str, dict[str, LazyTensor]] = {}
    for key, tensor in tensors.items():
        if key.startswith("optimizer."):
            name, _, entry = key.removeprefix("optimizer.").rpartition(".")
            entries.setdefault(name, {})[entry] = tensor
    return entries
