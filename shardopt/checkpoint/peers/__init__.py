"""The packages whose optimizer state shardopt reads: torch.optim, bitsandbytes, torchao, flashoptim and dion."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shardopt.checkpoint.peers.base import (
    CodedMoment,
    Peer,
    are_floats,
    check_blocks,
    is_dense,
    is_map,
    of_companding,
    of_map,
)
from shardopt.checkpoint.peers.bitsandbytes import Bitsandbytes
from shardopt.checkpoint.wording import few, kind_of, shown
from shardopt.codec import Moment

_EIGHT_BIT = "OptimState8bit"
_OTHERS = ("OptimState4bit", "OptimStateFp8")  # without a codec of ours


class Torchao(Peer):
    """Moments are tensor subclasses where blocks divide the parameter, and float tensors elsewhere.

    The subclasses are known by their names and attributes: torchao need not be there.
    """

    name = "torchao"
    form = f"exp_avg and exp_avg_sq as {_EIGHT_BIT}, {' or '.join(_OTHERS)}"

    def recognizes(self, state: Mapping[str, Any]) -> bool:
        return any(type(value).__name__ in (_EIGHT_BIT, *_OTHERS) for value in state.values())

    def read(
        self, state: Mapping[str, Any], group: Mapping[str, Any], expected: Sequence[Moment], name: str
    ) -> Mapping[str, Any]:
        moments = {moment.name: moment for moment in expected if moment.name in state}
        return {**state, **{k: self._moment(state[k], f"{name}: {k}", m.signed) for k, m in moments.items()}}

    def _moment(self, value: Any, what: str, signed: bool) -> Any:
        kind = type(value).__name__
        if kind in _OTHERS:
            return self._dequantized(value, what)
        if kind != _EIGHT_BIT:
            return value
        codes, scales, values, of_sign = (getattr(value, key, None) for key in ("codes", "scale", "qmap", "signed"))
        if not is_dense(codes) or codes.dtype != torch.uint8 or of_sign is not signed:
            raise ValueError(
                f"{what}: got codes of {kind_of(codes)}, signed={shown(of_sign)}, expected uint8, signed={signed}"
            )
        if not are_floats(scales) or not is_map(values):
            raise ValueError(
                f"{what}: got scales of {kind_of(scales)} and a map of {kind_of(values)}, expected floats, and 256 of "
                "them in the map"
            )
        size = max(codes.numel() // max(scales.numel(), 1), 1)
        check_blocks(codes, scales, size, what)
        return of_map(codes, scales.float(), values, size, signed=signed)

    def _dequantized(self, value: Any, what: str) -> Tensor:
        try:
            dequantized = value.dequantize()
        except Exception as error:  # torchao's own: it checks nothing
            raise ValueError(
                f"{what}: got {type(value).__name__} that torchao cannot dequantize ({type(error).__name__}), expected "
                "a whole one; save the state dict again"
            ) from error
        if not are_floats(dequantized):
            raise ValueError(f"{what}: got {kind_of(dequantized)} from dequantize(), expected floats")
        return dequantized


_GROUP = 32
_CODES, _SCALES, _LOW_BITS = "::quantized", "::scales", "error_bits"


class Flashoptim(Peer):
    """int8 and uint8 codes with float16 scales for groups of 32 elements of the flattened parameter.

    ``q / 127 = 2 y / (1 + |y|)`` of ``y = m / scale``, and ``q / 255 = sqrt(v) / scale``: companded8's formulas, so
    codes and scales go over as they are. Decoded, a second moment differs by float32's rounding, which is done in
    another order. One above zero that has the code 0, which companded8 never gives, is 0 here as it is there.
    ``error_bits`` are another form of low bits than ours.
    """

    name = "flashoptim"
    form = f"exp_avg{_CODES} and exp_avg{_SCALES}"
    extra = frozenset([_LOW_BITS])

    def recognizes(self, state: Mapping[str, Any]) -> bool:
        return any(key.endswith(_CODES) for key in state) or _LOW_BITS in state

    def read(
        self, state: Mapping[str, Any], group: Mapping[str, Any], expected: Sequence[Moment], name: str
    ) -> Mapping[str, Any]:
        coded = dict.fromkeys(key.removesuffix(_CODES) for key in state if key.endswith(_CODES))
        rest = {key: value for key, value in state.items() if not key.endswith((_CODES, _SCALES))}
        moments = {m.name: self._moment(state, m, f"{name}: {m.name}") for m in expected if m.name in coded}
        return {**rest, **coded, **moments}

    def _moment(self, state: Mapping[str, Any], moment: Moment, what: str) -> CodedMoment:
        codes, scales = state[moment.name + _CODES], state.get(moment.name + _SCALES)
        dtype = torch.int8 if moment.signed else torch.uint8
        if not is_dense(codes) or codes.dtype != dtype or not are_floats(scales):
            got = "no scales" if scales is None else f"scales of {kind_of(scales)} and codes of {kind_of(codes)}"
            raise ValueError(f"{what}: got {got}, expected {dtype} codes and float16 scales")
        if scales.dtype == torch.bfloat16:  # beside bfloat16 parameters they are float16's bits under that name
            scales = scales.view(torch.float16)
        check_blocks(codes, scales, _GROUP, what)
        return of_companding(codes, scales, _GROUP, signed=moment.signed)


_ADJUSTMENTS = {"spectral_norm": "spectral_norm", "rms_norm": "match_rms_adamw"}


class Dion(Peer):
    """The dion package's Muon: matrices have ``momentum``, a sum of gradients; AdamW's also have ``variance``."""

    name = "dion"
    form = "momentum and variance in float"

    def recognizes(self, state: Mapping[str, Any]) -> bool:
        return "momentum" in state and state.keys() <= {"momentum", "variance", "step_dev"}

    def read(
        self, state: Mapping[str, Any], group: Mapping[str, Any], expected: Sequence[Moment], name: str
    ) -> Mapping[str, Any]:
        step = {"step": torch.tensor(float(group.get("step", 0)), device="cpu")}
        if "momentum" not in state:  # of another package, refused by its entries
            return state
        if "variance" in state:
            return {**step, "exp_avg": state["momentum"], "exp_avg_sq": state["variance"]}
        if group.get("algorithm") == "lion":
            return {**step, "exp_avg": state["momentum"]}
        momentum = group.get("mu")
        if not isinstance(momentum, float) or not 0.0 <= momentum < 1.0:
            raise ValueError(
                f"{name}: got mu={shown(momentum)}, expected a decay rate below 1; save the state dict again"
            )
        total = state["momentum"]  # a sum of gradients; ours is their average
        return {**step, "momentum_buffer": total * (1.0 - momentum) if are_floats(total) else total}

    def hyper(self, group: Mapping[str, Any], moments: Sequence[str]) -> dict[str, Any]:
        names = {"mu": "momentum", "epsilon": "eps"}
        hyper = {names.get(key, key): value for key, value in group.items() if key not in ("beta1", "beta2", "step")}
        if {"beta1", "beta2"} <= group.keys():
            hyper["betas"] = (group["beta1"], group["beta2"])
        if group.get("algorithm") == "muon":  # there it guards a division, which is done otherwise here
            hyper.pop("eps", None)
        adjustment = hyper.pop("adjust_lr", None)
        if adjustment in _ADJUSTMENTS:
            hyper["adjust_lr_fn"] = _ADJUSTMENTS[adjustment]
        return hyper


#: torch.optim comes last: the other packages keep the state of some parameters as it does.
PEERS: tuple[Peer, ...] = (Bitsandbytes(), Torchao(), Flashoptim(), Dion(), Peer())


def package_of(states: Collection[Mapping[str, Any]]) -> Peer:
    """The package that wrote the states of an optimizer's parameters: none is empty, and no entry is None.

    Raises:
        ValueError: there is no state, or it is of no known package or of several.
    """
    if not states:
        raise ValueError("got no state at all, expected that of an optimizer which has taken a step")
    for state in states:
        if not any(peer.recognizes(state) for peer in PEERS):
            raise ValueError(
                f"got the state of an unknown optimizer, with {few(state)}, expected a known one: "
                f"{'; '.join(f'{peer.name} has {peer.form}' for peer in PEERS)}. Load shardopt's own with "
                "load_state_dict"
            )
    found = [peer for peer in PEERS[:-1] if any(map(peer.recognizes, states))]
    if len(found) > 1:
        raise ValueError(
            f"got the state of {' and '.join(peer.name for peer in found)}, expected that of one optimizer; save "
            "the state dict again"
        )
    return found[0] if found else PEERS[-1]
