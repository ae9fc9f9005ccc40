"""Sizes, times and bandwidths, as people write and read them."""

from __future__ import annotations

import re

_PREFIXES = ("", "Ki", "Mi", "Gi")
_SIZE = re.compile(r"(\d+)\s*([kmg]?)i?b?", re.IGNORECASE)


def parse_size(text: str) -> int:
    """Return the number of bytes that a text such as ``64k``, ``4 MiB`` or ``512`` means.

    k, M and G are powers of 1,024, as in nccl-tests.

    >>> parse_size("64k"), parse_size("4 MiB"), parse_size("512")
    (65536, 4194304, 512)
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None or int(match[1]) == 0:
        raise ValueError(f"a size must be a whole number of bytes, k, M or G, got {text!r}. Write it like 64k or 4M.")
    power: int = " kmg".index(match[2].lower() or " ")
    return int(match[1]) * int(1024**power)


def show_size(num_bytes: int) -> str:
    """Return a number of bytes as text.

    >>> show_size(8), show_size(65536), show_size(1536)
    ('8 B', '64 KiB', '1.5 KiB')
    """
    power = max((power for power in range(len(_PREFIXES)) if num_bytes >= 1024**power), default=0)
    return f"{num_bytes / 1024**power:.4g} {_PREFIXES[power]}B"


def show_seconds(seconds: float) -> str:
    """Return a time as text, three digits of it.

    >>> show_seconds(0.0000123), show_seconds(0.25), show_seconds(3)
    ('12.3 us', '250 ms', '3 s')
    """
    factor, unit = next(
        ((factor, unit) for factor, unit in ((1, "s"), (1e3, "ms")) if abs(seconds) * factor >= 1), (1e6, "us")
    )
    return f"{seconds * factor:.3g} {unit}" if abs(seconds) < 1000 else f"{seconds:.0f} s"


def show_bandwidth(bytes_per_second: float) -> str:
    """Return a bandwidth as text, in units of 10^3, 10^6 or 10^9 bytes a second, three digits of it.

    >>> show_bandwidth(1.25e9), show_bandwidth(2e5)
    ('1.25 GB/s', '200 kB/s')
    """
    factor, unit = next(
        ((factor, unit) for factor, unit in ((1e9, "GB/s"), (1e6, "MB/s")) if bytes_per_second >= factor), (1e3, "kB/s")
    )
    return f"{float(f'{bytes_per_second / factor:.3g}'):g} {unit}"
