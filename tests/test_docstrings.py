"""The docstrings of public names are whole: all parameters, what is returned, and an example, which is run.

An example is needed by every public class and function, and by every method with arguments. Properties and methods
without arguments are covered by the example of their class; what overrides a method of a public base, by that base;
methods without a body, which others write, by their class's. Its docstring says what all events of a training get.
"""

import doctest
import functools
import importlib
import inspect
import io
import pydoc
import re
from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from torch.utils.data import TensorDataset

from distman import DistributedManager
from distman.environments import LAUNCHERS
from distman.testing import ranks

from .launch import preloaded
from .test_docs import REPOSITORY
from .test_package import documented, exports, modules, own_modules

ON_TWO_RANKS = "Example on two ranks:"
FINDER = doctest.DocTestFinder()
IMPORTED = {"torch": torch, "TensorDataset": TensorDataset}  # which examples leave out, as they do public names
NAMES = {name: value for module in own_modules() for name, value in exports(module).items()}


def parameters(value):
    """The names of a function's parameters; of a class those that its own ``__init__`` takes."""
    function = inspect.unwrap(value.__init__ if inspect.isclass(value) else value)
    own = inspect.signature(function).parameters if inspect.isfunction(function) else {}
    return [name for name in own if name not in ("self", "cls", "handler")]


def section(docstring, title):
    """The lines of a section, without what belongs to others."""
    found = re.search(rf"^{title}:\n((?:(?: .*)?\n)*)", docstring + "\n", re.MULTILINE)
    return found[1] if found else ""


def described(docstring):
    names = re.findall(r"^    (\w+(?:, \w+)*):", section(docstring, "Args"), re.MULTILINE)
    return [name for listed in names for name in listed.split(", ")]


def overrides(name, value):
    """Whether a method has a public base whose docstring says it all."""
    return any(value.__name__ in vars(base) for base in public_bases(owner_of(name, value)))


def owner_of(name, value):
    """The class that a method is in; of a function, None's."""
    module, _, qualname = name.removesuffix(f".{value.__name__}").rpartition(".")
    owner = getattr(importlib.import_module(module), qualname, None) if module else None
    return owner if inspect.isclass(owner) else type(None)


def public_bases(cls):
    return [base for base in cls.__mro__[1:] if base in NAMES.values()]


def needs_example(name, value):
    if inspect.isclass(value) or "." not in value.__qualname__:
        return True
    is_for_others_to_write = inspect.unwrap(value).__code__.co_code == without_body.__code__.co_code
    return bool(parameters(value)) and not overrides(name, value) and not is_for_others_to_write


def without_body():
    """Do nothing."""


def is_function(value):
    return inspect.isroutine(value)


def returns_something(value):
    return inspect.signature(inspect.unwrap(value)).return_annotation not in (None, "None", inspect.Signature.empty)


def test_all_parameters_are_described_in_their_order():
    functions = {name: one for name, one in documented().items() if is_function(one) and not overrides(name, one)}
    found = {name: (parameters(value), described(inspect.getdoc(value))) for name, value in functions.items()}
    assert {name: pair for name, pair in found.items() if pair[0] != pair[1]} == {}


def test_what_is_returned_is_said_by_the_summary_or_a_section():
    texts = {name: inspect.getdoc(value) for name, value in documented().items() if is_function(value)}
    told = {name: "eturn " in text.partition("\n\n")[0] or section(text, "Returns") for name, text in texts.items()}
    silent = [name for name, is_told in told.items() if not is_told]
    assert [name for name in silent if returns_something(documented()[name])] == []


def test_what_is_returned_does_not_begin_with_what_is_taken_for_a_type():
    """Napoleon shows what stands before a colon in the first line as the type of the result."""
    lines = {name: section(inspect.getdoc(value), "Returns").partition("\n")[0] for name, value in documented().items()}
    assert [name for name, line in lines.items() if ":" in re.sub(r"``.*?``|:\w+:`.*?`", "", line)] == []


def test_there_is_an_example():
    texts = {name: inspect.getdoc(value) for name, value in documented().items() if needs_example(name, value)}
    assert [name for name, text in texts.items() if ">>>" not in section(text, "Example(?: on two ranks)?")] == []


@pytest.mark.parametrize(
    "inventory", sorted((REPOSITORY / "docs" / "inventories").glob("*.inv")), ids=lambda one: one.stem
)
def test_what_the_docs_link_to_is_there(inventory):
    first, project, _, *entries = inventory.read_text(encoding="utf-8").splitlines()
    assert (first, project) == ("# Sphinx inventory version 1", f"# Project: {inventory.stem}")
    assert entries == sorted(entries)
    kinds = {"class": type, "exception": type, "function": Callable, "mod": ModuleType, "data": object}
    for name, kind, page in map(str.split, entries):
        assert isinstance(pydoc.locate(name), kinds[kind])
        assert page.endswith(".html")


@functools.cache
def all_examples():
    found = [test for name in modules() for test in FINDER.find(importlib.import_module(name), name)]
    return [test for test in found if test.examples]


def examples(*, on_ranks):
    return [test for test in all_examples() if (ON_TWO_RANKS in test.docstring) == on_ranks]


def run(test, **names):
    """Return what an example gets wrong, as doctest tells it."""
    said = io.StringIO()
    test.globs = {**IMPORTED, **test.globs, **NAMES, **names}
    doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test, out=said.write)
    return said.getvalue()


@pytest.mark.parametrize("name", [test.name for test in examples(on_ranks=False)])
def test_an_example_runs(name, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(LAUNCHERS, "_records", dict(LAUNCHERS._records))  # one registers another
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # they show what a machine without a GPU says
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    if re.match(r"distman\.(_cli\.run|executor|errors\.Worker)", name):
        preloaded.stand_in(monkeypatch)
    (test,) = (one for one in examples(on_ranks=False) if one.name == name)
    try:
        assert run(test) == ""
    finally:
        DistributedManager.cleanup()


@ranks(2)
@pytest.mark.parametrize("name", [test.name for test in examples(on_ranks=True)])
def test_an_example_on_two_ranks_runs_with_the_same_output_on_both(name, rank, world_size, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (test,) = (one for one in examples(on_ranks=True) if one.name == name)
    assert run(test, rank=rank, world_size=world_size, manager=DistributedManager()) == ""
