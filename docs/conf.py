"""Configuration of the documentation; built with warnings as errors.

Names of Python and torch become links to their documentation, as far as ``inventories/`` says where they are; with
``-t online`` the sites themselves are asked, NumPy's too, which needs the network.
"""

import inspect
import re
import sys
from html import escape
from pathlib import Path
from types import UnionType

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.inspect import safe_getattr
from sphinx.writers.html5 import HTML5Translator

from distman._version import VERSION

DOCS = Path(__file__).parent
project = "distman"
author = "The distman authors"
release = VERSION
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
exclude_patterns = ["_build", "examples", "benchmarks/*.py"]
html_theme = "furo"
html_title = "distman"
html_show_copyright = False
html_static_path = ["_static"]
html_css_files = ["tables.css", "diagrams.css", "code.css", "copy.css", "versions.css", "headings.css"]
html_js_files = [("copy.js", {"defer": "defer"})]
html_search_scorer = str(DOCS / "search_scorer.js")
templates_path = ["_templates"]
sidebar = ["brand", "versions", "search", "scroll-start", "navigation", "scroll-end"]
html_sidebars = {"**": [f"sidebar/{part}.html" for part in sidebar]}
# The headings of the changelog are the list of versions: each with "unreleased" or its date, newest first.
changelog = (DOCS.parent / "CHANGELOG.md").read_text(encoding="utf-8")
html_context = {"versions": re.findall(r"^## (\S+) \((.+)\)$", changelog, re.MULTILINE)}
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
maximum_signature_line_length = 88
napoleon_google_docstring = True
napoleon_use_ivar = True
napoleon_custom_sections = ["Source", "Example on two ranks"]
myst_heading_anchors = 3

sys.path.insert(0, str(Path(__file__).parent / "_extensions"))
extensions += ["moved", "sphinx.ext.intersphinx", "summary"]
sites = {"python": "https://docs.python.org/3", "torch": "https://docs.pytorch.org/docs/stable"}
intersphinx_mapping = {name: (site, f"inventories/{name}.inv") for name, site in sites.items()}
if tags.has("online"):  # noqa: F821 - Sphinx puts it here
    sites["numpy"] = "https://numpy.org/doc/stable"
    intersphinx_mapping = {name: (site, None) for name, site in sites.items()}

PUBLIC_PATHS = {
    "concurrent.futures._base.Future": "concurrent.futures.Future",
    "torch._C.Generator": "torch.Generator",
    "torch.distributed.distributed_c10d.ProcessGroup": "torch.distributed.ProcessGroup",
    "torch.nn.modules.module.Module": "torch.nn.Module",
    "torch.utils.data.dataset.Dataset": "torch.utils.data.Dataset",
}


def let_names_break(_app: Sphinx, doctree: nodes.document, _page: str) -> None:
    """Let long names in tables break after underscores and dots, and before capitals."""
    for literal in [one for cell in doctree.findall(nodes.entry) for one in cell.findall(nodes.literal)]:
        parts = re.split(r"(?<=[_.])(?=[A-Za-z])|(?<=[a-z])(?=[A-Z][a-z])", literal.astext())
        literal.children = [nodes.Text(parts[0])]
        for part in parts[1:]:
            literal += [nodes.raw("", "<wbr>", format="html"), nodes.Text(part)]


def name_cells(_app: Sphinx, doctree: nodes.document, _page: str) -> None:
    """Note at each cell the head of its column, which a narrow screen shows beside it; two columns need no names."""
    for group in [group for group in doctree.findall(nodes.tgroup) if group["cols"] > 2]:
        heads = [head.astext() for row in group.findall(nodes.thead) for head in row.findall(nodes.entry)]
        for row in next(group.findall(nodes.tbody)).findall(nodes.row):
            for head, cell in zip(heads, row.findall(nodes.entry), strict=False):
                cell["column"] = head


class Translator(HTML5Translator):
    """Writes at each cell of a table the head of its column."""

    def starttag(self, node: nodes.Element, *arguments: object, **attributes: object) -> str:
        """Begin an element."""
        if isinstance(node, nodes.entry) and node.get("column"):
            attributes["data-column"] = node["column"]
        return super().starttag(node, *arguments, **attributes)


def draw_in_page(_app: Sphinx, doctree: nodes.document, _page: str) -> None:
    """Put diagrams into the page itself, where they take its colours and the search of a browser finds their words."""
    for image in list(doctree.findall(nodes.image)):
        if Path(image["uri"]).parent.name == "diagrams":
            drawing = (DOCS / image["uri"]).read_text(encoding="utf-8")
            said = f'<svg role="img" aria-label="{escape(image["alt"])}"'
            image.replace_self(nodes.raw("", drawing.replace("<svg", said, 1), format="html"))


def by_public_path(text: str) -> str:
    """Name classes by the package that users import them from, not by the private module that defines them."""
    for private, public in PUBLIC_PATHS.items():
        text = text.replace(private, public)
    return re.sub(r"\b(distman(?:\.[a-z]\w*)*)\._[\w.]*\.([A-Z]\w*)", r"\1.\2", text)


def shorten_signature(
    _app: Sphinx, _what: str, _name: str, value: object, _options: object, signature: str | None, returns: str | None
) -> tuple[str | None, str | None]:
    """Show public paths in signatures, no defaults that Sphinx takes for a mistake, and none of a protocol."""
    signature = "" if getattr(value, "_is_protocol", False) else signature and signature.replace("<factory>", "...")
    return signature and by_public_path(signature), returns and by_public_path(returns)


def shorten_docstring(_app: Sphinx, _what: str, _name: str, value: object, _options: object, lines: list[str]) -> None:
    """Show public paths in the types of attributes, which napoleon adds, and nothing that Python says of unions."""
    lines[:] = [] if isinstance(value, UnionType) else [by_public_path(line) for line in lines]


def get_member(cls: type, name: str, *default: object) -> object:
    """Find properties, too, that refuse to be asked of a class."""
    try:
        return safe_getattr(cls, name)
    except AttributeError:
        return inspect.getattr_static(cls, name, *default)


def setup(app: Sphinx) -> None:
    """Make all of it part of the build."""
    app.add_autodoc_attrgetter(type, get_member)
    app.set_translator("html", Translator)
    app.connect("doctree-resolved", name_cells, priority=400)  # before the heads, too, may break
    app.connect("doctree-resolved", let_names_break)
    app.connect("doctree-resolved", draw_in_page)
    app.connect("autodoc-process-signature", shorten_signature)
    app.connect("autodoc-process-docstring", shorten_docstring, priority=800)  # after napoleon
