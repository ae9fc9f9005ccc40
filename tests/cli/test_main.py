import signal
import subprocess
import sys

import pytest

from distman._version import VERSION

COMMAND = [sys.executable, "-m", "distman"]


def run(*arguments):
    return subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=60, check=False)


def test_the_version_is_that_of_the_package():
    assert run("--version").stdout == f"distman {VERSION}\n"


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
    assert finished.stderr.startswith("usage: distman [-h] [--version] COMMAND")
    assert finished.stderr.endswith("distman: error: unrecognized arguments: --versoin; did you mean --version?\n")


def test_a_reader_that_goes_away_ends_a_command_without_words():
    plan = [*COMMAND, "plan", "--world-size", "4096", "--mesh", "data=64,model=64", "--json"]
    with subprocess.Popen(plan, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 128 + signal.SIGPIPE


@pytest.mark.parametrize("command", ["env", "check", "bench", "plan"])
def test_every_command_says_what_it_does(command):
    finished = subprocess.run([*COMMAND, command, "--help"], capture_output=True, text=True, timeout=60, check=True)
    assert f"usage: distman {command}" in finished.stdout
    assert finished.stderr == ""


def test_a_wrong_option_is_answered_with_the_one_that_was_meant():
    launch = [*COMMAND, "launch", "--backend", "slurm", "--gpus-per-nod", "4", "--acount=physics"]
    finished = subprocess.run(launch, capture_output=True, text=True, timeout=60, check=False)
    assert finished.returncode == 2
    assert "usage: distman launch" in finished.stderr
    assert finished.stderr.rstrip().endswith("unrecognized arguments: --acount=physics; did you mean --account?")
