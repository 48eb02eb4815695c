"""bitsandbytes: codes of the dynamic map in ``state1`` and ``state2``, in blocks of the flattened parameter.

The state does not name its optimizer. The moments of the optimizer that imports say which kind is expected, and the
hyper-parameters of the state must be those of this kind: see :data:`_KINDS`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardopt.checkpoint.peers.base import CodedMoment, Peer, are_floats, check_blocks, is_dense, is_map, of_map
from shardopt.checkpoint.wording import few, kind_of, shown
from shardopt.codec import Moment
from shardopt.kernels.numeric import to_blocks

_WRAPPED = "__bnb_optimizer_quant_state__"
_BLOCK_SIZES = (256, 2048)  # of today and of versions before 0.44
_UPDATE_NORM, _GRADIENT_NORMS = "unorm_vec", "gnorm_vec"
_HYPER = ("betas", "eps", "alpha", "t_alpha", "t_beta3")  # as it names them, whatever they mean to an optimizer


class _OptimizerKind(NamedTuple):
    """A kind of optimizer in bitsandbytes.

    Attributes:
        words: its name, and how it is told from the others.
        fits: whether betas and eps are those of this kind.
        hyper: its hyper-parameters of :data:`_HYPER` under torch.optim's names, from a param group.
        places: of its moments: 1 for ``state1``, 2 for ``state2``, and one half of it where two moments are stacked.
    """

    words: str
    fits: Callable[[tuple[float, ...], float], bool]
    hyper: Callable[[Mapping[str, Any]], dict[str, Any]]
    places: tuple[tuple[int, int | None], ...] = ((1, None),)


def _adam(group: Mapping[str, Any]) -> dict[str, Any]:
    decays = group.get("weight_decay", 0) != 0
    return _some(group, "betas", "eps") | ({"decoupled_weight_decay": True} if decays else {})  # in its Adam too


def _ademamix(group: Mapping[str, Any]) -> dict[str, Any]:
    warm_ups = {"alpha_steps": group.get("t_alpha"), "beta3_steps": group.get("t_beta3")}
    return _some(group, "betas", "eps", "alpha") | warm_ups


def _rmsprop(group: Mapping[str, Any]) -> dict[str, Any]:
    alpha, momentum = group["betas"]
    unused = _some(group, "betas") if momentum else {}  # it never applies its momentum
    return _some(group, "eps") | {"alpha": alpha, "momentum": 0.0} | unused


def _sgd(group: Mapping[str, Any]) -> dict[str, Any]:
    return {"momentum": group["betas"][0], "dampening": 0.0}  # it never applies its dampening, betas[1]


#: The kinds, by the names of the moments that their optimizers have here.
_KINDS: dict[tuple[str, ...], _OptimizerKind] = {
    ("exp_avg", "exp_avg_sq"): _OptimizerKind(
        "Adam's (two betas)", lambda betas, eps: len(betas) == 2, _adam, ((1, None), (2, None))
    ),
    ("exp_avg_fast", "exp_avg_slow", "exp_avg_sq"): _OptimizerKind(
        "AdEMAMix's (three betas)", lambda betas, eps: len(betas) == 3, _ademamix, ((1, 0), (1, 1), (2, None))
    ),
    ("exp_avg",): _OptimizerKind(
        "Lion's (eps 0, betas[1] above 0)",
        lambda betas, eps: len(betas) == 2 and eps == 0 and betas[1] > 0,
        lambda group: _some(group, "betas"),
    ),
    ("momentum_buffer",): _OptimizerKind(
        "that of SGD with momentum (eps 0, betas[1] 0)",
        lambda betas, eps: len(betas) == 2 and eps == 0 and betas[1] == 0,
        _sgd,
    ),
    ("square_avg",): _OptimizerKind(
        "RMSprop's (eps and betas[0] above 0)",
        lambda betas, eps: len(betas) == 2 and eps > 0 and betas[0] > 0,
        _rmsprop,
    ),
    ("sum",): _OptimizerKind(
        "Adagrad's (betas 0)",
        lambda betas, eps: betas == (0, 0),
        lambda group: _some(group, "eps") | {"lr_decay": 0.0},
    ),
}


class Bitsandbytes(Peer):
    name = "bitsandbytes"
    form = f"state1, or {_WRAPPED} with it"
    extra = frozenset([_UPDATE_NORM, _GRADIENT_NORMS])

    def recognizes(self, state: Mapping[str, Any]) -> bool:
        return "state1" in state or _WRAPPED in state

    def check_together(self, states: Collection[Mapping[str, Any]]) -> None:
        """Refuses 32-bit LAMB and LARS: they limit the norm of updates, and with codes they are Adam and SGD."""
        unwrapped = [{**state, **state.get(_WRAPPED, {})} for state in states]
        limited = any(_UPDATE_NORM in state for state in unwrapped)
        if limited and not any(kind_of(state.get("state1")) == "torch.uint8" for state in unwrapped):
            raise ValueError(
                f"got state with {_UPDATE_NORM} and without codes, of LAMB or LARS in 32 bits, expected an optimizer "
                "that does not limit the norm of its updates; begin with new state"
            )

    def read(
        self, state: Mapping[str, Any], group: Mapping[str, Any], expected: Sequence[Moment], name: str
    ) -> Mapping[str, Any]:
        wrapped = state.get(_WRAPPED, {})
        if not isinstance(wrapped, Mapping):
            raise ValueError(
                f"{name}: got {_WRAPPED} as {kind_of(wrapped)}, expected a dict; save the state dict again"
            )
        state = {key: value for key, value in {**state, **wrapped}.items() if key != _WRAPPED}
        places = _kind([moment.name for moment in expected]).places
        present = [key for key in ("state1", "state2") if key in state]
        if present != sorted({f"state{number}" for number, _ in places}):
            raise ValueError(
                f"{name}: got {', '.join(present)}, expected the state of an optimizer with "
                f"{', '.join(moment.name for moment in expected)}; import it into one of the same kind"
            )
        if "max1" in state:
            raise ValueError(f"{name}: got state with max1, one with a scale per tensor; expected scales per block")
        moments = {m.name: _read_moment(state, *place, m, name) for place, m in zip(places, expected, strict=True)}
        return {key: state[key] for key in ("step", *self.extra) if key in state} | moments

    def hyper(self, group: Mapping[str, Any], moments: Sequence[str]) -> dict[str, Any]:
        kind = _kind(moments)
        betas, eps = group.get("betas"), group.get("eps", 0)
        numbers = [eps, *(group[key] for key in ("alpha", "t_alpha", "t_beta3") if group.get(key) is not None)]
        known = isinstance(betas, tuple | list) and all(isinstance(x, Real) for x in (*betas, *numbers))
        if not known or not kind.fits(tuple(betas or ()), eps):
            raise ValueError(
                f"got the param group of another optimizer of bitsandbytes (betas={shown(betas)}, eps={shown(eps)}, "
                f"alpha={shown(group.get('alpha'))}), expected {kind.words}; import it into the optimizer of that kind"
            )
        return {key: value for key, value in group.items() if key not in _HYPER} | kind.hyper(group)


def _kind(moments: Sequence[str]) -> _OptimizerKind:
    """The kind of optimizer in bitsandbytes that keeps moments of these names."""
    names = tuple(moments)
    if names not in _KINDS:
        raise ValueError(
            f"got the state of another optimizer, as bitsandbytes has none with {', '.join(names) or 'no moments'}, "
            f"expected {'; '.join(kind.words for kind in _KINDS.values())}; choose the optimizer of that kind"
        )
    return _KINDS[names]


def _some(group: Mapping[str, Any], *keys: str) -> dict[str, Any]:
    return {key: group[key] for key in keys if key in group}


def _read_moment(
    state: Mapping[str, Any], number: int, half: int | None, moment: Moment, name: str
) -> Tensor | CodedMoment:
    """One moment of a state: a float tensor, or codes with their scales.

    Args:
        state: of a parameter. The number of scales decides which of ``_BLOCK_SIZES`` the blocks have.
        number: 1 for ``state1``, 2 for ``state2``.
        half: index along dim 0 where AdEMAMix stacks two averages.
        moment: describes it.
        name: the parameter's, in errors.

    Raises:
        ValueError: the entries are damaged, or of another form.
    """
    what = f"{name}: state{number}"
    codes, values, scales = (state.get(f"{key}{number}") for key in ("state", "qmap", "absmax"))
    if half is not None:
        codes, scales = (_half(x, half, what) for x in (codes, scales))
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
    if half == 1 and _is_one_place_early(codes, scales, values, size):
        scales = torch.cat([state["absmax1"][0, -1:].to(scales), scales[:-1]])
        check_blocks(codes, scales, size, what)
    return of_map(codes, scales, values, size, signed=moment.signed)


def _is_one_place_early(codes: Tensor, scales: Tensor, values: Tensor, size: int) -> bool:
    """Whether the scales of the slow average begin at the last place of the fast one's.

    CUDA kernels of bitsandbytes write and read them there if the last block is not whole. The last place then is zero,
    and so is the scale of some block that has codes of the map's ends.
    """
    if codes.numel() % size == 0 or scales[-1] != 0:
        return False
    (at_ends,) = to_blocks((values.abs() > 0.9)[codes.reshape(1, -1).int()], size)
    return bool((at_ends.any(1) & (scales == 0)).any())


def _half(stacked: Any, half: int, what: str) -> Any:
    """One of two moments, or of their scales; None if there is none."""
    if stacked is None:
        return None
    if not is_dense(stacked) or stacked.shape[:1] != (2,):
        got = f"shape {tuple(stacked.shape)}" if is_dense(stacked) else kind_of(stacked)
        raise ValueError(
            f"{what}: got {got}, expected two averages (2, ...) and their scales; save the state dict again"
        )
    return stacked[half]
