"""The public modules, and where a name is that somebody looks for at the top of the package."""

from __future__ import annotations

import ast
import importlib.util
import opcode
from pathlib import Path
from types import FrameType

from distman._base.moved_names import new_name

PACKAGES = (
    "checkpoint",
    "collectives",
    "compat",
    "data",
    "decorators",
    "domain",
    "environments",
    "errors",
    "executor",
    "fft",
    "handler",
    "manager",
    "mappings",
    "metrics",
    "score",
    "testing",
    "topology",
    "training",
)
"""The public modules, imported when they are asked for."""


def missing_name(name: str, caller: FrameType, module: str = "distman") -> Exception:
    """Return the error for a name that a module does not have, and say where it is, or what it is called here."""
    homes = [] if name.startswith("_") else [package for package in PACKAGES if name in _names_of(package)]
    if not homes:
        text = f"module {module!r} has no attribute {name!r}"
        hint = new_name(name)
        return error_of_missing(f"{text}. {hint}", caller) if hint else AttributeError(text)
    hint = f"{name} is in distman.{homes[0]}. Write: from distman.{homes[0]} import {name}"
    return error_of_missing(hint, caller)


def error_of_missing(text: str, caller: FrameType) -> Exception:
    """Return the error for a name that a module does not have, of the type that shows its text where it is raised."""
    is_imported = caller.f_code.co_code[caller.f_lasti] == opcode.opmap["IMPORT_FROM"]
    return (ImportError if is_imported else AttributeError)(text)


def _names_of(package: str) -> list[str]:
    """Return the public names of a module without importing it, which may take a second."""
    spec = importlib.util.find_spec(f"distman.{package}")
    if spec is None or spec.origin is None:
        return []
    for statement in ast.parse(Path(spec.origin).read_bytes()).body:
        if isinstance(statement, ast.Assign) and [*map(ast.unparse, statement.targets)] == ["__all__"]:
            return list(ast.literal_eval(statement.value))
    return []
