"""Text of others on its way to a terminal."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from distman._text import printable, printable_lines, shortened

ESCAPES = [
    "\x1b[2J",
    "\x1b]0;title\x07",
    "\r",
    "\x9b31m",
    "\u202e",
    "\u200b",
    "\ufeff",
    "\u2028",
    "\ud800",
    "\0",
    "\x08",
]
TEXTS = st.text(st.characters(codec=None)) | st.lists(st.sampled_from([*ESCAPES, "a", "\n", "\t"])).map("".join)


@given(TEXTS)
@example("".join(ESCAPES))
def test_nothing_moves_a_cursor(text):
    assert printable(text).isprintable()
    for line in printable_lines(text).split("\n"):
        assert not line or (line.startswith("  ") and line.replace("\t", "").isprintable())


@given(st.text(st.characters(categories=["L", "N", "P"])))
def test_what_can_be_printed_stays(text):
    assert printable(text) == text


@pytest.mark.parametrize("one", ESCAPES)
def test_what_is_escaped_can_be_read(one):
    assert printable(f"before {one} after") == f"before {one.encode('unicode_escape').decode()} after"


def test_a_traceback_keeps_its_lines_and_tabs():
    assert (
        printable_lines("Traceback:\n\tx = 1\n\n[rank 0/2] \x1b[2J")
        == "  Traceback:\n  \tx = 1\n\n  [rank 0/2] \\x1b[2J"
    )


@given(st.sampled_from(["a", "\x1b", "\n", "\u202e", "\t"]))
def test_no_text_is_endless(one):
    assert len(printable(one * 1_000_000)) < 110_000
    assert len(printable_lines(one * 1_000_000)) < 1_100_000
    assert "990000 characters left out" in printable(one * 1_000_000)


def test_a_long_text_loses_its_middle():
    text = shortened("a" * 600 + "b" * 600, 100)
    assert text == "a" * 50 + "\n... 1100 characters left out ...\n" + "b" * 50
    assert shortened("short", 100) == "short"
