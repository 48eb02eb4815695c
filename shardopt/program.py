"""The command ``shardopt run``: runs an unchanged Python program with its optimizer classes replaced by shardopt's."""

from __future__ import annotations

import argparse
import importlib
import os
import runpy
import shutil
import sys
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from shardopt import optim
from shardopt.optim import ShardedOptimizer
from shardopt.sharding.deepspeed.hooks import TYPES

#: A parsed ``--replace``: a module's name, the name of a class in it, and shardopt's class to put in its place.
Replacement = tuple[str, str, type[ShardedOptimizer]]


def add_parser(commands: Any) -> None:
    """Adds the subcommand ``run`` to the result of ``argparse.ArgumentParser.add_subparsers``."""
    parser = commands.add_parser(
        "run",
        help="a Python program, after import shardopt, with its optimizers in others' places",
        description="Runs a Python program after import shardopt. Under torchrun: torchrun ... -m shardopt run ...",
    )
    parser.add_argument(
        "--replace",
        action="append",
        default=[],
        type=_parse_replacement,
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
    """Replaces classes as ``--replace`` says, runs the program as ``__main__``, and names unused ones. Returns 0."""
    program, *arguments = args.program[1:] if args.program[0] == "--" else args.program
    path = program if args.module or os.path.exists(program) else shutil.which(program)
    if path is None:
        raise SystemExit(f"shardopt run: got {program}, expected a file or a command on PATH; -m runs a module")
    sys.argv = [program, *arguments]
    sys.path.insert(0, os.getcwd() if args.module else os.path.dirname(os.path.realpath(path)))
    for replacement in args.replace:
        _replace_class(*replacement)
    stepped: set[type] = set()
    counting = register_optimizer_step_pre_hook(lambda optimizer, *_: stepped.add(type(optimizer)))
    try:
        if args.module:
            runpy.run_module(program, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(path, run_name="__main__")
    finally:
        counting.remove()
        for module, name, kind in args.replace:
            if stepped and not any(issubclass(each, kind) for each in stepped):
                found = ", ".join(sorted(f"{each.__module__}.{each.__name__}" for each in stepped))
                text = f"--replace {module}.{name}={kind.__name__} replaced nothing: the program stepped {found}"
                print(f"shardopt run: {text}; name the class that it uses, with its package", file=sys.stderr)
    return 0


def _parse_replacement(text: str) -> Replacement:
    """Parses the argument of ``--replace``: ``AdamW=AdamW8bit`` or ``package.module.Class=AdamW8bit``."""
    old, _, new = text.partition("=")
    kind = getattr(optim, new, None) if new in optim.__all__ else None
    if kind is None or kind is ShardedOptimizer:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected an optimizer of shardopt after =, as AdamW=AdamW8bit")
    module, _, name = old.rpartition(".")
    return module or "torch.optim", name, kind


def _replace_class(module: str, name: str, kind: type[ShardedOptimizer]) -> None:
    """Imports a module and sets one of its classes to an optimizer of shardopt.

    A class of torch.optim is also replaced in the module that defines it, and as DeepSpeed's type of that name.
    """
    try:
        old = getattr(importlib.import_module(module), name)
    except (ModuleNotFoundError, AttributeError) as error:
        raise SystemExit(f"--replace: got {module}.{name}, expected a class that exists: {error}") from None
    if module == "torch.optim":
        if not (isinstance(old, type) and issubclass(old, Optimizer)) or old is Optimizer:
            raise SystemExit(f"--replace: got {name}, expected an optimizer of torch.optim, or package.module.Class")
        setattr(sys.modules[old.__module__], name, kind)
        TYPES[name.lower()] = kind
    setattr(sys.modules[module], name, kind)
