"""The traceback of a rank that another one's failure ended: its own program's lines are what its user looks for."""

from __future__ import annotations

import os
import traceback

from distman._coordination.tracking import is_internal
from distman.environments._base import read_flag

_DEBUG = "DISTMAN_DEBUG"
_HINT = f"  (lines of torch and distman are left out; {_DEBUG}=1 shows them)\n"


def folded_traceback(error: BaseException) -> str:
    """Return a traceback without the frames of torch and this package; empty if it is to be shown in full."""
    try:
        shown = traceback.TracebackException.from_exception(error)
        if read_flag(os.environ, _DEBUG) or not _fold(shown):
            return ""
        return _HINT + "".join(shown.format())
    except Exception:  # noqa: BLE001 - an error in the chain cannot show itself: the interpreter does what it can
        return ""


def _fold(error: traceback.TracebackException) -> bool:
    """Drop frames of an error and of those that led to it, and return whether there were any; one of its own stays."""
    is_folded = False
    shown: traceback.TracebackException | None = error
    while shown is not None:
        kept = [frame for frame in shown.stack if not is_internal(frame.filename)]
        if len(kept) < len(shown.stack) and (kept or shown is not error):
            shown.stack[:] = kept
            is_folded = True
        shown = shown.__cause__ or shown.__context__
    return is_folded
