"""Every block of code in the README and in the documentation runs, the commands under the real launchers."""

import configparser
import re
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

from ..test_docs import PAGES, REPOSITORY, assert_shown
from .processes import launch

LIMIT = 60
LANGUAGES = {"python", "sh", "text"}
SPHINX = {"{toctree}", "{eval-rst}"}  # the build of the documentation checks them
SHELL = re.compile(r"[|&;<>$`]")
ASSIGNMENT = re.compile(r"[A-Z_]+=")
# Any number of ranks on any number of cores, and no binding, as in the tests' own mpirun.
MANY_RANKS = {
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "PRTE_MCA_hwloc_default_binding_policy": "none",
}


@dataclass(frozen=True)
class Block:
    """A block of code; a text that comes straight after one in Python, or after commands, is its output."""

    language: str
    text: str
    output: str = ""

    @property
    def is_test(self):
        return self.language == "python" and re.search(r"^def test_", self.text, re.MULTILINE) is not None


def blocks(page):
    """Return the blocks of a page in order; an indented one has no language."""
    tokens = MarkdownIt().parse(page.read_text(encoding="utf-8"))
    found = [(token.info, token.content) for token in tokens if token.type in ("fence", "code_block")]
    after = [*found[1:], ("", "")]
    return [
        Block(language, text, output=next_text if next_language == "text" and language in ("python", "sh") else "")
        for (language, text), (next_language, next_text) in zip(found, after, strict=False)
    ]


def scripts(page):
    return [block for block in blocks(page) if block.language == "python" and not block.is_test]


def commands(page):
    """Return the command lines of a page, each once, without comments."""
    return list(dict.fromkeys(line for block in blocks(page) if block.language == "sh" for line in lines_of(block)))


def lines_of(block):
    lines = block.text.replace("\\\n", "").splitlines()
    return list(filter(None, (re.sub(r"(^|\s)#.*", "", line).strip() for line in lines)))


def shown_with_output(page):
    """Return each script of a page with the command that runs it and the output that is shown after both."""
    found = zip(blocks(page), blocks(page)[1:], strict=False)
    kinds = ("python", "sh")
    return [
        (script, command)
        for script, command in found
        if (script.language, command.language) == kinds and command.output
    ]


def name_of(value):
    return str(value.relative_to(REPOSITORY)) if isinstance(value, Path) else None


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_block_is_of_a_kind_that_is_checked(page):
    assert {block.language for block in blocks(page)} <= LANGUAGES | (SPHINX if page.parent != REPOSITORY else set())


def test_blocks_are_found():
    readme = REPOSITORY / "README.md"
    assert "distman env" in commands(readme)
    assert "DistributedManager.initialize()" in scripts(readme)[0].text
    assert sum(block.is_test for page in PAGES for block in blocks(page)) > 0


@pytest.mark.parametrize(
    ("page", "number"), [(page, i) for page in PAGES for i in range(len(scripts(page)))], ids=name_of
)
def test_python_runs(page, number, tmp_path):
    script = scripts(page)[number]
    (tmp_path / "train.py").write_text(script.text)
    finished = launch([sys.executable, "train.py"], timeout=LIMIT, cwd=tmp_path)
    assert (finished.returncode, finished.stderr) == (0, "")
    assert_shown(script.output, finished.stdout)


@pytest.mark.parametrize("page", [page for page in PAGES if any(block.is_test for block in blocks(page))], ids=name_of)
def test_tests_pass_or_fail_as_shown(page, tmp_path):
    tests = {f"test_{i}.py": block for i, block in enumerate(blocks(page)) if block.is_test}
    for name, block in tests.items():
        (tmp_path / name).write_text(block.text)
    finished = launch(
        [sys.executable, "-m", "pytest", "-rA", "-c", "/dev/null", "--rootdir=."], timeout=LIMIT, cwd=tmp_path
    )
    endings = set(re.findall(r"^([A-Z]+) (\w+\.py)::", finished.stdout, re.MULTILINE))
    assert endings == {("FAILED" if block.output else "PASSED", name) for name, block in tests.items()}
    for block in tests.values():
        assert_shown(block.output, finished.stdout)


@pytest.mark.parametrize(
    ("page", "number"), [(page, i) for page in PAGES for i in range(len(shown_with_output(page)))], ids=name_of
)
def test_a_command_gives_the_output_that_is_shown(page, number, request, tmp_path):
    script, command = shown_with_output(page)[number]
    (tmp_path / "train.py").write_text(script.text)
    (line,) = lines_of(command)
    words = shlex.split(line)
    finished = RUNNERS[words[0]](request, words, {}, tmp_path)
    assert_shown(command.output, finished.stdout + finished.stderr)
    assert (finished.returncode != 0) == ("Error" in command.output)


def is_shown_with_output(page, line):
    return any(line in lines_of(command) for _, command in shown_with_output(page))


@pytest.mark.parametrize(
    ("page", "line"),
    [(page, line) for page in PAGES for line in commands(page) if not is_shown_with_output(page, line)],
    ids=name_of,
)
def test_commands_succeed(page, line, request, tmp_path):
    assert not SHELL.search(line), "only plain commands can be run here"
    if scripts(page):
        (tmp_path / "train.py").write_text(scripts(page)[0].text)
    words = shlex.split(line)
    variables = {}
    while ASSIGNMENT.match(words[0]):
        name, _, variables[name] = words.pop(0).partition("=")
    benchmark = next((word for word in words if word.startswith("docs/benchmarks/")), None)
    if benchmark is not None:
        assert_options_exist(benchmark, words[words.index(benchmark) + 1 :])
    elif words[0] in BUILDERS:
        BUILDERS[words[0]](words)
    else:
        assert words[0] in RUNNERS, f"no way is known to run {words[0]}"
        cwd = REPOSITORY if any(word.startswith("docs/") for word in words) else tmp_path
        assert RUNNERS[words[0]](request, words, variables, cwd).returncode == 0


def run_here(_request, words, variables, cwd):
    return launch(words, env=variables, timeout=LIMIT, cwd=cwd)


def run_mpi(request, words, variables, cwd):
    environment = {**request.getfixturevalue("openmpi").environment(), **MANY_RANKS, **variables}
    return launch(words, env=environment, timeout=LIMIT, cwd=cwd)


def run_slurm(request, words, variables, cwd):
    return request.getfixturevalue("slurm_cluster").srun(*words[1:], env=variables, timeout=LIMIT, cwd=cwd)


def assert_target_exists(words):
    assert launch(["make", "-n", *words[1:]], cwd=REPOSITORY).returncode == 0


def assert_can_be_installed(words):
    """Check what ``pip install`` is given: this folder, with extras that it has."""
    assert words[1] == "install"
    configuration = configparser.ConfigParser()
    configuration.read(REPOSITORY / "setup.cfg")
    for target in words[2:]:
        folder, extras = re.fullmatch(r"(\.)(?:\[([\w,]+)\])?", target).groups()
        assert (REPOSITORY / folder / "pyproject.toml").is_file()
        assert set((extras or "").split(",")) - {""} <= set(configuration["options.extras_require"])


def assert_options_exist(benchmark, options):
    """Check that a benchmark, which may run for minutes, is there and knows its options."""
    finished = launch([sys.executable, benchmark, "--help"], timeout=LIMIT, cwd=REPOSITORY)
    assert finished.returncode == 0
    assert [name for name in options if name.startswith("-") and name.partition("=")[0] not in finished.stdout] == []


RUNNERS = {
    "distman": run_here,
    "python": run_here,
    "torchrun": run_here,
    "mpirun": run_mpi,
    "mpiexec": run_mpi,
    "srun": run_slurm,
}
BUILDERS = {"make": assert_target_exists, "pip": assert_can_be_installed}
