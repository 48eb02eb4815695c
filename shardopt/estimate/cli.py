"""The command ``shardopt estimate``."""

from __future__ import annotations

import argparse
import json
from dataclasses import fields
from typing import Any

from shardopt.codec import CODECS
from shardopt.estimate.backends import BACKENDS
from shardopt.estimate.config import SUPPORTED, model_of_config
from shardopt.estimate.hiding import Machine
from shardopt.estimate.ledger import DTYPES, OPTIMIZERS, Setup
from shardopt.estimate.model import Model
from shardopt.estimate.table import Row, ladder, notes, table
from shardopt.estimate.zero import ZERO_OFFLOADS

_DESCRIPTION = """\
What weights, gradients and optimizer state of a model take up: bytes per parameter, and GiB per GPU and per host.
Shows AdamW on one GPU, from float32 throughout to 8-bit state with everything else that saves memory, and what is asked
for by options. Needs neither a GPU nor a process group."""

_SHORT_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
_OPTIONS = ("codec", "block_size", "master_weight_bits", "offload", "device_state_budget")
_SETUP = (
    "optimizer",
    "dtype",
    "backend",
    "world_size",
    "gpus_per_node",
    "release_gradients",
    "overlap_forward",
    "waiting_gradients",
    "micro_batches",
    "zero_offload",
)
#: Options that say what the machine reaches, with their words of help.
_MACHINE = {
    "gpu_tflops": "10^12 FLOP/s that training reaches on a GPU (default: %(default)s, 40%% of an H100's)",
    "link_gbps": "GB/s between GPU and host, each way at once (default: %(default)s, PCIe 5)",
    "host_gbps": "GB/s of the host's memory, for all its GPUs (default: %(default)s, eight channels of DDR5)",
    "host_cores": "that step, for all its GPUs (default: %(default)s)",
    "core_ns": "in which one core steps a parameter in its cache (default: %(default)s, Sapphire Rapids)",
    "tokens": "of a micro-batch, per GPU (default: %(default)s)",
}


def add_parser(commands: Any) -> None:
    """Adds the command to what ``argparse.ArgumentParser.add_subparsers`` made."""
    parser = commands.add_parser(
        "estimate",
        help="bytes per parameter and GiB per GPU and host",
        description=_DESCRIPTION,
        usage="%(prog)s (SIZE | --config FILE) [options]; --help lists them",
    )
    parser.add_argument("size", nargs="?", help="number of parameters: 125M, 7B, 1.3e9")
    parser.add_argument("--config", metavar="FILE", help=f"Hugging Face config.json of {', '.join(SUPPORTED)}")
    parser.add_argument(
        "--stable-embedding", action="store_true", help="with --config: its token embedding is a StableEmbedding"
    )
    asked = parser.add_argument_group("a row to add (any of these options adds it)")
    add, unset = asked.add_argument, argparse.SUPPRESS
    add("--optimizer", choices=OPTIMIZERS, default=unset, help="sgd is with momentum (default: adamw8bit)")
    add(
        "--dtype",
        type=lambda text: _SHORT_DTYPES.get(text, text),
        choices=DTYPES,
        default=unset,
        help="of weights and gradients, also bf16, fp16, fp32 (default: bfloat16)",
    )
    add("--backend", default=unset, help=f"how the model is sharded: {', '.join(BACKENDS)} (default: single)")
    add("--world-size", type=int, default=unset, metavar="N", help="GPUs (default: 1)")
    add("--gpus-per-node", type=int, default=unset, metavar="N", help="of them on one host, at most (default: 8)")
    add("--codec", choices=CODECS, default=unset, help="of the moments (default: that of the optimizer)")
    add("--block-size", type=int, default=unset, metavar="N", help="elements that share a scale (default: 128)")
    add("--master-weight-bits", type=int, choices=(24, 32), default=unset, help="(default: no master weights)")
    add("--release-gradients", action="store_true", default=unset, help="steps in the backward pass")
    add("--overlap-forward", action="store_true", default=unset, help="with it: steps beside the next forward pass")
    add("--waiting-gradients", type=int, default=unset, metavar="N", help="with it and --offload step (default: 4)")
    add(
        "--micro-batches",
        type=int,
        default=unset,
        metavar="N",
        help="of a step: with --release-gradients on a GPU, otherwise of all with ordered_gradients (default: without)",
    )
    add("--offload", choices=("none", "state", "step"), default=unset, help="to the host's memory (default: none)")
    add("--device-state-budget", default=unset, metavar="BYTES", help="what stays after all, e.g. 2GiB (default: 0)")
    add(
        "--zero-offload",
        choices=ZERO_OFFLOADS,
        default=unset,
        help="DeepSpeed's own; all: weights, too (default: none)",
    )
    machine = parser.add_argument_group("the machine, to say whether --offload step hides beside the GPU's work")
    for field in fields(Machine):
        name, kind = f"--{field.name.replace('_', '-')}", type(field.default)
        machine.add_argument(name, type=kind, default=field.default, metavar="N", help=_MACHINE[field.name])
    parser.add_argument("--chart", metavar="FILE.png", help="draws stacked bars; needs pip install 'shardopt[plot]'")
    parser.add_argument("--json", action="store_true", help="prints JSON instead of the table")
    parser.set_defaults(run=lambda args: _run(parser, args))


def _run(parser: argparse.ArgumentParser, args: argparse.Namespace) -> int:
    if (args.size is None) == (args.config is None):
        got = "neither" if args.size is None else "both"
        parser.error(f"got {got} of a size and --config, expected exactly one, such as: shardopt estimate 7B")
    try:
        model = _model(args)
        rows = ladder(model)
        setup = _asked(args)
        machine = Machine(**{name: getattr(args, name) for name in _MACHINE})
        if setup is not None:
            rows.append(Row(_name(setup), model, setup, machine))
        if args.chart is not None:
            from shardopt.estimate.chart import draw

            draw(rows, args.chart)
    except (ValueError, OSError, ModuleNotFoundError) as error:
        parser.error(str(error))
    if args.json:
        values = {
            "model": model.name,
            "parameters": model.numel,
            "largest_parameter": model.largest,
            "rows": [row.values() for row in rows],
            "notes": notes(rows),
        }
        print(json.dumps(values, indent=2))
    else:
        print(table(rows))
    return 0


def _model(args: argparse.Namespace) -> Model:
    if args.config is not None:
        return model_of_config(args.config, stable_embedding=args.stable_embedding)
    if args.stable_embedding:
        raise ValueError(
            f"--stable-embedding: got it with the size {args.size}, which does not tell the embedding's, expected "
            "--config; give the model's config.json"
        )
    return Model.of_size(args.size)


def _asked(args: argparse.Namespace) -> Setup | None:
    """The setup that the options ask for; None without options."""
    given = vars(args)
    setup = {name: given[name] for name in _SETUP if name in given}
    options = {name: given[name] for name in _OPTIONS if name in given}
    if not setup and not options:
        return None
    if options.get("offload") == "none":
        options["offload"] = None
    return Setup(**setup, options=options)


def _name(setup: Setup) -> str:
    """How the table calls it."""
    options = setup.options
    bits = None if setup.dtype == "float32" else options.get("master_weight_bits")  # it has them all anyway
    weights = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}[setup.dtype] + (f"+{bits}" if bits else "")
    weights += "+fp32" if setup.stepped_dtype != DTYPES[setup.dtype] else ""
    words = [setup.optimizer, *([options["codec"]] if "codec" in options else []), weights]
    words += [f"ordered {setup.micro_batches}"] if setup.orders else []
    words += ["released"] if setup.release_gradients else []
    words += ["overlap_forward"] if setup.overlap_forward else []
    words += [f"micro_batches={setup.micro_batches}"] if setup.release_gradients and setup.micro_batches else []
    words += [f"zero_offload={setup.zero_offload}"] if setup.zero_offload != "none" else []
    words += [f"offload={options['offload']}"] if options.get("offload") else []
    return " ".join([*words, setup.backend, *([f"x {setup.world_size}"] if setup.world_size > 1 else [])])
