"""Private names of torch stand in one module, so that a new release of torch is met there."""

import ast
from pathlib import Path

import pytest

import distman

PACKAGE = Path(distman.__file__).parent
HOME = PACKAGE / "_torch_internals.py"

# Private names of others than torch that the package touches: of the standard library, and of pytest.
NOT_OF_TORCH = {
    "_accept",
    "_bootstrap",
    "_shutdown",
    "_current_exceptions",
    "_current_frames",
    "_exit",
    "_fields",
    "_getframe",
    "_make",
    "_option_string_actions",
    "_register_atexit",
    "_replace",
    "_use_item_location",
    "_xoptions",
}


def is_private(name):
    return name.startswith("_") and not name.startswith("__")


def declared(tree):
    """The private names that a module makes itself: functions, classes, variables, fields."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_own(node.value):
            yield node.attr
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


def is_own(node):
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def parameters(tree):
    return (node.arg for node in ast.walk(tree) if isinstance(node, ast.arg))


def private_names_of_torch(tree, known):
    """What a module touches of torch though it is private, each with its line."""
    names_known, parameters_known = known
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            names = [*node.module.split("."), *(alias.name for alias in node.names)]
        elif isinstance(node, ast.Import):
            names = [part for alias in node.names if alias.name.startswith("torch.") for part in alias.name.split(".")]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("torch."):
            names = node.value.split(".")
        elif isinstance(node, ast.Attribute):
            names = {node.attr} - names_known
        elif isinstance(node, ast.keyword):
            names = {node.arg or ""} - parameters_known
        else:
            continue
        yield from (f"{name} in line {node.lineno}" for name in names if is_private(name))


def tree_of(path):
    return ast.parse(path.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def known():
    """The private names, and names of parameters, that the package may touch: its own, and those of a few others."""
    trees = [tree_of(path) for path in PACKAGE.rglob("*.py")]
    return (
        NOT_OF_TORCH.union(*map(declared, trees)),
        NOT_OF_TORCH.union(*map(parameters, trees)),
    )


def test_one_module_touches_private_names_of_torch(known):
    others = [path for path in sorted(PACKAGE.rglob("*.py")) if path != HOME]
    found = {str(path.relative_to(PACKAGE)): [*private_names_of_torch(tree_of(path), known)] for path in others}
    assert {path: names for path, names in found.items() if names} == {}


@pytest.mark.parametrize(
    "line",
    [
        "from torch.utils._pytree import tree_map",
        "from torch.distributed.distributed_c10d import _world",
        "import torch.distributed._functional_collectives as functional",
        "torch._foreach_norm(tensors)",
        "group._device_types",
        "DeviceMesh('cpu', ranks, _rank=0)",
        "sys.modules.get('torch._dynamo.eval_frame')",
    ],
)
def test_a_private_name_of_torch_is_found(known, line):
    (found,) = private_names_of_torch(ast.parse(line), known)
    assert found.endswith("in line 1")


def test_that_module_touches_some(known):
    assert len([*private_names_of_torch(tree_of(HOME), known)]) > 10
