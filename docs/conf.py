"""Configuration of the documentation; built with warnings as errors."""

import importlib.metadata

project = "distman"
author = "The distman authors"
release = importlib.metadata.version("distman")
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
exclude_patterns = ["_build", "examples", "benchmarks/*.py"]
html_theme = "furo"
html_title = f"distman {release}"
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
napoleon_google_docstring = True
napoleon_custom_sections = ["Source"]
myst_heading_anchors = 3
