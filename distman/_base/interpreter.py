"""New interpreters, which import what this one would: not what is in a folder where they happen to start."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

_NAME = "distman_search_path"  # variable of a program of ours, by which its frame is known


def options() -> list[str]:
    """Return the options that this interpreter was started with, as far as they change what another one does."""
    # Source: Python's manual, section Command line and environment; multiprocessing hands on the same.
    flags = sys.flags
    counts = {
        "-I": flags.isolated,
        "-E": flags.ignore_environment,
        "-s": flags.no_user_site,
        "-P": flags.safe_path,
        "-S": flags.no_site,
        "-B": flags.dont_write_bytecode,
        "-O": flags.optimize,
        "-b": flags.bytes_warning,
        "-d": flags.debug,
        "-v": flags.verbose,
    }
    letters = [letter for letter, count in counts.items() for _ in range(count)]
    warnings = [f"-W{option}" for option in sys.warnoptions]
    others = [f"-X{name}" if value is True else f"-X{name}={value}" for name, value in sys._xoptions.items()]
    return [*letters, *warnings, *others]


def program(text: str) -> list[str]:
    """Return the arguments with which an interpreter runs a program; its first statement takes over our search path."""
    # Until then an interpreter that runs a text would import from the current folder first.
    return ["-P", "-c", f"import sys\n{_NAME} = sys.path[:] = {search_path()!a}\n{text}"]


def search_path() -> list[str]:
    """Return the folders from which this interpreter imports; it passes over what is no text."""
    return [str(entry) for entry in sys.path if isinstance(entry, str)]


def environment(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment of a new interpreter, in which ``PYTHONPATH`` means the folders that it meant here."""
    # An entry that is empty or relative is taken from the folder in which an interpreter starts, and this one may have
    # gone to another since. What makes an interpreter ask for statements at its end is left out.
    variables = dict(os.environ if environ is None else environ)
    variables.pop("PYTHONINSPECT", None)
    if path := variables.pop("PYTHONPATH", ""):
        known = search_path()
        entries = [(entry, os.path.abspath(entry)) for entry in path.split(os.pathsep)]  # noqa: PTH100 - as Python has it
        kept = [place for entry, place in entries if place in known or os.path.isabs(entry)]  # noqa: PTH117 - the same
        variables |= {"PYTHONPATH": os.pathsep.join(kept)} if kept else {}
    return variables


def is_of_program(file: str, name: str) -> bool:
    """Return whether a frame is that of such a program, in which a user does not look for a mistake."""
    return (file, name) == ("<string>", "<module>") and hasattr(sys.modules["__main__"], _NAME)
