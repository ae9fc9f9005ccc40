"""What the documentation says is so: its links, tables and pictures."""

import ast
import importlib
import inspect
import itertools
import os
import re
import socket
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

import distman
from distman._version import VERSION
from distman.environments import LAUNCHERS, detect
from distman.handler import NNHandler
from distman.testing import fake_environment

from .test_package import exports, modules, own_modules

REPOSITORY = Path(__file__).parents[1]
PACKAGE = Path(distman.__file__).parent  # elsewhere, where a wheel is tested
PAGES = [
    REPOSITORY / "README.md",
    REPOSITORY / "SECURITY.md",
    REPOSITORY / "launchers" / "README.md",
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
# What a variable of the environment looks like in the sources, and what looks like one but is none.
VARIABLE = re.compile(r"[A-Z][A-Z0-9]*(?:_[A-Za-z0-9]+)+|RANK|NCPUS")
NO_VARIABLES = {
    "F8_E4M3",
    "F8_E5M2",
    "MADV_FREE",
    "SC_CLK_TCK",
    "TCP_KEEPCNT",
    "TCP_KEEPIDLE",
    "TCP_KEEPINTVL",
    "TCP_USER_TIMEOUT",
    "TESTING_ONLY_GenericMode",
}
INSTRUCTIONS = {"public_names.py"}  # which names those of Python's byte code
READ_BY_OTHERS = {"NCCL_DEBUG", "TORCH_DISTRIBUTED_DEBUG"}


MOST_WORDS = 1_500  # of a page that is read from its beginning to its end
LONGER = {"architecture.md": 2_800, "contributing.md": 2_500, "messages.md": 5_000}  # the last one is searched
# Words that were this project's own, or not English, with what to say instead.
RETIRED = {
    r"(?i:whoever)": "a rank, a process or a user that",
    r"(?<!there )is none\b": "is not one",
    r"(?<!there )are none\b": "are not any",
    r"so long as": "as long as",
    r"[Ss]igns? of life": "heartbeat",
    r"one's own": "your own",
    r"(?:ranks?|process|processes|threads?|hosts?|servers?|workers?|thing) who\b": "that",
    r"looker|leavers|caretaker|obligation|fates?": "the word of the glossary",
}


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


def anchors(page):
    """Return what links may name within a page: its headings as GitHub and Sphinx spell them."""
    tokens = MarkdownIt().parse(page.read_text(encoding="utf-8"))
    headings = [after.content for token, after in itertools.pairwise(tokens) if token.type == "heading_open"]
    return {re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_relative_links_lead_to_files_and_headings(page):
    targets = [target.partition("#") for target in links(page) if not re.match(r"[a-z]+:", target)]
    assert [target for target, *_ in targets if target and not (page.parent / target).is_file()] == []
    named = [(page.parent / target if target else page, anchor) for target, _, anchor in targets if anchor]
    assert [anchor for there, anchor in named if anchor not in anchors(there)] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_links_have_words(page):
    """Sphinx puts the title of a page where a link has no words; elsewhere such a link cannot be seen."""
    assert re.findall(r"(?<!!)\[\]\([^)]*\)", page.read_text(encoding="utf-8")) == []


def written():
    """What people read: pages, examples, and the modules of the package."""
    scripts = (script for script in (REPOSITORY / "docs").rglob("*.py") if "_build" not in script.parts)
    return [*PAGES, REPOSITORY / "CHANGELOG.md", *scripts, *PACKAGE.rglob("*.py")]


@pytest.mark.parametrize("word", RETIRED)
def test_words_that_were_retired_stay_away(word):
    found = [
        f"{file}:{number}: {line.strip()}; say: {RETIRED[word]}"
        for file in written()
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1)
        if re.search(rf"\b(?:{word})", line)
    ]
    assert found == []


@pytest.mark.parametrize(
    ("word", "line"),
    [
        (r"(?i:whoever)", "Whoever comes first"),
        (r"(?<!there )is none\b", "absence is none"),
        (r"[Ss]igns? of life", "a sign of life"),
    ],
)
def test_words_that_were_retired_would_be_found(word, line):
    assert word in RETIRED
    assert re.search(rf"\b(?:{word})", line)
    assert not re.search(rf"\b(?:{word})", "None where there is none; if value is None")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_a_page_can_be_read_at_one_sitting(page):
    assert len(page.read_text(encoding="utf-8").split()) <= LONGER.get(page.name, MOST_WORDS)


def test_the_architecture_names_modules_that_there_are():
    page = (REPOSITORY / "docs" / "architecture.md").read_text(encoding="utf-8")
    named = {name.rpartition("/")[2] for name in re.findall(r"[\w/]+\.py\b", page)}
    assert named - {path.name for path in PACKAGE.parent.rglob("*.py")} == set()


def test_links_are_found():
    assert "docs/launchers.md" in links(REPOSITORY / "README.md")
    assert "rendezvous.md" in links(REPOSITORY / "docs" / "variables.md")
    assert "when-calls-do-not-match" in anchors(REPOSITORY / "docs" / "collectives.md")


def launcher_rows():
    return [row for row in rows("docs/detection.md") if len(row) == 3 and row[0].strip("`") in LAUNCHERS]


def test_the_table_of_launchers_names_them_in_the_order_of_asking():
    asked = [sentence.split()[0] for sentence in detect({}).explanation if " was passed over: " in sentence]
    assert [row[0] for row in launcher_rows()] == [f"`{launcher}`" for launcher in [*asked, "single"]]
    assert {*asked, "single"} == {*LAUNCHERS}


@pytest.mark.parametrize("launcher", [launcher for launcher in LAUNCHERS if launcher != "single"])
def test_the_table_of_launchers_names_their_variables(launcher):
    (variables,) = (row[2] for row in launcher_rows() if row[0] == f"`{launcher}`")
    found = re.findall(r"([a-z ]+) ((?:`\w+`(?: or )?)+)(?:, |$)", variables)
    assert ", ".join(" ".join(pair) for pair in found) == variables
    documented = {FIELDS[field]: tuple(re.findall(r"`(\w+)`", names)) for field, names in found}
    assert documented == LAUNCHERS[launcher].fields


def test_the_output_on_the_page_of_launchers_is_real():
    environ = {"PATH": os.environ["PATH"], **fake_environment("slurm", nodes=2, tasks=4)[3]}
    command = [sys.executable, "-m", "distman", "env"]
    output = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60, check=True).stdout
    (shown,) = text_blocks("docs/launchers.md")
    assert_shown(shown, output)


def test_the_table_of_what_strangers_can_do_names_tests_that_exist():
    found = [row for row in rows("docs/security.md") if len(row) == 5 and row[4] != "shown by"]
    assert found
    for *_, tests in found:
        named = re.findall(r"`([\w/]+\.py)::(\w+)`", tests)
        assert named, "each row names a test"
        for file, test in named:
            source = (REPOSITORY / "tests" / "launch" / file).read_text()
            assert re.search(rf"^def {test}\(", source, re.MULTILINE), f"{file}::{test}"


def assert_shown(shown, output):
    """Compare what a page shows with the output, but for white space, ids, folders, this host and what "..." is for."""
    output = output.replace(f"({socket.gethostname()}, pid", "(laptop, pid")
    shown, output = (
        re.sub(r'(pid) \d+|(File ")[^"]*/|[^\s"]*/(?=train\.py)', r"\1\2", text) for text in (shown, output)
    )
    output = " ".join(output.split())
    parts = [" ".join(part.split()) for part in shown.split("...")]
    for text in filter(None, parts):
        assert text in output
        output = output.partition(text)[2]


def texts(source):
    """Return the text constants of a module, without those of ``__all__``."""
    tree = ast.parse(source.read_text(encoding="utf-8"))
    assignments = [node for node in ast.walk(tree) if isinstance(node, ast.Assign)]
    lists = [node.value for node in assignments if any(ast.unparse(target) == "__all__" for target in node.targets)]
    exported = {id(node) for one in lists for node in ast.walk(one)}
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.Constant) and id(node) not in exported]
    return {node.value for node in nodes if isinstance(node.value, str)}


def test_the_page_of_variables_has_all_that_the_package_knows_and_no_others():
    sources = [*PACKAGE.rglob("*.py"), REPOSITORY / "tests" / "conftest.py"]
    others = [source for source in sources if source.name not in INSTRUCTIONS]
    known = {text for source in others for text in texts(source) if VARIABLE.fullmatch(text)} - NO_VARIABLES
    documented = {name for row in rows("docs/variables.md") for cell in row for name in re.findall(r"`(\w+)`", cell)}
    documented = {name for name in documented if VARIABLE.fullmatch(name)}
    assert (known - documented, documented - known) == (set(), READ_BY_OTHERS)


def test_nothing_but_the_test_kit_and_what_gloo_is_told_writes_into_the_environment():
    methods = "update|setdefault|pop|popitem|clear"
    writes = re.compile(rf"environ\[[^]]+\] = |del os\.environ|environ\.({methods})\(|putenv|unsetenv")
    writing = {path for path in PACKAGE.rglob("*.py") if writes.search(path.read_text(encoding="utf-8"))}
    assert {path.parent.name if path.parent.name in ("testing", "physicsnemo") else path.name for path in writing} == {
        "testing",
        "physicsnemo",  # whose setup() does so
        "network.py",
        "_torch_internals.py",  # while a group is being made
    }


def public_names():
    """Return the names that users may import, each from the modules that offer it."""
    found = {}
    for module in own_modules():
        for name, value in exports(module).items():
            found.setdefault(id(value), set()).add(f"{module}.{name}")
    return list(found.values())


def names_in_the_reference():
    """Return the names that each page of the reference shows, under the path that it shows them by."""
    named = []
    for page in sorted((REPOSITORY / "docs" / "reference").glob("*.md")):
        text = page.read_text(encoding="utf-8")
        named += re.findall(r"auto(?:class|function|data|exception):: ([\w.]+)", text)
        for module, options in re.findall(r"automodule:: (\S+)\n((?:   :.*\n)*)", text):
            left_out = re.findall(r"\w+", "".join(re.findall(r":exclude-members:(.*)", options)))
            named += [f"{module}.{name}" for name in exports(module) if name not in left_out]
    return named


def test_the_reference_has_every_public_name_once_and_no_others():
    public, named = public_names(), names_in_the_reference()
    shown = {names: [name for name in named if name in names] for names in map(frozenset, public)}
    assert {names: places for names, places in shown.items() if len(places) != 1} == {}
    assert set(named) - set().union(*public) == set()


def test_methods_that_the_reference_lists_one_by_one_are_all_of_their_class():
    listed = {}
    for page in (REPOSITORY / "docs" / "reference").glob("*.md"):
        for path in re.findall(r"auto(?:method|property):: (\S+)", page.read_text(encoding="utf-8")):
            owner, _, name = path.rpartition(".")
            listed.setdefault(owner, []).append(name)
    assert "distman.handler.NNHandler" in listed
    for owner, names in listed.items():
        module, _, cls = owner.rpartition(".")
        bases = [base for base in getattr(importlib.import_module(module), cls).__mro__ if base is not object]
        assert sorted(names) == sorted({name for base in bases for name in vars(base) if not name.startswith("_")})


PLACES = {"distman": distman, "manager": distman.DistributedManager, "handler": NNHandler}


def attribute(owner, name):
    """Return an attribute; of a class as it stands there, since a property of the manager refuses the class."""
    return inspect.getattr_static(owner, name) if isinstance(owner, type) else getattr(owner, name)


def target_of(name):
    """Return what a name in the tables of the page about moving stands for; AttributeError where there is nothing."""
    first, *parts = name.split(".")
    value = PLACES.get(first) or getattr(distman, first)
    for part in parts:
        is_module = value is distman and f"distman.{part}" in modules()
        value = importlib.import_module(f"distman.{part}") if is_module else attribute(value, part)
    return value


MOVING = [row for page in sorted((REPOSITORY / "docs" / "howto").glob("from_*.md")) for row in rows(page)]


@pytest.mark.parametrize("row", MOVING, ids=lambda row: row[0])
def test_new_names_of_old_ones_exist(row):
    old, new = (re.findall(r"`([^`]+)`", cell) for cell in row[:2])
    assert new
    for name in new:
        if name in PLACES or name in modules():
            for one in old:
                attribute(target_of(name), one)
        else:
            assert VARIABLE.fullmatch(name) or target_of(name) is not None


def test_the_picture_of_the_layers_is_what_the_linter_checks():
    contracts = tomllib.loads(read("pyproject.toml"))["tool"]["importlinter"]["contracts"]
    layers = next(contract["layers"] for contract in contracts if contract["name"] == "Imports go down")
    picture = text_blocks("docs/architecture.md")[0].splitlines()
    assert [re.split(r"\s{2,}", line)[0] for line in picture] == [one for one in layers if one not in NO_LAYERS]


def test_the_diagrams_are_what_their_script_draws(tmp_path):
    drawn = REPOSITORY / "docs" / "diagrams"
    subprocess.run([sys.executable, drawn / "draw.py", tmp_path], timeout=60, check=True)
    pictures = {path.name: path.read_text(encoding="utf-8") for path in drawn.glob("*.svg")}
    assert pictures == {path.name: path.read_text(encoding="utf-8") for path in tmp_path.iterdir()} != {}
    shown = {target for page in PAGES for target in links(page)}
    assert {f"diagrams/{name}" for name in pictures} <= shown


def test_pictures_are_described_for_those_who_do_not_see_them():
    blocks = [block for page in PAGES for block in MarkdownIt().parse(page.read_text(encoding="utf-8"))]
    tokens = [token for block in blocks for token in block.children or ()]
    pictures = [token for token in tokens if token.type == "image"]
    assert [token.attrs["src"] for token in pictures if len(token.content) < 20] == []
    assert pictures


def test_the_newest_version_in_the_changelog_is_that_of_the_package():
    versions = re.findall(r"^## (\S+) \((?:unreleased|\d{4}-\d\d-\d\d)\)$", read("CHANGELOG.md"), re.MULTILINE)
    assert versions[0] == VERSION
    assert len(versions) == read("CHANGELOG.md").count("\n## ")


def test_the_search_ranks_pages_that_exist():
    lists = re.findall(r"^const \w+ = \[(.*)\];$", read("docs/search_scorer.js"), re.MULTILINE)
    named = [page for names in lists for page in re.findall(r'"([\w/]+)"', names)]
    assert [page for page in named if not (REPOSITORY / "docs" / f"{page}.md").is_file()] == []
    assert len(lists) == 2
