"""u-muP's learning rate of each parameter (arXiv 2407.17465, table 2), computed from its kind, shape and depth."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

from torch.nn import Module

from shardopt.layout.names import canonical_modules

#: Kinds of parameters: "weight" for matrices and embeddings, "norm" for gains of norms, "output" for the readout.
KINDS = ("weight", "bias", "norm", "output")

#: By name patterns: a kind, or a kind and the depth (number of residual blocks in the stack around the parameter).
KindPatterns = Mapping[str, str | tuple[str, int | None]]


class UMup:
    """Computes the learning rate of each parameter of a model by u-muP, for ``param_groups(rule="u-mup")``.

    The kind of a parameter comes from patterns, or else from the attribute ``mup_types`` of its module. The depth comes
    from patterns, too, or else from the innermost module around the parameter with an attribute ``mup_depth``.

    Args:
        model: the model, may be wrapped or sharded.
        lr: the peak of the global learning rate, from which each parameter's is computed.
        weight_decay: the fraction of a weight that a step at the peak learning rate subtracts.
        patterns: kinds by :mod:`fnmatch` patterns of parameters' names; the last pattern that matches wins.

    Raises:
        ValueError: ``lr``, ``weight_decay``, or the kind or depth that a pattern gives, is not allowed.
    """

    def __init__(self, model: Module, lr: float | None, weight_decay: float, patterns: KindPatterns) -> None:
        if lr is None or not 0 < lr < math.inf:
            raise ValueError(
                f"lr: got {lr!r}, expected a positive number, which the rule multiplies; see docs/unit_scaling.md"
            )
        if not 0 <= weight_decay < math.inf:
            raise ValueError(f"weight_decay: got {weight_decay!r}, expected a number that is not negative")
        self._lr, self.weight_decay = lr, weight_decay
        self._patterns = {pattern: _checked(pattern, value) for pattern, value in patterns.items()}
        self._kinds: dict[str, str] = {}
        self._depths: dict[str, int] = {}  # number of blocks of each stack, by the prefix of its parameters' names
        for prefix, module in canonical_modules(model, all_names=True):
            kinds: Mapping[str, str] = getattr(module, "mup_types", {})
            self._kinds.update((prefix + name, kind) for name, kind in kinds.items())
            depth: int | None = getattr(module, "mup_depth", None)
            if depth is not None:
                self._depths[prefix] = depth

    def lr(self, names: Sequence[str], shape: tuple[int, ...]) -> float:
        """Computes the learning rate of a parameter.

        Args:
            names: the names of the parameter, several if modules share it.
            shape: the parameter's shape before sharding.

        Raises:
            ValueError: the kind is unknown, or the names have different kinds.
        """
        distinct = {self._kind_and_depth(name) for name in names}
        if len(distinct) > 1:
            shown = ", ".join(f"{name} ({self._kind_and_depth(name)[0]})" for name in names)
            raise ValueError(
                f"got one parameter with the names {shown}, expected one kind for all names; give it by kinds=..., "
                "with a pattern for each name, or do not share the parameter"
            )
        ((kind, depth),) = distinct
        if kind is None:
            raise ValueError(
                f"got parameter {names[0]} of unknown kind, expected a parameter of a module of shardopt.unit; "
                f'give its kind, kinds={{{names[0]!r}: "weight"}}, one of {", ".join(KINDS)}'
            )
        factor = 1.0 if depth is None else depth**-0.5
        if kind == "weight":
            fan_in = math.prod(shape[1:] or shape)  # inputs of each output; of an embedding (entries, width) its width
            factor *= fan_in**-0.5
        return self._lr * factor

    def _kind_and_depth(self, name: str) -> tuple[str | None, int | None]:
        """Looks up a parameter's kind (None if unknown) and depth (None outside of a stack) by its name."""
        stacks = [prefix for prefix in self._depths if name.startswith(prefix)]
        depth = self._depths[max(stacks, key=len)] if stacks else None  # of the innermost stack
        kind = self._kinds.get(name)
        for pattern, given in self._patterns.items():
            if fnmatchcase(name, pattern):
                kind = given[0]
                depth = given[1] if len(given) == 2 else depth
        return kind, depth


def _checked(pattern: str, value: str | tuple[str, int | None]) -> tuple[str] | tuple[str, int | None]:
    """Returns a pattern's kind, or kind and depth, as a tuple; raises ValueError if they are not allowed."""
    given = (value,) if isinstance(value, str) else value
    is_kind = isinstance(given, tuple) and len(given) in (1, 2) and given[0] in KINDS
    if is_kind and all(depth is None or (isinstance(depth, int) and depth > 0) for depth in given[1:]):
        return given
    raise ValueError(
        f"kinds[{pattern!r}]: got {value!r}, expected one of {', '.join(KINDS)}, or a kind and the number of "
        'residual blocks in its stack, ("weight", 12)'
    )
