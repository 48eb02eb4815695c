"""The command ``shardopt convert``: a checkpoint in another codec or format, without the model."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

from shardopt.checkpoint.convert import FORMATS, convert
from shardopt.checkpoint.errors import CheckpointError
from shardopt.checkpoint.wording import first_of
from shardopt.codec import CODECS

_SECONDS = 10  # from one line of progress to the next
_DESCRIPTION = """\
Converts a checkpoint to another codec, block size or format, without the model, in pieces: memory does not grow with
the checkpoint. Recognizes the format of SOURCE by its files. TARGET must not exist."""


def add_parser(commands: Any) -> None:
    """Adds the command to what ``argparse.ArgumentParser.add_subparsers`` made."""
    parser = commands.add_parser("convert", help="a checkpoint in another codec or format", description=_DESCRIPTION)
    parser.add_argument("source", help="checkpoint to read: a folder, a file, or a URL of a portable checkpoint")
    parser.add_argument("target", help="checkpoint to write")
    parser.add_argument("--to", choices=FORMATS, default="portable", help="format of TARGET (default: portable)")
    parser.add_argument("--codec", choices=CODECS, help="of the moments (default: as they are)")
    parser.add_argument("--block-size", type=int, metavar="N", help="elements that share a scale (default: as it is)")
    parser.add_argument("--optimizer", metavar="CLASS", help="such as AdamW, where SOURCE does not name it")
    parser.add_argument("--quiet", action="store_true", help="prints errors only")
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    try:
        with _progress(args.quiet) as progress:
            converted = convert(
                args.source,
                args.target,
                args.to,
                codec=args.codec,
                block_size=args.block_size,
                optimizer=args.optimizer,
                progress=progress,
            )
    except (CheckpointError, OSError, ModuleNotFoundError) as error:
        print(error, file=sys.stderr)
        return 1
    if not args.quiet:
        print(f"{args.source} ({converted.source}) -> {args.target} ({args.to})")
        kinds = list(dict.fromkeys(converted.states.values()))
        print(f"states encoded anew: {len(converted.states):,}" + (f" ({first_of(kinds)})" if kinds else ""))
        for what in converted.left_out:
            print(f"left out: {what}")
    return 0


@contextmanager
def _progress(quiet: bool) -> Iterator[Callable[[int, int], object]]:
    """Shows how much was written: a bar where tqdm is installed, else a line every ten seconds."""
    if quiet:
        yield lambda done, total: None
        return
    if find_spec("tqdm") is None:
        last = time.monotonic()

        def show(done: int, total: int) -> None:
            nonlocal last
            if time.monotonic() - last >= _SECONDS:
                last = time.monotonic()
                print(f"{done / 2**20:,.0f} of {total / 2**20:,.0f} MiB", file=sys.stderr, flush=True)

        yield show
        return
    from tqdm import tqdm

    with tqdm(unit="B", unit_scale=True, file=sys.stderr) as bar:

        def update(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        yield update
