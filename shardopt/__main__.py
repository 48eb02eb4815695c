"""The console command ``shardopt``, also ``python -m shardopt``."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from shardopt import doctor, program
from shardopt.checkpoint import inspect_command
from shardopt.estimate import cli
from shardopt.removed import explained


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command.

    Args:
        arguments: those of the command line, by default the process's.

    Returns:
        The exit status; 141, as a shell reports SIGPIPE, where standard output was closed early, as by `head`.
    """
    parser = argparse.ArgumentParser(prog="shardopt", description="8-bit optimizers for sharded training.")
    commands = parser.add_subparsers(required=True, metavar="command")
    for command in (cli, inspect_command, doctor, program):
        command.add_parser(commands)
    given = sys.argv[1:] if arguments is None else arguments
    if removed := explained(given[:1]):
        parser.error(f"got {given[0]}, expected a command{removed}")
    args = parser.parse_args(arguments)
    try:
        status: int = args.run(args)
        sys.stdout.flush()
    except BrokenPipeError:
        if args.run is program.run_program:
            raise  # the program's own
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush when Python ends
        return 141
    return status


if __name__ == "__main__":
    sys.exit(main())
