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
from shardopt.checkpoint.header import dumped
from shardopt.checkpoint.summary import Parameter, Summary, summarize
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
    parser.add_argument("--json", action="store_true", help="prints JSON instead of tables")
    parser.set_defaults(run=lambda args: _run(parser, args))


def _run(parser: argparse.ArgumentParser, args: argparse.Namespace) -> int:
    try:
        with _progress() as progress:
            summary = summarize(args.path, values=not args.index_only, progress=progress)
    except CheckpointError as error:
        print(error, file=sys.stderr)
        return 1
    except OSError as error:
        parser.error(str(error))
    problems = list(summary.problems())
    print(json.dumps(_values(summary, problems), indent=2) if args.json else _text(summary, problems))
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


def _text(summary: Summary, problems: Sequence[str]) -> str:
    header, parameters = summary.header, summary.parameters
    numel, size = sum(parameter.numel for parameter in parameters), sum(summary.files.values())
    saved_by = header.get("optimizer", "no optimizer")
    lines = [
        f"{summary.path}: saved by {saved_by}; {len(parameters):,} parameters and buffers, {numel:,} elements; "
        f"data files: {len(summary.files):,}, {size / 2**20:,.1f} MiB"
    ]
    if header.get("extra"):
        lines.append(f"extra: {', '.join(header['extra'])}")
    totals: Counter[str] = Counter()
    for parameter in parameters:
        totals.update(parameter.nbytes())
    kinds = [[kind, f"{nbytes:,}", f"{nbytes / max(numel, 1):.3f}"] for kind, nbytes in totals.items()]
    lines += ["", *table(["kind", "bytes", "per element"], kinds)]
    groups = [
        [str(index), f"{len(group['parameters']):,}", *(str(group["options"].get(key)) for key in _SHOWN_OPTIONS)]
        for index, group in enumerate(header.get("param_groups", []))
    ]
    if groups:
        lines += ["", *table(["group", "parameters", *_SHOWN_OPTIONS], groups)]
        lines.append("Loads as it is into an optimizer with these options, into others with convert=True.")
    head = ["parameter", "shape", "weights", "codec", "step", "state, bytes per element", "codes, bits used", "scales"]
    lines += ["", *table(head, [_row(parameter) for parameter in parameters])]
    lines += ["", *(problems or ["No NaN, no infinities." if _is_read(summary) else "The data were not read."])]
    return "\n".join(lines)


def _row(parameter: Parameter) -> list[str]:
    weights, nbytes = parameter.weights, parameter.nbytes()
    state = sum(nbytes.values()) - nbytes["weights"]
    values = {key.rpartition(".")[2]: x for key, x in parameter.values.items()}
    codes = [f"{x.bits_used:.1f}" for key, x in values.items() if key.endswith("_codes")]
    scales = [f"{x.low:.1e} to {x.high:.1e}" for key, x in values.items() if key.endswith("_scales")]
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


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table whose columns are as wide as their longest cells."""
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    padded = ([cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in (head, *rows))
    return ["  ".join(cells).rstrip() for cells in padded]


def _is_read(summary: Summary) -> bool:
    return any(parameter.values for parameter in summary.parameters)


def _values(summary: Summary, problems: Sequence[str]) -> dict[str, Any]:
    return {
        "path": str(summary.path),
        "header": json.loads(dumped(summary.header)),
        "files": summary.files,
        "parameters": [
            {
                "name": parameter.name,
                "shape": list(parameter.shape),
                "codec": parameter.codec,
                "bytes": parameter.nbytes(),
                "values": {
                    key: {"nan": found.nan, "infinite": found.infinite}
                    | ({"low": found.low, "high": found.high} if found.low <= found.high else {})
                    | ({"bits_used": found.bits_used} if key.endswith("_codes") else {})
                    for key, found in parameter.values.items()
                },
            }
            for parameter in summary.parameters
        ],
        "problems": list(problems),
    }
