"""``distman completion``: the script by which a shell completes this command, which ``shtab`` makes from its parser."""

from __future__ import annotations

import argparse
import sys

from distman._cli.parser import commands, make_parser

_SHELLS = ("bash", "zsh", "fish")
_PATHS = ("FILE", "DIR")  # what stands for a path in help texts: such values are completed as files


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "distman completion SHELL"
    parser.description = (
        "Print the script by which a shell completes this command, its options and their values. For this shell only: "
        'eval "$(distman completion bash)", the same with zsh, or distman completion fish | source.'
    )
    parser.add_argument("shell", choices=_SHELLS, metavar="SHELL", help=", ".join(_SHELLS))
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    try:
        import shtab
    except ImportError:
        print("distman completion: shtab must be installed. Run pip install shtab.", file=sys.stderr)
        return 1
    parser = make_parser()
    for _, _, command in commands(parser):
        for action in command._actions:
            if action.nargs == argparse.REMAINDER:
                action.help = "script"  # shtab passes over what the help passes over
            if action.metavar in _PATHS or action.nargs == argparse.REMAINDER:
                action.complete = shtab.FILE  # type: ignore[attr-defined] # where shtab looks for it
    print(shtab.complete(parser, arguments.shell))
    return 0
