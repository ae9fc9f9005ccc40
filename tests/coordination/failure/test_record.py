"""What ranks tell each other of a failure."""

import threading

import pytest

from distman._base import timing
from distman._coordination.failure.record import DIED, EXITED, LEFT, SILENT, FailureRecord
from distman.errors import JobFailed, RankFailedError

from ...store.stores import MemoryStore
from ..ranks import Place, failure_on


def test_there_is_none_at_first():
    assert FailureRecord.read(MemoryStore()) is None


def test_the_first_failure_counts():
    store = MemoryStore()
    first, second = failure_on(0, "first"), failure_on(1, "second")
    assert first.publish(store) == first
    assert second.publish(store) == first
    assert FailureRecord.read(store) == first


def test_an_exception_is_told_with_its_traceback():
    try:
        raise ValueError("boom")
    except ValueError as error:
        record = FailureRecord.of(error, 3)
    assert (record.rank, record.error_type, record.error_text) == (3, "ValueError", "boom")
    assert record.traceback_text.endswith("ValueError: boom\n")


def test_the_failure_of_another_rank_is_passed_on():
    record = failure_on(2)
    assert FailureRecord.of(record.to_error(), 0) == record


class IncompleteError(RankFailedError):
    """What a program derived from the error, and does not fill in."""

    def __init__(self, text):
        Exception.__init__(self, text)

    def __getattr__(self, name):
        raise AttributeError(name)


def test_what_a_program_derived_from_the_error_is_told_as_its_own():
    error = IncompleteError("gave up")
    assert FailureRecord.of(error, 3).error_text == "gave up"
    assert not failure_on(2).is_told_by(error)
    assert failure_on(2).is_told_by(failure_on(2).to_failure())
    assert not failure_on(2).is_told_by(failure_on(1).to_failure())


def test_an_error_of_work_for_the_others_leaves_the_job_going():
    assert type(failure_on(2).to_error()) is RankFailedError
    assert type(failure_on(2).to_failure()) is JobFailed


def test_an_error_whose_text_never_ends_is_told_all_the_same(monkeypatch):
    class EndlessError(Exception):
        def __str__(self):
            threading.Event().wait(60)

    monkeypatch.setattr(timing, "ERROR_TEXT", 0.01)
    assert FailureRecord.of(EndlessError(), 0).error_text == "(its __str__ took more than 0.01 s)"


@pytest.mark.parametrize(("code", "number", "end"), [(3, 3, "."), (True, 1, "."), ("gave up", 1, ": gave up")])
def test_an_exit_code_is_told(code, number, end):
    record = FailureRecord.of(SystemExit(code), 0)
    assert record.error_type == EXITED
    assert record.error_text == f"ended with exit code {number}, by sys.exit() or SystemExit{end}"
    assert type(record.to_error()) is JobFailed


def test_an_error_that_cannot_say_what_it_is_is_told_all_the_same():
    class BrokenError(Exception):
        def __str__(self):
            raise LookupError

    assert FailureRecord.of(BrokenError(), 0).error_text == "(its __str__ raised LookupError)"


def test_what_another_rank_said_can_neither_clear_a_screen_nor_forge_a_line():
    text = "boom\x1b[2J\r\nINFO all is well\x85\u202e"
    record = FailureRecord(1, "n\x071", 101, "Value\nError", text, f"Traceback\n{text}\nValueError: {text}\n")
    lines = str(record.to_error()).split("\n")
    assert all(line.isprintable() for line in lines)
    assert lines[0] == r"rank 1 (n\x071, pid 101) raised Value\nError: boom\x1b[2J\r\nINFO all is well\x85\u202e"
    assert all(line.startswith("  ") for line in lines[3:])
    assert record.to_error().error_text == text


@pytest.mark.parametrize(
    ("record", "kind", "text"),
    [
        (FailureRecord.died(Place(1)), DIED, "rank 1 (n1, pid 101) died: its connection broke"),
        (FailureRecord.left(Place(1), "barrier 0"), LEFT, "left the job before it came to barrier 0"),
        (FailureRecord.silent(Place(1), 300), SILENT, "has been silent for 300 s: it is stopped"),
        (FailureRecord.silent(Place(1), 300, last_seen="in x"), SILENT, "for 300 s, last seen in x: it is stopped"),
    ],
)
def test_what_is_said_of_a_rank_that_cannot_say_it_itself(record, kind, text):
    assert record.error_type == kind
    assert isinstance(record.to_error(), JobFailed)
    assert text in str(record.to_error())
