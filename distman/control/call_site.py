"""Where in the user's program this process is."""

from __future__ import annotations

import sys
from pathlib import Path

__all__ = ["call_site"]

_PACKAGE = f"{Path(__file__).parent.parent}/"


def call_site() -> str:
    """Return file and line of the innermost call that is neither this package's own nor torch's.

    Local.
    """
    torch = getattr(sys.modules.get("torch"), "__file__", None)
    hidden = (_PACKAGE, f"{Path(torch).parent}/") if torch else (_PACKAGE,)
    frame = sys._getframe()
    while frame.f_back is not None and frame.f_code.co_filename.startswith(hidden):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
