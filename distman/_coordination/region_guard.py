"""What keeps a thread from waiting for ranks that do not run where it runs, whatever it calls."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from distman._torch_internals import CollectiveGuard, enter_regions, regions


class RegionGuard:
    """Asks before each of torch's collectives that is started in a region; new threads inherit regions."""

    def __init__(self, check: Callable[[str, Sequence[int]], None]) -> None:
        self._collectives = CollectiveGuard(check)
        self._start = start = threading.Thread.start

        def start_in_regions(thread: threading.Thread) -> None:
            inherited, run = regions(), thread.run

            def run_in_regions() -> None:
                leave = enter_regions(inherited)
                try:
                    run()
                finally:
                    leave()

            if inherited:
                thread.run = run_in_regions  # type: ignore[method-assign]
            start(thread)

        self._start_in_regions = start_in_regions
        threading.Thread.start = start_in_regions  # type: ignore[assignment,method-assign]

    def remove(self) -> None:
        """Put torch and threads back."""
        self._collectives.remove()
        if threading.Thread.start is self._start_in_regions:  # else someone has wrapped it, and it does no harm
            threading.Thread.start = self._start  # type: ignore[method-assign]
