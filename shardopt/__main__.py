"""The console command ``shardopt``, also ``python -m shardopt``."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from shardopt import __version__, doctor, program
from shardopt.checkpoint import inspect_command
from shardopt.estimate import cli
from shardopt.removed import explain_removed


def main(arguments: Sequence[str] | None = None) -> int:
    """Parses a command line, and runs the subcommand that it names.

    Args:
        arguments: the command line without the program's name; by default ``sys.argv[1:]``.

    Returns:
        The exit status; 141 (a shell's status for SIGPIPE) if the reader of standard output, such as `head`, is gone.
    """
    parser = argparse.ArgumentParser(prog="shardopt", description="8-bit optimizers for sharded training.")
    parser.add_argument("--version", action="version", version=f"shardopt {__version__}")
    commands = parser.add_subparsers(required=True, metavar="command")
    for command in (cli, inspect_command, doctor, program):
        command.add_parser(commands)
    command_line = sys.argv[1:] if arguments is None else arguments
    if explanation := explain_removed(command_line[:1]):
        parser.error(f"got {command_line[0]}, expected a command{explanation}")
    args = parser.parse_args(arguments)
    try:
        status: int = args.run(args)
        sys.stdout.flush()
    except BrokenPipeError:
        if args.run is program.run_program:
            raise  # an error of the user's program, not of this command
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush when Python ends
        return 141
    return status


if __name__ == "__main__":
    sys.exit(main())
