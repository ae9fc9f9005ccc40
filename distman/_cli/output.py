"""What the commands print: tables with lines and colours on a terminal, plain text everywhere else; never too wide."""

from __future__ import annotations

import itertools
import os
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from distman._base.arguments import require

_MAX_NAMED = 8  # in a sentence

PICTURES = (".pdf", ".png", ".svg")
"""Endings of the pictures that commands draw."""


class UsageError(ValueError):
    """An argument is wrong: the exit code is 2."""


def check_output(path: Path, suffixes: Sequence[str]) -> None:
    """Raise now what would keep a file from being written later."""
    if path.suffix not in suffixes:
        raise UsageError(
            f"the output must end in {', '.join(suffixes)}, got {str(path)!r}. Choose one of these formats."
        )
    if path.is_dir() or not os.access(path if path.exists() else path.absolute().parent, os.W_OK):
        raise UsageError(f"the output must be a file that can be written, got {path}. Choose another place.")
    if path.suffix in PICTURES:
        require("matplotlib", str(path))


def shorten_ranks(ranks: Sequence[int], most: int | None = None) -> str:
    """Return ascending ranks as a short text, such as ``0-3`` or ``0-1, 8-9``; of many runs the first and the last.

    >>> shorten_ranks(range(0, 1024, 64), most=4)
    '0, 64, 128, ..., 960'
    """
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and runs[-1][-1] == rank - 1:
            runs[-1][1:] = [rank]
        else:
            runs.append([rank])
    shown = ["-".join(map(str, run)) for run in runs]
    if most is not None and len(shown) > most:
        shown[most - 1 : -1] = ["..."]
    return ", ".join(shown)


def shown_ranks(ranks: Sequence[int]) -> str:
    """Return ranks in words, such as ``rank 3`` or ``ranks 0, 2-5``."""
    return f"rank{'s' * (len(ranks) > 1)} {shorten_ranks(sorted(ranks))}"


def named(things: Sequence[str], separator: str = ", ") -> str:
    """Return the first eight of some names, and how many more there are."""
    more = [f"and {len(things) - _MAX_NAMED} more"] if len(things) > _MAX_NAMED else []
    return separator.join([*things[:_MAX_NAMED], *more])


def print_table(
    columns: Sequence[str], rows: Sequence[Sequence[object]], *, title: str = "", is_plain: bool = False
) -> None:
    """Print a table: drawn by ``rich`` on a terminal, where it is installed, else columns of plain text."""
    width = _width()
    is_narrow = width is not None and sum(_narrowest(columns, rows)) + 3 * len(columns) + 1 > width
    if is_plain or is_narrow or os.environ.get("NO_COLOR") or not sys.stdout.isatty() or find_spec("rich") is None:
        print("\n".join([*([title] if title else []), plain_table(columns, rows, width)]), flush=True)
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title or None, title_justify="left", header_style="bold")
    for number, column in enumerate(columns):
        numeric = bool(rows) and all(isinstance(row[number], int | float) for row in rows)
        table.add_column(column, justify="right" if numeric else "left", overflow="fold")
    for row in rows:
        table.add_row(*map(str, row))
    Console(highlight=False, markup=False).print(table)


def print_text(text: str) -> None:
    """Print lines, each folded between words where it is longer than the terminal is wide."""
    print("\n".join(_folded(line, _width()) for line in text.split("\n")), flush=True)


def plain_table(columns: Sequence[str], rows: Sequence[Sequence[object]], width: int | None = None) -> str:
    """Return a table as lines of plain text, with two spaces between the columns.

    Where it is wider than ``width``, its cells are folded between words; where that does not help, each row is a
    sentence.
    """
    cells = [list(columns), *([str(cell) for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    room = None if width is None else width - 2 * (len(columns) - 1)
    if room is not None and sum(widths) > room:
        narrowest = _narrowest(columns, rows)
        if sum(narrowest) > room:
            sentences = (", ".join(map(" ".join, zip(columns, row, strict=True))) for row in cells[1:])
            return "\n".join(_folded(sentence, width) for sentence in sentences)
        while sum(widths) > room:
            widest = max(range(len(widths)), key=lambda column: widths[column] - narrowest[column])
            widths[widest] -= 1
    folded = [
        [textwrap.wrap(cell, size, break_on_hyphens=False) for cell, size in zip(row, widths, strict=True)]
        for row in cells
    ]
    lines = (line for row in folded for line in itertools.zip_longest(*row, fillvalue=""))
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)


def _narrowest(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> list[int]:
    """Return the length of the longest word in each column."""
    words = [[word for cell in column for word in str(cell).split()] for column in zip(columns, *rows, strict=True)]
    return [max(map(len, column), default=0) for column in words]


def _width() -> int | None:
    """Return the columns of the terminal, or of ``COLUMNS``; None where there is neither."""
    return shutil.get_terminal_size((0, 0)).columns or None


def _folded(line: str, width: int | None) -> str:
    """Return a line in as many as it needs, those that follow indented by two spaces; a longer word stays whole."""
    if width is None or len(line) <= width:
        return line
    return textwrap.fill(line, width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


@contextmanager
def progress_bar(num_steps: int, *, is_shown: bool = True) -> Iterator[Callable[[str], None]]:
    """Show a bar on standard error where that is a terminal and ``rich`` is there; yield what takes a step's name."""
    if not is_shown or not sys.stderr.isatty() or find_spec("rich") is None:
        yield _ignore
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=num_steps)
        num_begun = 0

        def begin(name: str) -> None:
            nonlocal num_begun
            progress.update(task, description=name, completed=num_begun)
            num_begun += 1

        yield begin


def _ignore(_name: str) -> None:
    """Show nothing."""
