"""From a pytest item to the tasks of its ranks."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, cast

import pytest

from distman.environments import LAUNCHERS
from distman.environments._detect import METHOD
from distman.environments._launcher import sets
from distman.testing._coverage import coverage_config
from distman.testing._messages import RankReport, RankTask
from distman.testing._serialization import pack

if TYPE_CHECKING:
    from distman.testing._debugger import Debugger
    from distman.testing._marks import RanksSpec
    from distman.testing._rank_pool import RankPool


WORLD_SIZE = "distman_world_size"
"""The parameter that makes one test of each world size."""

BACKEND = "ranks_backend"
"""The mark of a test whose process group has another backend than gloo."""

_GROUP_MARGIN_SECONDS = 60.0
"""A collective gives up so long after the test's own limit, so that the report shows where it was stuck."""
_DEBUGGED_SECONDS = 86400.0
"""The same where a debugger may hold another rank: nobody looks at one failure for longer than a day."""


def arguments_of(item: pytest.Function) -> dict[str, object]:
    """Return the arguments of a test by name, without ``rank`` and ``world_size``."""
    names = inspect.signature(item.obj).parameters
    return {name: item.funcargs[name] for name in names if name in item.funcargs}  # the others have defaults, or a mock


def run_on_workers(
    pool: RankPool,
    item: pytest.Function,
    function: Callable[..., object],
    arguments: Mapping[str, object],
    spec: RanksSpec,
    debugger: Debugger | None,
) -> list[RankReport]:
    """Run a test on as many workers as it is to have ranks, and wait until every rank has ended or was ended."""
    __tracebackhide__ = True
    world_size = cast("int", item.callspec.params[WORLD_SIZE])
    call = pack(function, arguments, spec.parameters, _own_modules(item))
    environ = _worker_environ()
    backend, backend_module = _backend_of(item)

    def make_task(rank: int, store_file: str) -> RankTask:
        return RankTask(
            test=item.nodeid,
            rank=rank,
            world_size=world_size,
            store_file=store_file,
            group_timeout=spec.timeout + (_GROUP_MARGIN_SECONDS if debugger is None else _DEBUGGED_SECONDS),
            uses_manager=spec.uses_manager,
            backend=backend,
            backend_module=backend_module,
            environ={**environ, **_place(rank, world_size)},
            directory=str(Path.cwd()),
            search_path=list(sys.path),
            report_directory=str(item.config.invocation_params.dir),
            traceback_style=item.config.getoption("tbstyle"),
            shows_locals=item.config.getoption("showlocals"),
            coverage=coverage_config(),
            debugs=debugger is not None,
            call=call,
        )

    return pool.run(make_task, world_size, spec.timeout, spec.dies, debugger)


def _backend_of(item: pytest.Function) -> tuple[str, str]:
    """Return the backend of the process group, and the module to import for it."""
    mark = item.get_closest_marker(BACKEND)
    return ("gloo", "") if mark is None else (mark.args[0], mark.args[1])


def server_environ() -> dict[str, str]:
    """Return the environment of the fork server: one thread per library, and nothing held back of a rank's output."""
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    return {**_worker_environ(), **threads, "PYTHONUNBUFFERED": "1"}


def _worker_environ() -> dict[str, str]:
    """Return this process's environment without its launcher, without GPUs, and on the loopback interface."""
    kept = {name: value for name, value in os.environ.items() if not _says_launcher(name)}
    kept.setdefault("GLOO_SOCKET_IFNAME", "lo")
    kept.setdefault("DISTMAN_WATCH", "0")  # a worker outlives its tests, and is watched by the pytest process
    return {**kept, "CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}


def _says_launcher(name: str) -> bool:
    """Return whether whoever started pytest set the variable: it has not started the workers."""
    return name == METHOD or any(sets(launcher, name) for launcher in LAUNCHERS.values())


def _place(rank: int, world_size: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(world_size),
    }


def _own_modules(item: pytest.Function) -> list[ModuleType]:
    """Return the test's module and the conftests, which a worker may not be able to import."""
    plugins = (plugin for _, plugin in item.config.pluginmanager.list_name_plugin())
    conftests = [
        plugin
        for plugin in plugins
        if isinstance(plugin, ModuleType) and Path(plugin.__file__ or "").name == "conftest.py"
    ]
    return [item.module, *conftests]
