"""The options that all of shardopt's optimizers have, their defaults, and checks of options and hyper-parameters."""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from difflib import get_close_matches
from numbers import Integral, Real
from typing import Any, Literal, TypedDict, TypeGuard

import numpy as np
import torch
from torch import Tensor
from typing_extensions import Unpack as Unpack

from shardopt import _C
from shardopt.codec import CODECS, get_codec
from shardopt.removed import explain_removed

MIN_BLOCK_SIZE = 16
MAX_BLOCK_SIZE: int = _C.max_block_size


class Options(TypedDict, total=False):
    """Keyword-only options, the same for every rule. All may be overridden per param group.

    Attributes:
        maximize: ascend instead of descend.
        codec: the format of stored moments: "log8" | "companded8" | "dynamic8" | "bf16" | "fp32", and for Adam and
            AdamW "log4".
        block_size: elements that share a scale; a power of two from 16 to 4096. A log8 block costs 12 bytes of scales
            for Adam (0.094 bytes per parameter at 128).
        min_quantized_numel: parameters with fewer elements (globally) keep float32 state.
        nonfinite: effect of a NaN or Inf in a gradient. "skip": its element is left unchanged (so is an element whose
            moments would overflow), and the next step warns with the count. "raise": FloatingPointError before anything
            changes; costs one more read of the gradients. "propagate": as in torch.
        master_weight_bits: 24 or 32: the least precision of bfloat16 and float16 parameters' master weights. The low
            bits that the parameters lack are in the state as ``master_low_bits`` (int8; 1 or 2 bytes per parameter).
            With 24 bits weights are within 1/512 of the parameter's last place; with 32 they are exactly float32's,
            beside float16 from 2^-17 to 65504 (below, within 2^-41; beyond, the parameter is infinite as in torch, the
            master weight stays finite). Float32 parameters have this precision anyway. The low bits belong to the
            parameter: load both or neither. A parameter that is overwritten keeps its low bits, an error of up to half
            a last place.
        stochastic_rounding: round bfloat16 parameters up or down at random, so that the mean is exact, and updates too
            small for the nearest value are not lost. The noise depends on the seed, the step, the parameter's index in
            the optimizer and the element's index in the parameter, not on the shard or device.
        stochastic_rounding_seed: seed of that noise, the same on all ranks.
        offload: which memory stores state of GPU parameters. None: the GPU's. "state": the host's; a step streams the
            state through a small buffer on the GPU. "step": the host's, and the CPU runs the step: gradients are
            copied to the host, and parameters back to the GPU.
        foreach: accepted for compatibility with torch.optim and ignored: a step is always one fused call.
        fused: ignored like ``foreach``.
        capturable: ignored like ``foreach``.
        differentiable: must be False.
    """

    maximize: bool
    codec: str
    block_size: int
    min_quantized_numel: int
    nonfinite: Literal["skip", "raise", "propagate"]
    master_weight_bits: int | None
    stochastic_rounding: bool
    stochastic_rounding_seed: int
    offload: Literal["state", "step"] | None
    foreach: bool | None
    fused: bool | None
    capturable: bool
    differentiable: bool


DEFAULTS: Options = {
    "maximize": False,
    "codec": "fp32",
    "block_size": 128,
    "min_quantized_numel": 4096,
    "nonfinite": "skip",
    "master_weight_bits": None,
    "stochastic_rounding": False,
    "stochastic_rounding_seed": 0,
    "offload": None,
    "foreach": None,
    "fused": None,
    "capturable": False,
    "differentiable": False,
}

#: Options that a checkpoint and the optimizer that loads it must share: codes are decoded by them.
STATE_FORMAT = ("codec", "block_size", "min_quantized_numel", "master_weight_bits")

#: Options that choose the device of the state: a load does not change them to the checkpoint's.
PLACEMENT = ("offload",)

#: Options that the cached argument tables of a step's kernels depend on.
TABLE_FORMAT = (*STATE_FORMAT, "stochastic_rounding", "stochastic_rounding_seed")


def is_shardopt(options: Container[str]) -> bool:
    """Whether a param group, of an optimizer or a state dict, belongs to one of shardopt's own optimizers."""
    return all(option in options for option in STATE_FORMAT)


def refuse_unknown(names: Iterable[str], known: Collection[str], error: type[Exception], what: str = "") -> None:
    """Raises ``error`` unless all names are ``known`` options; its message has the nearest ones, or else all."""
    unknown = sorted(set(names) - set(known))
    if unknown:
        near = [repr(match) for name in unknown for match in get_close_matches(name, known, 1)]
        explained = explain_removed(unknown)
        is_misspelt = len(near) == len(unknown) and not explained
        expected = ", ".join(near) if is_misspelt else f"some of {', '.join(known)}"
        raise error(f"{what}got unknown option {', '.join(map(repr, unknown))}, expected {expected}{explained}")


def refuse_misspelt(keys: Iterable[str], known: Collection[str]) -> None:
    """Raises ValueError if a key looks like a misspelt option, or is Muon's alone. Any other is allowed, as in torch.

    Users and frameworks have keys of their own, also with an option's name and more words: ``no_weight_decay``.
    """
    for key in keys:
        if key == "algorithm" and key not in known:  # muon_groups: learning rates of Muon would ruin AdamW's run
            raise ValueError("got a param group of muon_groups, which has algorithm=; use Muon8bit, or param_groups")
        near = get_close_matches(key, known, n=1, cutoff=0.8)
        if key not in known and near and not set(near[0].split("_")) <= set(key.split("_")):
            raise ValueError(f"got unknown option {key!r} in a param group, expected {near[0]!r}; rename the key")


#: For each option, a test whether a value is allowed, and the allowed values in words for errors.
_VALUES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "codec": (lambda x: isinstance(x, str), f"one of {', '.join(map(repr, CODECS))}"),
    "block_size": (
        lambda x: isinstance(x, int) and MIN_BLOCK_SIZE <= x <= MAX_BLOCK_SIZE and not x & (x - 1),
        f"a power of two from {MIN_BLOCK_SIZE} to {MAX_BLOCK_SIZE}",
    ),
    "min_quantized_numel": (lambda x: is_int(x) and x >= 0, "a whole number >= 0"),
    "nonfinite": (lambda x: x in ("skip", "raise", "propagate"), "'skip', 'raise' or 'propagate'"),
    "master_weight_bits": (lambda x: x is None or (is_int(x) and x in (24, 32)), "None, 24 or 32"),
    "stochastic_rounding": (lambda x: isinstance(x, bool), "True or False"),
    "stochastic_rounding_seed": (lambda x: is_int(x) and 0 <= x < 2**64, "a whole number from 0 to 2**64 - 1"),
    "maximize": (lambda x: isinstance(x, bool), "True or False"),
    "offload": (lambda x: x in (None, "state", "step"), "None, 'state' or 'step'"),
    "differentiable": (lambda x: not x, "False: shardopt does not support it"),
}


def check_options(group: Mapping[str, Any]) -> None:
    """Raises ValueError if an option in a param group has a value that is not allowed."""
    for name, (is_allowed, expected) in _VALUES.items():
        if not is_allowed(group[name]):
            raise ValueError(f"{name}: got {group[name]!r}, expected {expected}")
    get_codec(group["codec"])
    if group["stochastic_rounding"] and group["master_weight_bits"] is not None:
        raise ValueError(
            f"stochastic_rounding: got True and master_weight_bits={group['master_weight_bits']}, expected one of the "
            "two options; master weights are rounded to nearest, so leave stochastic_rounding out"
        )


def repays(group: Mapping[str, Any]) -> bool:
    """Whether a step corrects the weights for rounding errors of the first moment, as the option ``repay`` says.

    None means yes for codecs in which two moments share a code. Optimizers without the option never do so.
    """
    repay = group.get("repay", False)
    return get_codec(group["codec"]).shared if repay is None else bool(repay)


def check_repayment(dtype: torch.dtype, group: Mapping[str, Any]) -> None:
    """Raises ValueError if a param group :func:`repays`, but rounding to ``dtype`` would lose the corrections."""
    if repays(group) and dtype in (torch.bfloat16, torch.float16) and group["master_weight_bits"] is None:
        raise ValueError(
            f"repay: got a parameter of {dtype} without master weights, expected float32 or master_weight_bits: 16-bit "
            f"weights would lose what is repaid; set master_weight_bits=24, or repay=False"
        )


def is_int(value: object) -> TypeGuard[int]:
    """Whether a value is an int but not a bool."""
    return isinstance(value, int) and not isinstance(value, bool)


#: Options whose values are sequences, of numbers or of sequences of numbers.
_SEQUENCES = ("betas", "split", "ns_coefficients")


def convert_sequences(group: dict[str, Any]) -> None:
    """Converts sequences in a param group (lists, OmegaConf's ListConfig, arrays) to tuples of numbers, in place.

    State dicts that contain them can then be loaded with ``torch.load(weights_only=True)``.
    """
    for name in _SEQUENCES:
        if group.get(name) is not None:
            group[name] = _plain(group[name])
    names = group.get("param_names")
    if isinstance(names, Sequence) and not isinstance(names, str | list):
        group["param_names"] = list(names)


def _plain(value: Any) -> Any:
    """Returns ``value`` with all sequences in it, nested ones too, as tuples, and all numbers as int or float."""
    if type(value) in (int, float):  # as almost always: isinstance() takes longer
        return value
    if isinstance(value, np.ndarray | Tensor):
        value = value.tolist()
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return tuple(map(_plain, value))
    if isinstance(value, Real) and not isinstance(value, bool):
        return int(value) if isinstance(value, Integral) else float(value)
    return value


#: The largest finite float32: the kernels compute in float32.
LARGEST = 2.0**128 - 2.0**104

_BELOW_ONE = 1.0 - 2.0**-53

#: The range, ends included, of each hyper-parameter that is a single number.
_RANGES = {
    "lr": (0.0, LARGEST),
    "eps": (0.0, LARGEST),
    "weight_decay": (0.0, LARGEST),
    "momentum": (0.0, LARGEST),
    "dampening": (-LARGEST, LARGEST),
}


def check_hyper(group: Mapping[str, Any], beta_count: int = 2) -> None:
    """Raises ValueError if a hyper-parameter in a param group is out of range, or infinite in float32.

    A learning rate on a GPU is skipped: reading it would synchronize.
    """
    for name, (least, largest) in _RANGES.items():
        if name in group:
            _check_range(name, group[name], least, largest)
    betas = group.get("betas", (0.0,) * beta_count)
    if not isinstance(betas, (tuple, list)) or len(betas) != beta_count:
        raise ValueError(f"betas: got {betas!r}, expected {beta_count} numbers; {REMEDY}")
    for index, beta in enumerate(betas):
        _check_range(f"betas[{index}]", beta, 0.0, _BELOW_ONE)


def check_number(group: Mapping[str, Any], name: str, most: float = LARGEST) -> None:
    """Raises ValueError unless a hyper-parameter is a number from 0 to ``most``, which is excluded if it is 1."""
    _check_range(name, group[name], 0.0, _BELOW_ONE if most == 1.0 else most)


def check_bool(group: Mapping[str, Any], name: str) -> None:
    """Raises ValueError unless a hyper-parameter is True or False."""
    if not isinstance(group[name], bool):
        raise ValueError(f"{name}: got {group[name]!r}, expected True or False")


#: The end of errors about hyper-parameters.
REMEDY = "correct it where it is set: an argument, a param group, a scheduler or a checkpoint"


def _check_range(name: str, value: float | Tensor, least: float, largest: float) -> None:
    """Raises ValueError unless ``value``, a number or a tensor of one, is from ``least`` to ``largest``."""
    if type(value) is float and least <= value <= largest:  # fast path for steps, which check what schedulers changed
        return
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise ValueError(f"{name}: got a tensor of {value.numel()} elements, expected a single one")
        if name == "lr" and value.device.type != "cpu" and not value.is_complex():
            return  # reading it would wait for the device
        value = value.item()
    if isinstance(value, Real) and least <= value <= largest:
        return
    bounds = "in [0.0, 1.0)" if largest == _BELOW_ONE else "that float32 can hold"
    if least == 0 and largest == LARGEST:
        bounds = f">= 0.0 {bounds}"
    elif largest not in (_BELOW_ONE, LARGEST):
        bounds = f"from {least} to {largest}"
    text = "this is text: in YAML write 1.0e-3, as 1e-3 is no number there; " if isinstance(value, str) else ""
    raise ValueError(f"{name}: got {value!r}, expected a number {bounds}; {text}{REMEDY}")
