"""Configuration of the documentation; built with warnings as errors.

Names of Python and torch become links to their documentation, as far as ``inventories/`` says where they are; with
``-t online`` the sites themselves are asked, NumPy's too, which needs the network.
"""

import inspect
import re
import sys
from pathlib import Path

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.inspect import safe_getattr

from distman._version import VERSION

project = "distman"
author = "The distman authors"
release = VERSION
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
exclude_patterns = ["_build", "examples", "benchmarks/*.py"]
html_theme = "furo"
html_title = f"distman {release}"
html_show_copyright = False
html_static_path = ["_static"]
html_css_files = ["tables.css"]
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
maximum_signature_line_length = 88
napoleon_google_docstring = True
napoleon_use_ivar = True
napoleon_custom_sections = ["Source", "Example on two ranks"]
myst_heading_anchors = 3

sys.path.insert(0, str(Path(__file__).parent / "_extensions"))
extensions += ["sphinx.ext.intersphinx", "summary"]
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


def by_public_path(text: str) -> str:
    """Name classes by the package that users import them from, not by the private module that defines them."""
    for private, public in PUBLIC_PATHS.items():
        text = text.replace(private, public)
    return re.sub(r"\b(distman(?:\.[a-z]\w*)*)\._[\w.]*\.([A-Z]\w*)", r"\1.\2", text)


def shorten_signature(
    _app: Sphinx, _what: str, _name: str, _value: object, _options: object, signature: str | None, returns: str | None
) -> tuple[str | None, str | None]:
    """Show public paths in signatures, and no defaults that Sphinx takes for a mistake in the whole of it."""
    signature = signature and signature.replace("<factory>", "...")
    return signature and by_public_path(signature), returns and by_public_path(returns)


def shorten_docstring(_app: Sphinx, _what: str, _name: str, _value: object, _options: object, lines: list[str]) -> None:
    """Show public paths in the types of attributes, which napoleon adds to the docstring."""
    lines[:] = [by_public_path(line) for line in lines]


def get_member(cls: type, name: str, *default: object) -> object:
    """Find properties, too, that refuse to be asked of a class."""
    try:
        return safe_getattr(cls, name)
    except AttributeError:
        return inspect.getattr_static(cls, name, *default)


def setup(app: Sphinx) -> None:
    """Make all of it part of the build."""
    app.add_autodoc_attrgetter(type, get_member)
    app.connect("doctree-resolved", let_names_break)
    app.connect("autodoc-process-signature", shorten_signature)
    app.connect("autodoc-process-docstring", shorten_docstring, priority=800)  # after napoleon
