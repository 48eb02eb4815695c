"""One parameter on its way from a checkpoint into a model and an optimizer, and its conversions."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from shardopt.checkpoint.contents import Content
from shardopt.kernels.weights import StoredWeights, WeightFormat
from shardopt.state.slice_spec import LOW_BITS, SliceSpec


class Target(NamedTuple):
    """One parameter: this rank's part as read from the checkpoint, and the form that model and optimizer need.

    Attributes:
        content: the parameter, and its state before the load.
        values: the weights that are read, in the checkpoint's dtype.
        saved: the form of the state in the checkpoint; None if no state is to be loaded.
        spec: the form of the state in the optimizer; None if no optimizer has the parameter.
        state: the state entries that are read; empty if this rank needs none.
    """

    content: Content
    values: Tensor
    saved: SliceSpec | None
    spec: SliceSpec | None
    state: dict[str, Tensor]

    @property
    def converts_state(self) -> bool:
        """Whether moments have to be encoded anew."""
        if self.saved is None or self.spec is None or not self.spec.moments:
            return False
        return described(self.saved) != described(self.spec)

    @property
    def weights(self) -> tuple[WeightFormat, WeightFormat]:
        """The weights' format in the checkpoint and in the model. Without state, there are no low bits."""
        found = []
        for spec, tensor in ((self.saved, self.values), (self.spec, self.content.piece.local)):
            has_state = spec is not None and self.saved is not None
            found.append(WeightFormat(tensor.dtype, spec.weights.low_bits if has_state and spec else 0))
        return found[0], found[1]

    @property
    def converts_weights(self) -> bool:
        """Whether the weights are stored in another format."""
        old, new = self.weights
        return old != new

    @property
    def conversion(self) -> str:
        """The conversions of state and weights, in words; empty if there are none."""
        found = []
        if self.converts_state:
            assert self.saved is not None
            assert self.spec is not None
            found.append(f"{described(self.saved)} state for {described(self.spec)}")
        if self.converts_weights:
            old, new = self.weights
            found.append(f"{old.dtype} weights of {old.low_bits} low bits for {new.dtype} of {new.low_bits}")
        return " and ".join(found)

    def with_converted_weights(self) -> Target:
        """Converts the checkpoint's weights to the format of the parameter and the optimizer."""
        if not self.converts_weights:
            return self
        old, new = self.weights
        stored = new.store(old.load(StoredWeights(self.values, self.state.get(LOW_BITS))))
        state = {key: value for key, value in self.state.items() if key != LOW_BITS}
        if stored.low_bits is not None and state:
            state[LOW_BITS] = stored.low_bits
        return self._replace(values=stored.param, state=state)

    @property
    def moments(self) -> list[Tensor] | None:
        """The saved moments, decoded: this rank's part, float32; None if none are read."""
        return self.saved.decode(self.state) if self.saved is not None and self.state else None


def described(spec: SliceSpec) -> str:
    """The codec and block size of a state, in words."""
    return f"{spec.codec.name} in blocks of {spec.grid.block_size}" if spec.codec.blockwise else spec.codec.name
