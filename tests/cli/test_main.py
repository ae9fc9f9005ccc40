import signal
import subprocess
import sys

import pytest

COMMAND = [sys.executable, "-m", "distman"]


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
