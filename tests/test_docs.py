"""What the documentation says is so: its links, tables and pictures, and the examples of docstrings."""

import doctest
import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

from distman.environments import LAUNCHERS, detect
from distman.testing import fake_environment

from .test_package import modules

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10, where pytest brings it along
    import tomli as tomllib

REPOSITORY = Path(__file__).parents[1]
PAGES = [
    REPOSITORY / "README.md",
    *sorted(page for page in (REPOSITORY / "docs").rglob("*.md") if "_build" not in page.parts),
]
FIELDS = {
    "rank": "rank",
    "size": "world_size",
    "local rank": "local_rank",
    "local size": "local_world_size",
    "node": "node_rank",
    "nodes": "num_nodes",
    "address": "main_address",
    "port": "main_port",
    "job id": "job_id",
}
NO_LAYERS = {"__main__"}


def read(page):
    return (REPOSITORY / page).read_text(encoding="utf-8")


def links(page):
    """Return the targets of the page's links and pictures."""
    for block in MarkdownIt().parse(page.read_text(encoding="utf-8")):
        for token in block.children or ():
            yield from (token.attrs[name] for name in ("href", "src") if name in token.attrs)


def rows(page):
    """Return the cells of the table rows of a page, without the heads of the tables."""
    tokens = MarkdownIt().enable("table").parse(read(page))
    inside = False
    for index, token in enumerate(tokens):
        inside = (inside or token.type == "tbody_open") and token.type != "tbody_close"
        if inside and token.type == "tr_open":
            cells = []
        elif inside and token.type == "td_open":
            cells.append(tokens[index + 1].content)
        elif inside and token.type == "tr_close":
            yield cells


def text_blocks(page):
    return [token.content for token in MarkdownIt().parse(read(page)) if (token.type, token.info) == ("fence", "text")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_relative_links_lead_to_files(page):
    targets = [target.partition("#")[0] for target in links(page) if not re.match(r"[a-z]+:", target)]
    assert [target for target in targets if target and not (page.parent / target).is_file()] == []


def test_links_are_found():
    assert "docs/launchers.md" in links(REPOSITORY / "README.md")
    assert "rendezvous.md" in links(REPOSITORY / "docs" / "variables.md")


def launcher_rows():
    return [row for row in rows("docs/launchers.md") if len(row) == 3 and row[0].strip("`") in LAUNCHERS]


def test_the_table_of_launchers_names_them_in_the_order_of_asking():
    asked = [sentence.split()[0] for sentence in detect({}).explanation if " was passed over: " in sentence]
    assert [row[0] for row in launcher_rows()] == [f"`{launcher}`" for launcher in [*asked, "single"]]
    assert {*asked, "single"} == {*LAUNCHERS}


@pytest.mark.parametrize("launcher", [launcher for launcher in LAUNCHERS if launcher != "single"])
def test_the_table_of_launchers_names_their_variables(launcher):
    (variables,) = (row[2] for row in launcher_rows() if row[0] == f"`{launcher}`")
    found = re.findall(r"([a-z ]+) ((?:`\w+`(?: or )?)+)(?:, |$)", variables)
    assert ", ".join(" ".join(pair) for pair in found) == variables
    module = importlib.import_module(f"distman.environments.{'bare' if launcher == 'env' else launcher}")
    documented = {FIELDS[field]: tuple(re.findall(r"`(\w+)`", names)) for field, names in found}
    assert documented == {field: names for field, names in module.FIELDS.items() if names}


def test_the_output_on_the_page_of_launchers_is_real():
    environ = {"PATH": os.environ["PATH"], **fake_environment("slurm", nodes=2, tasks=4)[3]}
    command = [sys.executable, "-m", "distman", "env"]
    output = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60, check=True).stdout
    (shown,) = text_blocks("docs/launchers.md")
    assert_shown(shown, output)


def assert_shown(shown, output):
    """Compare what a page shows with the output, but for white space and what "..." stands for."""
    output = " ".join(output.split())
    parts = [" ".join(part.split()) for part in re.split(r"^\s*\.\.\.$", shown, flags=re.MULTILINE)]
    for text in filter(None, parts):
        assert text in output
        output = output.partition(text)[2]


def test_the_table_of_variables_is_complete_and_has_no_others():
    sources = [*(REPOSITORY / "distman").rglob("*.py"), REPOSITORY / "tests" / "conftest.py"]
    source = "\n".join(path.read_text(encoding="utf-8") for path in sources)
    documented = {name for row in rows("docs/variables.md") for name in re.findall(r"`(\w+)`", row[0])}
    assert set(re.findall(r"\bDISTMAN_[A-Z_]+\b", source)) == {name for name in documented if "DISTMAN" in name}
    assert [name for name in documented if not re.search(rf"\b{name}\b", source)] == []


def test_the_picture_of_the_layers_is_what_the_linter_checks():
    contracts = tomllib.loads(read("pyproject.toml"))["tool"]["importlinter"]["contracts"]
    (layers,) = (contract["layers"] for contract in contracts if contract["type"] == "layers")
    picture = text_blocks("docs/architecture.md")[0].splitlines()
    assert [re.split(r"\s{2,}", line)[0] for line in picture] == [one for one in layers if one not in NO_LAYERS]


def test_examples_in_docstrings_run():
    results = {name: doctest.testmod(importlib.import_module(name)) for name in modules()}
    assert {name: result for name, result in results.items() if result.failed} == {}
    assert sum(result.attempted for result in results.values()) > 0
