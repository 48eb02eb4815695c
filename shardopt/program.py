"""The command ``shardopt run``: a program in which shardopt's classes stand in others' places."""

from __future__ import annotations

import argparse
import os
import runpy
import shutil
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch.optim import Optimizer

from shardopt import optim
from shardopt.optim import ShardedOptimizer
from shardopt.sharding.deepspeed.hooks import TYPES
from shardopt.sharding.hooks import after_import


def add_parser(commands: Any) -> None:
    """Adds the command to the result of ``argparse.ArgumentParser.add_subparsers``."""
    parser = commands.add_parser(
        "run",
        help="a Python program, after import shardopt, with its optimizers in others' places",
        description="Runs a Python program as python does, after import shardopt. Under torchrun: "
        "torchrun ... -m shardopt run ...",
    )
    parser.add_argument(
        "--replace",
        action="append",
        default=[],
        type=_replacement,
        metavar="AdamW=AdamW8bit",
        help="put an optimizer of shardopt in the place of a class of torch.optim, and of DeepSpeed's type of that "
        "name, or of package.module.Class; may be given several times",
    )
    parser.add_argument("-m", "--module", action="store_true", help="the program is a module, as in python -m")
    parser.add_argument(
        "program",
        nargs=argparse.PARSER,  # one argument takes all: argparse would drop a "--" between two
        help="a file, a command on PATH that is a Python script, or with -m a module, and the program's own arguments",
    )
    parser.set_defaults(run=run_program)


def run_program(args: argparse.Namespace) -> int:
    """Replaces classes and runs the program as ``__main__``. Returns 0 unless the program exits by itself."""
    pending: set[str] = set()
    for replace in args.replace:
        replace(pending)
    try:
        return _run(args)
    finally:
        for name in sorted(pending):
            print(f"shardopt run: got no import of {name}, so that --replace has replaced nothing", file=sys.stderr)


def _run(args: argparse.Namespace) -> int:
    program, *arguments = args.program[1:] if args.program[0] == "--" else args.program
    sys.argv = [program, *arguments]
    if args.module:
        sys.path.insert(0, os.getcwd())
        runpy.run_module(program, run_name="__main__", alter_sys=True)
        return 0
    path = program if os.path.exists(program) else shutil.which(program)
    if path is None:
        raise SystemExit(f"shardopt run: got {program}, expected a file or a command on PATH; -m runs a module")
    sys.path.insert(0, os.path.dirname(os.path.realpath(path)))
    runpy.run_path(path, run_name="__main__")
    return 0


def _replacement(text: str) -> Callable[[set[str]], None]:
    """Reads ``AdamW=AdamW8bit`` or ``package.module.Class=AdamW8bit``.

    The function that is returned adds the name of a class to a set until the class's module is imported.

    Raises:
        argparse.ArgumentTypeError: one of the two is no optimizer.
    """
    old, _, new = text.partition("=")
    kind = getattr(optim, new, None) if new in optim.__all__ else None
    if kind is None or kind is ShardedOptimizer:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected an optimizer of shardopt after =, as AdamW=AdamW8bit")
    module, _, name = old.rpartition(".")
    if module not in ("", "torch.optim"):

        def replace_later(pending: set[str]) -> None:
            def put(imported: ModuleType) -> None:
                _put(imported, name, kind)
                pending.discard(old)

            pending.add(old)
            after_import(module, put)

        return replace_later
    of_torch = getattr(torch.optim, name, None)
    if not (isinstance(of_torch, type) and issubclass(of_torch, Optimizer)) or of_torch is Optimizer:
        raise argparse.ArgumentTypeError(
            f"got {text!r}, expected a class of torch.optim before =, or package.module.Class"
        )

    def replace(pending: set[str]) -> None:
        for imported in (torch.optim, sys.modules[of_torch.__module__]):
            _put(imported, name, kind)
        TYPES[name.lower()] = kind

    return replace


def _put(module: ModuleType, name: str, kind: type[ShardedOptimizer]) -> None:
    if not hasattr(module, name):
        raise AttributeError(
            f"--replace: got {module.__name__}.{name}, expected a class of {module.__name__}; correct it"
        )
    setattr(module, name, kind)
