"""The manual page, which is made from the parser."""

import shutil
import subprocess
from pathlib import Path

import pytest

from distman._cli.parser import make_parser

from .man_page import commands, man_page, options

PAGE = Path(__file__).parents[2] / "docs" / "distman.1"


def test_the_page_is_what_the_parser_says():
    assert PAGE.read_text() == man_page(), "make man writes it again"


def test_the_page_has_every_command_and_option():
    shown = man_page().replace("\\-", "-")
    for name, _, parser in commands(make_parser()):
        assert f"\n.SS {name}\n" in shown
        assert all(flag in shown for action, _ in options(parser) for flag in action.option_strings)


def test_the_page_is_clean():
    if shutil.which("mandoc") is None:
        pytest.skip("not installed: mandoc")
    checked = subprocess.run(["mandoc", "-Tlint", PAGE], capture_output=True, text=True, check=False, timeout=60)
    complaints = [
        line for line in checked.stdout.splitlines() if "missing date" not in line
    ]  # it would be that of today
    assert complaints == []


@pytest.mark.parametrize("width", [60, 78])
def test_the_page_can_be_read(width):
    if shutil.which("mandoc") is None:
        pytest.skip("not installed: mandoc")
    command = ["mandoc", "-Tascii", "-O", f"width={width}", PAGE]
    shown = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    plain = subprocess.run(["col", "-bx"], input=shown, capture_output=True, text=True, check=True, timeout=60).stdout
    assert "--log-dir DIR\n" in plain
    assert "[script.py [arguments]]" in plain
