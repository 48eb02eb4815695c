"""How much rounding to codes may change the next update: from a portable checkpoint, without the model.

    python benchmarks/quality/update_error.py FOLDER [--plot codes.png]

State is read and decoded in pieces: memory does not grow with the checkpoint. Takes about 15 s per 100 million elements
on one core. The plot has histograms of codes of 8 bits, too, by value.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
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
from shardopt.checkpoint.groups import checked_groups, options_by_name
from shardopt.checkpoint.index import load_index
from shardopt.checkpoint.inspect_command import table
from shardopt.checkpoint.owner import is_of_quantize_state
from shardopt.checkpoint.storage import PathLike, folder_at
from shardopt.checkpoint.summary import summarize
from shardopt.checkpoint.wording import line, named
from shardopt.codec import CODECS, Moment, Rounded
from shardopt.layout import Shard
from shardopt.state.slice_spec import SliceSpec
from shardopt.wrapper import entries as of_entries
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
        codec: the codec's name.
        update: the update, as a formula of moments.
        median: half of the elements have at most this error.
        most: 99% of the elements have at most this error. Both are up to 1/128 above the exact quantile.
        at_floor: share of the elements whose second moment may be anything below what is stored: the least code above
            zero. Their errors may be larger than the figures say.
        histogram: int64, ``(BINS,)``: elements by their error; those beyond an end are in the bin there.
        exact: elements without error, which are not in the histogram.
    """

    codec: str
    update: str
    median: float
    most: float
    at_floor: float
    histogram: Tensor
    exact: int


def update_errors(path: PathLike) -> tuple[dict[str, UpdateError], list[str]]:
    """Errors by parameter, of those with quantized state whose updates are not all zero.

    The update is ``exp_avg / (sqrt(exp_avg_sq) + eps)``, or without such moments the moment itself: of a rule without
    signed moments, the root that it divides by. Corrections of bias, weight decay and further moments are left out.

    Args:
        path: the checkpoint's folder.

    Returns:
        The errors, and a line for each parameter whose state cannot be decoded.

    Raises:
        CheckpointError: the checkpoint is damaged, or was replaced.
    """
    folder = folder_at(path)
    index = load_index(folder)
    groups = checked_groups(str(folder), index.header.get("param_groups", []))
    if not groups:
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
                of_parameter = _of_parameter(state, options[name])
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
                "shardopt, whose moments are known; measure another checkpoint"
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
) -> SliceSpec:
    own = Entries({}, options[UNSIGNED], ())
    coding = own.with_options({"codec": codec_name(options["codec"]), "block_size": options["block_size"]})
    form = SliceSpec.of(Shard(shape, shape), torch.float32, coding, tuple(map(own.moment, quantized)))
    for key, entry in form.moment_entries.items():
        found = entries[key]
        if (found.dtype, found.shape) != (entry.dtype, entry.shape):
            raise ValueError(
                f"got {named(key)} of {found.dtype} and shape {found.shape}, expected {entry.dtype} and {entry.shape}; "
                "load another checkpoint"
            )
    return form


def _of_parameter(state: State, options: dict[str, Any]) -> UpdateError | None:
    update = _Update.of(state.form, options)
    fine = torch.zeros(1 << (_FINE_BITS - 1), dtype=torch.int64, device="cpu")
    squares, at_floor, numel = 0.0, 0, math.prod(state.form.shard.global_shape)
    for rounded in _blocks(state):
        values, errors = update.of_blocks(rounded)
        squares += float(values.square().sum())
        bits = errors.clamp(max=torch.finfo(torch.float32).max).float().view(torch.int32)
        fine += torch.bincount(bits.flatten() >> _FINE_BITS, minlength=len(fine))
        at_floor += update.at_floor(rounded)
    scale = math.sqrt(squares / max(numel, 1))
    if scale == 0:
        return None
    median, most = (_quantile(fine, percent) / scale for percent in (50, 99))
    return UpdateError(
        state.form.codec.name, update.formula, median, most, at_floor / numel, _coarse(fine, scale), int(fine[0])
    )


def _blocks(state: State) -> Iterator[dict[str, Rounded]]:
    """The moments by name, some blocks at a time."""
    names = [moment.name for moment in state.form.moments]
    for first, end in ranges(state.form.shard.global_shape, _PIECE_NUMEL):
        entries = state.read(first, end)
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

    form: SliceSpec
    along: Moment
    divisor: Moment | None
    eps: float

    @classmethod
    def of(cls, form: SliceSpec, options: dict[str, Any]) -> _Update:
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


def main(argv: Sequence[str] | None = None) -> int:
    """Prints a table, and plots. The exit status is 1 if state cannot be read or decoded."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("path", help="folder of the checkpoint")
    parser.add_argument("--plot", metavar="FILE", help="histograms of codes and errors; needs matplotlib")
    args = parser.parse_args(argv)
    try:
        errors, problems = update_errors(args.path)
        if args.plot:
            plot(args.path, errors, args.plot)
    except CheckpointError as error:
        print(error, file=sys.stderr)
        return 1
    rows = [
        [name, of.codec, of.update, f"{of.median:.2%}", f"{of.most:.2%}", f"{of.at_floor:.2%}"]
        for name, of in errors.items()
    ]
    head = ["parameter", "codec", "update", "error of half the elements", "of 99%", "second moment at the floor"]
    nothing = ["No errors of rounding to show: no state in codes that could be decoded, or updates of zero."]
    print("\n".join([*(table(head, rows) if rows else nothing), *problems]))
    return 1 if problems else 0


def plot(path: PathLike, errors: Mapping[str, UpdateError], target: str) -> None:
    """Draws how often each code occurs, a panel per entry and codec, and the errors of updates, a line per codec.

    Raises:
        CheckpointError: there is nothing to draw.
    """
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    panels = _code_counts(path)
    if not panels and not errors:
        raise CheckpointError(f"{path}: got no state in codes to plot, expected some; leave out --plot")
    count = len(panels) + bool(errors)
    figure, axes = pyplot.subplots(count, squeeze=False, figsize=(8, 2.6 * count), layout="constrained")
    for axis, ((entry, codec), counts) in zip(axes[:, 0], panels.items(), strict=False):
        order = order_of_codes(entry, codec)
        axis.bar(range(256), (counts[order] / counts.sum()).tolist(), width=1.0)
        by_value = "" if order.tolist() == list(range(256)) else ", from the least value to the largest"
        axis.set(title=f"{entry}, {codec}", xlabel=f"code{by_value}", ylabel="share", xlim=(-1, 256))
    if errors:
        _draw_errors(axes[-1, 0], error_counts(errors))
    figure.savefig(target)
    pyplot.close(figure)


def _code_counts(path: PathLike) -> dict[tuple[str, str], Tensor]:
    """How often each code of 8 bits occurs, by entry and codec."""
    found: dict[tuple[str, str], Tensor] = {}
    for each in summarize(path).parameters:
        for key, values in each.values.items():
            entry = key.rpartition(".")[2]
            if entry.endswith("_codes") and each.state[entry].shape == each.shape:
                found[entry, each.codec] = values.counts + found.get((entry, each.codec), 0)
    return found


def order_of_codes(entry: str, codec: str) -> Tensor:
    """The 256 codes of an entry, from the one of the least value to the one of the largest."""
    codes = torch.arange(256, device="cpu")
    own = CODECS.get(codec_name(codec) or codec)
    if own is None or own.shared or entry.removesuffix("_codes") in of_entries.UNSIGNED:
        return codes
    return own.decode(codes.to(torch.uint8), torch.ones(1, device="cpu"), signed=True).argsort(stable=True)


def error_counts(errors: Mapping[str, UpdateError]) -> dict[str, tuple[Tensor, int]]:
    """Histogram of the errors of updates, and the number of elements without error, by codec."""
    found: dict[str, tuple[Tensor, int]] = {}
    for each in errors.values():
        histogram, exact = found.get(each.codec, (torch.zeros(BINS, dtype=torch.int64, device="cpu"), 0))
        found[each.codec] = histogram + each.histogram, exact + each.exact
    return found


def _draw_errors(axis: Any, errors: dict[str, tuple[Tensor, int]]) -> None:
    edges = [2.0 ** (FIRST_OCTAVE + index / BINS_PER_OCTAVE) for index in range(BINS + 1)]
    drawn = []
    for codec, (histogram, exact) in errors.items():
        numel = int(histogram.sum()) + exact
        without = f", {exact / numel:.1%} without error" if exact else ""
        axis.stairs((histogram / numel).tolist(), edges, label=f"{codec}{without}")
        drawn += histogram.nonzero().flatten().tolist()
    if drawn:
        axis.set_xlim(edges[max(min(drawn) - 1, 0)], edges[min(max(drawn) + 2, BINS)])
    axis.set(
        title="Most that rounding changes an update",
        xlabel="error / root mean square of the parameter's update",
        ylabel="share of elements",
        xscale="log",
    )
    axis.legend()


if __name__ == "__main__":
    raise SystemExit(main())
