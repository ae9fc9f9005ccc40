"""The table of measured operations that commands print."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from distman.cli.output import print_table
from distman.cli.units import show_bandwidth, show_seconds, show_size

if TYPE_CHECKING:
    from distman.cli.timing import Measurement

__all__ = ["print_speeds"]

_COLUMNS = ("operation", "size", "rounds", "time", "algorithm bandwidth", "bus bandwidth")


def print_speeds(measurements: Sequence[Measurement]) -> None:
    """Print how long operations took, and the bandwidths that follow.

    Local.
    """
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
