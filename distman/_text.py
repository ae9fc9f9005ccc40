"""Text that somebody else wrote, on its way to a terminal or a log."""

from __future__ import annotations

_INDENT = "  "


def printable(text: str) -> str:
    """Return a text as one line in which nothing moves a cursor: control characters and ends of lines are escaped."""
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)


def printable_lines(text: str) -> str:
    """Return a text of several lines with each of them printable, and none that begins where a log's own line does."""
    return "\n".join(f"{_INDENT}{printable(line)}" if line else "" for line in text.rstrip().split("\n"))


def shortened(text: str, limit: int) -> str:
    """Return a text of at most about so many characters: a store takes no message of any size."""
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]}\n... {len(text) - 2 * half} characters left out ...\n{text[-half:]}"
