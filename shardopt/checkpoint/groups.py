"""Param groups in the header: writes their options as JSON, merges groups of all ranks, and restores options."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from inspect import signature
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from shardopt.checkpoint.errors import CheckpointError
from shardopt.checkpoint.wording import few, named
from shardopt.optim import ShardedOptimizer
from shardopt.removed import OPTIONS
from shardopt.state.options import DEFAULTS, LARGEST, PLACEMENT, STATE_FORMAT, check_options
from shardopt.wrapper.optimizer import QuantizedState

#: Options that a load leaves as the loading optimizer has them, such as ``foreach``, and options of earlier versions,
#: which are ignored. ``repay`` stays as it is because only some codecs and weight dtypes allow it, and a load may
#: convert both.
RUN_OPTIONS = frozenset(["foreach", "fused", "capturable", "differentiable", "repay", *PLACEMENT, *OPTIONS])

#: Keys of a param group that are not saved. DeepSpeed's ``moe`` and ``name`` say how this run shards experts.
_NOT_SAVED = frozenset(["params", "param_names", "moe", "name"])

SavedGroup = dict[str, Any]


def describe_group(group: Mapping[str, Any], names: Sequence[str]) -> SavedGroup:
    """Describes a param group for the header: its parameters' names, and its options without those JSON cannot hold."""
    options = {}
    for key, value in group.items():
        with suppress(TypeError):
            if key not in _NOT_SAVED:
                options[key] = _as_json(value)
    return {"parameters": list(names), "options": options}


def _as_json(value: Any) -> Any:
    """Converts an option for JSON: one-element tensors become numbers. Raises TypeError for what JSON cannot hold."""
    if isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex():
        return value.item()
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return [_as_json(item) for item in value]
    raise TypeError(type(value).__name__)


def merged_groups(groups_of_ranks: Sequence[Sequence[SavedGroup]]) -> list[SavedGroup]:
    """Merges the param groups of ranks with different parameters (pipeline stages, experts) into one list.

    Groups of different ranks become one group if their options are equal, but for those in ``RUN_OPTIONS``; if several
    groups of the first ranks are equal, that of the same index. Groups of the first rank stay apart. Raises
    CheckpointError if a parameter has different options on different ranks.
    """
    merged: list[dict[str, Any]] = []
    for rank, groups in enumerate(groups_of_ranks):
        for index, group in enumerate(groups):
            candidates = [*merged[index : index + 1], *merged] if rank else []
            same = next((other for other in candidates if _hyper_parameters(other) == _hyper_parameters(group)), None)
            names = dict.fromkeys(group["parameters"])
            if same is None:
                merged.append({**group, "parameters": names})
            else:
                same["parameters"] |= names
    seen: set[str] = set()
    for group in merged:
        twice = seen & group["parameters"].keys()
        if twice:
            own, other = [_hyper_parameters(each) for each in merged if min(twice) in each["parameters"]][:2]
            different = [key for key in {**own, **other} if own.get(key) != other.get(key)]
            raise CheckpointError(
                f"got {named(min(twice))} with different {few(different)} on different ranks, expected the same "
                "hyper-parameters for a parameter everywhere; set them alike on all ranks"
            )
        seen |= group["parameters"].keys()
    return [{**group, "parameters": list(group["parameters"])} for group in merged]


def _hyper_parameters(group: SavedGroup) -> dict[str, Any]:
    """The options on which the training's result depends, which must be equal on all ranks."""
    return {key: value for key, value in group["options"].items() if key not in RUN_OPTIONS}


def saved_options(saved: Sequence[SavedGroup], names: Sequence[Sequence[str]]) -> list[dict[str, Any]]:
    """Looks up the options with which the parameters of each param group (``names``) were saved.

    Raises CheckpointError if they differ within a group, or if a parameter was saved in no group.
    """
    options = {name: group["options"] for group in saved for name in group["parameters"]}
    by_group = []
    for index, in_group in enumerate(names):
        for name in in_group:
            if name not in options:
                raise CheckpointError(
                    f"got no state of {named(name)}, expected the optimizer's in the checkpoint to have it; load it "
                    "into an optimizer of the parameters that were saved, or the model alone by load(path, model)"
                )
            first, other = options[in_group[0]], options[name]
            if other is not first and other != first:
                keys = [key for key in {*first, *other} if first.get(key) != other.get(key)]
                raise CheckpointError(
                    f"param group {index}: got parameters that were saved with different {few(keys)}, expected them to "
                    "be alike; make param groups like those of the checkpoint"
                )
        by_group.append(options[in_group[0]] if in_group else {})
    return by_group


def options_after_load(
    optimizer: ShardedOptimizer | QuantizedState,
    group: Mapping[str, Any],
    saved: Mapping[str, Any],
    *,
    keep: bool = False,
) -> dict[str, Any]:
    """A param group's options after a load: saved hyper-parameters, but the present codec, block size and the like.

    With ``keep`` only values that steps have computed are the saved ones. Raises ValueError if an option is not
    allowed.
    """
    unchanged = {*STATE_FORMAT, *RUN_OPTIONS, *_NOT_SAVED, *optimizer._internals.format}
    if saved.get("master_weight_bits") != group.get("master_weight_bits"):
        unchanged.add("stochastic_rounding")  # depends on the weights' format, which differs
    taken = {key: value for key, value in saved.items() if key not in unchanged}
    if keep:
        of_steps = values_kept_by_steps(optimizer) | (taken.keys() - group.keys() - {"initial_lr"})
        taken = {key: taken[key] for key in taken.keys() & of_steps}
    for key, value in taken.items():
        if isinstance(value, list) and isinstance(group.get(key), tuple | None):
            taken[key] = tuple(value)  # JSON has lists only
    check_options({**DEFAULTS, **group, **taken})
    optimizer.check_group({**group, **taken})
    for key, value in taken.items():  # an option that is a tensor, such as lr for CUDA graphs, was saved as a number
        present = group.get(key)
        is_number = isinstance(value, float | int) and abs(value) <= LARGEST
        if is_number and isinstance(present, Tensor) and present.numel() == 1:
            taken[key] = present.new_tensor(value).reshape(present.shape)
    return {**group, **taken}


def values_kept_by_steps(optimizer: ShardedOptimizer | QuantizedState) -> frozenset[str]:
    """The entries of param groups that are state, as Prodigy's ``d``: the class has no argument of such a name."""
    inner = getattr(optimizer, "_inner", optimizer)
    classes = [each for each in type(inner).__mro__ if issubclass(each, Optimizer)]
    arguments = {name for each in classes for name in signature(each).parameters}
    arguments |= {"lr", "betas", "momentum", "eps", "weight_decay"}  # which a class may take by other names
    return frozenset(inner.defaults.keys() - arguments - DEFAULTS.keys())


def changed_options(
    of_steps: Collection[str], group: Mapping[str, Any], saved: Mapping[str, Any], new: Mapping[str, Any]
) -> dict[str, tuple[Any, Any]]:
    """The hyper-parameters that a load changes in a param group: their values before and after, as in the header.

    Without values that steps keep, and without the learning rate if a schedule with the same initial one has set it.
    """
    before, after = (describe_group(each, ())["options"] for each in (group, new))
    same_initial = "initial_lr" in saved and before.get("initial_lr") == after.get("initial_lr")
    unlisted = {*of_steps, "lr"} if same_initial else of_steps
    return {
        key: (before[key], value)
        for key, value in after.items()
        if key in before and value != before[key] and key not in unlisted
    }


def set_options(group: dict[str, Any], new: Mapping[str, Any], dropped: Collection[str]) -> None:
    """Sets a param group's options in place. Copies into tensors, as CUDA graphs may have captured their addresses."""
    for key in dropped:
        group.pop(key, None)
    for key, value in new.items():
        present = group.get(key)
        if isinstance(present, Tensor) and isinstance(value, Tensor):
            present.copy_(value)
        elif key != "params":
            group[key] = value
