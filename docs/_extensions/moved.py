"""``.. moved:: accelerate.PartialState``: a table of the names of another library, and of the new ones.

The rows are those of ``howto/moving_names.json``: old names, new names, and what differs or why there is no new one.
"""

import json
from pathlib import Path

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

NAMES = Path(__file__).parents[1] / "howto" / "moving_names.json"


class Moved(SphinxDirective):
    """The table."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Return the table."""
        self.env.note_dependency(str(NAMES))
        lines = [".. list-table::", "   :header-rows: 1", "", "   * - there", "     - here", "     - what differs"]
        for old, new, note in json.loads(NAMES.read_text(encoding="utf-8"))[self.arguments[0]]:
            cells = (literals(old.split()), literals(new.split(", ")) if new else "none", note.replace("`", "``"))
            lines += [f"   {'*' if index == 0 else ' '} - {cell}" for index, cell in enumerate(cells)]
        return self.parse_text_to_nodes("\n".join(lines))


def literals(names: list[str]) -> str:
    """Return names as code."""
    return ", ".join(f"``{name}``" for name in names)


def setup(app: Sphinx) -> None:
    """Make the directive known."""
    app.add_directive("moved", Moved)
