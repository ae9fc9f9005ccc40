"""The command ``distman``, which is also ``python -m distman``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from distman.cli import check, env, launch

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command with these arguments, and return its exit code.

    Local or collective, as the subcommand.

    Args:
        argv: Arguments without the program's name; None takes those of the process.
    """
    parser = argparse.ArgumentParser(prog="distman", description="Start PyTorch jobs under any launcher.")
    subparsers = parser.add_subparsers(required=True, metavar="COMMAND")
    env.add_parser(subparsers)
    check.add_parser(subparsers)
    launch.add_parser(subparsers)
    arguments = parser.parse_args(argv)
    code: int = arguments.run(arguments)
    return code
