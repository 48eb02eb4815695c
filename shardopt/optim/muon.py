"""Muon (Jordan et al., 2024), with AdamW or Lion for parameters that are no matrices."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, Literal

from torch import Tensor
from torch.optim.optimizer import ParamsT

from shardopt.codec import Moment, get_codec
from shardopt.kernels.newton_schulz import POLAR_EXPRESS, QUINTIC, Coefficients, NewtonSchulz
from shardopt.layout import FlatBuffer, UnknownShardError, shard_of
from shardopt.optim.base import ShardedOptimizer
from shardopt.optim.interface import hyper_parameters
from shardopt.optim.param_groups import ParamGroups
from shardopt.state.names import param_name
from shardopt.state.options import Options, Unpack, is_int
from shardopt.state.rule import Orthogonalized, Rule, Split
from shardopt.step.muon.matrices import matrix_shapes

Algorithm = Literal["muon", "adamw", "lion"]

_ADAMW_EPS = 1e-8
_RULES = {
    "adamw": Rule("adam", (Moment("exp_avg", signed=True), Moment("exp_avg_sq", signed=False))),
    "lion": Rule("lion", (Moment("exp_avg", signed=True),)),
}

#: Factors of the learning rate of a matrix, by its rows and columns.
_FACTORS: Mapping[str, Callable[[int, int], float]] = {
    "original": lambda rows, cols: math.sqrt(max(1.0, rows / max(cols, 1))),
    "match_rms_adamw": lambda rows, cols: 0.2 * math.sqrt(max(rows, cols)),
    **dict.fromkeys(("spectral_norm", "spectral_unclamped"), lambda rows, cols: math.sqrt(rows / max(cols, 1))),
}


class Muon(ShardedOptimizer):
    """Muon (https://kellerjordan.github.io/posts/muon): each matrix moves by its orthogonalized momentum.

    A param group names the rule of its parameters by ``algorithm``: "muon" for two dimensions or more (convolutions
    as ``(out, everything else)``), "adamw" or "lion" for the others: embeddings, output heads, norms, biases.
    :func:`shardopt.muon_groups` makes such groups of a model.

    Every matrix is computed whole on one rank, by the same calls whatever the sharding: under FSDP, tensor parallel and
    ZeRO each element of its bfloat16 direction is sent to that rank and back once. Matrices go in waves: while one is
    computed, the next is in flight. Directions and intermediate matrices take at most 512 MiB at a time, or what the
    largest parameters need. Ranks with replicas (DistributedDataParallel) divide the matrices if the groups
    were made from the wrapped model, or after ``attach(model)``; otherwise each rank computes all of them. Results have
    the same bits on any number of ranks, but not on other kinds of devices, nor with other versions of PyTorch and of
    its libraries for multiplying matrices.

    Do not give Muon frozen parameters: the ranks exchange every matrix in every step, with or without a gradient.

    Bytes of state per parameter of a matrix: 4 with ``codec="fp32"``, 1.031 with an 8-bit codec in blocks of 128, and 4
    per row with ``normalize="rows"``. Other arguments as for :class:`shardopt.AdamW`.

    Args:
        weight_decay: decay per unit of lr, whatever ``adjust_lr_fn`` says.
        momentum: decay rate of the momentum.
        ns_coefficients: coefficients of the Newton-Schulz iteration: three numbers, or three for each step (further
            steps take the last three); or "polar_express" (arXiv 2505.16932).
        eps: the least norm that a matrix is divided by; in groups for AdamW the number added to the root of the second
            moment, by default 1e-8.
        ns_steps: number of steps of the Newton-Schulz iteration.
        adjust_lr_fn: factor of the learning rate of a matrix of m rows and n columns: None or "original" for
            ``sqrt(max(1, m / n))``; "match_rms_adamw" for ``0.2 sqrt(max(m, n))``, with which AdamW's learning rate and
            decay carry over; "spectral_norm", or torch's name "spectral_unclamped", for ``sqrt(m / n)``.
        normalize: "rows" for NorMuon (arXiv 2510.05491): the rows of an orthogonalized matrix, one per output, are
            divided by the roots of their second moments, and the result has the former norm again. State has 4 bytes
            more per row.
        beta2: decay rate of the rows' second moments.
        split: divides a parameter into several matrices: the rows of each, as ``(4096, 1024, 1024)`` for fused queries,
            keys and values; or "each" for stacks of three dimensions or more, such as experts.
        betas: decay rates of AdamW and Lion.
        **options: see :class:`shardopt.state.options.Options`. ``offload="step"`` is not possible.

    Raises:
        ValueError: a hyper-parameter or option is out of range, or a parameter of a group for Muon is no matrix.
        TypeError: there is no such option.
    """

    default_normalize: Literal["rows"] | None = None
    flags = ("nesterov",)
    numbers = (("momentum", 1.0), ("beta2", 1.0))  # averages
    decoupled = True

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: Coefficients | Sequence[Coefficients] | Literal["polar_express"] = QUINTIC,
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: Literal["original", "match_rms_adamw", "spectral_norm", "spectral_unclamped"] | None = None,
        *,
        algorithm: Algorithm = "muon",
        normalize: Literal["rows"] | None = None,
        beta2: float = 0.95,
        split: Split = None,
        betas: tuple[float, float] = (0.9, 0.95),
        **options: Unpack[Options],
    ) -> None:
        defaults = hyper_parameters(locals())
        if normalize is None:
            defaults["normalize"] = self.default_normalize
        super().__init__(params, defaults, options)
        if isinstance(params, ParamGroups):
            self._internals.set_copies(params.copies)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a param group, in which ``use_muon`` may be True for ``algorithm="muon"`` or False for "adamw".

        See :meth:`ShardedOptimizer.add_param_group`.
        """
        if "use_muon" in param_group:
            param_group = {"algorithm": "muon" if param_group["use_muon"] else "adamw", **param_group}
        if param_group.get("algorithm", self.defaults["algorithm"]) == "adamw":
            param_group = {"eps": _ADAMW_EPS, **param_group}
        super().add_param_group(param_group)

    def rule(self, group: Mapping[str, Any]) -> Rule:
        if group["algorithm"] != "muon":
            return _RULES[group["algorithm"]]
        return _muon_rule(
            _coefficients_per_step(group["ns_coefficients"], group["ns_steps"]),
            group["eps"],
            group["adjust_lr_fn"] or "original",
            group["split"] if group["split"] in (None, "each") else tuple(group["split"]),
            group["beta2"] if group["normalize"] == "rows" else None,
        )

    def check_group(self, group: Mapping[str, Any]) -> None:
        if group["algorithm"] not in ("muon", *_RULES):
            raise ValueError(f"algorithm: got {group['algorithm']!r}, expected 'muon', 'adamw' or 'lion'")
        super().check_group(group)
        if group["algorithm"] == "muon" and group["eps"] == 0:
            raise ValueError(
                "eps: got 0 for Muon, by which a gradient of zeros would be divided, expected a number above 0"
            )
        if get_codec(group["codec"]).shared:  # AdamW repays the rounding errors of log4; groups of Muon have no repay
            raise ValueError(
                f"codec: got {group['codec']!r} for a group of Muon, which does not repay what it loses, expected "
                "another codec; step these parameters with AdamW4bit"
            )
        if group["adjust_lr_fn"] not in (None, *_FACTORS):
            raise ValueError(
                f"adjust_lr_fn: got {group['adjust_lr_fn']!r}, expected None or one of {', '.join(map(repr, _FACTORS))}"
            )
        if not is_int(group["ns_steps"]) or not 1 <= group["ns_steps"] < 100:
            raise ValueError(f"ns_steps: got {group['ns_steps']!r}, expected a whole number from 1 to 99")
        if group["normalize"] not in (None, "rows"):
            raise ValueError(f"normalize: got {group['normalize']!r}, expected None or 'rows'")
        _coefficients_per_step(group["ns_coefficients"], 1)  # raises ValueError
        split = group["split"]
        is_rows = isinstance(split, (tuple, list)) and len(split) > 0 and all(is_int(n) and n > 0 for n in split)
        if not (split is None or split == "each" or is_rows):
            raise ValueError(f"split: got {split!r}, expected None, 'each', or the rows of each matrix")
        if group["offload"] == "step":
            raise ValueError(
                "offload: got 'step' for Muon, which multiplies matrices where the parameters are, expected None or "
                "'state'"
            )

    def check_parameters(self, index: int) -> None:
        group = self.param_groups[index]
        if group["algorithm"] == "muon":
            for position, param in enumerate(group["params"]):
                for name, shape in _global_shapes(param_name(group, index, position), param):
                    matrix_shapes(name, shape, group["split"])


class Muon8bit(Muon, codec="log8"):
    """:class:`Muon` with the codec log8 unless ``codec`` says otherwise."""


class NorMuon(Muon):
    """:class:`Muon` with ``normalize="rows"`` (Li et al., 2025, arXiv 2510.05491).

    The paper gives each update a root mean square of 0.2: nearly that of ``adjust_lr_fn="match_rms_adamw"``. The
    authors' code, whose state :meth:`load_state_dict` takes, leaves the norm of Newton-Schulz and scales as by default.
    """

    default_normalize = "rows"


class NorMuon8bit(NorMuon, codec="log8"):
    """:class:`NorMuon` with the codec log8 unless ``codec`` says otherwise."""


@lru_cache(maxsize=1024)
def _muon_rule(
    coefficients: tuple[Coefficients, ...], eps: float, adjust_lr_fn: str, split: Split, row_decay: float | None
) -> Rule:
    """Makes Muon's rule for a set of hyper-parameters; cached, as every step compares it with the last step's."""
    newton_schulz = NewtonSchulz(coefficients, eps)
    orthogonalized = Orthogonalized(newton_schulz, split, _FACTORS[adjust_lr_fn], "muon_apply", row_decay)
    return Rule("muon_direction", (Moment("momentum_buffer", signed=True),), orthogonalized=orthogonalized)


def _coefficients_per_step(coefficients: Any, steps: int) -> tuple[Coefficients, ...]:
    """Expands ``ns_coefficients`` to three finite numbers per step of Newton-Schulz; ValueError for other forms."""
    numbers = POLAR_EXPRESS if coefficients == "polar_express" else coefficients
    try:
        rows: Any = numbers if isinstance(numbers[0], Sequence) else [numbers]
        triples = [(float(a), float(b), float(c)) for a, b, c in rows]
    except (TypeError, ValueError, IndexError, KeyError):
        raise ValueError(
            f"ns_coefficients: got {coefficients!r}, expected three numbers, several threes, or 'polar_express'"
        ) from None
    if not all(math.isfinite(number) for triple in triples for number in triple):
        raise ValueError(f"ns_coefficients: got {coefficients!r}, expected finite numbers")
    return tuple(triples[min(step, len(triples) - 1)] for step in range(steps))


def _global_shapes(name: str, param: Tensor) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and global shapes of the parameters in an optimizer tensor; nothing if its sharding is not known yet."""
    if hasattr(param, "ds_shape"):  # ZeRO 3 has partitioned it
        yield name, tuple(param.ds_shape)
        return
    try:
        shard = shard_of(param)
    except UnknownShardError:  # raised in the first step, unless it is known then
        return
    if isinstance(shard, FlatBuffer):
        for segment in shard.segments:
            yield f"{segment.name} in {name}", segment.shard.global_shape
    else:
        yield name, shard.global_shape
