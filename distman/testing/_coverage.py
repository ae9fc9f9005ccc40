"""What coverage.py counts in the workers: by itself it measures the process that it was started in."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import coverage

_AS_TEXT = ":data:"  # what coverage.py puts before a configuration to tell it from the name of a file
_OF_ALL_PROCESSES = ("no-data-collected", "module-not-imported", "module-not-measured")


def coverage_config() -> str:
    """Return how this process is measured, as a text for the workers; empty if it is not."""
    module = sys.modules.get("coverage")
    current = module.Coverage.current() if module is not None else None
    return current.config.serialize() if current is not None else ""


class WorkerCoverage:
    """Measures a worker while it runs tests; its files lie beside those of the pytest process, which combines them."""

    def __init__(self) -> None:
        self._coverage: coverage.Coverage | None = None

    @contextmanager
    def measured(self, config: str) -> Iterator[None]:
        """Count what runs inside, and write it down: a worker may be killed later."""
        if not config:
            yield
            return
        measuring = self._start(config)
        try:
            yield
        finally:
            measuring.stop()
            measuring.save()

    def _start(self, config: str) -> coverage.Coverage:
        if self._coverage is None:
            import coverage

            inherited = coverage.Coverage.current()
            if inherited is not None:  # with ``patch = subprocess`` the fork server is measured too
                inherited.stop()
            self._coverage = coverage.Coverage(config_file=_AS_TEXT + config, data_suffix=True)
            # What only the pytest process can see is no news about a worker.
            self._coverage.set_option("run:disable_warnings", list(_OF_ALL_PROCESSES))
        self._coverage.start()
        return self._coverage
