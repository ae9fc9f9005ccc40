"""``.. moved:: accelerate.PartialState``: a table of the names of another library, and of the new ones.

The rows are those of ``moved_names.json`` in the package, whose errors name them too: old names, new names, and what
differs, or why nothing replaces them.
What is kept of NNHandler comes from the package that stands in its place.
"""

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from distman._base.moved_names import TABLE, read_tables
from distman.compat import nnhandler


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
    tables = read_tables()
    kept = {
        "NNHandler": nnhandler.__all__,
        "NNHandler.NNHandler": [name for name in dir(nnhandler.NNHandler) if not name.startswith("_")],
    }.get(library)
    if kept is None:
        return tables[library]
    home = f"distman.compat.nnhandler{library.removeprefix('NNHandler')}"
    return [[" ".join(kept), home, ""], *tables[library]]


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
