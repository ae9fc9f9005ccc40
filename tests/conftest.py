"""The order of the tests, which of them are unit tests, how they end, and what it means to leave one out.

With DISTMAN_FORBID_SKIP=1 a test that does not run fails; only those marked ``gpu`` may be skipped.
"""

import gc
import importlib.metadata
import importlib.util
import os
import signal
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path

import pytest

SKIPPING_IS_FORBIDDEN = os.environ.get("DISTMAN_FORBID_SKIP") == "1"
TESTS = Path(__file__).parent
LAUNCHERS = TESTS / "launch"
TOGETHER = {  # files whose tests share what takes long to make: a cluster, distributions, what one process comes to
    LAUNCHERS / "test_job_scripts.py",
    LAUNCHERS / "test_cookbook.py",
    TESTS / "test_packaging.py",
    LAUNCHERS / "test_afno.py",
    LAUNCHERS / "test_model_parallel.py",
}
FIRST = {*TOGETHER, LAUNCHERS / "test_training.py", TESTS / "test_types.py"}  # with the longest tests
WITH_PROCESSES = {  # that are no ranks of `@ranks`; these folders and files have no unit tests
    LAUNCHERS,
    TESTS / "executor",
    TESTS / "testing",
    TESTS / "checkpoint" / "test_ends.py",
    TESTS / "job" / "meeting" / "test_costs.py",
    TESTS / "job" / "meeting" / "test_places.py",
    TESTS / "job" / "meeting" / "test_membership.py",
    TESTS / "base" / "test_interpreter.py",
    TESTS / "test_no_skips.py",
    TESTS / "test_packaging.py",
}
OVER_NCCL_RULES = {TESTS / "collectives", TESTS / "domain", TESTS / "test_mappings.py"}
"""Folders and files whose tests of several ranks run over a backend with NCCL's rules too."""
BACKENDS = [
    pytest.param("gloo", id=pytest.HIDDEN_PARAM),
    pytest.param(
        "nccl_rules",
        marks=pytest.mark.ranks_backend("cpu:nccl_rules", "tests.nccl_rules.backend"),
        id="NCCL's rules",
    ),
]
COMPILER = pytest.StashKey[subprocess.Popen[bytes]]()
NOT_RUN = (pytest.skip.Exception, pytest.xfail.Exception)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let the tests over the backend with NCCL's rules run on all numbers of ranks, with all parameters."""
    parser.addoption(
        "--all-backends", action="store_true", help="Run tests over NCCL's rules on all numbers of ranks, in all ways."
    )


def pytest_configure(config: pytest.Config) -> None:
    """Let SIGTERM end the tests as Ctrl-C does, so that every fixture is torn down; let nothing hang on seconds.

    A shell ignores Ctrl-C for what it puts into the background, and for all that this starts; here it is an interrupt.
    Hypothesis would fail an example that takes 0.2 s, as it may on a busy machine.
    """
    os.environ.pop("COLUMNS", None)  # xdist tells its workers the width of its terminal, to which commands would fold
    config.addinivalue_line("markers", "gloo_only(reason): does not hold over a backend with NCCL's rules")
    config.addinivalue_line("markers", "torch(version): of what an older torch cannot do; not there with one")
    config.addinivalue_line("markers", "unit: starts no processes with torch; given to tests when they are collected")
    if importlib.util.find_spec("hypothesis") is not None:  # the report on GPUs does without it
        import hypothesis

        hypothesis.settings.register_profile("distman", deadline=None)
        hypothesis.settings.load_profile("distman")
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make two tests of each that runs on several ranks: over gloo, and over a backend with NCCL's rules."""
    test = metafunc.definition
    is_chosen = not OVER_NCCL_RULES.isdisjoint([test.path, *test.path.parents])
    if is_chosen and test.get_closest_marker("ranks"):
        metafunc.fixturenames.append("backend")
        metafunc.parametrize("backend", BACKENDS)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the unit tests before ``-m`` looks for them, and deal the tests of launchers out among the processes.

    xdist gives each process a piece of the list, of which the others steal the end when they are done. So every piece
    begins with its share of the tests of launchers, which take long and wait much, and ends with short ones. Tests that
    share something stay in one piece.
    """
    items[:] = [item for item in items if _is_wanted(item, everything=config.getoption("all_backends"))]
    for item in items:
        if item.get_closest_marker("ranks") is None and WITH_PROCESSES.isdisjoint([item.path, *item.path.parents]):
            item.add_marker("unit")
    num_processes = getattr(config, "workerinput", {}).get("workercount", 1)
    if num_processes > 1:
        shares: dict[object, list[pytest.Item]] = {}
        for item in sorted(filter(_is_long, items), key=lambda item: item.path not in FIRST):
            shares.setdefault(item.path if item.path in TOGETHER else item, []).append(item)
        long = list(shares.values())
        short = [item for item in items if not _is_long(item)]
        num_items = len(items)
        items.clear()
        for index in range(num_processes):
            items += [item for share in long[index::num_processes] for item in share]
            num_short = (index + 1) * num_items // num_processes - len(items)
            items += short[:num_short]
            del short[:num_short]


def parsed(version: str) -> tuple[int, int]:
    """Return the two first numbers of a version."""
    major, minor, *_ = version.split(".")
    return int(major), int(minor)


TORCH = parsed(importlib.metadata.version("torch"))


def _is_wanted(item: pytest.Item, *, everything: bool) -> bool:
    """Return whether a test is to run.

    Not with a torch that cannot do what it is about. Over the backend with NCCL's rules, as few ranks as can differ
    will do. Where gloo has answered how parameters go together, one varies at a time.
    """
    if any(parsed(mark.args[0]) > TORCH for mark in item.iter_markers("torch")):
        return False
    if item.get_closest_marker("ranks_backend") is None or not isinstance(item, pytest.Function):
        return True
    if item.get_closest_marker("gloo_only") is not None:
        return False
    spec = item.get_closest_marker("ranks").args[0]
    several = [size for size in spec.world_sizes if size > 1]
    is_smallest = item.callspec.params["distman_world_size"] == min(several, default=0)
    is_simple = "backend" not in item.callspec.params or _num_other_values(item) <= 1
    return everything or (is_smallest and is_simple)


def _num_other_values(item: pytest.Function) -> int:
    """Return how many parameters of a test have another value than their first."""
    names = [mark.args[0] for mark in item.iter_markers("parametrize")]
    firsts = [one.split(",")[0].strip() if isinstance(one, str) else one[0] for one in names]
    return sum(item.callspec.indices[name] > 0 for name in firsts)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Start to compile the backend with NCCL's rules: it takes half a minute, in which other tests run."""
    if (
        any(item.get_closest_marker("ranks_backend") for item in session.items)
        and not session.config.option.collectonly
    ):
        compiler = subprocess.Popen([sys.executable, "-m", "tests.nccl_rules.library"], cwd=TESTS.parent)
        session.config.stash[COMPILER] = compiler
        session.config.add_cleanup(compiler.wait)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Wait until the backend is compiled, before the time of a test runs."""
    if item.get_closest_marker("ranks_backend") and item.config.stash[COMPILER].wait():
        pytest.fail("the backend with NCCL's rules must be compiled, see above for why g++ did not.", pytrace=False)


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
    return LAUNCHERS in item.path.parents or item.path in FIRST


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
