"""Text that somebody else wrote, on its way to a terminal or a log: nothing in it is a command, and it has an end."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

_INDENT = "  "
_MOST_OF_A_LINE = 12_000  # characters: what a rank tells of its error, which it has shortened to a screen or two
_MOST = 120_000  # characters: a traceback or stacks as they are told, which is more than any honest ones have


def printable(text: str) -> str:
    """Return a text as one line of bounded length, in which all is escaped that Unicode does not take for printable."""
    left_out = len(text) - _MOST_OF_A_LINE
    if left_out > 0:
        half = _MOST_OF_A_LINE // 2
        return f"{printable(text[:half])} ... {left_out} characters left out ... {printable(text[-half:])}"
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else ascii(one)[1:-1] for one in text)  # a codec may fail to be imported


def printable_lines(text: str, indent: str = _INDENT) -> str:
    """Return a text of several lines with each of them printable, and none that begins where a log's own line does."""
    # Tabs stay: source code in a traceback may have them. The indent may be empty in a report.
    lines = shortened(text, _MOST).rstrip().split("\n")
    return "\n".join(indent + "\t".join(map(printable, line.split("\t"))) if line else "" for line in lines)


Line = Annotated[str, printable]
"""A field of a message that is shown on a line: it is printable as soon as the message is decoded."""


def listed(texts: Iterable[str], most: int, separator: str = ", ") -> str:
    """Return the first of some texts, and how many more there are."""
    every = list(texts)
    more = f" and {len(every) - most} more" if len(every) > most else ""
    return separator.join(every[:most]) + more


def shortened(text: str, limit: int) -> str:
    """Return a text of at most about so many characters: a store takes no message of any size."""
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]}\n... {len(text) - 2 * half} characters left out ...\n{text[-half:]}"
