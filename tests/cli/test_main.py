import json
import os
import signal
import subprocess
import sys

import pytest

from distman._version import VERSION

from ..launch import preloaded
from .commands import run

COMMAND = [sys.executable, "-m", "distman"]


def run_alone(*arguments):
    """Run what starts ranks, or is one, in a process of its own, which has imported torch."""
    command, environ = [preloaded.PYTHON, "-m", "distman", *arguments], {**os.environ, **preloaded.server_variables()}
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60, check=False)


def test_the_version_is_that_of_the_package():
    done = subprocess.run([*COMMAND, "--version"], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == f"distman {VERSION}\n"


@pytest.mark.parametrize(
    ("arguments", "command", "complaint"),
    [
        (["check", "--fodler", "x"], "check", "unrecognized arguments: --fodler x; did you mean --folder?"),
        (["env", "--jsno=1"], "env", "unrecognized arguments: --jsno=1; did you mean --json?"),
        (["env", "xyz"], "env", "unrecognized arguments: xyz"),
    ],
)
def test_a_wrong_option_is_told_by_its_command(arguments, command, complaint):
    finished = run(*arguments)
    assert (finished.returncode, finished.stdout) == (2, "")
    assert finished.stderr.startswith(f"usage: distman {command} [-h]")
    assert finished.stderr.endswith(f"distman {command}: error: {complaint}\n")


def test_a_wrong_option_before_the_command_is_told_by_the_program():
    finished = run("--versoin", "env")
    assert finished.stderr.startswith("usage: distman [-h] [-V] COMMAND")
    assert finished.stderr.endswith("distman: error: unrecognized arguments: --versoin; did you mean --version?\n")


def test_a_reader_that_goes_away_ends_a_command_without_words():
    plan = [*COMMAND, "plan", "--world-size", "4096", "--mesh", "data=64,model=64", "--json"]
    with subprocess.Popen(plan, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 128 + signal.SIGPIPE


@pytest.mark.parametrize("command", ["run", "env", "check", "bench", "plan", "launch"])
def test_every_command_says_what_it_does(command):
    finished = run(command, "--help")
    assert f"usage: distman {command}" in finished.stdout
    assert (finished.returncode, finished.stderr) == (0, "")


def test_a_wrong_option_is_answered_with_the_one_that_was_meant():
    finished = run("launch", "--backend", "slurm", "--acount=physics")
    assert finished.returncode == 2
    assert "usage: distman launch" in finished.stderr
    assert finished.stderr.rstrip().endswith("unrecognized arguments: --acount=physics; did you mean --account?")


@pytest.mark.parametrize("arguments", [[], ["help"], ["--help"]])
def test_without_a_command_the_commands_are_listed(arguments):
    finished = run(*arguments)
    assert (finished.returncode, finished.stderr) == (0, "")
    assert "start the ranks of a job on this machine" in finished.stdout


def test_help_of_a_command_has_two_spellings():
    assert run("help", "plan").stdout == run("plan", "--help").stdout


@pytest.mark.parametrize(("word", "meant"), [("checkup", "check"), ("laucnh", "launch"), ("ENV", None), ("x", None)])
def test_a_command_that_is_none_is_answered_with_the_one_that_was_meant(word, meant):
    finished = run(word)
    assert finished.returncode == 2
    assert ("did you mean" in finished.stderr) == (meant is not None)
    assert (meant or "choose from run, keep, env, check, bench, plan, launch") in finished.stderr


def test_options_are_not_abbreviated():
    assert run("env", "--jso").returncode == 2


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-"])
def test_closed_streams_are_no_error(closed):
    command = f"{sys.executable} -m distman plan --world-size 4 --mesh data=-1 {closed}"
    assert subprocess.run(["sh", "-c", command], timeout=60, check=False).returncode == 0


@pytest.mark.parametrize(
    ("arguments", "keys"),
    [
        (["env"], {"launcher", "rank", "protected_by", "warnings"}),
        (["check"], {"world_size", "ranks", "collectives", "problems", "is_ok"}),
        (["plan", "--world-size", "4", "--mesh", "data=-1"], {"tree", "groups", "warnings"}),
        (["launch", "--backend", "slurm"], {"backend", "file", "submit", "script"}),
        (["run", "-n", "2"], {"exit_code", "failure", "ranks"}),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_every_command_prints_json_and_nothing_else(arguments, keys):
    script = ["-m", "this"] if arguments[0] == "run" else []
    start = run_alone if arguments[0] in ("check", "run") else run
    finished = start(*arguments, "--json", *script)
    assert finished.returncode == 0
    assert json.loads(finished.stdout).keys() >= keys


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["env", "--method", "nobody"], 1),
        (["bench"], 1),  # of one process there is nothing to measure
        (["plan", "--world-size", "4", "--mesh", "data=3"], 1),
        (["plan", "--world-size", "4", "--mesh", "data=x"], 2),
        (["launch", "--backend", "slurm", "--nodes", "0"], 2),
        (["run", "-n", "0", "-m", "this"], 2),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_is_wrong_is_said_on_standard_error_with_json_too(arguments, code):
    start = run_alone if arguments[0] == "bench" else run
    finished = start(*arguments[:1], "--json", *arguments[1:])
    assert (finished.returncode, finished.stdout) == (code, "")
    assert f"distman {arguments[0]}: " in finished.stderr


def test_a_failure_of_a_rank_is_json_too(tmp_path):
    script = tmp_path / "fail.py"
    script.write_text("import distman\nprint('begun')\nraise ValueError('sample 17')\n")
    finished = run_alone("run", "-n", "1", "--json", str(script))
    said = json.loads(finished.stdout)
    assert (finished.returncode, said["exit_code"], finished.stderr) == (1, 1, "begun\n")
    assert (said["failure"]["error_type"], said["failure"]["error_text"]) == ("ValueError", "sample 17")


def test_help_needs_little():
    """Each of these takes longer to import than all that the help needs."""
    program = "import sys; from distman._cli import main; main([]); print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    modules = loaded.stdout.splitlines()[-1].split()
    heavy = {"torch", "numpy", "rich", "matplotlib", "multiprocessing.context", "ctypes", "uuid", "statistics"}
    assert heavy.isdisjoint(modules)
    assert [name for name in modules if name.startswith("distman._coordination")] == []
