"""The command ``distman``, which is also ``python -m distman``."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from distman._cli.parser import make_parser
from distman.environments import DISTMAN_RUN


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command, and return its exit code. Ctrl-C and a reader that goes away end it without further words."""
    with ExitStack() as stack:
        for name in ("stdout", "stderr"):
            if getattr(sys, name) is None:  # closed by the shell, as in `distman env >&-`
                setattr(sys, name, stack.enter_context(Path(os.devnull).open("w", encoding="utf-8")))
        return _run(sys.argv[1:] if argv is None else argv)


def _run(argv: Sequence[str]) -> int:
    arguments = make_parser().parse_args(argv or ["help"])
    ranks: str | None = getattr(arguments, "own_ranks", None)
    is_one = all(name in os.environ for names in DISTMAN_RUN.marks for name in names)
    if ranks is not None and not is_one:
        arguments = make_parser().parse_args(["run", "-n", ranks, "--bare", "-m", "distman", *argv])
    try:
        code: int = arguments.run(arguments)
        sys.stdout.flush()
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BrokenPipeError:  # the reader, such as head, has what it wants
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    return code
