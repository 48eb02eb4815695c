"""How much rounding to codes may change the next update: from a portable checkpoint, without the model.

State is read and decoded in pieces: memory does not grow with the checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardopt import optim
from shardopt.checkpoint.convert.portable import lazy_tensors
from shardopt.checkpoint.convert.recoding import add_states, checked, of_names, reading
from shardopt.checkpoint.convert.stream import (
    Checkpoint,
    LazyTensor,
    State,
    part_of_form,
    ranges,
    state_of_tensors,
)
from shardopt.checkpoint.errors import CheckpointError
from shardopt.checkpoint.folder import Folder
from shardopt.checkpoint.groups import SavedGroup, options_by_name
from shardopt.checkpoint.index import Index
from shardopt.checkpoint.owner import is_of_quantize_state
from shardopt.checkpoint.wording import line, named
from shardopt.codec import Moment, Rounded
from shardopt.layout import Shard
from shardopt.state.slice_state import SliceState
from shardopt.wrapper.coding import coded_names
from shardopt.wrapper.entries import Entries
from shardopt.wrapper.loading import UNSIGNED, codec_name

#: Bins of :attr:`UpdateError.histogram`: 4 per octave from 2^-40 on, up to 2^24.
BINS_PER_OCTAVE, FIRST_OCTAVE, BINS = 4, -40, 256

_PIECE_NUMEL = 1 << 18  # decoded at a time, which takes about 90 MiB
_FINE_BITS = 16  # of float32's 32, the lower ones, that fine bins leave out: 128 bins per octave

#: Moments that are divided by the root of another one, and these other ones: a rule has the first that it keeps.
_DIVIDED = ("exp_avg", "exp_avg_fast")
_DIVISORS = ("max_exp_avg_sq", "exp_avg_sq", "exp_inf")


@dataclass(frozen=True)
class UpdateError:
    """Errors of a parameter's updates due to rounding, divided by the root mean square of the parameter's updates.

    Attributes:
        update: the update, as a formula of moments.
        median: half of the elements have at most this error.
        most: 99% of the elements have at most this error. Both are up to 1/128 above the exact quantile.
        at_floor: share of the elements whose second moment may be anything below what is stored: the least code above
            zero. Their errors may be larger than the figures say.
        histogram: int64, ``(BINS,)``: elements by their error; those beyond an end are in the bin there.
        exact: elements without error, which are not in the histogram.
    """

    update: str
    median: float
    most: float
    at_floor: float
    histogram: Tensor
    exact: int


def update_errors(
    folder: Folder,
    index: Index,
    groups: Sequence[SavedGroup],
    progress: Callable[[int], object] = lambda _: None,
) -> tuple[dict[str, UpdateError], list[str]]:
    """Errors by parameter, of those with quantized state whose updates are not all zero.

    The update is ``exp_avg / (sqrt(exp_avg_sq) + eps)``, or without such moments the moment itself: of a rule without
    signed moments, the root that it divides by. Corrections of bias, weight decay and further moments are left out.

    Args:
        folder: the checkpoint's folder.
        index: its index.
        groups: its param groups.
        progress: called with the bytes of codes and scales that were read.

    Returns:
        The errors, and a line for each parameter whose state cannot be decoded.

    Raises:
        CheckpointError: the checkpoint is damaged, or was replaced.
    """
    if "param_groups" not in index.header:
        return {}, []
    found: dict[str, UpdateError] = {}
    problems: list[str] = []
    options = options_by_name(groups)
    with ExitStack() as closing:
        tensors = lazy_tensors(folder, index, closing)
        try:
            states = _states(Checkpoint(str(folder), index.header.get("optimizer"), list(groups)), tensors, options)
        except CheckpointError as error:
            return {}, [f"no update errors: {line(error)}"]
        for name, state in states.items():
            if not state.form.codec.blockwise:
                continue
            try:
                of_parameter = _of_parameter(state, options[name], progress)
            except CheckpointError as error:
                problems.append(f"no update errors of {named(name)}: {line(error)}")
                continue
            if of_parameter is not None:
                found[name] = of_parameter
    return found, problems


def _states(checkpoint: Checkpoint, tensors: dict[str, LazyTensor], options: dict[str, Any]) -> dict[str, State]:
    """The states of parameters. Reading them checks them."""
    entries = of_names(tensors)
    checkpoint.tensors = {key: tensor for key, tensor in tensors.items() if key.startswith("model.")}
    if not is_of_quantize_state(checkpoint.optimizer):
        if checkpoint.optimizer not in optim.__all__:
            raise CheckpointError(
                f"{checkpoint.path}: got the state of {named(checkpoint.optimizer)}, expected that of an optimizer of "
                "shardopt, whose moments are known; leave out --errors"
            )
        add_states(checkpoint, entries)
        return checkpoint.states
    states = {}
    for name, of_name in entries.items():
        quantized = coded_names(of_name)
        if name in options and quantized:
            with reading(f"{checkpoint.path}: {named(name)}"):
                form = _form_of_quantize_state(checkpoint.parameter(name).shape, of_name, quantized, options[name])
            coded = {key: of_name[key] for key in form.moment_entries}
            states[name] = checked(state_of_tensors(form, torch.zeros((), device="cpu"), coded), name, checkpoint.path)
    return states


def _form_of_quantize_state(
    shape: tuple[int, ...], entries: Mapping[str, LazyTensor], quantized: Sequence[str], options: Mapping[str, Any]
) -> SliceState:
    own = Entries({}, options[UNSIGNED], ())
    coding = own.with_options({"codec": codec_name(options["codec"]), "block_size": options["block_size"]})
    form = SliceState.of(Shard(shape, shape), torch.float32, coding, tuple(map(own.moment, quantized)))
    for key, entry in form.moment_entries.items():
        found = entries[key]
        if (found.dtype, found.shape) != (entry.dtype, entry.shape):
            raise ValueError(
                f"got {named(key)} of {found.dtype} and shape {found.shape}, expected {entry.dtype} and {entry.shape}; "
                "load another checkpoint"
            )
    return form


def _of_parameter(state: State, options: dict[str, Any], progress: Callable[[int], object]) -> UpdateError | None:
    update = _Update.of(state.form, options)
    fine = torch.zeros(1 << (_FINE_BITS - 1), dtype=torch.int64, device="cpu")
    squares, at_floor, numel = 0.0, 0, math.prod(state.form.shard.global_shape)
    for rounded in _blocks(state, progress):
        values, errors = update.of_blocks(rounded)
        squares += float(values.square().sum())
        bits = errors.clamp(max=torch.finfo(torch.float32).max).float().view(torch.int32)
        fine += torch.bincount(bits.flatten() >> _FINE_BITS, minlength=len(fine))
        at_floor += update.at_floor(rounded)
    scale = math.sqrt(squares / max(numel, 1))
    if scale == 0:
        return None
    median, most = (_quantile(fine, percent) / scale for percent in (50, 99))
    return UpdateError(update.formula, median, most, at_floor / numel, _coarse(fine, scale), int(fine[0]))


def _blocks(state: State, progress: Callable[[int], object]) -> Iterator[dict[str, Rounded]]:
    """The moments by name, some blocks at a time."""
    names = [moment.name for moment in state.form.moments]
    for first, end in ranges(state.form.shard.global_shape, _PIECE_NUMEL):
        entries = state.read(first, end)
        progress(sum(x.nbytes for x in entries.values()))
        for rounded in part_of_form(state.form, first, end).rounded(entries):
            yield dict(zip(names, rounded, strict=True))


@dataclass(frozen=True)
class _Update:
    """The update of a state, by the names of its moments.

    Attributes:
        form: the form of the state.
        along: the moment that weights are moved along.
        divisor: the moment by whose root it is divided; None without one.
        eps: added to the root.
    """

    form: SliceState
    along: Moment
    divisor: Moment | None
    eps: float

    @classmethod
    def of(cls, form: SliceState, options: dict[str, Any]) -> _Update:
        """The update of a state, with the options of its param group."""
        by_name = {moment.name: moment for moment in form.moments}
        along = next((by_name[name] for name in _DIVIDED if name in by_name), None)
        divisor = next((by_name[name] for name in _DIVISORS if name in by_name), None)
        # ADOPT averages what is divided already: in a rule only such a moment has its own units.
        if along is None or divisor is None or along.own_units != divisor.own_units:
            coded = [moment for moment in form.moments if not moment.exact]
            return cls(form, min(coded, key=lambda moment: (not moment.signed, not moment.own_units)), None, 0.0)
        eps = options.get("eps")
        return cls(form, along, divisor, float(eps) if isinstance(eps, int | float) else 0.0)

    @property
    def formula(self) -> str:
        """The update in words of Python."""
        along = self.along.name if self.along.signed else self._name_of_root(self.along)
        return along if self.divisor is None else f"{along} / ({self._name_of_root(self.divisor)} + eps)"

    def of_blocks(self, rounded: Mapping[str, Rounded]) -> tuple[Tensor, Tensor]:
        """The magnitudes of updates, and how far rounding may have moved the updates: float64.

        An element whose second moment is zero never had a gradient: it has no update and no error.
        """
        if not self.along.signed:
            root, least = self._root(self.along, rounded)
            return root, root - least
        value, error = rounded[self.along.name].value.double().abs(), rounded[self.along.name].error.double()
        if self.divisor is None:
            return value, error
        root, least = self._root(self.divisor, rounded)
        update = value / (root + self.eps)
        largest = (value + error) / (least + self.eps)  # farther away than the least
        return torch.where(root > 0, update, 0), torch.where(root > 0, largest - update, 0)

    def at_floor(self, rounded: Mapping[str, Rounded]) -> int:
        """Elements whose second moment may be anything below what is stored."""
        of = self.along if self.divisor is None else self.divisor
        return int(rounded[of.name].at_floor.sum())

    def _name_of_root(self, moment: Moment) -> str:
        return moment.name if moment.magnitude else f"sqrt({moment.name})"

    def _root(self, moment: Moment, rounded: Mapping[str, Rounded]) -> tuple[Tensor, Tensor]:
        """The root of an unsigned moment, and the least that it may have been before rounding: float64."""
        value, error = rounded[moment.name].value.double(), rounded[moment.name].error.double()
        if moment.magnitude or moment.has_root(self.form.codec):
            return value, value - error
        return value.sqrt(), (value - error).sqrt()


def _quantile(fine: Tensor, percent: int) -> float:
    """The upper edge of the bin in which so many percent of the elements are reached; 0 in the lowest one."""
    needed = -(-int(fine.sum()) * percent // 100)
    index = int(torch.searchsorted(fine.cumsum(0), needed))
    return float(_edges(torch.tensor([index + 1], device="cpu"))) if index else 0.0


def _coarse(fine: Tensor, scale: float) -> Tensor:
    """Counts of fine bins in those of :attr:`UpdateError.histogram`, of errors divided by ``scale``."""
    (index,) = fine[1:].nonzero(as_tuple=True)
    octaves = (_edges(index + 1).double() / scale).log2() - FIRST_OCTAVE
    bins = (octaves * BINS_PER_OCTAVE).floor().clamp(0, BINS - 1).long()
    return torch.zeros(BINS, dtype=torch.int64, device="cpu").index_add_(0, bins, fine[index + 1])


def _edges(index: Tensor) -> Tensor:
    """The lower edges of fine bins, float32."""
    return (index << _FINE_BITS).int().view(torch.float32)
