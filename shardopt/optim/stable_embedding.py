"""An embedding layer that stabilizes training with 8-bit optimizers (arXiv 2110.02861, section 2.3)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from torch.nn import Embedding, LayerNorm, Parameter, init

from shardopt.layout import keep_float32_state


class StableEmbedding(Embedding):
    """An embedding for 8-bit optimizers: Xavier-uniform weights, a layer norm behind, and float32 state.

    Every optimizer of this package keeps the moments of ``weight`` in float32, whatever its options or param groups
    say, under every sharding that shardopt knows: 8 bytes per element for Adam instead of about 2. Other optimizers
    treat ``weight`` like any parameter. Parameters that a parametrization (``weight_norm``) puts in the place of
    ``weight`` are quantized as usual.

    The layer norm belongs directly behind the token embedding: add position embeddings to its output. State dicts have
    ``weight``, ``norm.weight`` and ``norm.bias``, as those of ``bitsandbytes.nn.StableEmbedding``.

    Args:
        num_embeddings: the number of rows.
        embedding_dim: the width of a row, and of the layer norm.
        **kwargs: as in :class:`torch.nn.Embedding`, as are further positional arguments. Behind the layer norm the row
            of ``padding_idx`` is ``norm.bias``. The optimizers of this package refuse the gradients of ``sparse=True``.
    """

    def __init__(self, num_embeddings: int, embedding_dim: int, *args: Any, **kwargs: Any) -> None:
        super().__init__(num_embeddings, embedding_dim, *args, **kwargs)
        self.norm = LayerNorm(embedding_dim, device=self.weight.device, dtype=self.weight.dtype)

    def reset_parameters(self) -> None:
        """Initializes weights Xavier-uniform, with zeros for ``padding_idx``. The layer norm initializes itself."""
        init.xavier_uniform_(self.weight)
        self._fill_padding_idx_with_zero()

    def forward(self, input: Tensor) -> Tensor:
        """Looks up and normalizes embeddings, in the dtype of the layer norm; the result has the weights' dtype."""
        embedded = super().forward(input)
        normed: Tensor = self.norm(embedded.to(self.norm.weight.dtype))
        return normed.to(embedded.dtype)

    # Wrappers replace the weight: FSDP2 by a DTensor, to_empty() by a tensor with memory. Every new weight is marked.

    def register_parameter(self, name: str, param: Parameter | None) -> None:
        super().register_parameter(name, param)
        self._mark_weight()

    def __setattr__(self, name: str, value: Any) -> None:
        """As in Module. Must be defined here, or FSDP2 replaces parameters without :meth:`register_parameter`."""
        super().__setattr__(name, value)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> StableEmbedding:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._mark_weight()
        return self

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._mark_weight()

    def _mark_weight(self) -> None:
        """Marks the present weight as one whose state stays float32."""
        weight = self._parameters.get("weight")
        if weight is not None:
            keep_float32_state(weight)
