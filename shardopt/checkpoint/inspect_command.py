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

from shardopt.checkpoint.errors import CheckpointError
from shardopt.checkpoint.summary import Parameter, Summary, summarize
from shardopt.checkpoint.update_error import UpdateError
from shardopt.state.options import STATE_FORMAT

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
        help="also how much the rounding of codes may change the next update; takes SECONDS",
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
    scales = [found for key, found in values.items() if key.endswith("_scales")]
    step = values.get("step")
    return [
        parameter.name,
        " x ".join(map(str, parameter.shape)) or "scalar",
        "" if weights is None else str(weights.dtype).removeprefix("torch."),
        parameter.codec,
        "" if step is None else f"{step.low:g}",
        f"{state / max(parameter.numel, 1):.3f}" if parameter.state else "",
        ", ".join(codes),
        f"{min(each.low for each in scales):.1e} to {max(each.high for each in scales):.1e}" if scales else "",
    ]


def _errors(parameters: Sequence[Parameter]) -> list[str]:
    found = [(each, each.update_error) for each in parameters if each.update_error is not None]
    rows = [
        [each.name, each.codec, error.update, f"{error.median:.2%}", f"{error.most:.2%}", f"{error.at_floor:.2%}"]
        for each, error in found
    ]
    if not rows:
        return ["No state in codes, or updates of zero: no errors of rounding."]
    head = ["parameter", "codec", "update", "error of half the elements", "of 99%", "second moment at the floor"]
    return [
        *_table(head, rows),
        "Errors: the most that half a step of the codes changes an update, in % of its root mean square.",
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
        "header": summary.header,
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
    """Draws how often each code occurs, over all parameters, a panel per entry and codec."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    panels: dict[str, Any] = {}
    for each in summary.parameters:
        for key, found in each.values.items():
            if key.endswith("_codes") and each.state[key.rpartition(".")[2]].shape == each.shape:
                title = f"{key.rpartition('.')[2]}, {each.codec}"
                panels[title] = found.counts if title not in panels else panels[title] + found.counts
    figure, axes = pyplot.subplots(max(len(panels), 1), squeeze=False, figsize=(8, 2.4 * max(len(panels), 1)))
    for axis, (title, counts) in zip(axes[:, 0], panels.items(), strict=False):
        axis.bar(range(256), (counts / counts.sum()).tolist(), width=1.0)
        axis.set(title=title, xlabel="code", ylabel="share")
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)
