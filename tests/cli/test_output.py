import os
import pty
import subprocess
import sys

import pytest

from distman._cli.output import plain_table

TABLE = """
from distman._cli.output import print_table
print_table(["rank", "host"], [[0, "n1"], [10, "node2"]], title="ranks")
"""
BAR = """
from distman._cli.output import progress_bar
with progress_bar(2) as begin:
    begin("broadcast")
    begin("all_gather")
"""


def on_a_terminal(program):
    """Return what a program prints on a terminal."""
    parent, child = pty.openpty()
    environ = {**os.environ, "COLUMNS": "80", "TERM": "xterm-256color"}
    with subprocess.Popen([sys.executable, "-c", program], stdout=child, stderr=child, env=environ) as process:
        os.close(child)
        printed = b""
        while True:
            try:
                printed += os.read(parent, 4096)
            except OSError:  # the terminal's other side is closed
                break
    os.close(parent)
    assert process.returncode == 0
    return printed.decode()


def piped(program):
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)


def test_a_table_that_is_piped_is_plain_text():
    assert piped(TABLE).stdout == "ranks\nrank  host\n0     n1\n10    node2\n"


def test_a_table_on_a_terminal_has_lines():
    drawn = on_a_terminal(TABLE)
    assert "┃" in drawn
    assert "node2" in drawn


def test_a_table_without_rows():
    assert plain_table(["rank", "host"], []) == "rank  host"


@pytest.mark.parametrize(("run", "is_shown"), [(on_a_terminal, True), (lambda program: piped(program).stderr, False)])
def test_a_bar_is_for_terminals(run, is_shown):
    assert ("all_gather" in run(BAR)) is is_shown
