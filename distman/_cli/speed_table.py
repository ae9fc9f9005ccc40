"""The table of measured operations that commands print."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from distman._cli.output import print_table
from distman._cli.units import show_bandwidth, show_seconds, show_size
from distman.environments import LAUNCHERS

if TYPE_CHECKING:
    from distman._cli.timing import Measurement


_COLUMNS = ("operation", "size", "rounds", "time", "algorithm bandwidth", "bus bandwidth")


def print_speeds(measurements: Sequence[Measurement], *, is_plain: bool = False) -> None:
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
    print_table(_COLUMNS, rows, is_plain=is_plain)


def is_plain_under(launcher: str) -> bool:
    """Return whether a rank cannot know that it prints to a terminal, since its launcher gives it one in any case."""
    return LAUNCHERS[launcher].gives_terminals
