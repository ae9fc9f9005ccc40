"""The parser of the command line, which imports a command when its arguments are asked for."""

from __future__ import annotations

import argparse
import difflib
import importlib
from typing import Any

from distman._base.moved_names import new_option
from distman._version import VERSION

_MAX_DIGITS = 18

DESCRIPTION = "Start a job of many processes, look at it before it runs, and write its job script."

_COMMANDS = {
    "run": ("distman._cli.run.command", "start the ranks of a job on this machine"),
    "keep": ("distman._cli.keep.command", "start a job, and again when it fails, without the host that made it fail"),
    "env": ("distman._cli.env", "show what was detected, from which variables, and why, and what will go wrong"),
    "check": (
        "distman._cli.check.command",
        "start the job under any launcher; check collectives, network and folders",
    ),
    "bench": ("distman._cli.bench", "measure collectives over message sizes"),
    "plan": ("distman._cli.plan", "draw the groups or the mesh of a job of any size, without its processes"),
    "launch": ("distman._cli.launch.command", "write the job script for Slurm, PBS, LSF, Flux, an MPI or torchrun"),
}


def add_number(parser: argparse.ArgumentParser, name: str, *, least: int, metavar: str = "N", **options: Any) -> None:
    """Add an option that is a whole number of up to 18 digits; longer ones are typing errors."""

    def read(text: str) -> int:
        is_number = text.isascii() and text.isdigit() and len(text) <= _MAX_DIGITS
        if not is_number or int(text) < least:
            raise argparse.ArgumentTypeError(f"it must be a whole number of at least {least}, got {text[:40]!r}")
        return int(text)

    parser.add_argument(name, type=read, metavar=metavar, **options)


def add_job_options(parser: argparse.ArgumentParser, limits: str) -> None:
    """Add what commands take that are a job themselves; ``limits`` says what their time is limited to."""
    parser.add_argument("-n", "--ranks", dest="own_ranks", metavar="N", help="start N ranks on this machine")
    parser.add_argument("--method", help="believe this launcher")
    parser.add_argument(
        "--timeout", type=float, metavar="SECONDS", help=f"time to wait for all ranks, 300, and {limits}"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


class CommandParser(argparse.ArgumentParser):
    """A parser that refuses what it does not know by itself, and imports its command's module when it is needed."""

    def __init__(self, *, module: str | None = None, **kwargs: Any) -> None:
        super().__init__(**(kwargs | {"allow_abbrev": False}))
        self._module = module

    def load(self) -> None:
        module, self._module = self._module, None
        if module is not None:
            importlib.import_module(module).add_arguments(self)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Parse; what is left over is an error with the usage of this very command."""
        self.load()
        arguments, unknown = super().parse_known_args(args, namespace)
        if unknown:
            close = difflib.get_close_matches(unknown[0].partition("=")[0], self._option_string_actions, n=1)
            hint = new_option(unknown[0]) or (f"did you mean {close[0]}?" if close else "")
            self.error(f"unrecognized arguments: {' '.join(unknown)}{hint and f'; {hint}'}")
        return arguments, unknown

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Refuse a value that an option does not offer, and name the one that was meant."""
        if action.choices is None or value in action.choices:
            return
        if str(value).endswith(".py"):
            raise argparse.ArgumentError(action, f"there is no {value!r}; did you mean run {value}?")
        close = difflib.get_close_matches(str(value), action.choices, n=1)
        meant = f"did you mean {close[0]}?" if close else f"choose from {', '.join(action.choices)}"
        raise argparse.ArgumentError(action, f"there is no {value!r}; {meant}")


def make_parser() -> argparse.ArgumentParser:
    parser = CommandParser(prog="distman", description=DESCRIPTION, epilog="`distman help COMMAND` says more.")
    parser.add_argument("-V", "--version", action="version", version=f"%(prog)s {VERSION}")
    subparsers = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, (module, summary) in _COMMANDS.items():
        subparsers.add_parser(name, module=module, help=summary)
    more = subparsers.add_parser("help", help="say more of a command")
    more.add_argument("command", nargs="?", choices=[*_COMMANDS], metavar="COMMAND", help=", ".join(_COMMANDS))
    more.set_defaults(run=lambda arguments: make_parser().parse_args([*filter(None, [arguments.command]), "--help"]))
    return parser
