"""The pytest plugin behind ``distman.testing.ranks``.

It is loaded wherever distman is installed, so it imports nothing heavy and starts nothing: the workers start
with the first test that is marked, and end with the session.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from distman.testing._marks import RanksSpec
    from distman.testing._rank_pool import RankPool

WORLD_SIZE = "distman_world_size"  # the parameter that makes one test of each world size
BACKEND = "ranks_backend"  # the mark of a test whose process group has another backend than gloo
_POOL = pytest.StashKey["RankPool"]()


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "ranks(spec): the test runs on several ranks at once; set by distman.testing.ranks"
    )
    config.addinivalue_line(
        "markers",
        f"{BACKEND}(backend, module): the process group of a test of several ranks has this backend instead of "
        "gloo; workers import the module, which makes it known to torch",
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    spec = _spec_of(metafunc.definition)
    if spec is not None:
        metafunc.fixturenames.append(WORLD_SIZE)
        names = ["1 rank" if size == 1 else f"{size} ranks" for size in spec.world_sizes]
        metafunc.parametrize(WORLD_SIZE, spec.world_sizes, ids=names)


def pytest_runtest_call(item: pytest.Item) -> None:
    """Refuse a marked test that cannot be run on several ranks."""
    problem = ""
    if not hasattr(item, "callspec"):  # pytest would not hand it over, but run it itself
        problem = "@ranks must decorate a function or a method of a plain class, not of unittest.TestCase."
    elif getattr(getattr(item, "obj", None), "is_hypothesis_test", False):
        problem = "@ranks must not stand beside @given: each rank would draw examples of its own. Parametrize the test."
    if problem and _spec_of(item) is not None:
        raise pytest.fail.Exception(problem, pytrace=False)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    spec = _spec_of(pyfuncitem)
    if spec is None:
        return None
    from distman._workers.server_process import WorkerStartError
    from distman.testing._item import run_item
    from distman.testing._serialization import UnpicklableError

    try:
        run_item(pyfuncitem, spec, _pool_of(pyfuncitem.config))
    except (UnpicklableError, WorkerStartError) as error:
        raise pytest.fail.Exception(str(error), pytrace=False) from None
    return True


def _spec_of(node: pytest.Item | pytest.Collector) -> RanksSpec | None:
    marks = list(node.iter_markers("ranks"))
    if not marks:
        return None
    from distman.testing._marks import RanksSpec

    spec, *others = [one for mark in marks for one in mark.args or [None]]
    if others or not isinstance(spec, RanksSpec):
        raise pytest.UsageError(
            f"{node.nodeid}: the mark 'ranks' must be set once, by @distman.testing.ranks(2, 4), got {marks}."
        )
    return spec


def _pool_of(config: pytest.Config) -> RankPool:
    if _POOL not in config.stash:
        from distman.testing._rank_pool import RankPool

        config.stash[_POOL] = pool = RankPool(config.get_verbosity())
        config.add_cleanup(pool.close)
    return config.stash[_POOL]
