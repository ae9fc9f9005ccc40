"""The exception that ends a process of ``multiprocessing``, which prints it itself and calls no exception hook."""

from __future__ import annotations

import sys
from collections.abc import Callable

from distman._coordination.failure.stack import LAST_FRAME

_TOOLS = (3, 4, 5)
"""Numbers under which Python monitors, first those that belong to nobody; a debugger and others have lower ones."""

_NAME = "distman"


def error_that_ends_process() -> BaseException | None:
    """Return the exception that is ending this process, if one is; one that its parent was handling does not."""
    error = sys.exc_info()[1]
    trace = error.__traceback__ if error is not None else None
    return error if trace is not None and trace.tb_frame.f_code is LAST_FRAME else None


def call_before_it_is_printed(action: Callable[[], object]) -> None:
    """Let something be called, perhaps several times, while Python handles the exception that ends this process.

    Before Python 3.13 nothing need be called, since finalizers are, before the error is printed. From then on they are
    when it has been forgotten, and after the program's threads, which may wait for the others. So the lines of that
    one function, which is under way, are monitored, unless other tools have taken all numbers.
    """
    if sys.version_info >= (3, 13):
        monitoring = sys.monitoring
        tool = next((tool for tool in _TOOLS if monitoring.get_tool(tool) in (None, _NAME)), None)
        if tool is None:
            return
        if monitoring.get_tool(tool) is None:  # else forked from a process that did this
            monitoring.use_tool_id(tool, _NAME)
        monitoring.register_callback(tool, monitoring.events.LINE, lambda *_: action())
        monitoring.set_local_events(tool, LAST_FRAME, monitoring.events.LINE)
