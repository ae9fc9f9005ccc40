"""The manual page of the command, made from its parser: ``python -m tests.cli.man_page`` prints it."""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections.abc import Iterator

from distman._cli.parser import _COMMANDS, DESCRIPTION, CommandParser, make_parser
from distman._version import VERSION

_WIDTH = 60
"""Characters of a line of the source, which the reader's program fills anew; escapes come on top."""

_DESCRIPTION = (
    "distman is a package of Python for PyTorch jobs of many processes, and this command.",
    "`distman help COMMAND` shows what is here about one command.",
    "With --json, a command prints one JSON object on standard output; complaints are on standard error all the same.",
)

_EXIT_CODES = {
    "0": "Everything is well.",
    "1": "It did not work, or something is wrong: standard error says what.",
    "2": "The command line is wrong.",
    "130": "Ctrl-C.",
}
_MORE = "distman run ends with the code of the rank that failed first, and distman keep with that of its last try."
_VARIABLES = {
    "COLUMNS": "The width that lines are folded to; that of the terminal, if it is not set.",
    "NO_COLOR": "Without colours, if it is set.",
    "DISTMAN_DEBUG": "Show tracebacks in full, with the lines of torch and distman, if it is 1.",
}


def commands(parser: argparse.ArgumentParser) -> Iterator[tuple[str, str, CommandParser]]:
    """Yield each command with its summary and its parser, which knows its options."""
    (subparsers,) = (one for one in parser._actions if isinstance(one, argparse._SubParsersAction))
    for name, (_, summary) in _COMMANDS.items():
        subparsers.choices[name].load()
        yield name, summary, subparsers.choices[name]


def options(parser: argparse.ArgumentParser) -> Iterator[tuple[argparse.Action, str]]:
    """Yield the options that a parser shows, with their help."""
    for action in parser._actions:
        if action.option_strings and action.help not in (None, argparse.SUPPRESS):
            yield action, str(action.help) % {**vars(action), "prog": parser.prog}


def man_page() -> str:
    """Return the page in the language of man(7)."""
    return "\n".join(_page()) + "\n"


def _page() -> Iterator[str]:
    yield '.\\" Made by python -m tests.cli.man_page. Change the parser instead, and run `make man`.'
    yield f'.TH DISTMAN 1 "" "distman {VERSION}" "User Commands"'
    yield ".SH NAME"
    yield "distman \\-"
    yield _escaped(DESCRIPTION[0].lower() + DESCRIPTION[1:].rstrip("."))
    yield ".SH SYNOPSIS"
    yield ".B distman"
    yield ".I command"
    yield "[options]"
    yield ".SH DESCRIPTION"
    yield from map(_escaped, _DESCRIPTION)
    yield ".SH COMMANDS"
    for name, summary, parser in commands(make_parser()):
        yield f".SS {name}"
        yield _sentence(summary)
        yield ".PP"
        yield ".nf"
        yield from map(_escaped, (parser.usage or f"distman {name} [options]").splitlines())
        yield ".fi"
        yield ".PP"
        yield _escaped(parser.description or summary)
        for action, text in options(parser):
            yield ".TP"
            yield f".B {_escaped(', '.join(_with_value(flag, action) for flag in action.option_strings))}"
            yield _sentence(text)
        if parser.epilog:
            yield ".PP"
            yield _escaped(parser.epilog)
    yield from _table("EXIT STATUS", _EXIT_CODES)
    yield ".PP"
    yield _escaped(_MORE)
    yield from _table("ENVIRONMENT", _VARIABLES)


def _table(title: str, rows: dict[str, str]) -> Iterator[str]:
    yield f".SH {title}"
    for name, text in rows.items():
        yield ".TP"
        yield f".B {name}"
        yield _escaped(text)


def _with_value(flag: str, action: argparse.Action) -> str:
    return flag if action.nargs == 0 else f"{flag} {action.metavar or action.dest.upper()}"


def _sentence(text: str) -> str:
    return _escaped(f"{text[0].upper()}{text[1:]}.")


def _escaped(text: str) -> str:
    lines = textwrap.wrap(text, _WIDTH, break_long_words=False, break_on_hyphens=False)
    return "\n".join(f"\\&{line}" if line.startswith((".", "'")) else line for line in map(_without_hyphens, lines))


def _without_hyphens(text: str) -> str:
    return text.replace("\\", "\\e").replace("-", "\\-")


if __name__ == "__main__":
    sys.stdout.write(man_page())
