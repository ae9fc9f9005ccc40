"""What coverage.py counts in the workers: by itself it measures the process that it was started in."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import coverage

_AS_TEXT = ":data:"  # what coverage.py puts before a configuration to tell it from the name of a file
_OF_ALL_PROCESSES = ["no-data-collected", "module-not-imported", "module-not-measured"]


def coverage_config() -> str:
    """Return how this process is measured, as a text for the workers; empty if it is not."""
    module = sys.modules.get("coverage")
    current = module.Coverage.current() if module is not None else None
    return current.config.serialize() if current is not None else ""


@contextmanager
def measured(config: str) -> Iterator[None]:
    """Count what runs inside, and write it beside the files of the pytest process: a worker may be killed later."""
    if not config:
        yield
        return
    measuring = _coverage(config)
    measuring.start()
    try:
        yield
    finally:
        measuring.stop()
        measuring.save()


@functools.cache
def _coverage(config: str) -> coverage.Coverage:
    import coverage

    inherited = coverage.Coverage.current()
    if inherited is not None:  # with ``patch = subprocess`` the fork server is measured too
        inherited.stop()
    measuring = coverage.Coverage(config_file=_AS_TEXT + config, data_suffix=True)
    measuring.set_option("run:disable_warnings", _OF_ALL_PROCESSES)  # which only the pytest process can judge
    return measuring
