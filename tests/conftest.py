"""The order of the tests, which of them are unit tests, how they end, and what it means to leave one out.

With DISTMAN_FORBID_SKIP=1 a test that does not run fails; only those marked ``gpu`` may be skipped.
"""

import gc
import os
import signal
from collections.abc import Generator
from pathlib import Path

import hypothesis
import pytest

SKIPPING_IS_FORBIDDEN = os.environ.get("DISTMAN_FORBID_SKIP") == "1"
TESTS = Path(__file__).parent
LAUNCHERS = TESTS / "launch"
LONGEST = ("test_training.py", "test_job_scripts.py")
WITH_PROCESSES = {  # that are no ranks of `@ranks`; these folders and files have no unit tests
    LAUNCHERS,
    TESTS / "executor",
    TESTS / "testing",
    TESTS / "checkpoint" / "test_ends.py",
    TESTS / "rendezvous" / "test_door.py",
    TESTS / "rendezvous" / "test_membership.py",
    TESTS / "test_no_skips.py",
    TESTS / "test_packaging.py",
}
NOT_RUN = (pytest.skip.Exception, pytest.xfail.Exception)


def pytest_configure(config: pytest.Config) -> None:
    """Let SIGTERM end the tests as Ctrl-C does, so that every fixture is torn down; let nothing hang on seconds.

    A shell ignores Ctrl-C for what it puts into the background, and for all that this starts; here it is an interrupt.
    Hypothesis would fail an example that takes 0.2 s, as it may on a busy machine.
    """
    config.addinivalue_line("markers", "unit: starts no processes with torch; given to tests when they are collected")
    hypothesis.settings.register_profile("distman", deadline=None)
    hypothesis.settings.load_profile("distman")
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the unit tests before ``-m`` looks for them, and deal the tests of launchers out among the processes.

    xdist gives each process a piece of the list, of which the others steal the end when they are done. So every piece
    begins with its share of the tests of launchers, which take long and wait much, and ends with short ones.
    """
    for item in items:
        if item.get_closest_marker("ranks") is None and WITH_PROCESSES.isdisjoint([item.path, *item.path.parents]):
            item.add_marker("unit")
    num_processes = getattr(config, "workerinput", {}).get("workercount", 1)
    if num_processes > 1:
        long = sorted(filter(_is_long, items), key=lambda item: item.path.name not in LONGEST)
        short = [item for item in items if not _is_long(item)]
        num_items = len(items)
        items.clear()
        for index in range(num_processes):
            items += long[index::num_processes]
            num_short = (index + 1) * num_items // num_processes - len(items)
            items += short[:num_short]
            del short[:num_short]


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Keep the collector of garbage from what stays for good: pytest runs it five times at the end, and tests fork."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def _is_long(item: pytest.Item) -> bool:
    return LAUNCHERS in item.path.parents


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Fail a test that was skipped, or cut short by ``xfail``."""
    report = yield
    reason = call.excinfo.value if call.excinfo else None
    if SKIPPING_IS_FORBIDDEN and isinstance(reason, NOT_RUN) and item.get_closest_marker("gpu") is None:
        report.outcome = "failed"
        report.longrepr = f"DISTMAN_FORBID_SKIP=1 forbids to leave out {item.nodeid}: {reason}"
        vars(report).pop("wasxfail", None)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Fail a module that was skipped as a whole."""
    report = yield
    if SKIPPING_IS_FORBIDDEN and report.skipped:
        report.outcome = "failed"
        report.longrepr = f"DISTMAN_FORBID_SKIP=1 forbids to skip {collector.nodeid}: {report.longrepr}"
    return report
