"""A fork of the process that has imported torch is as the interpreter that it stands for."""

import os
import re
import signal
import sys
from pathlib import Path

import pytest

from . import preloaded
from .preloaded import PYTHON
from .processes import launch, marked, poll, start

SAY = """
import os, sys
print(sys.argv[1:], os.getcwd(), os.environ["WORD"], sys.stdin.read(), sys.path[0], sorted(os.listdir("/proc/self/fd")))
sys.stderr.write("an error")
sys.exit(3)
"""
WAIT = """
import os, time
print("pid", os.getpid(), flush=True)
time.sleep(100)
"""


@pytest.fixture(params=[[PYTHON], ["env", PYTHON]], ids=["itself", "what a launcher starts"])
def python(request):
    return request.param


def test_arguments_folder_environment_files_and_exit_code(python, tmp_path):
    (tmp_path / "say.py").write_text(SAY)
    finished = launch([*python, "say.py", "a b", "c"], env={"WORD": "w"}, cwd=tmp_path)
    assert (finished.returncode, finished.stderr) == (3, "an error")
    assert finished.stdout == f"['a b', 'c'] {tmp_path} w  {tmp_path} ['0', '1', '2', '3']\n"


@pytest.mark.parametrize(("status", "code"), [("None", 0), ("300", 44), ("-1", 255), ("'a text'", 1), ("True", 1)])
def test_the_exit_code_is_the_status(python, status, code):
    assert launch([*python, "-c", f"raise SystemExit({status})"]).returncode == code


def test_what_cannot_be_written_at_the_end_is_an_exit_code():
    command = ["sh", "-c", 'exec "$0" "$@" > /dev/full', PYTHON, "-c", "print('lost')"]
    assert launch(command).returncode == 120


def test_limits_and_cores_are_those_of_its_client():
    code = "import os, resource; print(os.sched_getaffinity(0), *resource.getrlimit(resource.RLIMIT_NOFILE))"
    assert launch(["taskset", "-c", "0", "prlimit", "--nofile=100", PYTHON, "-c", code]).stdout == "{0} 100 100\n"


def test_a_module_and_code(python):
    assert launch([*python, "-c", "import sys; print(sys.argv)", "a"]).stdout == "['-c', 'a']\n"
    assert launch([*python, "-m", "platform"]).stdout.startswith("Linux")


def test_an_error(python):
    finished = launch([*python, "-c", "raise ValueError('boom')"])
    assert finished.returncode == 1
    first, *_, last = finished.stderr.splitlines()
    assert (first, last) == ("Traceback (most recent call last):", "ValueError: boom")
    assert "server" not in finished.stderr


def test_what_it_has_made_is_taken_apart_at_its_end(python):
    code = "class Made:\n    def __del__(self): print('taken apart')\nmade = Made()"
    assert launch([*python, "-c", code]).stdout == "taken apart\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGKILL])
def test_a_signal_ends_it_and_whoever_stands_for_it(python, number):
    with start([*python, "-c", WAIT]) as running:
        running.wait_for_output("pid")
        os.kill(running.pid, number)
        assert running.wait(timeout=30).returncode == -number
        assert poll(lambda: not marked(running.marker), 30)


def test_it_and_whoever_stands_for_it_end_together():
    """The server hears of both at once, when the process id of the fork is already free for another process."""
    server = preloaded._server()._process.pid
    with start(["env", PYTHON, "-c", WAIT]) as running:
        running.wait_for_output("pid")
        os.kill(server, signal.SIGSTOP)
        try:
            os.kill(pid := int(running.stdout.split()[1]), signal.SIGKILL)
            assert poll(lambda: ") Z " in Path(f"/proc/{pid}/stat").read_text(), 30)
            os.kill(running.pid, signal.SIGKILL)
            assert running.wait(timeout=30).returncode == -signal.SIGKILL
        finally:
            os.kill(server, signal.SIGCONT)
    assert launch([PYTHON, "-c", "print('served')"]).stdout == "served\n"


def test_its_own_death_is_that_of_whoever_stands_for_it(python):
    finished = launch([*python, "-c", "import os; os.kill(os.getpid(), 9)"])
    assert finished.returncode == -signal.SIGKILL


def test_it_is_found_by_its_marker_and_shows_its_command(python):
    with start([*python, "-c", WAIT, "a word"]) as running:
        running.wait_for_output("pid")
        pid = int(running.stdout.split()[1])
        (process,) = (one for one in marked(running.marker) if one.pid == pid)
        assert process.is_python
        assert "a word" in process.command


def test_forks_draw_different_numbers(python):
    code = "import random, numpy, torch; print(random.random(), numpy.random.rand(), torch.rand(1).item())"
    one, other = (launch([*python, "-c", code]).stdout.split() for _ in range(2))
    assert all(a != b for a, b in zip(one, other, strict=True))


def test_it_is_on_the_host_of_whoever_started_it(namespace_hosts):
    code = "import socket; print(socket.gethostname(), socket.gethostbyname(socket.gethostname()))"
    finished = namespace_hosts.run([PYTHON, "-c", code], host="n2", cwd=Path("/"))
    assert finished.stdout == f"n2 {namespace_hosts.addresses['n2']}\n"


IMPORT = """
import os, sys
import distman
def show():
    print(*sorted(name for name in sys.modules if name.partition(".")[0] == "distman"))
show()
distman.DistributedManager
import distman.data
show()
print(type(distman.__spec__.loader), distman.__file__, getattr(sys.excepthook, "__module__", None))
hook = sys.modules["distman._coordination.failure.hook"]
print(hook._IMPORTED_IN == os.getpid(), hook._hook)
"""


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_an_import_of_distman_does_what_it_does_in_an_interpreter(num_ranks):
    variables = {"WORLD_SIZE": str(num_ranks), "RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    fork, interpreter = (launch([python, "-c", IMPORT], env=variables) for python in (PYTHON, sys.executable))
    assert (fork.returncode, interpreter.returncode) == (0, 0)
    assert re.sub("0x[0-9a-f]+", "", fork.stdout) == re.sub("0x[0-9a-f]+", "", interpreter.stdout)


def test_another_copy_of_distman_is_imported_from_its_place(tmp_path):
    (tmp_path / "distman.py").write_text("word = 'another'")
    code = "import distman; print(distman.word)"
    assert launch([PYTHON, "-c", code], cwd=tmp_path).stdout == "another\n"


def test_a_program_that_does_not_import_distman_has_nothing_of_it():
    code = (
        "import sys; print([name for name in sys.modules if 'distman' in name], sys.excepthook is sys.__excepthook__)"
    )
    assert launch([PYTHON, "-c", code]).stdout == "[] True\n"
