"""Configuration of the documentation; built with warnings as errors."""

from distman.version import VERSION

project = "distman"
author = "The distman authors"
release = VERSION
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
exclude_patterns = ["_build", "examples", "benchmarks/*.py"]
html_theme = "furo"
html_title = f"distman {release}"
html_show_copyright = False
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
napoleon_google_docstring = True
napoleon_use_ivar = True
napoleon_custom_sections = ["Source"]
myst_heading_anchors = 3
