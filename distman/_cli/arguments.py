"""Types of command line arguments, which say in words what is wrong with one."""

from __future__ import annotations

import argparse
from collections.abc import Callable

_MAX_DIGITS = 18  # longer numbers are typing errors, and do not fit into 64 bits


def at_least(smallest: int) -> Callable[[str], int]:
    def read(text: str) -> int:
        is_number = text.isascii() and text.isdigit() and len(text) <= _MAX_DIGITS
        if not is_number or int(text) < smallest:
            raise argparse.ArgumentTypeError(f"it must be a whole number of at least {smallest}, got {text[:40]!r}")
        return int(text)

    return read


def not_empty(text: str) -> str:
    if not text.strip():
        raise argparse.ArgumentTypeError(f"it must be a name, got {text!r}")
    return text
