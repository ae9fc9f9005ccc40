"""What the commands print: tables, sentences, and the ranks in them."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Sequence

_MAX_NAMED = 8  # in a sentence


def shorten_ranks(ranks: Sequence[int], most: int | None = None) -> str:
    """Return ascending ranks as a short text, such as ``0-3`` or ``0-1, 8-9``; of many runs the first and the last."""
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


def print_table(columns: Sequence[str], rows: Sequence[Sequence[object]], *, title: str = "") -> None:
    """Print a table as lines of plain text, with two spaces between the columns, below a title if there is one."""
    cells = [list(columns), *([str(cell) for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join(map(str.ljust, line, widths)).rstrip() for line in cells]
    print("\n".join([*([title] if title else []), *lines]), flush=True)


def print_text(text: str) -> None:
    """Print lines, each folded between words where it is longer than the terminal is wide."""
    width = shutil.get_terminal_size((0, 0)).columns  # of the terminal, or of ``COLUMNS``; 0 where there is neither
    print("\n".join(_folded(line, width) for line in text.split("\n")), flush=True)


def _folded(line: str, width: int) -> str:
    if not 0 < width < len(line):
        return line
    return textwrap.fill(line, width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
