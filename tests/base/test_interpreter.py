"""What a new interpreter imports: what the one that starts it would, and nothing from where it happens to start."""

import os
import random
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from distman._base import interpreter as _interpreter
from distman._cli.launch.job_script import BACKENDS, JobRequest, render

REPOSITORY = Path(__file__).parents[2]
DISTMAN = Path(sys.executable).with_name("distman")
PLANTED = {
    *sys.stdlib_module_names,
    "cloudpickle",
    "distman",
    "mpi4py",
    "numpy",
    "torch",
    "sitecustomize",
    "usercustomize",
}
AT_THE_START = {"sitecustomize", "usercustomize"}
"""What only the start of an interpreter imports, before its search path has a folder of the program."""

JOB = """
import os, sys
sys.path += os.environ["LIBRARIES"].split(os.pathsep)
import mine  # from where this program has it
if folder := os.environ["FOLDER"]:
    os.chdir(folder)
import distman
from distman._store.process import listen_on_this_host, start_store
from distman._workers.server_process import ServerProcess
from distman._workers.server_process import WorkerProcess

expected = mine.state()
assert distman.run(mine.state, n=1) == [expected]
server = ServerProcess("mine:prepare", [expected])
WorkerProcess(server, {}).close()
server.close()
store = start_store(
    listen_on_this_host(f"\\0distman-test/{os.getpid()}"), job="one", entry_limit=0.0, unreachable_after=1.0
)
store.wait_until_up(60.0)
assert store.popen.wait(60.0) == 0
print("all of them worked")
"""
MINE = """
import contextlib, sys

FLAGS = ("isolated", "ignore_environment", "no_user_site", "no_site", "dont_write_bytecode", "optimize", "utf8_mode")

def state():
    flags = [int(getattr(sys.flags, name)) for name in FLAGS]
    return [flags, list(sys.warnoptions), dict(sys._xoptions), list(sys.path)]

@contextlib.contextmanager
def prepare(expected):
    assert state() == expected
    yield lambda *_: None
"""
EXECUTES = """
import threading
from distman import ParallelExecutor
threading.Thread(target=threading.Event().wait, daemon=True).start()  # so the workers are no forks of this process
with ParallelExecutor(devices=["cpu"]) as executor:
    print(executor.run(lambda device: 7))
"""
TESTS = """
from distman.testing import ranks
@ranks(1)
def test_it_runs(rank):
    assert rank == 0
"""


class Place:
    """A program in a folder of its own, and another folder with modules that were planted there."""

    def __init__(self, folder: Path) -> None:
        self.home, self.planted, self._trace = folder / "home", folder / "planted", folder / "trace"
        self.home.mkdir()
        self.planted.mkdir()
        self.job = self.home / "job.py"
        self.job.write_text(JOB)
        (self.home / "mine.py").write_text(MINE)

    def plant(self, names: set[str]) -> None:
        for name in names:
            text = f"import sys\nopen({str(self._trace)!r}, 'a').write(f'{name} in {{sys.orig_argv}}\\n')"
            (self.planted / f"{name}.py").write_text(text)

    def run(self, *command: str | Path, cwd: Path | None = None, **variables: str) -> str:
        """Run a program in the planted folder, or another one, and return what it says."""
        names = {name for name in os.environ if name.startswith("PYTHON")}
        kept = {name: value for name, value in os.environ.items() if name not in names}
        finished = subprocess.run(
            command,
            cwd=cwd or self.planted,
            env={**kept, "LIBRARIES": str(self.home), "FOLDER": "", **variables},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert finished.returncode == 0, finished.stderr
        return finished.stdout

    @property
    def imported(self) -> str:
        """What was imported of what was planted, a line each, with the command of the process that did."""
        return self._trace.read_text() if self._trace.exists() else ""


@pytest.fixture
def place(tmp_path):
    return Place(tmp_path)


@pytest.mark.parametrize(
    ("options", "python_path"),
    [
        ("", None),
        ("-S -s -b", None),
        ("-OO -Xutf8 -Xdev -B -Wdefault::ImportWarning -Xpycache_prefix=/tmp/none", "home"),
    ],
)
def test_children_of_a_script_import_nothing_from_the_current_folder(place, options, python_path):
    place.plant(PLANTED)
    variables = {}
    if "-S" in options:
        variables["LIBRARIES"] = os.pathsep.join(map(str, [place.home, sysconfig.get_path("purelib"), REPOSITORY]))
    if python_path is not None:
        variables["PYTHONPATH"] = python_path and str(place.home)
    assert place.run(sys.executable, *options.split(), place.job, **variables) == "all of them worked\n"
    assert place.imported == ""


@pytest.mark.parametrize("options", ["-I", "-E"])
def test_children_ignore_the_environment_where_their_parent_does(place, options):
    place.plant(PLANTED)
    variables = {"PYTHONPATH": f"{place.planted}:", "PYTHONINSPECT": "1", "PYTHONWARNINGS": "ignore::json.Planted"}
    assert place.run(sys.executable, options, place.job, **variables) == "all of them worked\n"
    assert place.imported == ""


@pytest.mark.parametrize("entries", [":", "{home}::{home}:x/..:../{start}"])
def test_children_take_relative_entries_of_the_path_as_their_parent_did(place, tmp_path, entries):
    """The parent began in another folder, where an empty or relative entry meant something else.

    It was told to ask for statements at its end, too, which its children must not do.
    """
    place.plant(PLANTED)
    start = tmp_path / "start"
    start.mkdir()
    path = entries.format(home=place.home, start=start.name)
    asks = {"PYTHONINSPECT": "1", "PYTHONSTARTUP": str(place.planted / "json.py")}
    said = place.run(sys.executable, place.job, cwd=start, PYTHONPATH=path, FOLDER=str(place.planted), **asks)
    assert said == "all of them worked\n"
    assert place.imported == ""


def test_distman_run_starts_a_script_as_python_does(place):
    place.plant(PLANTED)
    assert place.run(DISTMAN, "run", "-n", "1", place.job) == "all of them worked\n"
    assert place.imported == ""


def test_workers_of_an_executor_import_nothing_from_there(place):
    place.plant(PLANTED)
    place.job.write_text(EXECUTES)
    assert place.run(sys.executable, place.job) == "[7]\n"
    assert place.imported == ""


def test_ranks_of_a_test_import_nothing_from_there(place):
    place.plant(PLANTED)
    test = place.home / "test_on_ranks.py"
    test.write_text(TESTS)
    said = place.run(DISTMAN.with_name("pytest"), "-q", "-p", "no:cacheprovider", f"--rootdir={place.home}", test)
    assert "1 passed" in said
    assert place.imported == ""


@pytest.mark.parametrize(
    "command",
    [
        ["-c", JOB],
        ["-m", "job"],
        ["-P", "-c", f"import sys\nsys.path.insert(0, '')\n{JOB}"],
    ],
    ids=["-c", "-m", "-P and a path of its own"],
)
def test_children_find_what_their_parent_finds_in_the_current_folder(place, command):
    """A text, a module and a notebook import from there, but not what an interpreter imports at its start."""
    place.plant(AT_THE_START)
    for name in ("job.py", "mine.py"):
        (place.planted / name).write_text((place.home / name).read_text())
    assert place.run(sys.executable, *command, LIBRARIES="/nowhere") == "all of them worked\n"
    assert place.imported == ""


@pytest.mark.parametrize("name", [name for name in BACKENDS if name in ("mpich", "openmpi")])
def test_a_job_script_looks_for_mpi4py_where_a_script_would(place, name):
    place.plant({"mpi4py"})
    (line,) = (line for line in render(JobRequest(backend=name)).splitlines() if "mpi4py'" in line)
    question = line.removeprefix("if ").partition(";")[0]
    place.run("bash", "-c", f"{question} || true", PATH=f"{DISTMAN.parent}:{os.environ['PATH']}")
    assert place.imported == ""


def absolute(entry: str) -> str:
    return os.path.abspath(entry)  # noqa: PTH100 - what an interpreter does


def test_an_environment_keeps_what_its_path_means_here(monkeypatch, tmp_path):
    """Entries drawn at random: an interpreter elsewhere has no folder at its start that this one does not have."""
    generator = random.Random(4)  # noqa: S311 - no secret
    names = ["", ".", "..", "a", "./a", "a/..", "a/../b", "/", "/opt/x", str(tmp_path), "é", " ", "\udc80"]
    (tmp_path / "a").mkdir()
    monkeypatch.chdir(tmp_path)
    for _ in range(1_000):
        known = [absolute(one) for one in generator.sample(names, 3)]
        monkeypatch.setattr(sys, "path", known)
        entries = generator.choices(names, k=generator.randrange(4))
        variables = _interpreter.environment({"PYTHONPATH": ":".join(entries), "A": "b", "PYTHONINSPECT": "1"})
        kept = variables.pop("PYTHONPATH", None)
        assert variables == {"A": "b"}
        places = [absolute(one) for one in entries if one[:1] == "/" or absolute(one) in known]
        assert kept == (":".join(places) if places and ":".join(entries) else None)
