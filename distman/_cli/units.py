"""Sizes, times and bandwidths, as people write and read them, and the table of what was measured."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from distman._cli.output import print_table

if TYPE_CHECKING:
    from distman._cli.timing import Measurement


_COLUMNS = ("operation", "size", "rounds", "time", "algorithm bandwidth", "bus bandwidth")
_SIZE = re.compile(r"(\d+)\s*([kmg]?)i?b?", re.IGNORECASE)


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
