"""An exception in a worker as the text that pytest would have shown for it."""

from __future__ import annotations

import io
import os
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Literal, cast

import pytest
from _pytest import assertion
from _pytest._io import TerminalWriter
from _pytest.config import Config, _prepareconfig
from _pytest.terminal import TerminalReporter

_Style = Literal["long", "short", "native", "no", "value"]
_STYLES: dict[str, _Style] = {"auto": "long", "line": "short"}
_UNWANTED = ("cacheprovider", "capture", "faulthandler", "junitxml", "logging", "pastebin", "distman")


def describe_error(error: BaseException, style: str, *, shows_locals: bool) -> tuple[str, str]:
    """Return a headline and the full traceback, both as text.

    Text, because an exception may have a constructor or contents that do not survive a pickle.
    """
    headline = "".join(traceback.format_exception_only(error)).strip() or type(error).__name__
    pytest_style = _STYLES.get(style, cast("_Style", style))
    shown: list[str] = []
    problem = attempt(lambda: shown.append(_as_pytest_shows(error, pytest_style, shows_locals=shows_locals)))
    if problem is None:
        return headline, shown[0]
    plain = "".join(traceback.format_exception(error))
    return headline, f"{plain}\n(shown plainly: pytest's own form raised {type(problem).__name__})"


def attempt(call: Callable[[], object]) -> BaseException | None:
    """Run code of a test, or that shows objects of a test, and return what it raised, or None."""
    __tracebackhide__ = True
    try:
        call()
    except BaseException as error:  # noqa: BLE001 - the worker's border: every error of a test is a result
        return error
    return None


def _as_pytest_shows(error: BaseException, style: _Style, *, shows_locals: bool) -> str:
    shown = pytest.ExceptionInfo.from_exception(error).getrepr(style=style, showlocals=shows_locals)
    text = io.StringIO()
    writer = TerminalWriter(text)
    writer.hasmarkup = False
    shown.toterminal(writer)
    return text.getvalue().strip("\n")


@contextmanager
def explained_assertions(verbosity: int) -> Iterator[None]:
    """Let failing assertions in this process say what differs, as they do in pytest's own process."""
    config = _quiet_config(verbosity)
    item = SimpleNamespace(config=config, ihook=config.hook)
    # pytest's own wrapper around every test sets the hooks that the rewritten assertions call.
    wrapper = assertion.pytest_runtest_protocol(cast("pytest.Item", item))
    next(wrapper)
    yield
    wrapper.close()


def _quiet_config(verbosity: int) -> Config:
    """Return a pytest configuration that has no plugins of others, rewrites nothing and captures nothing."""
    for name in ("PYTEST_ADDOPTS", "PYTEST_PLUGINS"):
        os.environ.pop(name, None)
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    options = ["-c", os.devnull, f"--verbosity={verbosity}", "--color=no", "--assert=plain"]
    config = _prepareconfig([*options, *(part for name in _UNWANTED for part in ("-p", f"no:{name}"))])
    config.option.assertmode = "rewrite"
    config.pluginmanager.register(TerminalReporter(config, io.StringIO()), "terminalreporter")
    return config
