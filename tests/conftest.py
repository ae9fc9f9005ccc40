"""How the tests end, and what it means to leave one out.

With DISTMAN_FORBID_SKIP=1 a test that does not run fails; only those marked ``gpu`` may be skipped.
"""

import os
import signal
from collections.abc import Generator

import hypothesis
import pytest

SKIPPING_IS_FORBIDDEN = os.environ.get("DISTMAN_FORBID_SKIP") == "1"
NOT_RUN = (pytest.skip.Exception, pytest.xfail.Exception)


def pytest_configure() -> None:
    """Let SIGTERM end the tests as Ctrl-C does, so that every fixture is torn down; let nothing hang on seconds.

    A shell ignores Ctrl-C for what it puts into the background, and for all that this starts; here it is an interrupt.
    Hypothesis would fail an example that takes 0.2 s, as it may on a busy machine.
    """
    hypothesis.settings.register_profile("distman", deadline=None)
    hypothesis.settings.load_profile("distman")
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)


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
