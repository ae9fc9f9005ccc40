"""The command ``distman``, which is also ``python -m distman``."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from distman._cli.parser import make_parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command, and return its exit code. Ctrl-C and a reader that goes away end it without further words."""
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
