"""What other libraries call things, and what they are called here: one table, for errors and for the documentation."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable
from pathlib import Path

TABLE = Path(__file__).with_suffix(".json")
OPTIONS = "options of launchers"
_START = "manager.initialize"
_MANAGER = ", of manager = DistributedManager()"


def read_tables() -> dict[str, list[list[str]]]:
    """Return rows of old names, new names, and what differs or what to write, by library."""
    tables: dict[str, list[list[str]]] = json.loads(TABLE.read_text(encoding="utf-8"))
    return tables


def refusals(library: str) -> dict[str, str]:
    """Return what to write in place of each name of NNHandler that :mod:`distman.compat` refuses."""
    return {name: remedy for olds, _, remedy in read_tables()[library] for name in olds.split()}


def new_name(name: str, *, is_of_manager: bool = False) -> str:
    """Return in a sentence what is here in place of a name of another library, or nothing."""
    in_errors = [rows for library, rows in read_tables().items() if library != OPTIONS and "NNHandler" not in library]
    return _sentence(name, itertools.chain(*in_errors), "" if is_of_manager else _MANAGER)


def new_option(name: str) -> str:
    """Return in a clause what ``distman run`` takes in place of an option of another launcher, or nothing."""
    text = _sentence(name.partition("=")[0], read_tables()[OPTIONS], "")
    return f"{text[0].lower()}{text[1:-1]}" if text else ""


def _sentence(name: str, rows: Iterable[list[str]], of_manager: str) -> str:
    """Return what the first row with an old name says."""
    for olds, new, note in rows:
        if name in olds.split():
            note = note.replace("`", "")
            if not new:
                return f"{note[0].upper()}{note[1:]}."
            news = [f"manager.{name}" if one == "manager" else one for one in new.split(", ")]
            names = " or ".join("DistributedManager.initialize" if one == _START else one for one in news)
            return f"Here it is {names}{of_manager if 'manager.' in names else ''}{note and f' ({note})'}."
    return ""


def missing_attribute(owner: object, name: str) -> AttributeError:
    """Return the error for an attribute that an object does not have, or raise again what its property raised."""
    own = getattr(type(owner), name, None)
    if isinstance(own, property) and own.fget is not None:
        own.fget(owner)
    hint = "" if name.startswith("_") else new_name(name, is_of_manager=True)
    text = f"{type(owner).__name__!r} object has no attribute {name!r}"
    # With a hint the interpreter is not to add one of its own, which it takes from the owner's attributes.
    return AttributeError(f"{text}. {hint}", name=name) if hint else AttributeError(text)
