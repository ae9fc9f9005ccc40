"""The command ``distman``, which is also ``python -m distman``."""

from __future__ import annotations

import argparse
import difflib
import os
import signal
import sys
from collections.abc import Sequence
from typing import Any

from distman._cli import env, run
from distman._cli.bench import command as bench
from distman._cli.check import command as check
from distman._cli.launch import command as launch
from distman._cli.plan import command as plan
from distman._version import VERSION

_DESCRIPTION = "Start a job of many processes, look at it before it runs, and write its job script."


class _Parser(argparse.ArgumentParser):
    """A parser whose subparsers, which are of its class, refuse what they do not know by themselves."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, allow_abbrev=False, **kwargs)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Parse; what is left over is an error with the usage of this very command."""
        arguments, unknown = super().parse_known_args(args, namespace)
        if unknown:
            close = difflib.get_close_matches(unknown[0].partition("=")[0], self._option_string_actions, n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            self.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
        return arguments, unknown


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command with these arguments, and return its exit code.

    Local or collective, as the subcommand. Ctrl-C and a reader that goes away end it without further words.

    Args:
        argv: Arguments without the program's name; None takes those of the process.
    """
    parser: argparse.ArgumentParser = _Parser(prog="distman", description=_DESCRIPTION)
    parser.add_argument("--version", action="version", version=f"%(prog)s {VERSION}")
    subparsers = parser.add_subparsers(required=True, metavar="COMMAND")
    run.add_parser(subparsers)
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
