"""State entries by name: which are quantized, which of these are never below zero, and which are kept in full."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Set
from typing import Any

import torch
from torch import Tensor

from shardopt.codec import Moment
from shardopt.layout import Shard, is_quantized
from shardopt.state.options import DEFAULTS, check_options
from shardopt.state.slice_spec import SliceSpec
from shardopt.wrapper.chunks import TransferUnit

#: Averages of squares, of magnitudes or of variances, and sums of squares. Other names are signed.
UNSIGNED = frozenset(
    [
        *("exp_avg_sq", "max_exp_avg_sq", "square_avg", "acc_delta", "sum", "exp_inf", "grad_sum_sq"),
        *("exp_avg_var", "max_exp_avg_var", "variance_ma", "max_variance_ma", "fim", "hessian"),
    ]
)

#: Copies of the weights, whose errors would go straight into the weights.
WEIGHT_COPIES = frozenset(["z", "x0", "p0", "ax", "slow_params", "slow_buffer", "lookahead_params"])

#: Usual names of signed moments, in which nothing is a copy of weights, even if it is equal to them once.
MOMENTS = frozenset(
    [
        *("exp_avg", "exp_avg_slow", "exp_avg_diff", "momentum_buffer", "momentum", "grad_avg"),
        *("grok_exp_avg", "grad_ma", "neg_grad_ma"),
    ]
)

#: Averages over so many steps that an 8-bit code would drop what a step adds to them: coded in 16 bits.
WIDE = frozenset(["exp_avg_slow"])

#: Sizes of Rprop's steps, which grow and shrink by factors.
STEP_SIZES = frozenset(["step_size"])

#: The dtypes of entries that are quantized, beside the parameter's: double precision would be lost in codes.
CODED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

#: Of centered RMSprop, which takes the root of ``square_avg - grad_avg**2``: errors of codes would put it below zero.
CENTERED = frozenset(["grad_avg", "square_avg"])


class Entries:
    """Decides by name which entries are quantized, so that all ranks decide alike.

    Attributes:
        options: how entries are coded, as options of a param group of shardopt's.
        unsigned: names of entries that are never below zero.
        kept: names of entries that stay as they are; detected copies of weights are added.
        given: names that the user gave.
        looks_for_copies: whether to detect copies of weights: for an optimizer that is not in shardopt's tables.
    """

    looks_for_copies = False

    def __init__(self, options: Mapping[str, Any], unsigned: Iterable[str], keep: Iterable[str]) -> None:
        self.options = {**DEFAULTS, **options}
        more, kept = frozenset(unsigned), frozenset(keep)
        self.given = more | kept
        self.unsigned = UNSIGNED | more
        self.kept = {*WEIGHT_COPIES, *STEP_SIZES, *kept}

    def moment(self, name: str) -> Moment:
        """The entry of that name as a moment."""
        return Moment(name, name not in self.unsigned, own_units=True, wide=name in WIDE)

    def spec(self, unit: TransferUnit, name: str) -> SliceSpec:
        """The spec of the stored entry, in units of its own."""
        return SliceSpec.of(unit.shard, torch.float32, self.options, (self.moment(name),))

    def with_options(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """The options, updated.

        Raises:
            ValueError: an option is out of range.
        """
        changed = {**self.options, **options}
        check_options(changed)
        return changed

    def is_quantized(self, shard: Shard) -> bool:
        """Whether entries of a parameter's shape are quantized: by its global shape, and not for StableEmbedding."""
        return not shard.float32_state and is_quantized(shard.global_shape, self.options["min_quantized_numel"])

    def names(self, unit: TransferUnit, state: Mapping[str, Any]) -> list[str]:
        """The entries of a state in floats that are to be quantized."""
        if not self.is_quantized(unit.shard):
            return []
        kept = self.kept_among(state)
        return [
            name
            for name, x in state.items()
            if isinstance(x, Tensor)
            and x.is_floating_point()
            and x.dtype in (*CODED_DTYPES, unit.param.dtype)
            and x.shape == unit.shape
            and name not in kept
            and not name.endswith(("_codes", "_scales"))
        ]

    def kept_among(self, names: Collection[str]) -> Set[str]:
        """The names that are not quantized in a state with entries of these names."""
        return self.kept | CENTERED if frozenset(names) >= CENTERED else self.kept

    def keep_copies(self, unit: TransferUnit, state: Mapping[str, Any], before: Tensor) -> None:
        """Keeps entries that begin as copies of the weights.

        Args:
            unit: the tensor, after its first step; no shard, as ranks could decide differently about shards.
            state: its new state.
            before: the tensor before that step.
        """
        for name in set(self.names(unit, state)) - MOMENTS - self.unsigned:
            value = state[name]
            equal = any(torch.equal(value, x.to(value.dtype)) for x in (before, unit.param.detach()))
            if equal and value.any():  # zeros may as well be a moment of a parameter of zeros
                self.kept.add(name)
