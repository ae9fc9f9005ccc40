"""What the commands print: tables, sentences, and the ranks, sizes and times in them, as people write and read them."""

from __future__ import annotations

import argparse
import re
import shutil
import sys
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

from distman._base.text import printable

if TYPE_CHECKING:
    from distman._cli.timing import Measurement

MAX_NAMED = 8  # ranks in a sentence
_COLUMNS = ("operation", "size", "rounds", "time", "algorithm bandwidth", "bus bandwidth")
_SIZE = re.compile(r"(\d+)\s*([kmg]?)i?b?", re.IGNORECASE)


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


def print_table(columns: Sequence[str], rows: Sequence[Sequence[object]], *, title: str = "") -> None:
    """Print a table as lines of plain text, with two spaces between the columns, below a title if there is one."""
    cells = [list(columns), *([str(cell) for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join(map(str.ljust, line, widths)).rstrip() for line in cells]
    print("\n".join([*([title] if title else []), *lines]), flush=True)


def complain(command: str, problem: object) -> int:
    """Say on standard error what is wrong, on one line, and return 1, the exit code."""
    print(f"distman {command}: {printable(str(problem))}", file=sys.stderr, flush=True)
    return 1


def print_text(text: str) -> None:
    """Print lines, each folded between words where it is longer than the terminal is wide."""
    width = shutil.get_terminal_size((0, 0)).columns  # of the terminal, or of ``COLUMNS``; 0 where there is neither
    print("\n".join(_folded(line, width) for line in text.split("\n")), flush=True)


def _folded(line: str, width: int) -> str:
    if not 0 < width < len(line):
        return line
    return textwrap.fill(line, width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def parse_size(text: str) -> int:
    """Return the bytes that a text such as ``64k`` or ``4 MiB`` means: with powers of 1,024, as in nccl-tests."""
    match = _SIZE.fullmatch(text.strip())
    if match is None or int(match[1]) == 0:
        raise argparse.ArgumentTypeError(
            f"a size must be a whole number of bytes, k, M or G, got {text!r}. Write it like 64k or 4M."
        )
    return int(match[1]) << 10 * " kmg".index(match[2].lower() or " ")


def show_size(num_bytes: int) -> str:
    return _scaled(num_bytes, 4, {"GiB": 1 << 30, "MiB": 1 << 20, "KiB": 1 << 10, "B": 1})


def show_seconds(seconds: float) -> str:
    return f"{seconds:.0f} s" if abs(seconds) >= 1000 else _scaled(seconds, 3, {"s": 1, "ms": 1e-3, "us": 1e-6})


def show_bandwidth(bytes_per_second: float) -> str:
    return _scaled(bytes_per_second, 3, {"GB/s": 1e9, "MB/s": 1e6, "kB/s": 1e3})


def _scaled(number: float, num_digits: int, units: dict[str, float]) -> str:
    """Return a number in the largest of the units that it reaches, or else in the last."""
    unit = next((unit for unit, size in units.items() if abs(number) >= size), [*units][-1])
    return f"{float(f'{number / units[unit]:.{num_digits}g}'):g} {unit}"


def print_speeds(measurements: Sequence[Measurement]) -> None:
    rows = [
        (
            one.operation,
            show_size(one.num_bytes),
            one.num_rounds,
            show_seconds(one.seconds),
            show_bandwidth(one.algorithm_bandwidth),
            show_bandwidth(one.bus_bandwidth),
        )
        for one in measurements
    ]
    print_table(_COLUMNS, rows)
