"""``.. summary:: distman.fft``: a table of what a module or class offers, a line each, which links to the rest.

Without names below it the table has all: the names of ``__all__``, or the public members of a class, its own first.
"""

import importlib
import inspect

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective


class Summary(SphinxDirective):
    """The table: each name, and the first paragraph of its docstring."""

    required_arguments = 1
    has_content = True

    def run(self) -> list[nodes.Node]:
        """Return the table."""
        path = self.arguments[0]
        owner = find(path)
        names = " ".join(self.content).split() or members(owner)
        rows = [f"   * - :py:obj:`~{path}.{name}`\n     - {first_paragraph(owner, name)}" for name in names]
        context = [] if isinstance(owner, type) else [f".. py:currentmodule:: {path}", ""]  # of names in docstrings
        return self.parse_text_to_nodes("\n".join([*context, ".. list-table::", "   :class: summary", "", *rows]))


def find(path: str) -> object:
    """Return a module, or a class by the module that offers it."""
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError:
        module, _, name = path.rpartition(".")
        return getattr(importlib.import_module(module), name)


def members(owner: object) -> list[str]:
    """Return what a module or class offers."""
    if not isinstance(owner, type):
        return list(owner.__all__)
    own = [base for base in owner.__mro__ if base.__module__.startswith("distman.")]
    return [name for base in own for name in vars(base) if not name.startswith("_")]


def first_paragraph(owner: object, name: str) -> str:
    """Return the first paragraph of a docstring."""
    value = inspect.getattr_static(owner, name) if isinstance(owner, type) else getattr(owner, name)
    text = inspect.getdoc(value) or ""
    return " ".join(text.partition("\n\n")[0].split())


def setup(app: Sphinx) -> None:
    """Make the directive known."""
    app.add_directive("summary", Summary)
