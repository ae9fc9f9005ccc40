"""A test of pytest that runs on the workers."""

from __future__ import annotations

import inspect
import os
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import cast

import pytest

from distman._base import timing
from distman.testing._coverage import coverage_config
from distman.testing._environments import worker_environ
from distman.testing._marks import RanksSpec
from distman.testing._messages import RankReport, RankStatus, RankTask, SeenWarning
from distman.testing._plugin import BACKEND, WORLD_SIZE
from distman.testing._rank_pool import RankPool
from distman.testing._report import has_failed, report_failure
from distman.testing._serialization import pack


def run_item(item: pytest.Function, spec: RanksSpec, pool: RankPool) -> None:
    """Run a test, with its fixtures made, on the workers, and end it as its ranks did; a failure has their reports."""
    __tracebackhide__ = True
    names = inspect.signature(item.obj).parameters  # those that are no fixtures have defaults, or a mock
    arguments = {name: item.funcargs[name] for name in names if name in item.funcargs}
    reports = pool.run(_task(item, spec, arguments), spec.timeout, spec.dies)
    for report in reports:
        _show_output(item, report)
    for seen in dict.fromkeys(one for report in reports for one in report.warnings):
        _warn_again(seen)
    statuses = {report.status for report in reports}
    if statuses == {RankStatus.SKIPPED}:
        raise pytest.skip.Exception(reports[0].headline, _use_item_location=True)
    if statuses == {RankStatus.XFAILED}:
        raise pytest.xfail.Exception(reports[0].headline)
    if has_failed(reports, spec.dies):
        raise pytest.fail.Exception(report_failure(reports, spec.dies), pytrace=False)


def _task(item: pytest.Function, spec: RanksSpec, arguments: Mapping[str, object]) -> RankTask:
    config, mark = item.config, item.get_closest_marker(BACKEND)
    backend, backend_module = ("gloo", "") if mark is None else mark.args
    return RankTask(
        test=item.nodeid,
        world_size=cast("int", item.callspec.params[WORLD_SIZE]),
        group_timeout=spec.timeout + timing.TEST_GROUP_MARGIN,
        uses_manager=spec.uses_manager,
        backend=backend,
        backend_module=backend_module,
        environ=worker_environ(),
        directory=os.getcwd(),  # noqa: PTH109 - a string
        search_path=list(sys.path),
        report_directory=str(config.invocation_params.dir),
        traceback_style=config.getoption("tbstyle"),
        shows_locals=config.getoption("showlocals"),
        coverage=coverage_config(),
        call=pack(item.obj, arguments, spec.parameters, [item.module, *_conftests(config)]),
    )


def _conftests(config: pytest.Config) -> list[ModuleType]:
    """Return the conftests, which a worker may not be able to import."""
    plugins = [plugin for _, plugin in config.pluginmanager.list_name_plugin() if isinstance(plugin, ModuleType)]
    return [plugin for plugin in plugins if Path(plugin.__file__ or "").name == "conftest.py"]


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
        # The test's filters have been applied in the worker.
        warnings.simplefilter("always")
        warnings.warn_explicit(seen.text, category, seen.file, seen.line)
