"""Param groups by patterns over the names of a model's parameters."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from difflib import SequenceMatcher, get_close_matches
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from shardopt.layout import Copies, FlatBuffer, assigned, copies_in, keeps_float32_state, number_parameters, read_model
from shardopt.layout.names import all_parameter_names
from shardopt.state.options import DEFAULTS

_Options = dict[str, Any]


class GroupedParameter(NamedTuple):
    """A parameter of the model, and what became of it.

    Attributes:
        names: its names in the bare model; a shared parameter has several.
        shape: its global shape.
        group: index of its param group.
        options: those of its param group.
        notes: "frozen", "float32 state (StableEmbedding)".
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    group: int
    options: Mapping[str, Any]
    notes: tuple[str, ...]


class ParamGroups(list[dict[str, Any]]):
    """Param groups for any torch optimizer.

    Attributes:
        parameters: all parameters of the model, in its order.
        copies: those of which other ranks hold copies.
    """

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        parameters: Sequence[GroupedParameter],
        copies: Mapping[Tensor, Copies],
    ) -> None:
        super().__init__(groups)
        self.parameters = tuple(parameters)
        self.copies = copies

    def table(self) -> str:
        """A line per parameter: name, shape, index of the param group, options and notes."""
        cells = [["parameter", "shape", "group", "options"]]
        for names, shape, group, options, notes in self.parameters:
            shown = [*(f"{key}={value!r}" for key, value in options.items()), *notes]
            of_shape = " x ".join(map(str, shape)) or "scalar"
            cells.append([" = ".join(names), of_shape, str(group), ", ".join(shown)])
        widths = [max(len(line[column]) for line in cells) for column in range(3)]
        return "\n".join(
            f"{name:{widths[0]}}  {shape:>{widths[1]}}  {group:>{widths[2]}}  {options}".rstrip()
            for name, shape, group, options in cells
        )


class _Part(NamedTuple):
    """A parameter of the model as it stands in one of the wrapped model's tensors."""

    names: tuple[str, ...]
    shape: tuple[int, ...]
    float32_state: bool


def param_groups(
    model: Module,
    overrides: Mapping[str, Mapping[str, Any]] | None = None,
    no_decay: Iterable[str] = (),
) -> ParamGroups:
    """The parameters of a model as param groups, with options by patterns over their names.

    To be called for the whole model, before it is wrapped or sharded or afterwards: patterns are matched against the
    names in the bare model, without what DistributedDataParallel, FSDP, torch.compile and activation checkpointing add.
    FSDP replaces parameters, so make the groups after it; DeepSpeed takes groups that were made before
    ``deepspeed.initialize``.

    Patterns are those of :mod:`fnmatch`: ``*`` stands for any characters, dots too. Upper and lower case differ. Of
    several patterns that give a parameter the same option, the last one in ``overrides`` wins, and any of them wins
    over ``no_decay``. Parameters with the same options are one group; the groups are in the order of their first
    parameters, alike on all ranks. A shared parameter appears once, and is matched by all of its names. Frozen
    parameters are included, as by ``model.parameters()``: they take no state until they get a gradient.

    Args:
        model: the model.
        overrides: by pattern, options of the optimizers and hyper-parameters.
        no_decay: patterns of parameters with ``weight_decay=0``.

    Returns:
        A list of dicts with ``params``, ``param_names`` and the options. ``table()`` says what became of each
        parameter.

    Raises:
        ValueError: a pattern matches no parameter; an option is unknown; or the parts of one flat parameter would have
            different options (FSDP1 with ``use_orig_params=False``).
    """
    overrides = {} if overrides is None else overrides
    if isinstance(no_decay, str) or not isinstance(no_decay, Iterable):
        raise ValueError(f'no_decay: got {no_decay!r}, expected several patterns; write ("*.bias",) for one')
    rules: list[tuple[str, Mapping[str, Any]]] = [(pattern, {"weight_decay": 0.0}) for pattern in no_decay]
    rules += overrides.items()
    _check_options(overrides)
    read_model(model)
    number_parameters(model)
    named = all_parameter_names(model)
    tensors = {param: _parts(param, names) for param, names in named.items()}
    _check_patterns([pattern for pattern, _ in rules], [n for ps in tensors.values() for p in ps for n in p.names])
    groups: list[dict[str, Any]] = []
    options_of: list[_Options] = []
    parameters = []
    for param, parts in tensors.items():
        options = _common_options(parts, rules)
        index = next((i for i, known in enumerate(options_of) if _is_same(known, options)), len(groups))
        if index == len(groups):
            groups.append({"params": [], "param_names": [], **options})
            options_of.append(options)
        groups[index]["params"].append(param)
        groups[index]["param_names"].append(named[param][0])
        for part in parts:
            notes = [] if param.requires_grad else ["frozen"]
            notes += ["float32 state (StableEmbedding)"] if part.float32_state else []
            parameters.append(GroupedParameter(part.names, part.shape, index, options, tuple(notes)))
    return ParamGroups(groups, parameters, copies_in(model))


def _parts(param: Tensor, names: Sequence[str]) -> list[_Part]:
    shard = assigned(param)
    if isinstance(shard, FlatBuffer):
        return [
            _Part((name, *shard.aliases.get(name, ())), part.global_shape, part.float32_state)
            for name, _, part, _ in shard.segments
        ]
    # Parameters that ZeRO 3 has partitioned are empty, and say their shapes.
    shape = tuple(getattr(param, "ds_shape", param.shape)) if shard is None else shard.global_shape
    return [_Part(tuple(names), shape, keeps_float32_state(param))]


def _options(part: _Part, rules: Sequence[tuple[str, Mapping[str, Any]]]) -> _Options:
    found: _Options = {}
    for pattern, options in rules:
        if any(fnmatchcase(name, pattern) for name in part.names):
            found.update(options)
    return dict(sorted(found.items()))


def _common_options(parts: Sequence[_Part], rules: Sequence[tuple[str, Mapping[str, Any]]]) -> _Options:
    """The options of all parts of one tensor.

    Raises:
        ValueError: they are different.
    """
    first, *others = parts
    options = _options(first, rules)
    for other in others:
        of_other = _options(other, rules)
        if not _is_same(options, of_other):
            raise ValueError(
                f"got {first.names[0]} with {_shown(options)} and {other.names[0]} with {_shown(of_other)} in one flat "
                "parameter, expected the same options for all of its parts; wrap the model with use_orig_params=True, "
                "or wrap modules whose parameters need options of their own by themselves"
            )
    return options


def _shown(options: _Options) -> str:
    return ", ".join(f"{key}={value!r}" for key, value in options.items()) or "no options"


def _is_same(one: _Options, other: _Options) -> bool:
    if one.keys() != other.keys():
        return False
    pairs = [(one[key], other[key]) for key in one]
    return all(a is b or (not isinstance(a, Tensor) and not isinstance(b, Tensor) and a == b) for a, b in pairs)


def _check_options(overrides: Mapping[str, Mapping[str, Any]]) -> None:
    """Checks the names of options; their values are checked by the optimizer."""
    known = {*DEFAULTS, "initial_lr", *_hyper_parameters(Optimizer)}
    for pattern, options in overrides.items():
        if not isinstance(options, Mapping):
            raise ValueError(f"overrides[{pattern!r}]: got {options!r}, expected a dict of options")
        for name in options:
            if name not in known:
                near = get_close_matches(str(name), known, n=1)
                expected = repr(near[0]) if near else f"one of {', '.join(sorted(known))}"
                raise ValueError(f"overrides[{pattern!r}]: got unknown option {name!r}, expected {expected}; rename it")


def _hyper_parameters(base: type[Optimizer]) -> set[str]:
    """The hyper-parameters of all optimizers that there are, the user's own included."""
    found: set[str] = set()
    for kind in base.__subclasses__():
        parameters = () if inspect.isabstract(kind) else inspect.signature(kind).parameters.values()
        found |= {p.name for p in parameters if p.name != "params" and p.kind is not p.VAR_KEYWORD}
        found |= _hyper_parameters(kind)
    return found


def _check_patterns(patterns: Sequence[str], names: Sequence[str]) -> None:
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            near = ", ".join(_near(pattern, names) or names[:3]) or "those of a model that has parameters"
            raise ValueError(
                f"got pattern {pattern!r}, which matches no parameter, expected one for names such as {near}; correct "
                "the pattern or leave it out"
            )


def _near(pattern: str, names: Sequence[str]) -> list[str]:
    """Up to three names that resemble a pattern, in whole or by one of the parts between their dots, best first."""
    text = pattern.strip("*.")

    def likeness(name: str) -> float:
        return max(SequenceMatcher(None, text, part).ratio() for part in (name, *name.split(".")))

    found = sorted(((likeness(name), -place) for place, name in enumerate(names)), reverse=True)
    return [names[-place] for ratio, place in found[:3] if ratio >= 0.6]
