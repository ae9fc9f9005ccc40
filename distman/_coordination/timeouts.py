"""Work that may never come back, such as a call into the store of a stopped process, with a limit."""

from __future__ import annotations

import threading
from collections.abc import Callable


def run_with_timeout(work: Callable[[], None], seconds: float) -> bool:
    """Do something in a thread of its own, and return whether it was done in time.

    Blocking. What is not done in time is left alone, and goes with the process.

    Raises:
        BaseException: What the work raised.
    """
    raised: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - it is raised in the thread that waits
            raised.append(error)

    thread = threading.Thread(target=run, name="distman-timeout", daemon=True)
    thread.start()
    thread.join(seconds)
    if raised:
        raise raised[0]
    return not thread.is_alive()
