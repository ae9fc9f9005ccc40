"""The traceback of an error without the lines between it and the program, whose lines are what its user looks for."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from distman._base.interpreter import is_of_program
from distman.environments import read_flag
from distman.errors import DistmanError, JobFailed, RankFailedError

_PACKAGE = f"{Path(__file__).parents[2]}/"
_LIBRARY = f"{Path(os.__file__).parent}/"  # Python's own, with what is installed in it


def is_internal(file: str) -> bool:
    """Return whether a file is one of this package or of torch, in which a user does not look for a mistake."""
    return file.startswith(internal_folders())


def is_of_package(file: str) -> bool:
    return file.startswith(_PACKAGE)


def is_of_user(file: str) -> bool:
    """Return whether a file belongs to none of these, nor to Python's own library."""
    is_of_python = file.startswith(_LIBRARY) and "-packages" not in file
    return not (is_of_python or is_internal(file))


@functools.lru_cache(maxsize=1)
def internal_folders() -> tuple[str, ...]:
    torch = getattr(sys.modules.get("torch"), "__file__", None)
    return (_PACKAGE, f"{Path(torch).parent}/") if torch else (_PACKAGE,)


_DEBUG = "DISTMAN_DEBUG"
_HINT = f"  (lines of torch and distman are left out; {_DEBUG}=1 shows them)\n"
_STARTER = "<frozen runpy>"  # the file of what starts a module; the interpreter shows no such lines for a script


def show(
    error_type: type[BaseException],
    error: BaseException,
    trace: TracebackType | None,
    whole: Callable[..., object] = sys.__excepthook__,
) -> None:
    """Print an uncaught exception, by a hook that prints it whole where none of this package's frames are left out."""
    text, left_out = _shortened(error)
    with contextlib.suppress(Exception):  # standard error is None or closed, or a program's own, which may raise all
        if any(map(is_internal, left_out)):
            sys.stderr.write(_HINT + text)
            sys.stderr.flush()
        else:
            whole(error_type, error, trace)


def short_traceback(error: BaseException) -> str:
    """Return a traceback without the frames of this package; empty if none is left out, or it is to be shown in full.

    Of another rank's failure, torch's are left out too. Of an error that is not of this package, the innermost frame
    stays: it may be a mistake here.
    """
    return _shortened(error)[0]


def _shortened(error: BaseException) -> tuple[str, list[str]]:
    """Return what :func:`short_traceback` does, and the files of the frames that are left out."""
    try:
        shown = traceback.TracebackException.from_exception(error)
        if read_flag(os.environ, _DEBUG):
            return "", []
        left_out = _fold(shown, error)
        return "".join(shown.format()) if left_out else "", left_out
    except Exception:  # noqa: BLE001 - an error in the chain cannot show itself: the interpreter does what it can
        return "", []


def _fold(shown: traceback.TracebackException, error: BaseException) -> list[str]:
    """Drop frames of an error and of those that led to it, and return their files; one of its own stays."""
    is_dropped = is_internal if isinstance(error, JobFailed | RankFailedError) else is_of_package
    left_out: list[str] = []
    one: traceback.TracebackException | None = shown
    while one is not None:
        stays = [not is_dropped(frame.filename) and frame.filename != _STARTER for frame in one.stack]
        if one is shown and stays:
            stays[0] &= not is_of_program(one.stack[0].filename, one.stack[0].name)
        if one is not shown or any(is_of_user(frame.filename) for frame in itertools.compress(one.stack, stays)):
            if one is shown and not isinstance(error, DistmanError):
                stays[-1] = True
            left_out += [frame.filename for frame, stay in zip(one.stack, stays, strict=True) if not stay]
            one.stack[:] = itertools.compress(one.stack, stays)
        one = one.__cause__ or one.__context__
    return left_out
