"""The options that every optimizer takes, and their checks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from torch import Tensor
from typing_extensions import TypedDict

from shardopt import _C
from shardopt.codec import get_codec

NonFinite = Literal["skip", "raise", "propagate"]

MIN_BLOCK_SIZE = 16
MAX_BLOCK_SIZE: int = _C.max_block_size


class Options(TypedDict, total=False):
    """Keyword-only options, the same for every rule. All may be overridden per param group.

    Attributes:
        maximize: ascend instead of descend.
        codec: how moments are stored: "log8" | "companded8" | "dynamic8" | "bf16" | "fp32".
        block_size: elements that share a scale; a power of two from 16 to 4096. A log8 block costs 12 bytes of scales
            for Adam (0.094 bytes per parameter at 128).
        min_quantized_numel: parameters with fewer elements (globally) keep float32 state.
        nonfinite: what a NaN or Inf in a gradient does. "skip": its element is left as it is (so is one whose moments
            would overflow), and the next step warns with the count. "raise": FloatingPointError before anything
            changes; costs one more read of the gradients. "propagate": as in torch.
        master_weight_bits: None; extra bits for low-precision parameters are not in this version.
        stochastic_rounding: False; not in this version.
        offload: None; not in this version.
        foreach: accepted for compatibility with torch.optim and ignored: a step is always one fused call.
        fused: the same.
        capturable: the same.
        differentiable: must be False.
    """

    maximize: bool
    codec: str
    block_size: int
    min_quantized_numel: int
    nonfinite: NonFinite
    master_weight_bits: int | None
    stochastic_rounding: bool
    offload: str | None
    foreach: bool | None
    fused: bool | None
    capturable: bool
    differentiable: bool


DEFAULTS: Options = {
    "maximize": False,
    "codec": "log8",
    "block_size": 128,
    "min_quantized_numel": 4096,
    "nonfinite": "skip",
    "master_weight_bits": None,
    "stochastic_rounding": False,
    "offload": None,
    "foreach": None,
    "fused": None,
    "capturable": False,
    "differentiable": False,
}

#: What a checkpoint and the optimizer that loads it must agree on: the codes mean nothing without it.
STATE_FORMAT = ("codec", "block_size", "min_quantized_numel")

_NOT_YET: dict[str, Any] = {
    "master_weight_bits": None,
    "stochastic_rounding": False,
    "offload": None,
}


def with_defaults(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options completed by their defaults.

    Raises:
        TypeError: there is no such option.
    """
    unknown = set(options) - set(DEFAULTS)
    if unknown:
        raise TypeError(
            f"got unknown option {', '.join(map(repr, sorted(unknown)))}, expected some of {', '.join(DEFAULTS)}"
        )
    return {**DEFAULTS, **options}


def check_options(group: Mapping[str, Any]) -> None:
    """Checks the options in a param group.

    Raises:
        ValueError: a value is not allowed, or not in this version.
    """
    get_codec(group["codec"])
    size = group["block_size"]
    if not isinstance(size, int) or not MIN_BLOCK_SIZE <= size <= MAX_BLOCK_SIZE or size & (size - 1):
        raise ValueError(f"block_size: got {size!r}, expected a power of two from {MIN_BLOCK_SIZE} to {MAX_BLOCK_SIZE}")
    least = group["min_quantized_numel"]
    if not isinstance(least, int) or least < 0:
        raise ValueError(f"min_quantized_numel: got {least!r}, expected a whole number >= 0")
    if group["nonfinite"] not in ("skip", "raise", "propagate"):
        raise ValueError(f"nonfinite: got {group['nonfinite']!r}, expected 'skip', 'raise' or 'propagate'")
    for name, only in _NOT_YET.items():
        if group[name] != only:
            raise ValueError(
                f"{name}: got {group[name]!r}, but this version supports only {only!r}; leave the option out"
            )
    for name in ("differentiable", "amsgrad"):
        if group.get(name):
            raise ValueError(f"{name}: got True, which shardopt does not support; leave the option out")


def check_hyper(group: Mapping[str, Any]) -> None:
    """Checks the hyper-parameters in a param group, of those that rules have in common.

    Raises:
        ValueError: one is out of range.
    """
    for index, beta in enumerate(group.get("betas", ())):
        _check_range(f"betas[{index}]", beta, 0.0, 1.0)
    for name in ("lr", "eps", "weight_decay", "momentum"):
        if name in group:
            _check_range(name, group[name], 0.0)


def _check_range(name: str, value: float | Tensor, low: float, high: float | None = None) -> None:
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise ValueError(f"{name}: got a tensor of {value.numel()} elements, expected a single one")
        if value.device.type != "cpu":  # reading it would wait for the device
            return
        value = float(value)
    if not (low <= value and (high is None or value < high)):
        bounds = f">= {low}" if high is None else f"in [{low}, {high})"
        raise ValueError(f"{name}: got {value!r}, expected a number {bounds}")
