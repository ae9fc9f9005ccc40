import io
import os
import random
from unittest import mock

import pytest

from distman._cli.run.console import Console

CLEAR = "\r\x1b[K"


def shown(writes, num_ranks=2, *, is_terminal=False, is_colored=False):
    """What a stream has after some writes of (rank, text)."""
    stream = io.BytesIO()
    stream.isatty = lambda: is_terminal
    with mock.patch.dict(os.environ, {"TERM": "xterm", "NO_COLOR": "" if is_colored else "1"}):
        console = Console(stream, num_ranks)
    for rank, text in writes:
        console.write(rank, text.encode())
    console.close()
    return stream.getvalue().decode()


@pytest.mark.parametrize(
    ("writes", "expected"),
    [
        ([(0, "a\n"), (1, "b\n")], "0: a\n1: b\n"),
        ([(0, "he"), (1, "b\n"), (0, "llo\n")], "1: b\n0: hello\n"),
        ([(0, "no end")], "0: no end\n"),
        ([(1, "a\n\nb\n")], "1: a\n1: \n1: b\n"),
        ([(0, "windows\r\n")], "0: windows\n"),
        ([(0, "\r 10 %"), (1, "b\n"), (0, "\r 50 %"), (0, "\r100 %\n")], "1: b\n0: 100 %\n"),
    ],
)
def test_lines_are_whole_and_carry_their_rank(writes, expected):
    assert shown(writes) == expected


def test_a_single_rank_has_no_name():
    assert shown([(0, "a\n")], num_ranks=1) == "a\n"


def test_names_have_one_width():
    assert shown([(3, "a\n"), (11, "b\n")], num_ranks=12) == " 3: a\n11: b\n"


def test_lines_that_are_cut_anywhere_stay_whole():
    draw = random.Random(3)  # noqa: S311 - no secret
    texts = [[f"{rank} {draw.random()} ü\n" for _ in range(50)] for rank in range(4)]
    queues = {rank: "".join(lines).encode() for rank, lines in enumerate(texts)}
    stream = io.BytesIO()
    console = Console(stream, 4)
    while any(queues.values()):
        rank = draw.choice([rank for rank, rest in queues.items() if rest])
        cut = draw.randint(1, 40)
        console.write(rank, queues[rank][:cut])
        queues[rank] = queues[rank][cut:]
    lines = stream.getvalue().decode().splitlines(keepends=True)
    assert [[line[3:] for line in lines if line.startswith(f"{rank}: ")] for rank in range(4)] == texts


def test_a_bar_stays_the_last_line_of_a_terminal():
    writes = [(0, "\r 10 %"), (1, "b\n"), (0, "\r 50 %"), (0, "\r100 %\n"), (1, "c\n")]
    bar, ten, half = CLEAR, "0:  10 %", "0:  50 %"
    assert shown(writes, is_terminal=True) == (f"{bar}{ten}{bar}1: b\n{ten}{bar}{half}{bar}0: 100 %\n1: c\n")


def test_of_two_bars_that_of_the_first_is_drawn_until_it_ends():
    writes = [(0, "\rone"), (1, "\rtwo"), (0, "\rone more\n"), (1, "\rtwo more")]
    assert shown(writes, is_terminal=True) == (
        f"{CLEAR}0: one{CLEAR}0: one more\n{CLEAR}1: two more{CLEAR}1: two more\n"
    )


def test_a_bar_that_is_too_wide_does_not_go_on_in_the_next_row(monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    assert shown([(0, "x" * 100)], is_terminal=True).startswith(f"{CLEAR}0: {'x' * 36}{CLEAR}0: xxx")


def test_colours_are_those_of_ranks():
    assert (
        shown([(0, "a\n"), (1, "b\n")], is_terminal=True, is_colored=True)
        == "\x1b[36m0:\x1b[0m a\n\x1b[33m1:\x1b[0m b\n"
    )


def test_a_line_without_end_takes_no_memory_for_ever():
    assert shown([(0, "x" * 50_000)] * 3).count("\n") == 2
