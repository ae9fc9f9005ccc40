"""The end of a fork: what the program has imported and made is taken apart, torch is left to the kernel.

Taking torch apart takes five times as long as the fork: it writes to nearly every page, which is copied before.
"""

import atexit
import ctypes
import os
import sys
import threading
from contextlib import suppress
from pathlib import Path
from types import ModuleType

preloaded: "dict[str, ModuleType]" = {}
NEEDED = {"sys", "builtins", "__main__"}
HELD = {"pt_tcpstore_uv", "python"}
"""Threads of what is spared: the server of a store, and gloo's loop, named as the process, of a group left open."""

WHOLE = "TEST_DISTMAN_WHOLE_END"
"""A variable that keeps a process with other threads than Python's from sparing anything, as interpreters do."""


def leave_to_the_kernel() -> None:
    """Spare what was preloaded, unless native threads are left: these might still use it while it is taken apart."""
    if native_threads() - (set() if WHOLE in os.environ else HELD):
        return
    for name in preloaded.keys() - NEEDED:
        sys.modules.pop(name, None)
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(preloaded))
    libc = ctypes.CDLL(None)
    libc.fflush(None)
    libc.on_exit(libc._exit, None)  # it comes before the destructors of torch's static objects, and instead of them


def native_threads() -> "set[str]":
    """Return the names of the threads that Python does not know."""
    known = {os.getpid(), *(thread.native_id for thread in threading.enumerate())}
    names = set()
    for task in Path("/proc/self/task").iterdir():
        if int(task.name) not in known:
            with suppress(OSError):  # it has just ended
                names.add((task / "comm").read_text().strip())
    return names


atexit.register(leave_to_the_kernel)
