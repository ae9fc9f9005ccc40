"""The traceback of an error without the lines between it and the program, whose lines are what its user looks for."""

from __future__ import annotations

import os
import traceback

from distman._coordination.internal_files import is_internal, is_of_package, is_of_user
from distman.environments._base import read_flag
from distman.errors import DistmanError, RankFailedError

_DEBUG = "DISTMAN_DEBUG"
HINT = f"  (lines of torch and distman are left out; {_DEBUG}=1 shows them)\n"
_STARTER = "<frozen runpy>"  # what starts a module; the interpreter shows no such lines for a script


def short_traceback(error: BaseException) -> str:
    """Return a traceback without the frames of this package; empty if none is left out, or it is to be shown in full.

    Of a failure of another rank, those of torch are left out too. Of an error that is none of this package's own, its
    innermost frame stays: it may be a mistake here.
    """
    try:
        shown = traceback.TracebackException.from_exception(error)
        if read_flag(os.environ, _DEBUG) or not _fold(shown, error):
            return ""
        return "".join(shown.format())
    except Exception:  # noqa: BLE001 - an error in the chain cannot show itself: the interpreter does what it can
        return ""


def _fold(shown: traceback.TracebackException, error: BaseException) -> bool:
    """Drop frames of an error and of those that led to it, and return whether there were any; one of its own stays."""
    is_dropped = is_internal if isinstance(error, RankFailedError) else is_of_package
    is_folded = False
    one: traceback.TracebackException | None = shown
    while one is not None:
        kept = [frame for frame in one.stack if not is_dropped(frame.filename) and frame.filename != _STARTER]
        if one is not shown or any(is_of_user(frame.filename) for frame in kept):
            is_own = one is not shown or isinstance(error, DistmanError)
            last = [] if is_own or kept[-1] is one.stack[-1] else [one.stack[-1]]
            is_folded |= len(kept + last) < len(one.stack)
            one.stack[:] = kept + last
        one = one.__cause__ or one.__context__
    return is_folded
