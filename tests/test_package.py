"""What holds for every module of the package: its exports, their docstrings, and the map for contributors."""

import dataclasses
import functools
import importlib
import inspect
import pkgutil
import pydoc
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

import distman
from distman._base.public_names import PACKAGES
from distman._version import VERSION

from .launch.preloaded import PYTHON
from .launch.processes import launch
from .mutants import MUTANTS

PACKAGE = Path(distman.__file__).parent
REPOSITORY = Path(__file__).parents[1]  # the package is elsewhere where a wheel is tested
README = REPOSITORY / "README.md"
MAP = REPOSITORY / "docs" / "contributing.md"
RUNS_ON_IMPORT = {"distman.__main__"}


def modules():
    names = [module.name for module in pkgutil.walk_packages(distman.__path__, "distman.")]
    return ["distman", *(name for name in names if name not in RUNS_ON_IMPORT)]


def public_modules():
    """The modules whose names users may import: no part of their path begins with an underscore."""
    return [name for name in modules() if not re.search(r"\._", name)]


def own_modules():
    """The public modules whose names are ours: those of `compat` are described where ours are."""
    return [name for name in public_modules() if not name.startswith("distman.compat")]


def exports(module_name):
    module = importlib.import_module(module_name)
    return {name: getattr(module, name) for name in getattr(module, "__all__", ())}


def own(module_name):
    """The public functions and classes that a module defines itself, except pytest's hooks."""
    return {
        name
        for name, value in vars(importlib.import_module(module_name)).items()
        if (inspect.isfunction(value) or inspect.isclass(value)) and value.__module__ == module_name
        if not name.startswith(("_", "pytest_"))
    }


@functools.cache
def documented():
    """Every exported function and class, and the public methods of the classes, once: name and object."""
    found = {}
    for module_name in own_modules():
        for value in exports(module_name).values():
            if inspect.isroutine(value) or inspect.isclass(value):
                found[f"{value.__module__}.{value.__qualname__}"] = value
            if inspect.isclass(value):
                found |= {f"{value.__module__}.{value.__qualname__}.{name}": method for name, method in methods(value)}
    return {name: value for name, value in sorted(found.items()) if name.startswith("distman.")}


def methods(cls):
    """The public methods of a class and its own bases, bound or not; properties and what torch calls are none."""
    if issubclass(cls, torch.autograd.Function):
        return
    bases = [base for base in reversed(cls.__mro__) if base.__module__.startswith("distman.")]
    for name, value in {name: value for base in bases for name, value in vars(base).items()}.items():
        function = value.__func__ if isinstance(value, classmethod | staticmethod) else value
        is_torchs = issubclass(cls, torch.nn.Module) and name == "forward"
        if not name.startswith("_") and isinstance(function, types.FunctionType) and not is_torchs:
            yield name, function


def sort_key(name):
    """Order of ruff's RUF022: CONSTANTS, then Classes, then functions; numbers inside names by value."""
    kind = 0 if name.isupper() else 1 if name[0].isupper() else 2
    return kind, [(part.isdigit(), int(part) if part.isdigit() else part) for part in re.split(r"(\d+)", name)]


@pytest.mark.parametrize("module_name", public_modules())
def test_all_names_of_a_public_module_exist_and_are_sorted(module_name):
    names = list(exports(module_name))
    assert names == sorted(set(names), key=sort_key) != []


@pytest.mark.parametrize("module_name", public_modules())
def test_what_a_public_module_does_not_export_has_an_underscore(module_name):
    assert own(module_name) <= set(exports(module_name))


def test_a_private_module_exports_nothing():
    """Its whole content is internal, so a list of public names would only be in the way."""
    private = set(modules()) - set(public_modules())
    assert {name for name in private if hasattr(importlib.import_module(name), "__all__")} == set()


def test_nothing_outside_of_a_public_package_imports_its_private_modules():
    wrong = []
    for path in sorted(PACKAGE.rglob("*.py")):
        own = path.relative_to(PACKAGE).parts[0]
        names = re.findall(r"^ *from (distman\.[\w.]+) import", path.read_text(encoding="utf-8"), re.MULTILINE)
        wrong += [(str(path), name) for name in names if re.match(rf"distman\.(?!_|{own}\.)\w+\._", name)]
    assert wrong == []


@pytest.mark.parametrize("module_name", modules())
def test_every_module_says_in_a_sentence_what_it_is(module_name):
    summary = (importlib.import_module(module_name).__doc__ or "").strip().split("\n\n")[0]
    assert summary.endswith((".", "::", ":"))


def test_every_exported_function_and_class_has_a_docstring():
    assert [name for name, value in documented().items() if not (inspect.getdoc(value) or "").strip()] == []


def test_every_docstring_of_a_function_says_after_its_summary_who_takes_part():
    functions = {name: value for name, value in documented().items() if inspect.isroutine(value)}
    assert [name for name, function in functions.items() if not says_who_takes_part(function)] == []


def says_who_takes_part(function):
    _, *paragraphs = inspect.getdoc(function).split("\n\n")
    return bool(paragraphs) and re.match(r"(Local|Collective)\b", paragraphs[0]) is not None


def test_the_checks_above_see_functions_methods_and_classes():
    kinds = {type(value).__name__ for value in documented().values()}
    assert {"function", "type"} <= kinds
    assert "distman.environments._detect.detect" in documented()
    assert "distman.manager.DistributedManager.initialize" in documented()
    assert dataclasses.is_dataclass(documented()["distman.environments._base.LaunchEnvironment"])


@pytest.mark.parametrize("name", distman.__all__)
def test_every_name_of_page_one_is_there_and_seen_by_dir(name):
    assert getattr(distman, name) is not None
    assert name in dir(distman)


@pytest.mark.parametrize(
    "name",
    [
        "ProcessGroupConfig",
        "ProcessGroupNode",
        "initialize_ddp",
        "is_env_distributed",
        "parallelize_on_gpus",
        "should_use_distributed",
    ],
)
def test_a_name_that_other_libraries_have_is_found_and_not_shown(name):
    exec(f"from distman import {name}")  # noqa: S102 - the statement is what is tested
    assert getattr(distman, name).__name__ == name
    assert name not in dir(distman)


def test_a_name_that_is_not_there_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'distman' has no attribute 'DistributedManger'"):
        distman.DistributedManger  # noqa: B018 - the access is the test


@pytest.mark.parametrize("module_name", ["distman", "distman.environments", "distman.testing", "distman._cli"])
def test_an_import_loads_neither_torch_nor_numpy_nor_mpi4py(module_name):
    code = f"import sys, {module_name}; print(*{{'torch', 'numpy', 'mpi4py'}} & set(sys.modules))"
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (finished.returncode, finished.stdout.strip(), finished.stderr) == (0, "", "")


def test_the_tree_on_the_page_for_contributors_names_what_there_is():
    (tree,) = re.findall(r"^distman/\n((?:  .*\n|\n)+?)tests/", MAP.read_text(encoding="utf-8"), re.MULTILINE)
    named = {line.split()[0] for line in tree.splitlines() if re.match(r"  \S", line)}
    there = {path.name + "/" * path.is_dir() for path in PACKAGE.iterdir() if path.name != "__pycache__"}
    assert named == there - {"__main__.py", "py.typed"}


def test_no_message_names_the_package_on_pypi_that_is_another_one():
    """``pip install distman`` would install what somebody else has published under that name."""
    sources = [*PACKAGE.rglob("*.py"), *(REPOSITORY / "docs").rglob("*.md"), README]
    wrong = re.compile(r"pip3? install ([^\n`]* )?['\"]?distman\b(?!-torch)")
    across_lines = re.compile(r'" *\n *f?"')
    texts = {source: across_lines.sub("", source.read_text(encoding="utf-8")) for source in sources}
    assert [source.name for source, text in texts.items() if wrong.search(text)] == []


def test_the_package_says_its_version():
    assert distman.__version__ == VERSION


def test_the_help_of_the_package_fits_two_screens_and_names_all():
    shown = pydoc.plain(pydoc.render_doc(distman))
    assert len(shown.splitlines()) <= 100
    assert [name for name in distman.__all__ if not re.search(rf"\b{name}\b", shown)] == []


def test_the_package_shows_its_public_names_and_nothing_else():
    shown = {name for name in dir(distman) if not name.startswith("__")}
    assert shown == {*distman.__all__, *PACKAGES}
    assert {module.removeprefix("distman.") for module in public_modules() if module.count(".") == 1} == {*PACKAGES}


@pytest.mark.parametrize("code", ["distman.collectives.all_gather_v", "distman.fft.fft2", "distman.data"])
def test_public_modules_are_there_without_an_import_of_their_own(code):
    fresh = launch([PYTHON, "-c", f"import distman; {code}"])
    assert (fresh.returncode, fresh.stderr) == (0, "")


@pytest.mark.parametrize("name", ["all_gather_v", "NNHandler", "distributed_loader", "LAUNCHERS"])
def test_a_name_that_is_elsewhere_is_found(name):
    with pytest.raises(ImportError, match=rf"{name} is in distman\.(\w+)\. Write: from distman\.\1 import {name}"):
        exec(f"from distman import {name}")  # noqa: S102 - the statement is what is tested
    assert not hasattr(distman, name)


@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_a_mutant_finds_its_line_and_its_tests(mutant):
    assert mutant.text(REPOSITORY)
    assert all((REPOSITORY / "tests" / one.partition("::")[0]).exists() for one in mutant.tests)
