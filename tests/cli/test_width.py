"""What the commands print on a narrow terminal, and without one."""

import contextlib
import io

import pytest

from distman._cli import main
from distman._cli.output import print_text
from distman._cli.parser import make_parser

COMMANDS = ["run", "env", "check", "bench", "plan", "launch"]


def printed(*arguments):
    """Return what the command prints, run in this process."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.suppress(SystemExit):
        main(arguments)
    return output.getvalue()


def words_of(text):
    return text.split()


@pytest.mark.parametrize("width", [60, 80])
@pytest.mark.parametrize("arguments", [["env"], ["help"], *(["help", command] for command in COMMANDS)], ids=" ".join)
def test_nothing_is_wider_than_the_terminal_and_no_word_is_lost(monkeypatch, arguments, width):
    monkeypatch.setenv("COLUMNS", "1000")
    wide = printed(*arguments)
    monkeypatch.setenv("COLUMNS", str(width))
    narrow = printed(*arguments)
    assert max(map(len, narrow.splitlines())) <= width
    assert sorted(words_of(narrow)) == sorted(words_of(wide))


def test_without_a_terminal_nothing_is_folded(monkeypatch, capsys):
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setattr("sys.__stdout__", None)
    print_text("word " * 100)
    assert len(capsys.readouterr().out.splitlines()) == 1


def test_a_word_that_is_too_long_stays_whole(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "20")
    print_text(f"see {'x' * 50} for more")
    assert capsys.readouterr().out == f"see\n  {'x' * 50}\n  for more\n"


def test_lines_that_were_empty_stay(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "20")
    print_text("a\n\nb")
    assert capsys.readouterr().out == "a\n\nb\n"


def test_every_command_has_a_usage_that_fits(monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    assert max(map(len, make_parser().format_help().splitlines())) <= 60
