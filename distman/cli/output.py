"""What the commands print: tables with lines and colours on a terminal, plain text everywhere else."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec

__all__ = ["plain_table", "print_table", "progress_bar"]


def print_table(
    columns: Sequence[str], rows: Sequence[Sequence[object]], *, title: str = "", is_plain: bool = False
) -> None:
    """Print a table.

    Local. Drawn by ``rich`` on a terminal, where it is installed; else columns of plain text.

    Args:
        columns: Heads of the columns.
        rows: Rows of as many cells.
        title: A line above.
        is_plain: Print plain text also on what looks like a terminal.
    """
    if is_plain or not sys.stdout.isatty() or find_spec("rich") is None:
        print("\n".join([*([title] if title else []), plain_table(columns, rows)]), flush=True)
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


def plain_table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return a table as lines of plain text, with two spaces between the columns.

    Local.
    """
    cells = [list(columns), *([str(cell) for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in cells)


@contextmanager
def progress_bar(num_steps: int, *, is_shown: bool = True) -> Iterator[Callable[[str], None]]:
    """Show a bar on standard error for the length of a ``with`` block, if that is a terminal and ``rich`` is there.

    Local.

    Args:
        num_steps: Number of steps.
        is_shown: Whether to show it at all; only rank 0 of a job does.

    Yields:
        What to call before each step, with its name.
    """
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
