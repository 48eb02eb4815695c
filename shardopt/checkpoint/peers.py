"""Reads the optimizer state of other packages, under torch.optim's names of moments, and recognizes the package."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from numbers import Real
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor

from shardopt.checkpoint.wording import few, kind_of, shown
from shardopt.codec import Codec, Moment, get_codec
from shardopt.codec.base import are_finite
from shardopt.codec.dynamic8 import dynamic_map
from shardopt.kernels.numeric import from_blocks, to_blocks
from shardopt.layout import BlockGrid

#: A parameter's state or a param group, as another package saves it: values by name.
Entries = Mapping[str, Any]

_TABLE_SHAPE = (256,)  # of the values that 8-bit codes stand for

#: Entries of torch.optim's state that can be computed from the step count, and so are not imported.
DERIVED = {"mu_product"}

#: The moments that optimizers of torch.optim keep.
_MOMENTS = {
    *("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf"),
    *("momentum_buffer", "square_avg", "grad_avg", "sum"),
}


class Peer:
    """Reads one package's optimizer state. The base class reads torch.optim's, whose moments are float tensors."""

    #: The package's name in errors and reports.
    name = "torch.optim"
    #: The form of the package's state, for errors.
    looks = "exp_avg, exp_avg_sq, momentum_buffer and the like in float"
    #: Entries beside the moments that shardopt does not have: left out, and reported as ignored.
    ignored: frozenset[str] = frozenset()

    def recognizes(self, state: Entries) -> bool:
        """Whether one parameter's state is from this package, by its entries, of which none is None."""
        return state.keys() <= {"step", *DERIVED, *_MOMENTS} and all(
            isinstance(state[key], Tensor) for key in _MOMENTS & set(state)
        )

    def read(self, state: Entries, group: Entries, expected: Sequence[Moment], name: str) -> Entries:
        """Renames one parameter's entries to torch.optim's names; moments become floats or a :class:`CodedMoment`.

        ``state`` has a form that :meth:`recognizes` accepts, or torch.optim's; ``group`` is its param group as saved,
        ``expected`` are the moments of the optimizer that takes it, ``name`` is for errors. Raises ValueError if the
        state is of another kind of optimizer, or damaged.
        """
        return state

    def hyper_parameters(self, group: Entries, moments: Sequence[str]) -> dict[str, Any]:
        """Renames a param group's hyper-parameters to torch.optim's names, and converts their values.

        ``moments`` has the names of the moments that the optimizer keeps. Raises a ValueError if the hyper-parameters
        are of another kind of optimizer.
        """
        return dict(group)


class CodedMoment(NamedTuple):
    """A quantized moment as another package keeps it: blocks of the flattened parameter, which may cross rows.

    Attributes:
        codes: uint8, the parameter's shape.
        scales: float32, ``(blocks,)``.
        block_size: elements per block.
        codec: the name of shardopt's codec with the same codes and scales; None if there is none.
        decode: function from blocks of codes ``(blocks, block_size)`` and their scales ``(blocks, 1)`` to float32.
    """

    codes: Tensor
    scales: Tensor
    block_size: int
    codec: str | None
    decode: Callable[[Tensor, Tensor], Tensor]

    def decoded(self) -> Tensor:
        """Decodes the moment to float32, in the parameter's shape."""
        (blocks,) = to_blocks(self.codes.reshape(1, -1), self.block_size)
        decoded = self.decode(blocks, self.scales[:, None])
        return from_blocks(decoded[None], self.codes.numel()).reshape(self.codes.shape)

    def is_same_as(self, codec: Codec, grid: BlockGrid) -> bool:
        """Whether codes and scales can be copied as they are: the same codec and block size, no block across rows."""
        has_whole_blocks = grid.row_numel % grid.block_size == 0 or grid.rows == 1
        return self.codec == codec.name and has_whole_blocks and self.block_size == grid.block_size


def table_coded(codes: Tensor, scales: Tensor, table: Tensor, block_size: int, *, signed: bool) -> CodedMoment:
    """Makes a moment whose codes index a table of 256 values; its codec is dynamic8 if it has dynamic8's table."""
    dynamic8_table = dynamic_map(signed=signed).to(table.device)
    is_dynamic8 = table.dtype == dynamic8_table.dtype and torch.equal(table, dynamic8_table)

    def decode(blocks: Tensor, scales: Tensor) -> Tensor:
        return table[blocks.int()] * scales

    return CodedMoment(codes, scales, block_size, "dynamic8" if is_dynamic8 else None, decode)


def check_scales(codes: Tensor, scales: Tensor, block_size: int, what: str) -> None:
    """Raises ValueError unless there is one scale per block of codes, finite and not negative."""
    blocks = -(-codes.numel() // block_size)
    if scales.shape != (blocks,):
        raise ValueError(
            f"{what}: got scales of shape {tuple(scales.shape)} for {codes.numel()} codes, expected ({blocks},) of "
            f"blocks of {block_size}"
        )
    if not are_finite(scales, signed=False):
        raise ValueError(
            f"{what}: got scales with NaN or Inf, or below zero, expected finite ones >= 0; reset this parameter's "
            "state"
        )


def is_dense(value: object) -> TypeGuard[Tensor]:
    """Whether a value is a strided tensor of real numbers, not on the meta device."""
    return isinstance(value, Tensor) and value.layout == torch.strided and not (value.is_meta or value.is_complex())


def are_floats(value: object) -> TypeGuard[Tensor]:
    """Whether a value is a strided tensor of a float dtype, not on the meta device."""
    return is_dense(value) and value.dtype.is_floating_point


_EIGHT_BIT = "OptimState8bit"
_DECODED = ("OptimState4bit", "OptimStateFp8")  # decoded to float: no codec of shardopt has their codes


class Torchao(Peer):
    """torchao: moments are tensor subclasses if the block size divides the parameter, else float tensors.

    The subclasses are recognized by name and attributes, so that torchao need not be installed.
    """

    name = "torchao"
    looks = f"exp_avg and exp_avg_sq as {_EIGHT_BIT}, {' or '.join(_DECODED)}"

    def recognizes(self, state: Entries) -> bool:
        return any(type(value).__name__ in (_EIGHT_BIT, *_DECODED) for value in state.values())

    def read(self, state: Entries, group: Entries, expected: Sequence[Moment], name: str) -> Entries:
        moments = {moment.name: moment for moment in expected if moment.name in state}
        return {**state, **{k: self._moment(state[k], f"{name}: {k}", m.signed) for k, m in moments.items()}}

    def _moment(self, value: Any, what: str, signed: bool) -> Any:
        """A moment as floats or a :class:`CodedMoment`; a value of another type unchanged, for the caller to check."""
        kind = type(value).__name__
        if kind in _DECODED:
            return value.dequantize()
        if kind != _EIGHT_BIT:
            return value
        codes, scales, table, is_signed = (getattr(value, key, None) for key in ("codes", "scale", "qmap", "signed"))
        if not is_dense(codes) or codes.dtype != torch.uint8 or is_signed is not signed:
            raise ValueError(
                f"{what}: got codes of {kind_of(codes)}, signed={shown(is_signed)}, expected uint8, signed={signed}"
            )
        if not are_floats(scales) or not are_floats(table) or table.shape != _TABLE_SHAPE:
            raise ValueError(
                f"{what}: got scales of {kind_of(scales)} and a map of {kind_of(table)}, expected floats, and 256 of "
                "them in the map"
            )
        block_size = max(codes.numel() // max(scales.numel(), 1), 1)
        check_scales(codes, scales, block_size, what)
        return table_coded(codes, scales.float(), table, block_size, signed=signed)


_GROUP_SIZE = 32
_CODES, _SCALES, _LOW_BITS = "::quantized", "::scales", "error_bits"


class Flashoptim(Peer):
    """flashoptim: int8 and uint8 codes, float16 scales of groups of 32 elements of the flattened parameter.

    ``q / 127 = 2 y / (1 + |y|)`` of ``y = m / scale``, and ``q / 255 = sqrt(v) / scale``: companded8's formulas, so
    codes and scales go over as they are. Decoded, a second moment differs by float32's rounding, which is done in
    another order. One above zero that has the code 0, which companded8 never gives, is 0 here as it is there.
    ``error_bits`` are another form of low bits than ours.
    """

    name = "flashoptim"
    looks = f"exp_avg{_CODES} and exp_avg{_SCALES}"
    ignored = frozenset([_LOW_BITS])

    def recognizes(self, state: Entries) -> bool:
        return any(key.endswith(_CODES) for key in state) or _LOW_BITS in state

    def read(self, state: Entries, group: Entries, expected: Sequence[Moment], name: str) -> Entries:
        # Coded moments that the optimizer does not keep stay in the result, as None: the caller refuses their names.
        coded = dict.fromkeys(key.removesuffix(_CODES) for key in state if key.endswith(_CODES))
        others = {key: value for key, value in state.items() if not key.endswith((_CODES, _SCALES))}
        moments = {m.name: self._moment(state, m, f"{name}: {m.name}") for m in expected if m.name in coded}
        return {**others, **coded, **moments}

    def _moment(self, state: Entries, moment: Moment, what: str) -> CodedMoment:
        """One moment's codes and scales."""
        codes, scales = state[moment.name + _CODES], state.get(moment.name + _SCALES)
        dtype = torch.int8 if moment.signed else torch.uint8
        if not is_dense(codes) or codes.dtype != dtype or not are_floats(scales):
            got = "no scales" if scales is None else f"scales of {kind_of(scales)} and codes of {kind_of(codes)}"
            raise ValueError(f"{what}: got {got}, expected {dtype} codes and float16 scales")
        if scales.dtype == torch.bfloat16:  # beside bfloat16 parameters they are float16's bits under that name
            scales = scales.view(torch.float16)
        check_scales(codes, scales, _GROUP_SIZE, what)
        companded8 = get_codec("companded8")

        def decode(blocks: Tensor, scales: Tensor) -> Tensor:
            values = companded8.decode(blocks, scales, signed=moment.signed)
            return values if moment.signed else values * values

        return CodedMoment(codes.view(torch.uint8), scales.float(), _GROUP_SIZE, companded8.name, decode)


_ADJUSTMENTS = {"spectral_norm": "spectral_norm", "rms_norm": "match_rms_adamw"}


class Dion(Peer):
    """The dion package's Muon: matrices have ``momentum``, a sum of gradients; AdamW's also have ``variance``."""

    name = "dion"
    looks = "momentum and variance in float"

    def recognizes(self, state: Entries) -> bool:
        return "momentum" in state and state.keys() <= {"momentum", "variance", "step_dev"}

    def read(self, state: Entries, group: Entries, expected: Sequence[Moment], name: str) -> Entries:
        step = {"step": torch.tensor(float(group.get("step", 0)), device="cpu")}
        if "momentum" not in state:  # another package's state: the caller refuses its entries
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
        gradient_sum = state["momentum"]  # shardopt averages gradients
        average = gradient_sum * (1.0 - momentum) if are_floats(gradient_sum) else gradient_sum
        return {**step, "momentum_buffer": average}

    def hyper_parameters(self, group: Entries, moments: Sequence[str]) -> dict[str, Any]:
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


_WRAPPED = "__bnb_optimizer_quant_state__"
_BLOCK_SIZES = (256, 2048)  # of bitsandbytes today, and before version 0.44
_UPDATE_NORM, _GRADIENT_NORMS = "unorm_vec", "gnorm_vec"
_HYPER_PARAMETERS = ("betas", "eps", "alpha", "t_alpha", "t_beta3")  # their meanings differ between its optimizers

_ADAM, _LION, _SGD = ("exp_avg", "exp_avg_sq"), ("exp_avg",), ("momentum_buffer",)
#: The kinds of optimizer whose state is imported, by the names of shardopt's moments.
_KINDS = {
    _ADAM: "Adam's (two betas)",
    _LION: "Lion's (eps 0, betas[1] above 0)",
    _SGD: "that of SGD with momentum (eps 0, betas[1] 0)",
}


class Bitsandbytes(Peer):
    """bitsandbytes: 8-bit codes in ``state1`` and ``state2``, in blocks of the flattened parameter.

    The state does not say which optimizer wrote it. The importing optimizer's moments decide which kind is expected
    (Adam, Lion or SGD), and the saved hyper-parameters must fit that kind.
    """

    name = "bitsandbytes"
    looks = f"state1, or {_WRAPPED} with it"
    ignored = frozenset([_GRADIENT_NORMS])

    def recognizes(self, state: Entries) -> bool:
        return "state1" in state or _WRAPPED in state

    def read(self, state: Entries, group: Entries, expected: Sequence[Moment], name: str) -> Entries:
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
        return {key: state[key] for key in ("step", *self.ignored) if key in state} | moments

    def hyper_parameters(self, group: Entries, moments: Sequence[str]) -> dict[str, Any]:
        kind = tuple(moments)
        if kind not in _KINDS:
            raise ValueError(
                f"got the state of bitsandbytes for an optimizer with {', '.join(kind) or 'no moments'}, expected one "
                f"whose state is imported: {'; '.join(_KINDS.values())}; begin with new state"
            )
        betas, eps = group.get("betas"), group.get("eps", 0)
        hyper = {key: value for key, value in group.items() if key not in _HYPER_PARAMETERS}
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


def _read_moment(state: Entries, number: int, moment: Moment, name: str) -> Tensor | CodedMoment:
    """One moment of a parameter's state (1: ``state1``, 2: ``state2``): a float tensor, or codes with their scales."""
    what = f"{name}: state{number}"
    entries: list[Any] = [state.get(f"{key}{number}") for key in ("state", "qmap", "absmax")]
    codes, table, scales = entries
    if are_floats(codes):
        return codes
    are_tensors = is_dense(codes) and are_floats(table) and are_floats(scales)
    if not are_tensors or codes.dtype != torch.uint8 or table.shape != _TABLE_SHAPE:
        raise ValueError(
            f"{what}: got {kind_of(codes)} and {few(state)}, expected uint8 codes, and "
            f"float tensors qmap{number} (256 values) and absmax{number}"
        )
    fitting = (size for size in _BLOCK_SIZES if scales.numel() == -(-codes.numel() // size))
    block_size = next(fitting, _BLOCK_SIZES[0])
    scales, table = scales.float().to(codes.device), table.to(codes.device)  # codes may be paged: in host memory
    check_scales(codes, scales, block_size, what)
    return table_coded(codes, scales, table, block_size, signed=moment.signed)


#: Readers by package. torch.optim's comes last: other packages keep the state of some parameters in its form.
PEERS: tuple[Peer, ...] = (Bitsandbytes(), Torchao(), Flashoptim(), Dion(), Peer())


def package_of(states: Collection[Entries]) -> Peer:
    """The package that all ``states`` (none empty) of an optimizer are from; ValueError if there is not exactly one."""
    if not states:
        raise ValueError("got no state at all, expected that of an optimizer which has taken a step")
    for state in states:
        if not any(peer.recognizes(state) for peer in PEERS):
            raise ValueError(
                f"got the state of an unknown optimizer, with {few(state)}, expected a known one: "
                f"{'; '.join(f'{peer.name} has {peer.looks}' for peer in PEERS)}. Load shardopt's own with "
                "load_state_dict"
            )
    found = [peer for peer in PEERS[:-1] if any(map(peer.recognizes, states))]
    if len(found) > 1:
        raise ValueError(
            f"got the state of {' and '.join(peer.name for peer in found)}, expected that of one optimizer; save "
            "the state dict again"
        )
    return found[0] if found else PEERS[-1]
