"""The command ``distman``, which is also ``python -m distman``."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence

from distman.cli import bench, check, env, launch, plan

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command with these arguments, and return its exit code.

    Local or collective, as the subcommand. Ctrl-C and a reader that goes away end it without further words.

    Args:
        argv: Arguments without the program's name; None takes those of the process.
    """
    parser = argparse.ArgumentParser(prog="distman", description="Start PyTorch jobs under any launcher.")
    subparsers = parser.add_subparsers(required=True, metavar="COMMAND")
    env.add_parser(subparsers)
    check.add_parser(subparsers)
    bench.add_parser(subparsers)
    plan.add_parser(subparsers)
    launch.add_parser(subparsers)
    arguments = parser.parse_args(argv)
    try:
        code: int = arguments.run(arguments)
        sys.stdout.flush()
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BrokenPipeError:  # whoever reads, such as head, has what it wants
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    return code
