"""The command ``shardopt inspect``: prints sizes and codecs of a checkpoint and verifies its data, without a model."""

from __future__ import annotations

import argparse
import math
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from shardopt.checkpoint.errors import CheckpointError
from shardopt.checkpoint.index import Index, StoredTensor, load_index
from shardopt.checkpoint.items import Chunks
from shardopt.checkpoint.reading import read_tensors
from shardopt.checkpoint.storage import Folder, folder_at
from shardopt.state.options import STATE_FORMAT
from shardopt.state.slice_spec import LOW_BITS

_SHOWN_OPTIONS = ("lr", *STATE_FORMAT)
_KINDS = ("weights", "codes", "scales", "moments", "master low bits")


def add_parser(commands: Any) -> None:
    """Adds the command to ``commands``, the result of ``argparse.ArgumentParser.add_subparsers``."""
    parser = commands.add_parser(
        "inspect",
        help="what a portable checkpoint holds",
        description="Sizes and codecs of a portable checkpoint. Reads and verifies all data; the exit status is 1 if "
        "it is damaged.",
    )
    parser.add_argument("path", help="folder of the checkpoint")
    parser.add_argument("--index-only", action="store_true", help="does not read the data")
    parser.set_defaults(run=lambda args: _run(parser, args))


def _run(parser: argparse.ArgumentParser, args: argparse.Namespace) -> int:
    """Runs the command: prints the summary, then the damage if there is any, and returns the exit status."""
    try:
        folder = folder_at(args.path)
        index = load_index(folder)
        print(_summary(folder, index))
        if not args.index_only:  # chunk by chunk: memory does not grow with the checkpoint
            empty = (torch.empty(x.shape, dtype=x.dtype, device="meta") for x in index.tensors.values())
            read_tensors(folder, index, dict(zip(index.tensors, map(Chunks.whole, empty), strict=True)))
    except CheckpointError as error:
        print(error, file=sys.stderr)
        return 1
    except OSError as error:
        parser.error(str(error))
    print("The data were not read." if args.index_only else "No damage: all data have their checksums.")
    return 0


def _summary(folder: Folder, index: Index) -> str:
    """The totals of a checkpoint, and tables of its kinds of bytes, param groups, and parameters and buffers."""
    header, tensors = index.header, index.tensors
    groups = header.get("param_groups", [])
    codec_of = {name: str(group["options"].get("codec")) for group in groups for name in group["parameters"]}
    names = dict.fromkeys(key.removeprefix("model.") for key in tensors if key.startswith("model.")) | codec_of
    states: dict[str, dict[str, StoredTensor]] = {name: {} for name in names}
    for key, tensor in tensors.items():
        name, _, entry = key.removeprefix("optimizer.").rpartition(".")
        if key.startswith("optimizer.") and name in states:
            states[name][entry] = tensor
    rows, totals, numel = [], Counter(dict.fromkeys(_KINDS, 0)), 0
    for name, state in states.items():
        weights = tensors.get(f"model.{name}")
        shape, nbytes = _shape(weights, state), _bytes_by_kind(weights, state)
        totals.update(nbytes)
        numel += math.prod(shape)
        state_bytes = f"{(nbytes.total() - nbytes['weights']) / max(math.prod(shape), 1):.3f}" if state else ""
        formats = _formats(weights, state, codec_of.get(name))
        rows.append([name, " x ".join(map(str, shape)) or "scalar", *formats, state_bytes])
    size = sum(each.data + each.table for each in index.files if each is not None)
    options = [
        [str(number), f"{len(group['parameters']):,}", *(str(group["options"].get(key)) for key in _SHOWN_OPTIONS)]
        for number, group in enumerate(groups)
    ]
    kinds = [[kind, f"{totals[kind]:,}", f"{totals[kind] / max(numel, 1):.3f}"] for kind in _KINDS]
    lines = [
        f"{folder}: saved by {header.get('optimizer', 'no optimizer')}; {len(states):,} parameters and buffers, "
        f"{numel:,} elements; data files: {sum(each is not None for each in index.files):,}, {size / 2**20:,.1f} MiB",
        *([f"extra: {', '.join(header['extra'])}"] if header.get("extra") else []),
        "",
        *_table(["kind", "bytes", "per element"], kinds),
        *(["", *_table(["group", "parameters", *_SHOWN_OPTIONS], options)] if options else []),
        "",
        *_table(["parameter", "shape", "weights", "codec", "state, bytes per element"], rows),
        "",
    ]
    return "\n".join(lines)


def _shape(weights: StoredTensor | None, state: Mapping[str, StoredTensor]) -> tuple[int, ...]:
    """The parameter's shape: that of its weights, or without them that of its first state entry of values or codes."""
    whole = (entry.shape for key, entry in state.items() if key != "step" and not key.endswith("_scales"))
    return weights.shape if weights is not None else next(whole, ())


def _bytes_by_kind(weights: StoredTensor | None, state: Mapping[str, StoredTensor]) -> Counter[str]:
    """The bytes of a parameter and its state, by the names in ``_KINDS``."""
    nbytes = Counter({"weights": 0 if weights is None else weights.nbytes})
    for key, entry in state.items():
        kind = "codes" if key.endswith("_codes") else "scales" if key.endswith("_scales") else "moments"
        nbytes["master low bits" if key == LOW_BITS else kind] += entry.nbytes
    return nbytes


def _formats(weights: StoredTensor | None, state: Mapping[str, StoredTensor], codec: str | None) -> list[str]:
    """Table cells: the weights' dtype, and the state's codec ("fp32" if the parameter was too small to quantize)."""
    is_coded = codec == "bf16" or any(key.endswith("_codes") for key in state)  # bf16 has no scales, and one entry
    dtype = "" if weights is None else str(weights.dtype).removeprefix("torch.")
    return [dtype, "" if not state else str(codec) if is_coded else "fp32"]


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Formats a table as lines of text, with each column as wide as its longest cell."""
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    padded = ([cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in (head, *rows))
    return ["  ".join(cells).rstrip() for cells in padded]
