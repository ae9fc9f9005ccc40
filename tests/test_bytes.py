"""Where bytes become objects, or names of things to call: the table on the security page has every place."""

import ast
import re

from .test_package import PACKAGE, REPOSITORY

CALLS = {
    "__import__",
    "Unpickler",
    "compile",
    "eval",
    "exec",
    "find_class",
    "get_record",
    "import_module",
    "load",
    "load_file",
    "load_module",
    "loads",
    "run_module",
    "run_path",
    "spec_from_file_location",
    "unsafe_load",
}
"""Names of functions and methods that make objects of bytes, or call or import what they are told."""

OF_NO_ACCOUNT = {
    "json.loads": "plain values alone",
    "command.load": "a method of the command line's own parser, by its own table",
    "self.load": "the same",
    "subparsers.choices[name].load": "the same",
    "re.compile": "expressions of this package",
    "module.eval": "torch's switch from training to evaluation",
    "model.eval": "the same",
    "layer.eval": "the same",
    "self.module.compile": "torch.compile of a model",
    "torch.compile": "the same",
    "auto_save.load": "calls checkpoint.load, which is listed",
    "handler.sampler.load": "the same",
    "self._archive.load": "the same",
    "checkpoint.load": "this package's own, which is listed by what it calls",
    "load": "the same",
}
"""Calls of these names that read nothing which others wrote, or that are listed by what they call."""


def entries():
    """Module and called name of every place in the package."""
    found = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [node.func] if isinstance(node, ast.Call) else node.bases if isinstance(node, ast.ClassDef) else []
            for name in map(ast.unparse, names):
                short = name.rpartition(".")[2]
                if (short in CALLS or short == "entry_points") and name not in OF_NO_ACCOUNT:
                    found.add((str(path.relative_to(PACKAGE)), re.sub(r"\(.*\)", "()", name)))
    return found


def test_the_security_page_lists_every_place():
    page = (REPOSITORY / "docs" / "bytes.md").read_text()
    rows = re.findall(r"^\| `([\w/.]+\.py)`: (.*?) \|", page, re.MULTILINE)
    listed = {(path, name) for path, names in rows for name in re.findall(r"`([\w.()]+)`", names)}
    assert entries() == listed


def test_every_row_says_what_protects_it():
    page = (REPOSITORY / "docs" / "bytes.md").read_text()
    for row in re.findall(r"^\| `[\w/.]+\.py`: .*$", page, re.MULTILINE):
        assert re.fullmatch(r"\| [^|]+ \| [^|]+ \| [^|]+ \|", row), row
