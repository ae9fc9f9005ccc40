"""Text of others on its way to a terminal."""

from hypothesis import given
from hypothesis import strategies as st

from distman._text import printable, printable_lines, shortened


@given(st.text())
def test_nothing_moves_a_cursor(text):
    assert printable(text).isprintable()
    assert all(not line or (line.startswith("  ") and line.isprintable()) for line in printable_lines(text).split("\n"))


@given(st.text(st.characters(categories=["L", "N", "P"])))
def test_what_can_be_printed_stays(text):
    assert printable(text) == text


def test_a_long_text_loses_its_middle():
    text = shortened("a" * 600 + "b" * 600, 100)
    assert text == "a" * 50 + "\n... 1100 characters left out ...\n" + "b" * 50
    assert shortened("short", 100) == "short"
