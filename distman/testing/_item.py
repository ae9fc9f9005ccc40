"""A test of pytest that runs on the workers, once or, under Hypothesis, once for each example."""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

import pytest

from distman.testing._debugger import Debugger, Terminal
from distman.testing._dispatch import arguments_of, run_on_workers
from distman.testing._failure import failure
from distman.testing._hypothesis import draw, is_given
from distman.testing._marks import RanksSpec
from distman.testing._messages import RankReport, RankStatus, SeenWarning
from distman.testing._rank_pool import RankPool
from distman.testing._report import common_types, failed, report_failure


def run_item(item: pytest.Function, spec: RanksSpec, pool: RankPool) -> None:
    """Run a test, with its fixtures made, on the workers, and end it as its ranks did."""
    __tracebackhide__ = True
    call = _Call(item, spec, pool)
    try:
        if not is_given(item.obj):
            call(item.obj, arguments_of(item), _debugger_of(item))
            return
        try:
            draw(item, arguments_of(item), spec, call)
        except pytest.fail.Exception:
            call.repeat(_debugger_of(item))
            raise
    finally:
        call.show()


class _Call:
    def __init__(self, item: pytest.Function, spec: RanksSpec, pool: RankPool) -> None:
        self._item = item
        self._spec = spec
        self._pool = pool
        self._reports: list[RankReport] = []
        self._seen: dict[SeenWarning, None] = {}
        self._repeat: Callable[[Debugger], None] | None = None

    def __call__(
        self, function: Callable[..., object], arguments: Mapping[str, object], debugger: Debugger | None = None
    ) -> None:
        """Call a function on all ranks; raise how it ended there."""
        __tracebackhide__ = True
        self._repeat = functools.partial(self, function, arguments)
        self._reports = run_on_workers(self._pool, self._item, function, arguments, self._spec, debugger)
        self._seen |= dict.fromkeys(one for report in self._reports for one in report.warnings)
        if debugger is not None and debugger.quits:
            raise pytest.exit.Exception("Quitting debugger")
        _conclude(self._reports, self._spec, is_debugged=self._item.config.getoption("usepdb"))

    def repeat(self, debugger: Debugger | None) -> None:
        """Call the last function again, under a debugger: while Hypothesis shrank, there was none."""
        if debugger is not None and self._repeat is not None:
            with suppress(pytest.fail.Exception):
                self._repeat(debugger)

    def show(self) -> None:
        """Show what the ranks wrote in the last call, and what they warned of in any."""
        for report in self._reports:
            _show_output(self._item, report)
        for seen in self._seen:
            _warn_again(seen)


def _conclude(reports: Sequence[RankReport], spec: RanksSpec, *, is_debugged: bool) -> None:
    """End the test the way its ranks did, with a report of every rank if they failed or disagree."""
    __tracebackhide__ = True
    statuses = {report.status for report in reports}
    if statuses == {RankStatus.SKIPPED}:
        raise pytest.skip.Exception(reports[0].headline, _use_item_location=True)
    if statuses == {RankStatus.XFAILED}:
        raise pytest.xfail.Exception(reports[0].headline)
    if failed(reports, spec.dies):
        types = common_types(reports, spec.dies)
        raise failure(report_failure(reports, spec.dies), types, was_debugged=is_debugged)


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


def _debugger_of(item: pytest.Function) -> Debugger | None:
    """Return the debugger that ``--pdb`` asks for, at pytest's terminal; none where a failure is expected."""
    config = item.config
    is_expected = item.get_closest_marker("xfail") is not None and not config.getoption("runxfail")
    if is_expected or not config.getoption("usepdb"):
        return None
    return Debugger(config.getoption("pdb_rank"), Terminal(config))
