"""The command ``distman``, which is also ``python -m distman``."""

from __future__ import annotations

import argparse
import difflib
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
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
        super().__init__(*args, **(kwargs | {"allow_abbrev": False}))

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Parse; what is left over is an error with the usage of this very command."""
        arguments, unknown = super().parse_known_args(args, namespace)
        if unknown:
            close = difflib.get_close_matches(unknown[0].partition("=")[0], self._option_string_actions, n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            self.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
        return arguments, unknown

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Refuse a value that is none of an option's choices, and name the one that was meant."""
        if action.choices is None or value in action.choices:
            return
        close = difflib.get_close_matches(str(value), action.choices, n=1)
        meant = f"did you mean {close[0]}?" if close else f"choose from {', '.join(action.choices)}"
        raise argparse.ArgumentError(action, f"there is no {value!r}; {meant}")


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command."""
    parser = _Parser(prog="distman", description=_DESCRIPTION, epilog="`distman help COMMAND` says more.")
    parser.add_argument("-V", "--version", action="version", version=f"%(prog)s {VERSION}")
    subparsers = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in (run, env, check, bench, plan, launch):
        command.add_parser(subparsers)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command with these arguments, and return its exit code.

    Local or collective, as the subcommand. Ctrl-C and a reader that goes away end it without further words.

    Args:
        argv: Arguments without the program's name; None takes those of the process.
    """
    with ExitStack() as stack:
        for name in ("stdout", "stderr"):
            if getattr(sys, name) is None:  # closed by the shell, as in `distman env >&-`
                setattr(sys, name, stack.enter_context(Path(os.devnull).open("w", encoding="utf-8")))
        return _run(sys.argv[1:] if argv is None else argv)


def _run(argv: Sequence[str]) -> int:
    parser = make_parser()
    if not argv or list(argv) == ["help"]:
        parser.print_help()
        return 0
    arguments = parser.parse_args([*argv[1:], "--help"] if argv[0] == "help" else argv)
    try:
        code: int = arguments.run(arguments)
        sys.stdout.flush()
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BrokenPipeError:  # whoever reads, such as head, has what it wants
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    return code
