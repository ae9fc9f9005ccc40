"""Checks of what a program passes."""

from __future__ import annotations

import datetime
import difflib
import reprlib
import threading
from collections.abc import Iterable, Mapping
from numbers import Real


def check_options(options: Mapping[str, object], known: Iterable[str], method: str) -> None:
    """Refuse options that a method does not take, with the name that was meant."""
    names = sorted(known)
    for name, value in options.items():
        if name not in names:
            close = difflib.get_close_matches(name, names, n=1)
            hint = f"Did you mean {close[0]}?" if close else f"It takes {', '.join(names)}."
            raise TypeError(f"{name} must be an option that {method}() takes, got {name}={reprlib.repr(value)}. {hint}")


def check_seconds(name: str, value: object, *, below: float | None = None) -> float:
    """Return a number of seconds, or a timedelta, as seconds; ``below`` None takes what Python can wait for."""
    number = value.total_seconds() if isinstance(value, datetime.timedelta) else value
    if isinstance(number, bool) or not isinstance(number, Real):
        raise TypeError(f"{name} must be a number of seconds or a timedelta, got {value!r}. Pass 300 for five minutes.")
    seconds = float(number)
    if not 0 < seconds < (below or threading.TIMEOUT_MAX):
        most = f" below {below:,.0f}" if below is not None else ""
        raise ValueError(
            f"{name} must be a positive number of seconds{most}, got {value} from the call. Leave it out for the "
            "default."
        )
    return seconds
