"""The norm of all gradients, bitwise equal on any number of ranks, and clipping: gradients times a coefficient."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from shardopt import _C
from shardopt.kernels.dispatch import DTYPES, check_device
from shardopt.kernels.dispatch_cuda import use_in_current_stream
from shardopt.kernels.norms import make_norm_call, norm_and_coefficient
from shardopt.layout import FlatBuffer, HoldersForSums, Shard, meet, shard_of
from shardopt.state.names import naming_errors
from shardopt.step.inputs import check_gradient
from shardopt.step.over_all import OverAll

#: This rank's exact sums of squares, or largest magnitudes, by the ranks to reduce them over: int64, on the CPU.
Shares = Mapping[HoldersForSums | None, Tensor]

#: A table row: `cols` elements of the gradient of `parameter` (an index), from the index `element` on, and the address
#: `sums` of the buffer to which kernels add their squares. A flat parameter has a row per model parameter.
_ROW = np.dtype([(name, np.int64) for name in ("parameter", "element", "cols", "sums")])


class GradientNorm:
    """Computes and clips the norm of parameters' gradients, with kernel tables that are cached between calls.

    The tables keep no parameter and no gradient alive.

    Args:
        params: the parameters. Ranks that hold parts of the same parameters pass them in the same order.

    Raises:
        UnknownShardError: the shard of a parameter is not known.
        RuntimeError: the kernels cannot read a parameter's gradient.
    """

    def __init__(self, params: list[Tensor]) -> None:
        may_have_gradient = [p.dtype in DTYPES and (p.requires_grad or p.grad is not None) for p in params]
        self._shards = [shard_of(p) if may else None for p, may in zip(params, may_have_gradient, strict=True)]
        # Buffers by the ranks that hold a parameter's shards: all join each reduction, with or without gradients.
        self._sums: dict[HoldersForSums | None, dict[torch.device, Tensor]] = {}
        rows: dict[torch.device, list[tuple[int, ...]]] = {param.device: [] for param in params}
        first_index = {id(param): index for index, param in reversed(list(enumerate(params)))}
        for index, (param, shard) in enumerate(zip(params, self._shards, strict=True)):
            if shard is None or first_index[id(param)] != index:  # a parameter that is given twice counts once
                continue
            parts: list[tuple[int, int, Shard]] = [(0, shard.rows * shard.cols, shard)]
            if isinstance(shard, FlatBuffer):
                parts = [(segment.offset, segment.shard.numel, segment.shard) for segment in shard.segments]
            for first, numel, part in parts:
                sums = self._sums.setdefault(part.holders_for_sums(), {})
                if param.device not in sums:
                    check_device(f"parameter {index}", param.device)
                    sums[param.device] = torch.zeros(_C.sum_words, dtype=torch.int64, device=param.device)
                rows[param.device].append((index, first, numel, sums[param.device].data_ptr()))
        self._over_all, self._is_first = OverAll(self._sums), True
        self._rows = {device: np.array(of_device, _ROW) for device, of_device in rows.items()}
        entries = [None if shard is None else frozenset[str]() for shard in self._shards]
        self._originals: dict[int, Tensor] = {}  # the gradients of which the kernels read copies, by index
        read_gradient = partial(_read_gradient, self._shards, self._originals)  # no method: that would keep this alive
        self._watched = _C.Inputs([{"params": params}], {}, self._shards, entries, shard_of, read_gradient)
        self._selected: tuple[bytes, list[int]] | None = None  # gradient_kinds() and `_originals` that batches are for
        self._batches: list[_NormBatch] = []
        if not self.take_gradients(params):  # a gradient cannot be read: say which and why, if known
            for index, param in enumerate(params):
                if param.grad is not None:
                    check_gradient(f"parameter {index} of shape {tuple(param.shape)}", param.grad)
            raise RuntimeError(
                "got a gradient that is not in memory as a dense tensor, expected a dense one; make it dense"
            )

    def take_gradients(self, params: list[Tensor]) -> bool:
        """Takes the current gradients, and selects their table rows; returns False if the tables do not fit ``params``.

        To be called before each of the other methods. Runs collectives for gradients sharded unlike their parameters.
        """
        self._originals.clear()
        result = self._watched.read([{"params": params}], {}, None)
        if result is None:
            return False
        self._gradients, self.with_gradient = result  # the latter: the parameters that have a gradient
        kinds = self._watched.gradient_kinds()
        if self._selected != (kinds, list(self._originals)):
            self._select(np.frombuffer(kinds, dtype=np.uint8))
            self._selected = kinds, list(self._originals)
        for batch in self._batches:
            batch.fill(self._watched, self._gradients)
        return True

    def norm_and_coefficient(
        self, max_norm: float, *, largest: bool, host_shares: Sequence[Shares] = ()
    ) -> tuple[Tensor, Tensor]:
        """The norm of all elements, and the coefficient that makes it at most ``max_norm``. All ranks must call this.

        Args:
            max_norm: the largest norm that the gradients may have after clipping.
            largest: whether the norm is the largest magnitude, instead of the root of the sum of squares, rounded once.
            host_shares: this rank's sums or magnitudes of gradients in the host's memory, to be included.

        Returns:
            The norm, and the coefficient: each float32, 0-d, on the device of the first parameter.
        """
        for sums in self._sums.values():
            for device, words in sums.items():
                if device.type == "cuda":
                    use_in_current_stream(device, (words,))
                words.zero_()
        for batch in self._batches:
            batch.call(_C.NormPass.largest if largest else _C.NormPass.squares, len(batch.parameters))
        shares = {holders: [x[:1] if largest else x for x in sums.values()] for holders, sums in self._sums.items()}
        for on_host in host_shares:
            for holders, share in on_host.items():
                shares.setdefault(holders, []).append(share)
        # Parameters frozen after their backward pass are not in the tables, but may have gradients on the host.
        over_all = self._over_all if shares.keys() == self._sums.keys() else OverAll(shares)
        if self._is_first:
            meet([each.ranks for each in over_all.reductions if each.ranks is not None], "clip_grad_norm_", once=True)
            self._is_first = False
        zeros = torch.zeros(1 if largest else _C.sum_words, dtype=torch.int64, device=next(iter(self._rows)))
        words = over_all.total(shares, zeros, largest=largest)
        norm, coefficient = norm_and_coefficient(words, max_norm, is_magnitude=largest)
        return norm, coefficient

    def scale_gradients(self, coefficient: Tensor) -> None:
        """Multiplies the gradients in place by a coefficient (float32, 0-d), in float32, and rounds once.

        Raises RuntimeError if two parameters have the same gradient. Nothing was changed.
        """
        for batch in self._batches:
            batch.demand_apart()  # on all devices, before anything is changed
        for batch in self._batches:
            batch.call(_C.NormPass.scale, batch.in_place, coefficient)
            for index in batch.others:
                gradient = self._originals.get(index, self._gradients[index])
                gradient.copy_(gradient.float() * coefficient.to(gradient.device))
        _C.increment_versions([param.grad for param in self.with_gradient])

    def forget_gradients(self) -> None:
        """Drops all references to gradients, so that their memory can be freed."""
        self._gradients, self.with_gradient = [], []
        self._originals.clear()
        for batch in self._batches:
            batch.contiguous.clear()

    def _select(self, kinds: npt.NDArray[np.uint8]) -> None:
        """Makes a batch per device of the rows with a gradient; rows that the kernels can scale in place come first."""
        has_gradient = kinds != _C.Inputs.no_gradient
        is_copied = has_gradient & (kinds & _C.Inputs.strided > 0)
        is_copied[list(self._originals)] = True
        self._batches = []
        for device, of_device in self._rows.items():
            rows = of_device[has_gradient[of_device["parameter"]]]
            row_is_copied = is_copied[rows["parameter"]]
            rows = rows[np.argsort(row_is_copied, kind="stable")]
            self._batches.append(_NormBatch(device, rows, int((~row_is_copied).sum())))


class _NormBatch:
    """The table of all gradients on a device, with the kernel call that reads or scales the gradients.

    Attributes:
        parameters: per row, the parameter's index.
        in_place: number of leading rows whose gradients the kernels multiply in place.
        others: indices of the other parameters, whose gradients PyTorch multiplies: strided ones, or read from copies.
        contiguous: contiguous copies of the gradients of ``others``, which the kernels read.
    """

    def __init__(self, device: torch.device, rows: npt.NDArray[np.void], in_place: int) -> None:
        self._kernel_rows, self._elements = np.zeros(len(rows), _C.kernel_row), rows["element"].copy()
        self._kernel_rows["cols"], self._kernel_rows["sums"] = rows["cols"], rows["sums"]
        self.parameters, self.in_place = rows["parameter"].copy(), in_place
        self.others: list[int] = list(dict.fromkeys(self.parameters[in_place:].tolist()))
        self.call = make_norm_call(device, self._kernel_rows)
        self.contiguous: dict[int, Tensor] = {}

    def fill(self, watched: _C.Inputs, gradients: Sequence[Tensor]) -> None:
        """Writes the gradients' current addresses into the table, after contiguous copies of strided gradients."""
        watched.fill(self._kernel_rows, self.parameters, self._elements)
        self.contiguous = {index: gradients[index].contiguous() for index in self.others}
        for row in range(self.in_place, len(self.parameters)):
            copy = self.contiguous[int(self.parameters[row])]
            self._kernel_rows["gradient"][row] = copy.data_ptr() + int(self._elements[row]) * copy.itemsize

    def demand_apart(self) -> None:
        """Raises RuntimeError if two parameters have the same gradient, which would be multiplied twice."""
        rows = self._kernel_rows[: self.in_place]
        with_elements = np.flatnonzero(rows["cols"])  # rows without elements share nothing
        addresses = rows["gradient"][with_elements]
        order = np.argsort(addresses, kind="stable")
        equal = np.flatnonzero(np.diff(addresses[order]) == 0)
        if len(equal):
            first, second = self.parameters[with_elements[order[equal[0] : equal[0] + 2]]]
            raise RuntimeError(
                f"parameter {second}: got the same gradient as parameter {first}, expected gradients of their own, as "
                "each is multiplied in place; make one of them of a .clone()"
            )


def _read_gradient(
    shards: Sequence[Shard | None], originals: dict[int, Tensor], index: int, gradient: Tensor
) -> Tensor:
    """This rank's shard of a gradient that is not yet in the tables; if a copy, ``originals`` gets the original."""
    shard = shards[index]
    assert shard is not None
    with naming_errors(f"parameter {index} {shard.global_shape}"):
        part = shard.local_gradient(gradient)
    original = getattr(gradient, "_local_tensor", gradient)  # a DTensor's
    if part is not original:
        originals[index] = original
    return part
