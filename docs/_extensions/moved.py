"""``.. moved:: accelerate.PartialState``: a table of the names of another library, and of the new ones.

The rows are those of ``moved_names.json`` in the package, whose errors name them too: old names, new names, and what
differs, or why nothing replaces them.
Those of NNHandler come from the package that stands in its place, which lists what it refuses, and what it says then.
"""

import inspect
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from distman._base.moved_names import TABLE
from distman.compat import nnhandler
from distman.compat.nnhandler._names import REFUSED, REFUSED_METHODS


class Moved(SphinxDirective):
    """The table."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Return the table."""
        self.env.note_dependency(str(TABLE))
        lines = [".. list-table::", "   :header-rows: 1", "", "   * - there", "     - here", "     - what differs"]
        for old, new, note in rows(self.arguments[0]):
            cells = (literals(old.split()), literals(new.split(", ")) if new else "none", text(note))
            lines += [f"   {'*' if index == 0 else ' '} - {cell}" for index, cell in enumerate(cells)]
        return self.parse_text_to_nodes("\n".join(lines))


def rows(library: str) -> list[list[str]]:
    """Return old names, new names and a sentence, of each row."""
    if library == "NNHandler":
        return rows_of_compat("distman.compat.nnhandler", nnhandler.__all__, REFUSED)
    if library == "NNHandler.NNHandler":
        methods = [name for name, _ in inspect.getmembers(nnhandler.NNHandler) if not name.startswith("_")]
        return rows_of_compat("distman.compat.nnhandler.NNHandler", methods, REFUSED_METHODS)
    tables: dict[str, list[list[str]]] = json.loads(TABLE.read_text(encoding="utf-8"))
    return tables[library]


def rows_of_compat(home: str, kept: Iterable[str], refused: Mapping[str, str]) -> list[list[str]]:
    """Return what is kept under its name, and what is not, the names that have one reason together."""
    reasons = defaultdict(list)
    for name, reason in refused.items():
        reasons[reason].append(name)
    own = [name for name in kept if name not in refused]
    return [[" ".join(own), home, ""], *([" ".join(names), "", reason] for reason, names in reasons.items())]


def text(note: str) -> str:
    """Return a note with its code, in which alone underscores mean nothing to docutils."""
    parts = note.split("`")
    return "``".join(part if index % 2 else part.replace("_", r"\_") for index, part in enumerate(parts))


def literals(names: list[str]) -> str:
    """Return names as code."""
    return ", ".join(f"``{name}``" for name in names)


def setup(app: Sphinx) -> None:
    """Make the directive known."""
    app.add_directive("moved", Moved)
