"""The command ``shardopt estimate``: prints a table of estimated memory, a row per way of training the model."""

from __future__ import annotations

import argparse
from collections.abc import Collection, Mapping
from typing import Any

from shardopt.codec import CODECS
from shardopt.estimate.ledger import BACKENDS, DTYPES, OPTIMIZERS, ZERO_OFFLOADS, Setup, estimate
from shardopt.estimate.model import Model

_DESCRIPTION = """\
Memory of the weights, gradients and optimizer state of a model, per parameter, GPU and host: AdamW on one GPU, from
float32 to 8-bit state with all that saves memory, and a row for options. Needs neither a GPU nor a process group."""

_SHORT_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
#: Arguments that become the row's optimizer options, and those that become its fields of :class:`Setup`.
_OPTIONS = ("codec", "block_size", "master_weight_bits", "offload")
_SETUP = ("optimizer", "dtype", "backend", "world_size", "gpus_per_node", "release_gradients", "zero_offload")
#: Columns of the table: fields of :class:`shardopt.report.MemoryUse`, with their headings.
_COLUMNS = {
    "parameters": "weights",
    "gradients": "gradients",
    "state": "state",
    "scales": "scales",
    "master_weights": "master weights",
    "offload_buffers": "offload buffers",
}


def default_rows() -> dict[str, Setup]:
    """The table's default rows: AdamW on one GPU, from float32 state to all of shardopt's memory savings."""
    masters = {"master_weight_bits": 24}
    return {
        "fp32 throughout": Setup("adamw", "float32"),
        "8-bit state, fp32 weights": Setup(dtype="float32"),
        "bf16 weights, 24-bit masters": Setup(options=masters),
        "  + release_gradients": Setup(release_gradients=True, options=masters),
        "  + offload='state'": Setup(release_gradients=True, options={**masters, "offload": "state"}),
    }


def table(model: Model, rows: Mapping[str, Setup]) -> str:
    """Estimates each row's memory, and formats the table as text, with notes on what the numbers include."""
    cells = [["", *_COLUMNS.values(), "total", "GiB per GPU", "GiB per host"]]
    for name, setup in rows.items():
        report = estimate(model, setup)
        nbytes = [*(getattr(report.device, kind) for kind in _COLUMNS), report.device.total]
        digits = 2 if report.device.total >= model.numel else 4  # less than 1 byte per parameter, as on many ranks
        gib = (report.device.total / 2**30, min(setup.gpus_per_node, setup.world_size) * report.host.total / 2**30)
        cells.append([name, *(f"{n / model.numel:.{digits}f}" for n in nbytes), *(f"{x:.2f}" for x in gib)])
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [f"{model.name}: {model.numel:,} parameters"]
    for name, *others in cells:
        lines.append("  ".join([name.ljust(widths[0]), *map(str.rjust, others, widths[1:])]).rstrip())
    return "\n".join([*lines, "", *_notes(model, rows.values())])


def _notes(model: Model, setups: Collection[Setup]) -> list[str]:
    """Lines to print below the table: what its numbers include, and what the back ends in it need in addition."""
    used = {setup.backend for setup in setups}
    notes = [
        "Bytes per parameter of the whole model, on the GPU that holds most; what is offloaded is in GiB per host.",
        "Not counted: activations, the framework's other buffers, padding, the allocator's slack.",
        model.note,
        "Released gradients: the largest single parameter's is counted, or the largest layer's with fsdp2.",
    ]
    if "ddp" in used:
        notes.append("DDP: without gradient_as_bucket_view=True gradients take twice as much.")
    if used & {"fsdp1", "fsdp2"}:
        notes.append("FSDP: the unsharded weights and gradients of the layers at work come on top.")
    if any(setup.zero_stage for setup in setups):
        notes.append(
            "DeepSpeed: while the optimizer steps. Masters are float32, or with master_weight_bits in the state "
            "(bf16_master_weights_and_grads). Its buckets (reduce_bucket_size: 1 GB by default in bf16), gathered "
            "weights and, with zero_offload, two copies of the largest gradient come on top."
        )
    return [note for note in notes if note]


def add_parser(commands: Any) -> None:
    """Adds the subcommand ``estimate`` to the result of ``argparse.ArgumentParser.add_subparsers``."""
    parser = commands.add_parser(
        "estimate",
        help="bytes per parameter and GiB per GPU and host",
        description=_DESCRIPTION,
        usage="%(prog)s (SIZE | --config FILE) [options]; --help lists them",
    )
    parser.add_argument("size", nargs="?", help="number of parameters: 125M, 7B, 1.3e9")
    parser.add_argument("--config", metavar="FILE", help="Hugging Face config.json; needs transformers")
    asked = parser.add_argument_group("a row to add (any of these options adds it)", argument_default=argparse.SUPPRESS)
    add = asked.add_argument
    add("--optimizer", choices=OPTIMIZERS, help="sgd is with momentum (default: adamw8bit)")
    add("--dtype", choices=DTYPES, type=lambda x: _SHORT_DTYPES.get(x, x), help="or bf16 (default), fp16, fp32")
    add("--backend", help=f"how the model is sharded: {', '.join(BACKENDS)} (default: single)")
    add("--world-size", type=int, metavar="N", help="GPUs (default: 1)")
    add("--gpus-per-node", type=int, metavar="N", help="of them on one host, at most (default: 8)")
    add("--codec", choices=CODECS, help="of the moments (default: that of the optimizer)")
    add("--block-size", type=int, metavar="N", help="elements that share a scale (default: 128)")
    add("--master-weight-bits", type=int, choices=(24, 32), help="(default: no master weights)")
    add("--release-gradients", action="store_true", help="steps in the backward pass")
    add("--offload", choices=("state", "step"), help="to the host's memory (default: none)")
    add("--zero-offload", choices=ZERO_OFFLOADS, help="DeepSpeed's own; all: weights, too (default: none)")
    parser.set_defaults(run=lambda args: _run(parser, args))


def _run(parser: argparse.ArgumentParser, args: argparse.Namespace) -> int:
    """Prints the table for the parsed arguments; exits with the parser's error if they are wrong."""
    if (args.size is None) == (args.config is None):
        parser.error("got neither or both of a size and --config, expected one, such as: shardopt estimate 7B")
    try:
        model = Model.of_size(args.size) if args.config is None else Model.of_config(args.config)
        rows = default_rows()
        fields = {name: getattr(args, name) for name in _SETUP if name in args}
        options = {name: getattr(args, name) for name in _OPTIONS if name in args}
        if fields or options:
            setup = Setup(**fields, options=options)
            rows[_row_name(setup, {**fields, **options})] = setup
    except (ValueError, OSError, ModuleNotFoundError) as error:
        parser.error(str(error))
    print(table(model, rows))
    return 0


def _row_name(setup: Setup, given: Mapping[str, Any]) -> str:
    """Names the row of the options that the user gave: ``adamw8bit bfloat16 fsdp2 x 8 offload=state``."""
    words = [setup.optimizer, setup.dtype, setup.backend, *([f"x {setup.world_size}"] if setup.world_size > 1 else [])]
    others = {key: x for key, x in given.items() if key not in ("optimizer", "dtype", "backend", "world_size")}
    return " ".join([*words, *(key if x is True else f"{key}={x}" for key, x in others.items())])
