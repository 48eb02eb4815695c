"""The command ``shardopt inspect``: what a portable checkpoint holds, as tables."""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from shardopt.checkpoint.errors import CheckpointError
from shardopt.checkpoint.header import dumped
from shardopt.checkpoint.summary import Parameter, Summary, summarize
from shardopt.checkpoint.update_error import BINS, BINS_PER_OCTAVE, FIRST_OCTAVE, UpdateError
from shardopt.codec import CODECS
from shardopt.state.options import STATE_FORMAT
from shardopt.wrapper.entries import UNSIGNED
from shardopt.wrapper.loading import codec_name

_SHOWN_OPTIONS = ("lr", *STATE_FORMAT)


def add_parser(commands: Any) -> None:
    """Adds the command to what ``argparse.ArgumentParser.add_subparsers`` made."""
    parser = commands.add_parser(
        "inspect",
        help="what a portable checkpoint holds",
        description="Sizes, codecs and ranges of values of a portable checkpoint, and what is wrong with it. Reads and "
        "verifies all data; the exit status is 1 if it is damaged, or has NaN or infinities.",
    )
    parser.add_argument("path", help="folder of the checkpoint")
    parser.add_argument("--index-only", action="store_true", help="does not read the data")
    parser.add_argument(
        "--errors",
        action="store_true",
        help="also how much rounding to codes may change updates; takes about 15 s per 100 million elements",
    )
    parser.add_argument("--json", action="store_true", help="prints JSON instead of tables")
    parser.add_argument(
        "--plot", metavar="FILE", help="histograms of codes and errors; needs pip install 'shardopt[plot]'"
    )
    parser.set_defaults(run=lambda args: _run(parser, args))


def _run(parser: argparse.ArgumentParser, args: argparse.Namespace) -> int:
    errors = args.errors or args.plot is not None
    if errors and args.index_only:
        parser.error(f"got {'--errors' if args.errors else '--plot'} and --index-only, expected one; leave one out")
    try:
        with _progress() as progress:
            summary = summarize(args.path, values=not args.index_only, errors=errors, progress=progress)
        if args.plot:
            _plot(summary, args.plot)
    except CheckpointError as error:
        print(error, file=sys.stderr)
        return 1
    except (OSError, ModuleNotFoundError) as error:
        parser.error(str(error))
    if not args.errors:  # asked for a plot, whose histograms of codes need no errors
        for line in summary.undecoded:
            print(line, file=sys.stderr)
        summary.undecoded.clear()
    problems = list(summary.problems())
    print(json.dumps(_values(summary, problems), indent=2) if args.json else _text(summary, problems, errors=errors))
    return 1 if problems else 0


@contextmanager
def _progress() -> Iterator[Callable[[int], object]]:
    """Shows how much was read, where tqdm is installed and somebody looks."""
    if find_spec("tqdm") is None or not sys.stderr.isatty():
        yield lambda _: None
        return
    from tqdm import tqdm

    with tqdm(unit="B", unit_scale=True) as bar:
        yield bar.update


def _text(summary: Summary, problems: Sequence[str], *, errors: bool) -> str:
    header, parameters = summary.header, summary.parameters
    numel, size = sum(each.numel for each in parameters), sum(summary.files.values())
    saved_by = header.get("optimizer", "no optimizer")
    lines = [
        f"{summary.path}: saved by {saved_by}; {len(parameters):,} parameters and buffers, {numel:,} elements; "
        f"data files: {len(summary.files):,}, {size / 2**20:,.1f} MiB"
    ]
    if header.get("extra"):
        lines.append(f"extra: {', '.join(header['extra'])}")
    totals: Counter[str] = Counter()
    for each in parameters:
        totals.update(each.nbytes())
    kinds = [[kind, f"{nbytes:,}", f"{nbytes / max(numel, 1):.3f}"] for kind, nbytes in totals.items()]
    lines += ["", *_table(["kind", "bytes", "per element"], kinds)]
    groups = [
        [str(index), f"{len(group['parameters']):,}", *(str(group["options"].get(key)) for key in _SHOWN_OPTIONS)]
        for index, group in enumerate(header.get("param_groups", []))
    ]
    if groups:
        lines += ["", *_table(["group", "parameters", *_SHOWN_OPTIONS], groups)]
        lines.append("Loads as it is into an optimizer with these options, into others with convert=True.")
    head = ["parameter", "shape", "weights", "codec", "step", "state, bytes per element", "codes, bits used", "scales"]
    lines += ["", *_table(head, [_row(each) for each in parameters])]
    if errors:
        lines += ["", *_errors(parameters)]
    lines += ["", *(problems or ["No NaN, no infinities." if _is_read(summary) else "The data were not read."])]
    return "\n".join(lines)


def _row(parameter: Parameter) -> list[str]:
    weights, nbytes = parameter.weights, parameter.nbytes()
    state = sum(nbytes.values()) - nbytes["weights"]
    values = {key.rpartition(".")[2]: found for key, found in parameter.values.items()}
    codes = [f"{found.bits_used:.1f}" for key, found in values.items() if key.endswith("_codes")]
    scales = [f"{found.low:.1e} to {found.high:.1e}" for key, found in values.items() if key.endswith("_scales")]
    step = values.get("step")
    return [
        parameter.name,
        " x ".join(map(str, parameter.shape)) or "scalar",
        "" if weights is None else str(weights.dtype).removeprefix("torch."),
        parameter.codec,
        "" if step is None else f"{step.low:g}",
        f"{state / max(parameter.numel, 1):.3f}" if parameter.state else "",
        ", ".join(codes),
        ", ".join(scales),
    ]


def _errors(parameters: Sequence[Parameter]) -> list[str]:
    found = [(each, each.update_error) for each in parameters if each.update_error is not None]
    rows = [
        [each.name, each.codec, error.update, f"{error.median:.2%}", f"{error.most:.2%}", f"{error.at_floor:.2%}"]
        for each, error in found
    ]
    if not rows:
        return ["No errors of rounding to show: no state in codes that could be decoded, or updates of zero."]
    head = ["parameter", "codec", "update", "error of half the elements", "of 99%", "second moment at the floor"]
    return [
        *_table(head, rows),
        "Errors: the most that rounding to codes changes an update, in % of the root mean square over the parameter.",
    ]


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    padded = ([cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in (head, *rows))
    return ["  ".join(cells).rstrip() for cells in padded]


def _is_read(summary: Summary) -> bool:
    return any(each.values for each in summary.parameters)


def _values(summary: Summary, problems: Sequence[str]) -> dict[str, Any]:
    return {
        "path": str(summary.path),
        "header": json.loads(dumped(summary.header)),
        "files": summary.files,
        "parameters": [
            {
                "name": each.name,
                "shape": list(each.shape),
                "codec": each.codec,
                "bytes": each.nbytes(),
                "values": {
                    key: {"nan": found.nan, "infinite": found.infinite}
                    | ({"low": found.low, "high": found.high} if found.low <= found.high else {})
                    | ({"bits_used": found.bits_used} if key.endswith("_codes") else {})
                    for key, found in each.values.items()
                },
                "update_error": None if each.update_error is None else _error_values(each.update_error),
            }
            for each in summary.parameters
        ],
        "problems": list(problems),
    }


def _error_values(error: UpdateError) -> dict[str, Any]:
    return {"update": error.update, "median": error.median, "most": error.most, "at_floor": error.at_floor}


def _plot(summary: Summary, path: str) -> None:
    """Draws how often each code occurs, a panel per entry and codec, and the errors of updates, a line per codec."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    panels = _code_counts(summary)
    errors = _error_counts(summary)
    if not panels and not errors:
        raise CheckpointError(f"{summary.path}: got no state in codes to plot, expected some; leave out --plot")
    count = len(panels) + bool(errors)
    figure, axes = pyplot.subplots(count, squeeze=False, figsize=(8, 2.6 * count), layout="constrained")
    for axis, ((entry, codec), counts) in zip(axes[:, 0], panels.items(), strict=False):
        order = _order(entry, codec)
        axis.bar(range(256), (counts[order] / counts.sum()).tolist(), width=1.0)
        by_value = "" if order.tolist() == list(range(256)) else ", from the least value to the largest"
        axis.set(title=f"{entry}, {codec}", xlabel=f"code{by_value}", ylabel="share", xlim=(-1, 256))
    if errors:
        _draw_errors(axes[-1, 0], errors)
    figure.savefig(path)
    pyplot.close(figure)


def _code_counts(summary: Summary) -> dict[tuple[str, str], Tensor]:
    """How often each code of 8 bits occurs, by entry and codec."""
    found: dict[tuple[str, str], Tensor] = {}
    for each in summary.parameters:
        for key, values in each.values.items():
            entry = key.rpartition(".")[2]
            if entry.endswith("_codes") and each.state[entry].shape == each.shape:
                found[entry, each.codec] = values.counts + found.get((entry, each.codec), 0)
    return found


def _order(entry: str, codec: str) -> Tensor:
    """The 256 codes of an entry, from the one of the least value to the one of the largest."""
    codes = torch.arange(256, device="cpu")
    own = CODECS.get(codec_name(codec) or codec)
    if own is None or own.shared or entry.removesuffix("_codes") in UNSIGNED:
        return codes
    return own.decode(codes.to(torch.uint8), torch.ones(1, device="cpu"), signed=True).argsort(stable=True)


def _error_counts(summary: Summary) -> dict[str, tuple[Tensor, int]]:
    """Histogram of the errors of updates, and the number of elements without error, by codec."""
    found: dict[str, tuple[Tensor, int]] = {}
    for each in summary.parameters:
        if each.update_error is not None:
            histogram, exact = found.get(each.codec, (torch.zeros(BINS, dtype=torch.int64, device="cpu"), 0))
            found[each.codec] = histogram + each.update_error.histogram, exact + each.update_error.exact
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
