"""Moments of a flat buffer in DeepSpeed's checkpoints: codes that decode to float32 when they are read.

``python -m deepspeed.checkpoint.ds_to_universal`` and similar tools unpickle these checkpoints and cut float32 tensors
out of them. Moments are such tensors, but are decoded only when their elements are read; files have codes and scales.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from shardopt.codec import Moment
from shardopt.layout import FlatBuffer, FlatShard, Segment
from shardopt.state.options import with_defaults
from shardopt.state.tensor_state import TensorState

#: Options on which the meaning of codes depends.
_OPTIONS = ("codec", "block_size", "min_quantized_numel")


@dataclass
class SavedBuffer:
    """The state of a flat buffer and all that is needed to decode it, as plain values and tensors, which are pickled.

    Attributes:
        numel: the buffer's length.
        segments: name, shape, first and end element, and offset in the buffer, of each parameter in the buffer.
        options: the param group's options on which the meaning of codes depends.
        moments: name, and whether signed.
        low_bits: number of bits of each master weight in the state.
        entries: the optimizer's state.
    """

    numel: int
    segments: list[tuple[str, tuple[int, ...], int, int, int]]
    options: dict[str, Any]
    moments: list[tuple[str, bool]]
    low_bits: int
    entries: dict[str, Tensor]

    @classmethod
    def of(cls, spec: TensorState, group: Mapping[str, Any], entries: Mapping[str, Tensor]) -> SavedBuffer:
        """The state of one of the optimizer's buffers, without a copy."""
        assert isinstance(spec.shard, FlatBuffer)
        held = [segment for segment in spec.shard.segments if segment.shard.numel]
        return cls(
            spec.shard.local_shape[0],
            [(s.name, s.shard.global_shape, s.shard.start, s.shard.end, s.offset) for s in held],
            {option: group[option] for option in _OPTIONS},
            [(moment.name, moment.signed) for moment in spec.moments],
            spec.weights.low_bits,
            dict(entries),
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return SavedBuffer, tuple(getattr(self, field.name) for field in fields(self))

    @cached_property
    def decoded(self) -> dict[str, Tensor]:
        """The moments, float32, laid out like the buffer.

        Raises:
            RuntimeError: masters have low bits in the state, which readers of float32 moments do not know.
        """
        if self.low_bits:
            raise RuntimeError(
                f"got masters of which {self.low_bits} bits are in the optimizer's state, expected masters without low "
                "bits, which a universal checkpoint would lose; use shardopt.checkpoint.save(path, engine)"
            )
        segments = [
            Segment(name, number, FlatShard(shape, start, end), offset)
            for number, (name, shape, start, end, offset) in enumerate(self.segments)
        ]
        moments = tuple(Moment(name, signed=signed) for name, signed in self.moments)
        buffer = FlatBuffer(self.numel, segments)
        return TensorState.of(buffer, torch.float32, with_defaults(self.options), moments).decode(self.entries)


class MomentView(Tensor):
    """One moment of a buffer: a float32 tensor of the buffer's length, decoded once any operation reads it."""

    saved: SavedBuffer
    moment: str
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, saved: SavedBuffer, moment: str) -> MomentView:
        device = saved.entries["step"].device
        view: MomentView = Tensor._make_wrapper_subclass(cls, (saved.numel,), dtype=torch.float32, device=device)
        view.saved, view.moment = saved, moment
        return view

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        args, kwargs = tree_map_only(cls, lambda view: view.saved.decoded[view.moment], (args, kwargs or {}))
        return func(*args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return MomentView, (self.saved, self.moment)


class SavedState(dict[str, Any]):
    """A buffer's state with torch.optim's entries: ``step``, and a :class:`MomentView` per moment."""

    @classmethod
    def of(cls, saved: SavedBuffer) -> SavedState:
        """The state with views of its moments."""
        views = {name: MomentView(saved, name) for name, _ in saved.moments}
        return cls({"step": saved.entries["step"], **views})

    def __missing__(self, key: str) -> Any:
        raise KeyError(
            f"got optimizer state with {', '.join(self)}, expected {key}, too, as DeepSpeed's universal checkpoints "
            "are for Adam and AdamW; use shardopt.checkpoint.save(path, engine) for other optimizers"
        )


def native(entries: Mapping[str, Any]) -> Mapping[str, Any]:
    """The optimizer's own state behind a :class:`SavedState`; other entries unchanged."""
    for value in entries.values():
        if isinstance(value, MomentView):
            return value.saved.entries
    return entries
