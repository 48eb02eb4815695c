"""bitsandbytes: codes of the dynamic map in ``state1`` and ``state2``, in blocks of the flattened parameter.

The state does not name its optimizer. What the number of moments does not tell apart, the hyper-parameters do: RMSprop
and Adagrad have an eps, Lion has a betas[1], SGD neither; LAMB and LARS have ``unorm_vec``; AdEMAMix has three betas.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from shardopt.checkpoint.foreign.moments import CodedMoment, check_blocks, is_map, of_map
from shardopt.checkpoint.foreign.peer import Moments, Peer
from shardopt.checkpoint.foreign.structure import are_floats, is_dense
from shardopt.checkpoint.wording import few, kind_of, shown
from shardopt.codec import Moment

_WRAPPED = "__bnb_optimizer_quant_state__"
_BLOCK_SIZES = (256, 2048)  # of today and of versions before 0.44
_ADAM, _LION, _SGD = ("exp_avg", "exp_avg_sq"), ("exp_avg",), ("momentum_buffer",)


class Bitsandbytes(Peer):
    name = "bitsandbytes"
    form = f"state1, or {_WRAPPED} with it"

    def recognizes(self, state: Mapping[str, Any]) -> bool:
        return "state1" in state or _WRAPPED in state

    def moments(self, state: Mapping[str, Any], expected: Sequence[Moment], name: str) -> Moments:
        wrapped = state.get(_WRAPPED, {})
        if not isinstance(wrapped, Mapping):
            raise ValueError(
                f"{name}: got {_WRAPPED} as {kind_of(wrapped)}, expected a dict; save the state dict again"
            )
        state = {**state, **wrapped}
        found = [key for key in ("state1", "state2") if key in state]
        if len(found) != len(expected):
            raise ValueError(
                f"{name}: got {', '.join(found)}, expected the state of an optimizer with "
                f"{', '.join(moment.name for moment in expected) or 'no moments'}; import it into one of the same kind"
            )
        for key, kind in (("unorm_vec", "LAMB's, LARS's or a max_unorm's"), ("max1", "one with a scale per tensor")):
            if key in state:
                raise ValueError(f"{name}: got state with {key}, {kind}; expected block-wise Adam's, Lion's or SGD's")
        return {m.name: _read(state, index, m, name) for index, m in enumerate(expected, start=1)}

    def hyper(self, group: Mapping[str, Any], expected: Sequence[Moment]) -> dict[str, Any]:
        hyper = dict(group)
        moments = tuple(moment.name for moment in expected)
        betas = hyper.get("betas", ())
        mixed = {key: hyper.pop(key, None) for key in ("alpha", "t_alpha", "t_beta3")}
        right = moments in (_ADAM, _LION, _SGD) and all(value is None or _is_zero(value) for value in mixed.values())
        right = right and isinstance(betas, tuple | list) and [isinstance(beta, Real) for beta in betas] == [True, True]
        if moments != _ADAM:
            right = right and _is_zero(hyper.pop("eps", 0))
        if right and moments == _SGD:
            right = betas[1] == 0  # dampening, which it never applies
        elif right and moments == _LION:
            right = betas[1] > 0
        if not right:
            raise ValueError(
                f"got the param group of another optimizer of bitsandbytes (betas={shown(betas)}, "
                f"eps={shown(group.get('eps'))}, alpha={shown(mixed['alpha'])}), expected one with "
                f"{', '.join(moments) or 'no moments'}; import Adam's into AdamW, Lion's (eps 0, betas[1] above 0) "
                "into Lion, SGD's (eps 0, betas[1] 0) into SGD with momentum"
            )
        if moments == _SGD:
            hyper |= {"momentum": hyper.pop("betas")[0], "dampening": 0.0}
        elif moments == _ADAM and not _is_zero(hyper.get("weight_decay", 0)):
            hyper["decoupled_weight_decay"] = True  # in its Adam too
        return hyper


def _is_zero(value: object) -> bool:
    return isinstance(value, Real) and value == 0


def _read(state: Mapping[str, Any], index: int, moment: Moment, name: str) -> Tensor | CodedMoment:
    """``state1`` or ``state2``."""
    what = f"{name}: state{index}"
    codes, values, scales = (state.get(f"{key}{index}") for key in ("state", "qmap", "absmax"))
    if are_floats(codes):
        return codes
    if not is_dense(codes) or codes.dtype != torch.uint8 or not is_map(values) or not are_floats(scales):
        raise ValueError(
            f"{what}: got {kind_of(codes)} and {few(state)}, expected uint8 with qmap{index} and absmax{index} in "
            "floats, of which the map has 256"
        )
    size = next((size for size in _BLOCK_SIZES if scales.numel() == -(-codes.numel() // size)), _BLOCK_SIZES[0])
    check_blocks(codes, scales, size, what)
    return of_map(codes, scales.float(), values, size, signed=moment.signed)
