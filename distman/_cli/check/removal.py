"""A file that is gone at the end, however the end comes."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def removed_at_the_end(file: Path) -> Iterator[None]:
    """Remove a file at the end of a ``with`` block, also where an exception, Ctrl-C or SIGTERM is what ends it.

    In the main thread of a process that has no handler for SIGTERM, SIGTERM raises SystemExit within the block. Wait
    there in Python only: in a collective no signal is heard.
    """
    is_free = signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    is_ours = is_free and threading.current_thread() is threading.main_thread()
    if is_ours:
        signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # it could not even be written
            file.unlink(missing_ok=True)
        if is_ours:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
