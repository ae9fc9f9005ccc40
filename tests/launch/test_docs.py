"""Every block of code in the README and in the documentation runs, the commands under the real launchers."""

import configparser
import re
import shlex
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
import yaml
from markdown_it import MarkdownIt

from ..ports import find_free_port
from ..test_docs import PAGES, REPOSITORY, assert_shown
from . import preloaded
from .preloaded import PYTHON
from .processes import Finished, launch

LIMIT = 60
LANGUAGES = {"python", "sh", "text", "yaml"}
SPHINX = {"{toctree}", "{include}", "{literalinclude}", "{eval-rst}"}  # the build of the documentation checks them
NOTHING_RAN = Finished((), 0, "", "", 0.0)
MEASURED = ("docs/benchmarks/", "docs/comparison/")  # which need minutes, or other libraries
CPU_WHEELS = "https://download.pytorch.org/whl/cpu"
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

    @property
    def is_script(self):
        return self.language == "python" and not self.is_test

    @property
    def is_job_script(self):
        return self.language == "sh" and self.text.startswith("#!")


@cache
def blocks(page):
    """Return the blocks of a page in order; an indented one has no language."""
    tokens = MarkdownIt().parse(page.read_text(encoding="utf-8"))
    found = [(token.info, token.content) for token in tokens if token.type in ("fence", "code_block")]
    found = [("python", side_of(text, "+")) if language == "diff" else (language, text) for language, text in found]
    after = [*found[1:], ("", "")]
    return [
        Block(language, text, output=next_text if next_language == "text" and language in ("python", "sh") else "")
        for (language, text), (next_language, next_text) in zip(found, after, strict=False)
    ]


def side_of(diff, sign):
    """Return one side of a diff: the lines that begin with the sign, and those that both sides have."""
    return "\n".join(line[1:] for line in diff.splitlines() if line[:1] in (sign, " ", ""))


def diffs(page):
    tokens = MarkdownIt().parse(page.read_text(encoding="utf-8"))
    return [token.content for token in tokens if token.type == "fence" and token.info == "diff"]


def scripts(page):
    return [block for block in blocks(page) if block.is_script]


def commands(page):
    """Return the command lines of a page, each with the last script before it; a job script is none."""
    found, script = {}, ""
    for block in blocks(page):
        if block.is_script:
            script = block.text
        elif block.language == "sh" and not block.is_job_script:
            found = {**dict.fromkeys(lines_of(block), script), **found}
    return found


def job_scripts(page):
    """Return the job scripts of a page, each with the last script in Python before it."""
    found, script = [], ""
    for block in blocks(page):
        script = block.text if block.is_script else script
        found += [(script, block)] if block.is_job_script else []
    return found


def lines_of(block):
    lines = block.text.replace("\\\n", "").splitlines()
    return list(filter(None, (re.sub(r"(^|\s)#.*", "", line).strip() for line in lines)))


def shown_with_output(page):
    """Return each script of a page with the command that runs it and the output that is shown after both."""
    found = zip(blocks(page), blocks(page)[1:], strict=False)
    return [
        (script, command)
        for script, command in found
        if script.is_script and command.language == "sh" and command.output and not command.is_job_script
    ]


def name_of(value):
    return str(value.relative_to(REPOSITORY)) if isinstance(value, Path) else None


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_block_is_of_a_kind_that_is_checked(page):
    kinds = {block.language.partition(" ")[0] for block in blocks(page)}
    assert kinds <= LANGUAGES | (SPHINX if page.parent != REPOSITORY else set())


def test_blocks_are_found():
    readme = REPOSITORY / "README.md"
    assert "distman env" in commands(readme)
    assert "DistributedManager.initialize()" in scripts(readme)[0].text
    assert sum(block.is_test for page in PAGES for block in blocks(page)) > 0
    assert sum(block.is_job_script for page in PAGES for block in blocks(page)) > 0


def test_both_sides_of_a_diff_are_programs():
    found = [diff for page in PAGES for diff in diffs(page)]
    assert found
    for diff in found:
        assert side_of(diff, "-") != side_of(diff, "+")
        compile(side_of(diff, "-"), "before.py", "exec")


@pytest.mark.parametrize(
    ("page", "number"), [(page, i) for page in PAGES for i in range(len(scripts(page)))], ids=name_of
)
def test_python_runs(page, number, tmp_path):
    script = scripts(page)[number]
    (tmp_path / "train.py").write_text(script.text)
    finished = launch([PYTHON, "train.py"], timeout=LIMIT, cwd=tmp_path)
    assert (finished.returncode, finished.stderr) == (0, "")
    assert_shown(script.output, finished.stdout)


def test_tests_pass_or_fail_as_shown(tmp_path):
    tests = {
        f"test_{page.stem}_{i}.py": block for page in PAGES for i, block in enumerate(blocks(page)) if block.is_test
    }
    for name, block in tests.items():
        (tmp_path / name).write_text(block.text)
    finished = launch([PYTHON, "-m", "pytest", "-rA", "-c", "/dev/null", "--rootdir=."], timeout=LIMIT, cwd=tmp_path)
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
    has_failed = "Error" in command.output
    finished = [run_line(request, line, tmp_path) for line in lines_of(command)]
    assert_shown(command.output, "".join(one.stdout + one.stderr for one in finished))
    assert any(one.returncode != 0 for one in finished) == has_failed


@pytest.mark.parametrize(
    ("page", "number"), [(page, i) for page in PAGES for i in range(len(job_scripts(page)))], ids=name_of
)
def test_a_job_script_runs_under_slurm(page, number, request, tmp_path):
    script, job = job_scripts(page)[number]
    (tmp_path / "train.py").write_text(script)
    variables = (
        request.getfixturevalue("openmpi").preloaded.batch_environment()
        if "mpirun" in job.text
        else preloaded.variables()
    )
    cluster = request.getfixturevalue("slurm_cluster")
    finished = cluster.sbatch(job.text, timeout=LIMIT, env={**variables, **MANY_RANKS}, cwd=tmp_path)
    assert finished.returncode == 0, finished
    assert_shown(job.output, finished.stdout)


@pytest.mark.parametrize(
    "page", [page for page in PAGES if any(b.language == "yaml" for b in blocks(page))], ids=name_of
)
def test_yaml_can_be_read(page):
    for block in blocks(page):
        if block.language == "yaml":
            assert all(document["kind"] for document in yaml.safe_load_all(block.text))


def is_shown_with_output(page, line):
    return any(line in lines_of(command) for _, command in shown_with_output(page))


@pytest.mark.parametrize(
    ("page", "line"),
    [(page, line) for page in PAGES for line in commands(page) if not is_shown_with_output(page, line)],
    ids=name_of,
)
def test_commands_succeed(page, line, request, tmp_path):
    assert not SHELL.search(line), "only plain commands can be run here"
    (tmp_path / "train.py").write_text(commands(page)[line])
    assert run_line(request, line, tmp_path).returncode == 0


def run_line(request, line, folder):
    """Run a command line in the folder, or from the repository if it names what lies there; check what may not run."""
    words = shlex.split(line)
    variables = {}
    while ASSIGNMENT.match(words[0]):
        name, _, variables[name] = words.pop(0).partition("=")
    benchmark = next((word for word in words if word.startswith(MEASURED)), None)
    if benchmark is not None:
        return assert_options_exist(benchmark, words[words.index(benchmark) + 1 :])
    if words[0] in BUILDERS:
        return BUILDERS[words[0]](tuple(words))
    assert words[0] in RUNNERS, f"no way is known to run {words[0]}"
    cwd = REPOSITORY if any(word.startswith("docs/") for word in words) else folder
    return RUNNERS[words[0]](request, words, variables, cwd)


def run_here(_request, words, variables, cwd):
    # Several pages name one port, and are run at one time.
    words = [f"--master-port={find_free_port()}" if word.startswith("--master-port=") else word for word in words]
    return launch(words, env={**preloaded.variables(), **variables}, timeout=LIMIT, cwd=cwd)


def run_mpi(request, words, variables, cwd):
    environment = {**request.getfixturevalue("openmpi").preloaded.environment(), **MANY_RANKS, **variables}
    return launch(words, env=environment, timeout=LIMIT, cwd=cwd)


def run_slurm(request, words, variables, cwd):
    return request.getfixturevalue("slurm_cluster").srun(
        *words[1:], env={**preloaded.variables(), **variables}, timeout=LIMIT, cwd=cwd
    )


@cache  # several pages have one
def assert_target_exists(words):
    return launch(["make", "-n", *words[1:]], cwd=REPOSITORY)


def assert_can_be_installed(words):
    """Check what ``pip install`` is given: this folder with extras that it has, and packages that it names itself."""
    assert words[1] == "install"
    configuration = configparser.ConfigParser()
    configuration.read(REPOSITORY / "setup.cfg")
    extras = configuration["options.extras_require"]
    named = "\n".join([configuration["options"]["install_requires"], *extras.values()])
    packages = {re.match(r"[\w-]*", line)[0] for line in named.splitlines()}
    targets = " ".join(words[2:]).replace(f"--index-url {CPU_WHEELS}", "").split()
    for target in set(targets) - packages:
        folder, chosen = re.fullmatch(r"(\.)(?:\[([\w,]+)\])?", target).groups()
        assert (REPOSITORY / folder / "pyproject.toml").is_file()
        assert set((chosen or "").split(",")) - {""} <= set(extras)
    return NOTHING_RAN


def assert_options_exist(benchmark, options):
    """Check that a benchmark, which may run for minutes, is there and knows its options."""
    finished = launch([PYTHON, benchmark, "--help"], timeout=LIMIT, cwd=REPOSITORY)
    assert finished.returncode == 0
    assert [name for name in options if name.startswith("-") and name.partition("=")[0] not in finished.stdout] == []
    return finished


RUNNERS = {
    "distman": run_here,
    "python": run_here,
    "torchrun": run_here,
    "mpirun": run_mpi,
    "mpiexec": run_mpi,
    "srun": run_slurm,
}
BUILDERS = {"make": assert_target_exists, "pip": assert_can_be_installed}
