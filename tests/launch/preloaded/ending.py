"""The end of a fork: what the program has imported and made is taken apart, torch is left to the kernel.

Taking torch apart takes five times as long as the fork: it writes to nearly every page, which is copied before. So does
the interpreter when it gives back its own tables, after all that a program can notice: the process ends before that.
"""

import atexit
import ctypes
import os
import sys
import threading
from contextlib import suppress
from os import _exit  # a program may replace it, and its own may not work so late
from pathlib import Path
from types import ModuleType

preloaded: "dict[str, ModuleType]" = {}
code: "int | None" = None
"""The exit code of the program; None after an error, of which the exception hook may make another one."""
NEEDED = {"sys", "builtins", "__main__"}
ENDS_LATER = {"mpi4py.MPI"}  # it finalizes MPI after the last module, or mpirun complains
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
    if code is not None and not ENDS_LATER & sys.modules.keys():
        sys._last = Last(code)


class Last:
    """Ends the process when the interpreter clears the last modules, `sys` and `builtins`."""

    def __init__(self, code: int) -> None:
        self.code = code

    def __del__(self) -> None:
        """End as an interpreter does, which has an exit code of its own where the last output cannot be written."""
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        except OSError:
            _exit(120)
        except (AttributeError, ValueError):  # the program has closed them
            pass
        _exit(self.code & 0xFF)


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
