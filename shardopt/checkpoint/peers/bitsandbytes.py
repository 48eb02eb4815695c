"""Reads bitsandbytes' state: 8-bit codes in ``state1`` and ``state2``, in blocks of the flattened parameter.

The state does not say which optimizer wrote it. The importing optimizer's moments decide which kind is expected (Adam,
Lion or SGD), and the saved hyper-parameters must fit that kind.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from shardopt.checkpoint.peers.base import CodedMoment, Peer, are_floats, check_blocks, is_dense, is_map, of_map
from shardopt.checkpoint.wording import few, kind_of, shown
from shardopt.codec import Moment

_WRAPPED = "__bnb_optimizer_quant_state__"
_BLOCK_SIZES = (256, 2048)  # of bitsandbytes today, and before version 0.44
_UPDATE_NORM, _GRADIENT_NORMS = "unorm_vec", "gnorm_vec"
_HYPER = ("betas", "eps", "alpha", "t_alpha", "t_beta3")  # their meanings differ between its optimizers

_ADAM, _LION, _SGD = ("exp_avg", "exp_avg_sq"), ("exp_avg",), ("momentum_buffer",)
#: The kinds of optimizer whose state is imported, by the names of shardopt's moments.
_KINDS = {
    _ADAM: "Adam's (two betas)",
    _LION: "Lion's (eps 0, betas[1] above 0)",
    _SGD: "that of SGD with momentum (eps 0, betas[1] 0)",
}


class Bitsandbytes(Peer):
    name = "bitsandbytes"
    form = f"state1, or {_WRAPPED} with it"
    extra = frozenset([_GRADIENT_NORMS])

    def recognizes(self, state: Mapping[str, Any]) -> bool:
        return "state1" in state or _WRAPPED in state

    def read(
        self, state: Mapping[str, Any], group: Mapping[str, Any], expected: Sequence[Moment], name: str
    ) -> Mapping[str, Any]:
        state = {key: value for key, value in {**state, **state.get(_WRAPPED, {})}.items() if key != _WRAPPED}
        if _UPDATE_NORM in state:
            raise ValueError(
                f"{name}: got state with {_UPDATE_NORM}, of LAMB or LARS, expected an optimizer that does not limit "
                "the norm of its updates; begin with new state"
            )
        present = [key for key in ("state1", "state2") if key in state]
        if len(present) != len(expected):
            raise ValueError(
                f"{name}: got {', '.join(present) or 'no moments'}, expected the state of an optimizer with "
                f"{', '.join(moment.name for moment in expected)}; import it into one of the same kind"
            )
        moments = {m.name: _read_moment(state, number, m, name) for number, m in enumerate(expected, start=1)}
        return {key: state[key] for key in ("step", *self.extra) if key in state} | moments

    def hyper(self, group: Mapping[str, Any], moments: Sequence[str]) -> dict[str, Any]:
        kind = tuple(moments)
        if kind not in _KINDS:
            raise ValueError(
                f"got the state of bitsandbytes for an optimizer with {', '.join(kind) or 'no moments'}, expected one "
                f"whose state is imported: {'; '.join(_KINDS.values())}; begin with new state"
            )
        betas, eps = group.get("betas"), group.get("eps", 0)
        hyper = {key: value for key, value in group.items() if key not in _HYPER}
        if isinstance(betas, tuple | list) and len(betas) == 2 and all(isinstance(x, Real) for x in (*betas, eps)):
            if kind == _ADAM:
                decays = group.get("weight_decay", 0) != 0  # also its Adam decays apart from the gradient
                return {**hyper, "betas": betas, "eps": eps, **({"decoupled_weight_decay": True} if decays else {})}
            if kind == _LION and eps == 0 and betas[1] > 0:
                return {**hyper, "betas": betas}
            if kind == _SGD and eps == 0 and betas[1] == 0:
                return {**hyper, "momentum": betas[0], "dampening": 0.0}  # it never applies its dampening, betas[1]
        raise ValueError(
            f"got the param group of another optimizer of bitsandbytes (betas={shown(betas)}, eps={shown(eps)}), "
            f"expected {_KINDS[kind]}; import it into the optimizer of that kind"
        )


def _read_moment(state: Mapping[str, Any], number: int, moment: Moment, name: str) -> Tensor | CodedMoment:
    """One moment of a state: a float tensor, or codes with their scales.

    Args:
        state: a parameter's state. The number of scales decides which of ``_BLOCK_SIZES`` the blocks have.
        number: 1 for ``state1``, 2 for ``state2``.
        moment: shardopt's description of the moment.
        name: the parameter's name, for errors.

    Raises:
        ValueError: the entries are damaged, or of another form.
    """
    what = f"{name}: state{number}"
    codes, values, scales = (state.get(f"{key}{number}") for key in ("state", "qmap", "absmax"))
    if are_floats(codes):
        return codes
    if not is_dense(codes) or codes.dtype != torch.uint8 or not is_map(values) or not are_floats(scales):
        raise ValueError(
            f"{what}: got {kind_of(codes)} and {few(state)}, expected uint8 codes, and "
            f"float tensors qmap{number} (256 values) and absmax{number}"
        )
    size = next((size for size in _BLOCK_SIZES if scales.numel() == -(-codes.numel() // size)), _BLOCK_SIZES[0])
    scales, values = scales.float().to(codes.device), values.to(codes.device)  # codes may be paged: in host memory
    check_blocks(codes, scales, size, what)
    return of_map(codes, scales, values, size, signed=moment.signed)
