"""What the package changes in a process is declared, and put back by one call."""

import ast
import functools
import re
import signal
import sys
import threading
from pathlib import Path

import pytest

import distman
from distman import DistributedManager
from distman._base.log import logger
from distman._base.process_state import puts_back, reset
from distman._coordination import tracking
from distman._coordination.failure import hook, pending_work
from distman._coordination.monitor.watcher import is_watching
from distman.checkpoint import _background
from distman.testing import ranks

from ..test_docs import rows

PACKAGE = Path(distman.__file__).parent
# These run in processes of the package's own.
NO_STATE = re.compile(r"getLogger|\.format$|no_grad\(\)\(|= _raising_both\(")
OWN_PROCESSES = ("_cli", "_run", "_workers", "executor", "testing")
CHANGES = (
    "atexit.register",
    "register_at_fork(",
    "signal.signal(",
    "set_local_events(",
    "setrlimit(",
    "sys.excepthook = ",
    "os.environ[_VARIABLE] = ",
    "os.environ[name] = ",
    "threading.excepthook = ",
)


def sources():
    """The modules of the package by their names within it."""
    for path in sorted(PACKAGE.rglob("*.py")):
        yield ".".join(path.relative_to(PACKAGE).with_suffix("").parts), path.read_text(encoding="utf-8")


@functools.cache
def trees():
    return {module: ast.parse(source) for module, source in sources()}


def variables(tree):
    """The variables of a module: what it assigns to a name in lower case, other than loggers and functions."""
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and not NO_STATE.search(ast.unparse(node)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = [target.id for target in targets if isinstance(target, ast.Name)]
            yield from (name for name in names if name.lstrip("_")[:1].islower() and not name.startswith("__"))


def names_put_back(tree):
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and any(ast.unparse(one) == "puts_back" for one in node.decorator_list):
            yield from (name.id for name in ast.walk(node) if isinstance(name, ast.Name))


def documented():
    """The rows of the tables of state: the names in their first two columns, and the last column."""
    for first, second, last in rows("docs/process_state.md"):
        yield re.findall(r"`([^`]+)`", first), re.findall(r"`([^`]+)`", second), last


def test_every_variable_of_a_module_is_in_the_table():
    found = {f"{module}.{name}" for module, tree in trees().items() for name in variables(tree)}
    table = {name for names, _, _ in documented() for name in names if re.search(r"\w\._[a-z]\w+$", name)}
    assert found == table


def test_reset_puts_back_what_the_table_says():
    put_back = {module: {*names_put_back(tree)} for module, tree in trees().items()}
    for names, _, last in documented():
        for name in names:
            module, _, variable = name.rpartition(".")
            if module in put_back and variable in variables(trees()[module]):
                assert (variable in put_back[module]) == ("`reset()`" in last), name


def test_every_module_that_changes_the_process_is_in_the_table():
    changing = {module for module, source in sources() if any(one in source for one in CHANGES)}
    modules = {module for module, _ in sources()}
    table = {place for _, places, _ in documented() for place in places if place in modules}
    assert {module for module in changing if module.split(".")[0] not in OWN_PROCESSES} == table


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("_cache = {}", ["_cache"]),
        ("_seen: set[str] = set()", ["_seen"]),
        ("_LIMIT = 3", []),
        ("Names = list[str]", []),
        ("log = logging.getLogger('x')", []),
        ("key = 'key {}'.format", []),
        ("__all__ = []", []),
    ],
)
def test_a_variable_is_known_by_its_name(source, expected):
    assert [*variables(ast.parse(source))] == expected


@pytest.fixture(autouse=True)
def fresh_process():
    reset()
    yield
    reset()


def test_reset_leaves_the_job_and_forgets_it(caplog):
    before = sys.excepthook
    DistributedManager.initialize(device="cpu")
    hook.install(logger.error)
    hook.end_job_at_exit(lambda: None)
    assert sys.excepthook is not before
    tracking.TrackedWait("barrier").__enter__()
    tracking.Restricted("on_rank(0)", frozenset({0})).__enter__()
    pending_work.register(lambda: None)
    reset()
    assert not DistributedManager.is_initialized()
    assert sys.excepthook is before
    assert not hook.has_failed()
    assert (tracking.waits(), tracking.restriction(), tracking.is_outside(), tracking.describe_here()) == (
        [],
        None,
        False,
        "",
    )
    assert not pending_work.is_anything_left()
    logger.warning("nobody")
    assert caplog.messages[-1] == "nobody"


def test_reset_silences_a_hook_that_another_one_wraps(monkeypatch):
    told = []
    monkeypatch.setattr(sys, "excepthook", lambda *_: None)
    hook.install(told.append)
    wrapped = sys.excepthook
    monkeypatch.setattr(sys, "excepthook", lambda *error: wrapped(*error))
    reset()
    sys.excepthook(ValueError, ValueError("boom"), None)
    assert told == []


def test_reset_within_a_wait_or_a_restricted_region_is_forgotten_at_its_end():
    with tracking.TrackedWait("barrier"), tracking.Restricted("on_rank(0)", frozenset({0})):
        reset()
    assert (tracking.waits(), tracking.restriction(), tracking.describe_here()) == ([], None, "")


@ranks(2, manager=False)
def test_reset_stops_the_watcher(monkeypatch):
    monkeypatch.setenv("DISTMAN_WATCH", "1")
    DistributedManager.initialize().barrier("watched")
    assert is_watching()
    reset()
    assert not is_watching()
    assert "distman-watcher" not in {thread.name for thread in threading.enumerate()}
    assert signal.getsignal(signal.SIGURG) == signal.SIG_DFL


def test_reset_waits_for_background_writes_and_tells_of_their_errors(tmp_path, caplog):
    goes_on = threading.Event()

    def fail():
        goes_on.wait()
        raise OSError("disk full")

    write = _background.BackgroundWrite(tmp_path, fail)
    goes_on.set()
    reset()
    assert "failed: OSError('disk full')" in caplog.text
    _background.refuse_after_failure(tmp_path)
    assert write.error is not None


def test_an_error_keeps_nothing_else_from_being_put_back(monkeypatch):
    done = []
    monkeypatch.setattr("distman._base.process_state._functions", [lambda: done.append("first")])

    @puts_back
    def fail():
        raise OSError("no")

    puts_back(lambda: done.append("last"))
    with pytest.raises(OSError, match="no"):
        reset()
    assert done == ["last", "first"]
