"""Checks of what a program passes."""

from __future__ import annotations

import datetime
import difflib
import importlib
import operator
import reprlib
import threading
from collections.abc import Iterable, Mapping, Sequence
from numbers import Real
from types import ModuleType


def check_number(name: str, value: int, *, least: int = 1, remedy: str = "Pass a positive number.") -> int:
    """Return a whole number that is not too small, as one of Python."""
    if not hasattr(value, "__index__"):
        raise TypeError(f"{name} must be a whole number, got {value!r}. Pass an integer.")
    if (number := operator.index(value)) < least:
        raise ValueError(f"{name} must be at least {least}, got {value}. {remedy}")
    return number


def check_choice(name: str, value: object, choices: Sequence[str | None]) -> None:
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(str, choices))}, got {value!r}. Choose one of them.")


def check_options(options: Mapping[str, object], known: Iterable[str], method: str) -> None:
    """Refuse options that a method does not take, with the name that was meant."""
    names = sorted(known)
    for name, value in options.items():
        if name not in names:
            close = difflib.get_close_matches(name, names, n=1)
            hint = f"Did you mean {close[0]}?" if close else f"It takes {', '.join(names)}."
            raise TypeError(f"{name} must be an option that {method}() takes, got {name}={reprlib.repr(value)}. {hint}")


def require(module: str, what: str) -> ModuleType:
    """Return a module of a package that something needs and users install themselves, or say so."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise ImportError(f"{what} needs {package}, which is not installed. Run pip install {package}.") from error


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
