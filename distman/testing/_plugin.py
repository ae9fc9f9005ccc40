"""The pytest plugin behind ``distman.testing.ranks``.

It is loaded wherever distman is installed, so it imports nothing heavy and starts nothing: the workers start
with the first test that is marked, and end with the session.
"""

from __future__ import annotations

import sys
import warnings
from typing import TYPE_CHECKING, cast

import pytest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from distman.testing._marks import RanksSpec
    from distman.testing._messages import RankReport, SeenWarning
    from distman.testing._rank_pool import RankPool

_POOL = pytest.StashKey["RankPool"]()
_WORLD_SIZE = "distman_world_size"


def pytest_configure(config: pytest.Config) -> None:
    """Make the mark known."""
    config.addinivalue_line(
        "markers", "ranks(spec): the test runs on several ranks at once; set by distman.testing.ranks"
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make one test of each world size."""
    spec = _spec_of(metafunc.definition)
    if spec is not None:
        metafunc.fixturenames.append(_WORLD_SIZE)
        names = ["1 rank" if size == 1 else f"{size} ranks" for size in spec.world_sizes]
        metafunc.parametrize(_WORLD_SIZE, spec.world_sizes, ids=names)


def pytest_runtest_call(item: pytest.Item) -> None:
    """Refuse a marked test that pytest would not hand over but run itself."""
    if _spec_of(item) is not None and not hasattr(item, "callspec"):
        raise pytest.fail.Exception(
            "@ranks must decorate a function or a method of a plain class, not of unittest.TestCase.",
            pytrace=False,
        )


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a marked test on the workers instead of here."""
    spec = _spec_of(pyfuncitem)
    if spec is None:
        return None
    from distman._workers.server_process import WorkerStartError
    from distman.testing._dispatch import run_on_workers
    from distman.testing._serialization import UnpicklableError

    world_size = pyfuncitem.callspec.params[_WORLD_SIZE]
    try:
        reports = run_on_workers(_pool_of(pyfuncitem.config), pyfuncitem, spec, cast("int", world_size))
    except (UnpicklableError, WorkerStartError) as error:
        raise pytest.fail.Exception(str(error), pytrace=False) from None
    for report in reports:
        _show_output(pyfuncitem, report)
        for seen in report.warnings:
            _warn_again(seen)
    _conclude(reports, spec)
    return True


def _spec_of(node: pytest.Item | pytest.Collector) -> RanksSpec | None:
    marks = list(node.iter_markers("ranks"))
    if not marks:
        return None
    from distman.testing._marks import RanksSpec

    specs = [mark.args[0] for mark in marks if len(mark.args) == 1 and isinstance(mark.args[0], RanksSpec)]
    if len(specs) != 1 or len(marks) != 1:
        raise pytest.UsageError(
            f"{node.nodeid}: the mark 'ranks' must be set once, by @distman.testing.ranks(2, 4), got {marks}."
        )
    return specs[0]


def _pool_of(config: pytest.Config) -> RankPool:
    if _POOL not in config.stash:
        from distman.testing._dispatch import server_environ
        from distman.testing._rank_pool import RankPool

        config.stash[_POOL] = pool = RankPool(server_environ, config.get_verbosity())
        config.add_cleanup(pool.close)
    return config.stash[_POOL]


def _show_output(item: pytest.Function, report: RankReport) -> None:
    for name, text in (("stdout", report.stdout), ("stderr", report.stderr)):
        if not text:
            continue
        if item.config.getoption("capture") == "no":
            sys.stdout.writelines(f"[rank {report.rank}] {line}\n" for line in text.splitlines())
        else:
            item.add_report_section("call", f"rank {report.rank} {name}", text)


def _warn_again(seen: SeenWarning) -> None:
    """Hand a worker's warning to pytest, which lists it in its summary."""
    category = getattr(sys.modules.get(seen.category_module), seen.category_name, UserWarning)
    with warnings.catch_warnings():
        # What the test's filters had to say about it was said in the worker.
        warnings.simplefilter("always")
        warnings.warn_explicit(seen.text, category, seen.file, seen.line)


def _conclude(reports: Sequence[RankReport], spec: RanksSpec) -> None:
    """End the test the way its ranks did, with a report of every rank if they failed or disagree."""
    __tracebackhide__ = True
    from distman.testing._messages import RankStatus
    from distman.testing._report import failed, report_failure

    statuses = {report.status for report in reports}
    if statuses == {RankStatus.SKIPPED}:
        raise pytest.skip.Exception(reports[0].headline, _use_item_location=True)
    if statuses == {RankStatus.XFAILED}:
        raise pytest.xfail.Exception(reports[0].headline)
    if failed(reports, spec.dies):
        raise pytest.fail.Exception(report_failure(reports, spec.dies), pytrace=False)
