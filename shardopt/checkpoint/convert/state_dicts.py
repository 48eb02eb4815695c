"""State dicts of a model and an optimizer, torch.optim's or shardopt's own, as a checkpoint."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from shardopt.checkpoint.convert.guess import class_defaults, class_of_entries
from shardopt.checkpoint.convert.recoding import FLOAT32, add_states, class_named, made_optimizer
from shardopt.checkpoint.convert.stream import Checkpoint, LazyTensor, lazy
from shardopt.checkpoint.errors import CheckpointError
from shardopt.checkpoint.foreign.importing import taken_hyper
from shardopt.checkpoint.foreign.peer import Peer
from shardopt.checkpoint.foreign.structure import check_structure, is_dense
from shardopt.checkpoint.groups import SavedGroup, describe
from shardopt.checkpoint.wording import few, kind_of, line, named, shown
from shardopt.codec import Moment
from shardopt.state.options import DEFAULTS, STATE_FORMAT, is_own

#: Entries of a state: tensors and numbers.
States = Mapping[Any, Mapping[str, Any]]

#: Entries of torch.optim's state that follow from the step count.
_DERIVED = frozenset(["mu_product"])

#: torch.optim's classes by the moments of their state, where these tell the class.
_CLASSES = {
    frozenset(["momentum_buffer"]): "SGD",
    frozenset(["exp_avg", "exp_inf"]): "Adamax",
    frozenset(["square_avg"]): "RMSprop",
    frozenset(["square_avg", "momentum_buffer"]): "RMSprop",
    frozenset(["square_avg", "grad_avg"]): "RMSprop",
    frozenset(["square_avg", "momentum_buffer", "grad_avg"]): "RMSprop",
    frozenset(["sum"]): "Adagrad",
}
_ADAM = (frozenset(["exp_avg", "exp_avg_sq"]), frozenset(["exp_avg", "exp_avg_sq", "max_exp_avg_sq"]))

_BY_NAME = (
    "make the optimizer with model.named_parameters(), load its state, and save it again: the state dict then has "
    "the names"
)


def take_state_dicts(
    checkpoint: Checkpoint,
    model: Mapping[str, LazyTensor],
    states: States,
    groups: Sequence[Mapping[str, Any]],
    optimizer: str | None,
) -> None:
    """Adds a model's tensors and an optimizer's state to an empty checkpoint.

    State of shardopt stays as it is; torch.optim's becomes float32 state of the class of the same name.

    Args:
        checkpoint: the checkpoint.
        model: parameters and buffers by name.
        states: ``state`` of the optimizer's state dict, with tensors as :class:`LazyTensor`.
        groups: ``param_groups`` of the optimizer's state dict.
        optimizer: the optimizer's class; None to find it by options and entries.

    Raises:
        CheckpointError: names are missing or ambiguous, the state is of an unknown optimizer, or damaged.
    """
    path = checkpoint.path
    checkpoint.tensors |= {f"model.{name}": tensor for name, tensor in model.items()}
    check_groups(path, groups)
    kept = {key: _entries(of_key, f"{path}: {named(key)}") for key, of_key in states.items()}
    names = names_by_group(path, groups, model, kept)
    keys = [key for group in groups for key in group["params"]]
    name_of = dict(zip(keys, (name for of_group in names for name in of_group), strict=True))
    strangers = kept.keys() - name_of.keys()
    if strangers:
        raise CheckpointError(
            f"{path}: got state of {few(strangers)} in no param group, expected each in one; save it again"
        )
    entries = {name_of[key]: of_key for key, of_key in kept.items() if of_key}
    if groups and all(is_own(group) for group in groups):
        checkpoint.groups = [describe(group, own) for group, own in zip(groups, names, strict=True)]
        checkpoint.optimizer = optimizer or class_of_entries(checkpoint, entries)
    else:
        checkpoint.optimizer = optimizer or _class_of(path, groups, entries)
        entries = {name: _in_float32(of_name) for name, of_name in entries.items()}
        checkpoint.groups = imported_groups(checkpoint, groups, names, Peer(), states=states)
    add_states(checkpoint, entries)


def check_groups(path: str, groups: Sequence[Mapping[str, Any]]) -> None:
    """Checks that param groups are dicts of plain values.

    Raises:
        CheckpointError: one is not.
    """
    with _naming(path):
        hyper = {key for group in groups for key in group} - {"params", "param_names"}
        check_structure({"state": {}, "param_groups": groups}, hyper)


@contextmanager
def _naming(path: str) -> Iterator[None]:
    """Raises an error about a content as a CheckpointError that names where it is."""
    try:
        yield
    except (ValueError, TypeError, KeyError) as error:
        raise CheckpointError(f"{path}: {line(error)}") from error


def lazy_tensors(path: str, tensors: Mapping[Any, Any], what: str) -> dict[str, LazyTensor]:
    """Tensors as :class:`LazyTensor`.

    Raises:
        CheckpointError: a name is no text, or a value no dense tensor with all its elements in memory.
    """
    found = {}
    for key, value in tensors.items():
        if not isinstance(key, str) or not is_whole_tensor(value):
            raise CheckpointError(
                f"{path}: got {kind_of(value)} as {named(key)} of {what}, expected names and dense tensors; save "
                "state_dict() of a model whose tensors are whole"
            )
        found[key] = lazy(value)
    return found


def is_whole_tensor(value: object) -> bool:
    """Whether a value is a plain dense tensor whose memory has an element for each index."""
    return (
        type(value) in (Tensor, torch.nn.Parameter)
        and is_dense(value)
        and value.numel() * value.itemsize <= value.untyped_storage().nbytes()
    )


def _entries(entries: Mapping[str, Any], what: str) -> dict[str, LazyTensor]:
    """The entries of one parameter's state without those that are None or follow from others.

    Raises:
        CheckpointError: an entry is neither a tensor nor a number.
    """
    found = {}
    for key, value in entries.items():
        if value is None or key in _DERIVED:
            continue
        if isinstance(value, int | float) and not isinstance(value, bool):
            value = lazy(torch.tensor(float(value), device="cpu"))
        if not isinstance(value, LazyTensor):
            raise CheckpointError(
                f"{what}: got {named(key)} as {kind_of(value)}, expected a tensor or a number; save it again"
            )
        found[key] = value
    return found


def names_by_group(
    path: str, groups: Sequence[Mapping[str, Any]], model: Mapping[str, LazyTensor], states: States
) -> list[list[str]]:
    """The names of each param group's parameters.

    Raises:
        CheckpointError: they cannot be told, or the model has no such parameters.
    """
    if all(isinstance(key, str) for group in groups for key in group["params"]):
        names = [list(group["params"]) for group in groups]
    elif all("param_names" in group for group in groups):
        for names_of in (group["param_names"] for group in groups):
            if not isinstance(names_of, list | tuple) or not all(isinstance(name, str) for name in names_of):
                raise CheckpointError(f"{path}: got param_names as {shown(names_of)}, expected names; save it again")
        names = [list(group["param_names"]) for group in groups]
        if any(len(own) != len(group["params"]) for own, group in zip(names, groups, strict=True)):
            raise CheckpointError(f"{path}: got param_names of other parameters than params, expected as many")
    else:
        names = [_names_by_order(path, groups, model, states)]
    flat = [name for own in names for name in own]
    unknown = [name for name in flat if name not in model]
    if unknown or len(set(flat)) < len(flat):
        raise CheckpointError(
            f"{path}: got an optimizer of {few(unknown) or 'parameters that it has twice'}, expected each once, and in "
            "the model; save model and optimizer of one run"
        )
    return names


def _names_by_order(
    path: str, groups: Sequence[Mapping[str, Any]], model: Mapping[str, LazyTensor], states: States
) -> list[str]:
    if len(groups) != 1:
        raise CheckpointError(
            f"{path}: got {len(groups)} param groups without param_names, expected names, as the order of the "
            f"parameters does not tell them; {_BY_NAME}"
        )
    keys = groups[0]["params"]
    names = [name for name, tensor in model.items() if tensor.dtype.is_floating_point]
    shapes = [model[name].shape for name in names]
    fits = len(keys) == len(names) and all(
        entry.shape in ((), shape) for key, shape in zip(keys, shapes, strict=True) for entry in _tensors(states, key)
    )
    if not fits:
        raise CheckpointError(
            f"{path}: got {len(keys)} parameters without param_names and a model of {len(names)} tensors in floats, "
            f"expected as many, of the same shapes in the same order; {_BY_NAME}"
        )
    return names


def _tensors(states: States, key: Any) -> Iterable[LazyTensor]:
    return [each for each in states.get(key, {}).values() if isinstance(each, LazyTensor)]


def _class_of(path: str, groups: Sequence[Mapping[str, Any]], entries: Mapping[str, Mapping[str, Any]]) -> str:
    """The class of the same name as torch.optim's."""
    moments = frozenset(key for of_name in entries.values() for key in of_name if key != "step")
    keys = set().union(*groups) if groups else set()
    if moments in _ADAM and "momentum_decay" not in keys:
        decoupled = {group.get("decoupled_weight_decay", None) for group in groups}
        if decoupled <= {True, False}:
            return "AdamW" if True in decoupled else "Adam"
        if not any(group.get("weight_decay") for group in groups):
            return "AdamW"
    elif moments in _ADAM:
        return "NAdam"
    elif moments == {"momentum_buffer"} and "ns_steps" in keys:
        return "Muon"
    elif moments in _CLASSES:
        return _CLASSES[moments]
    raise CheckpointError(
        f"{path}: got state with {few(moments) or 'no moments'} and hyper-parameters {few(keys - {'params'})}, "
        "expected those of a known optimizer; name the class with --optimizer"
    )


def _in_float32(entries: Mapping[str, LazyTensor]) -> dict[str, LazyTensor]:
    """Entries as a float32 state has them. State without a step count has taken a step, as torch's SGD."""
    found = {"step": lazy(torch.tensor(1.0, device="cpu")), **entries}
    step = found["step"]
    if step.numel == 1:
        found["step"] = LazyTensor(torch.float32, (), lambda first, end: step.read(first, end).float())
    return {key: tensor if key == "step" else _as_float32(tensor) for key, tensor in found.items()}


def _as_float32(tensor: LazyTensor) -> LazyTensor:
    if not tensor.dtype.is_floating_point:
        return tensor  # refused by its dtype
    return LazyTensor(torch.float32, tensor.shape, lambda first, end: tensor.read(first, end).float())


def _scalars(entries: Mapping[str, Any]) -> dict[str, Any]:
    """The step count and what follows from it, of state that has both."""
    if entries.keys().isdisjoint(_DERIVED):
        return {}
    values = {key: entries[key] for key in ("step", *_DERIVED) if entries.get(key) is not None}
    return {key: x.whole().item() if isinstance(x, LazyTensor) and x.numel == 1 else x for key, x in values.items()}


def imported_groups(
    checkpoint: Checkpoint,
    groups: Sequence[Mapping[str, Any]],
    names: Sequence[Sequence[str]],
    peer: Peer,
    moments: Sequence[Moment] = (),
    states: States = MappingProxyType({}),
) -> list[SavedGroup]:
    """Param groups of float32 state with the hyper-parameters that the class has, as import_state takes them over.

    Args:
        checkpoint: has the parameters and the name of the class.
        groups: the other package's.
        names: those of each group's parameters.
        peer: the other package.
        moments: those of its state, which tell what its hyper-parameters mean.
        states: the state of each group's parameters, of which a group may keep what follows from the step count.

    Raises:
        CheckpointError: the hyper-parameters are of another optimizer, or out of range.
    """
    kind = class_named(checkpoint.optimizer, checkpoint.path)
    own_keys = class_defaults(kind).keys() - DEFAULTS.keys() | {"maximize", "initial_lr"}
    saved = []
    for group, params in zip(groups, names, strict=True):
        with _naming(checkpoint.path):
            hyper = peer.hyper({**group, "params": ()}, moments)
        described = describe({key: value for key, value in hyper.items() if key in own_keys}, params)
        saved.append({**described, "options": {**described["options"], **FLOAT32}})
    optimizer = made_optimizer(kind, saved, checkpoint)
    found = []
    for index, (group, own, params) in enumerate(zip(groups, optimizer.param_groups, names, strict=True)):
        hyper = {key: value for key, value in group.items() if key not in ("params", "param_names", *STATE_FORMAT)}
        with _naming(f"{checkpoint.path}: param group {index}"):
            taken, left_out = taken_hyper(optimizer, own, hyper, peer)
            options = {**own, **taken}
            for key in group["params"]:
                optimizer.adopt_derived(options, group, _scalars(states.get(key, {})))
            optimizer.check_group(options)
        checkpoint.left_out += [f"{key}={shown(value)} of param group {index}" for key, value in left_out.items()]
        found.append(describe(options, params))
    return found
