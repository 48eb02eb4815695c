"""Divides a model's parameters into param groups, with options by patterns of parameter names."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from torch import Tensor
from torch.nn import Module
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from shardopt.layout import (
    FlatBuffer,
    RankGroup,
    assigned,
    copies_in,
    keeps_float32_state,
    number_parameters,
    read_model,
)
from shardopt.layout.names import all_parameter_names
from shardopt.state.options import DEFAULTS, convert_sequences, refuse_unknown

if TYPE_CHECKING:
    from shardopt.unit.u_mup import KindPatterns, UMup

_Options = dict[str, Any]
_Patterns = Sequence[tuple[str, Mapping[str, Any]]]


class GroupedParameter(NamedTuple):
    """Tells which param group a parameter of the model is in, for :meth:`ParamGroups.table`.

    Attributes:
        names: names of the parameter in the unwrapped model; a shared parameter has several.
        shape: global shape, before sharding.
        group: index of the parameter's param group.
        options: the param group's options.
        notes: remarks for the table: "frozen", "float32 state (StableEmbedding)".
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    group: int
    options: Mapping[str, Any]
    notes: tuple[str, ...]


class ParamGroups(list[dict[str, Any]]):
    """A list of param groups, for any torch optimizer, that also describes the model's parameters.

    Attributes:
        parameters: all parameters of the model, in the model's order.
        copies: parameters that are replicated on several ranks, with these ranks.
    """

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        parameters: Sequence[GroupedParameter],
        copies: Mapping[Tensor, RankGroup],
    ) -> None:
        super().__init__(groups)
        self.parameters = tuple(parameters)
        self.copies = copies

    def table(self) -> str:
        """A line per parameter: name, shape, index of the param group, options and notes."""
        cells = [["parameter", "shape", "group", "options"]]
        for names, shape, group, options, notes in self.parameters:
            shown = [*(f"{key}={value!r}" for key, value in options.items()), *notes]
            sizes = " x ".join(map(str, shape)) or "scalar"
            cells.append([" = ".join(names), sizes, str(group), ", ".join(shown)])
        widths = [max(len(line[column]) for line in cells) for column in range(3)]
        return "\n".join(
            f"{name:{widths[0]}}  {shape:>{widths[1]}}  {group:>{widths[2]}}  {options}".rstrip()
            for name, shape, group, options in cells
        )


class _Part(NamedTuple):
    """A parameter of the unwrapped model that is stored in a tensor of the wrapped one; flat tensors have several."""

    names: tuple[str, ...]
    shape: tuple[int, ...]  # global
    float32_state: bool  # whether its state stays float32, as StableEmbedding's does


def param_groups(
    model: Module,
    overrides: Mapping[str, Mapping[str, Any]] | None = None,
    no_decay: Iterable[str] | Literal["auto"] = (),
    *,
    rule: Literal["u-mup"] | None = None,
    lr: float | None = None,
    weight_decay: float | None = None,
    kinds: KindPatterns | None = None,
) -> ParamGroups:
    """Divides a model's parameters into param groups, whose options are given by patterns of parameter names.

    Call this for the whole model, after FSDP, which replaces parameters, and before ``deepspeed.initialize``. Patterns
    are matched against the names in the bare model, without the prefixes of DistributedDataParallel, FSDP,
    torch.compile and activation checkpointing. Like ``attach(model)``, the call records shards of the parameters.

    Patterns are those of :mod:`fnmatch`: ``*`` stands for any characters, dots too. Case matters. Where several
    patterns give a parameter the same option, the last one in ``overrides`` wins; any of them wins over ``no_decay``.
    Parameters with the same options are one group; the groups are in the order of their first parameters, alike on all
    ranks. A shared parameter appears once, and is matched by all of its names. Frozen parameters are included.

    ``rule="u-mup"`` sets ``lr`` and ``weight_decay`` of every parameter, for Adam's kin and other rules whose updates
    have elements of about ``lr`` (arXiv 2407.17465, table 2). The rate is ``lr`` times ``fan_in ** -0.5`` for matrices
    and embeddings (a global shape's product but for its first dimension), 1 for readouts, biases and gains of norms,
    and all of them times ``depth ** -0.5`` in a stack of ``depth`` residual blocks. Weight decay is ``weight_decay``
    divided by the group's rate: a decoupled decay subtracts ``weight_decay`` times the weight at the peak of the
    schedule, whatever the rate. Overrides win over both. Kinds and depths are those of modules of :mod:`shardopt.unit`.

    Args:
        model: the model.
        overrides: by pattern, options of the optimizers and hyper-parameters.
        no_decay: patterns of parameters with ``weight_decay=0``, or "auto": all of fewer than two dimensions.
        rule: None, or how learning rates follow from kinds and shapes.
        lr: with a rule, the global learning rate at its peak.
        weight_decay: with a rule, the share that a step at the peak subtracts (default: 0).
        kinds: with a rule, by pattern, the kind of parameters whose modules do not say it, or say another: "weight",
            "bias", "norm" or "output"; or a kind and the depth of the stack around them, ``("weight", 12)``.

    Returns:
        A list of dicts with ``params``, ``param_names`` and the options. ``table()`` lists the parameters.

    Raises:
        TypeError: ``model`` is no Module.
        ValueError: a pattern matches no parameter; an option is unknown; a parameter is uninitialized; the parts of one
            flat parameter would have different options (FSDP1 with ``use_orig_params=False``); or there is a rule and
            no positive ``lr``, a negative ``weight_decay``, or a parameter of unknown kind.
    """
    if not isinstance(model, Module):
        raise TypeError(
            f"got {type(model).__name__}, expected a model, whose parameters have names; pass the module, not its "
            "parameters"
        )
    overrides = {} if overrides is None else overrides
    of_vectors: _Options = {}
    if no_decay == "auto":
        no_decay, of_vectors = (), {"weight_decay": 0.0}
    if isinstance(no_decay, str) or not isinstance(no_decay, Iterable):
        raise ValueError(f'no_decay: got {no_decay!r}, expected "auto" or several patterns; write ("*.bias",) for one')
    known = sorted({*DEFAULTS, "initial_lr", *_hyper_parameters(Optimizer)} - {"params", "defaults", "options"})
    for pattern, options in overrides.items():
        if not isinstance(options, Mapping):
            raise ValueError(f"overrides[{pattern!r}]: got {options!r}, expected a dict of options")
        refuse_unknown(options, known, ValueError, f"overrides[{pattern!r}]: ")
    plain_overrides = {pattern: dict(options) for pattern, options in overrides.items()}
    for options in plain_overrides.values():
        convert_sequences(options)
    patterns: _Patterns = [*((pattern, {"weight_decay": 0.0}) for pattern in no_decay), *plain_overrides.items()]
    rates = None
    if rule == "u-mup":
        from shardopt.unit.u_mup import UMup  # here, as shardopt.unit is imported where it is used

        rates = UMup(model, lr, 0.0 if weight_decay is None else weight_decay, kinds or {})
    elif rule is not None:
        raise ValueError(f"rule: got {rule!r}, expected 'u-mup' or None")
    else:
        for name, value in (("lr", lr), ("weight_decay", weight_decay), ("kinds", kinds)):
            if value is not None:
                raise ValueError(
                    f'{name}: got {value!r} without a rule, expected rule="u-mup"; give options to the optimizer'
                )
    read_model(model)
    number_parameters(model)
    names_of = all_parameter_names(model)
    lazy = [names[0] for param, names in names_of.items() if is_lazy(param)]  # without a shape yet
    if lazy:
        raise ValueError(
            f"got {lazy[0]} of a lazy module, which has no shape yet, expected initialized parameters; take a forward "
            "pass first"
        )
    parts_of = {param: _parts(param, names) for param, names in names_of.items()}
    all_names = [name for parts in parts_of.values() for part in parts for name in part.names]
    check_patterns([pattern for pattern, _ in patterns] + list(kinds or ()), all_names)
    groups: list[dict[str, Any]] = []
    keys: list[_Options] = []  # the options of each group, comparable
    parameters = []
    for param, parts in parts_of.items():
        options = _options(parts, patterns, rates, of_vectors)
        key = _comparable(options)
        if key not in keys:
            groups.append({"params": [], "param_names": [], **options})
            keys.append(key)
        index = keys.index(key)
        groups[index]["params"].append(param)
        groups[index]["param_names"].append(names_of[param][0])
        for part in parts:
            notes = [] if param.requires_grad else ["frozen"]
            notes += ["float32 state (StableEmbedding)"] if part.float32_state else []
            parameters.append(GroupedParameter(part.names, part.shape, index, options, tuple(notes)))
    return ParamGroups(groups, parameters, copies_in(model))


def _parts(param: Tensor, names: Sequence[str]) -> list[_Part]:
    """The parameters in a tensor of the wrapped model, ``names`` if it is an ordinary one, with global shapes."""
    shard = assigned(param)
    if isinstance(shard, FlatBuffer):
        return [
            _Part((part.name, *part.aliases), part.shard.global_shape, part.shard.float32_state)
            for part in shard.segments
        ]
    # Parameters that ZeRO 3 has partitioned are empty, with their shapes in an attribute.
    shape = tuple(getattr(param, "ds_shape", param.shape)) if shard is None else shard.global_shape
    return [_Part(tuple(names), shape, keeps_float32_state(param))]


def _options(parts: Sequence[_Part], patterns: _Patterns, rates: UMup | None, of_vectors: _Options) -> _Options:
    """The options of an optimizer tensor; raises ValueError unless all model parameters in it have the same options."""
    found: list[_Options] = []
    for part in parts:
        options: _Options = {} if rates is None else {"lr": rates.lr(part.names, part.shape)}
        options |= of_vectors if len(part.shape) < 2 else {}
        for pattern, pattern_options in patterns:  # later ones win
            if any(fnmatchcase(name, pattern) for name in part.names):
                options.update(pattern_options)
        if rates and "weight_decay" not in options:
            # Decoupled decay multiplies by lr, so that a step at the peak subtracts rates.weight_decay.
            options["weight_decay"] = rates.weight_decay / float(options["lr"]) if options["lr"] else 0.0
        found.append(dict(sorted(options.items())))
        if _comparable(found[0]) != _comparable(found[-1]):
            raise ValueError(
                f"got {parts[0].names[0]} with {found[0] or 'no options'} and {part.names[0]} with "
                f"{found[-1] or 'no options'} in one flat parameter, expected the same for all of its parts; wrap the "
                "model with use_orig_params=True, or by themselves the modules whose parameters need other options"
            )
    return found[0]


def _comparable(options: _Options) -> _Options:
    """Replaces tensors among option values by their ids, so that ``==`` on options compares tensors by identity."""
    return {key: id(x) if isinstance(x, Tensor) else x for key, x in options.items()}


def _hyper_parameters(base: type[Optimizer]) -> set[str]:
    """Constructor argument names of all subclasses of an optimizer class, users' own classes included."""
    names: set[str] = set()
    for kind in base.__subclasses__():
        parameters = inspect.signature(kind).parameters.values()
        names |= {p.name for p in parameters if p.kind is not p.VAR_KEYWORD}
        names |= _hyper_parameters(kind)
    return names


def check_patterns(patterns: Sequence[str], names: Sequence[str]) -> None:
    """Raises ValueError for a pattern that matches none of the names, and suggests similar ones."""
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            # Names that are alike as wholes or in one of their dotted parts.
            by_part = {part: name for name in reversed(names) for part in (name, *name.split("."))}
            close = dict.fromkeys(by_part[part] for part in get_close_matches(pattern.strip("*."), by_part))
            near = ", ".join(close or names[:3])
            raise ValueError(
                f"got pattern {pattern!r}, which matches no parameter, expected one for names such as "
                f"{near or 'those of model.named_parameters(), which are not known here'}; correct the pattern or "
                "leave it out"
            )
