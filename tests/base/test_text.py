"""Text of others on its way to a terminal, by whatever message it gets there."""

import dataclasses
import functools
import json
import subprocess
import sys
import types
import typing

import pytest
from hypothesis import HealthCheck, example, given, settings, strategies as st

from distman._base.text import Line, printable, printable_lines, shortened
from distman._coordination import protocol
from distman._coordination.consensus import Consensus, wait_for_all
from distman._coordination.failure.record import FailureRecord
from distman._coordination.messages import decode
from distman._coordination.monitor.context import WatchContext, WatchLimits
from distman._coordination.monitor.deadlocks import reason_of
from distman._coordination.monitor.hang import Answer, write_report
from distman._coordination.monitor.watcher import Watcher
from distman._coordination.sections import ExclusiveSections
from distman._coordination.tracking import Call
from distman._job.meeting.membership import _Verdict
from distman._job.meeting.peers import JoinRecord, complete, describe_present, find_faults
from distman.collectives._headers import describe
from distman.errors import DistmanError
from distman.executor._pool import DeviceWorker
from distman.testing._messages import RankReport, RankStatus
from distman.testing._report import report_failure

from ..coordination.ranks import at_once, places, store_groups
from ..job.meeting.join_records import join_record
from ..store.stores import MemoryStore

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
    assert len(printable(one * 1_000_000)) < 130_000
    assert len(printable_lines(one * 1_000_000)) < 1_300_000
    assert "988000 characters left out" in printable(one * 1_000_000)


def test_what_was_left_out_before_is_still_said():
    record = FailureRecord.of(ValueError("a" * 1_000_000), 1)
    assert "990000 characters left out" in printable(record.error_text)


def error_of(call):
    try:
        call()
    except DistmanError as error:
        return str(error)
    return ""


def failure(text):
    record = FailureRecord(1, text, 1, text, text, text)
    return f"{record.to_error()}{dataclasses.replace(record, traceback_text='').to_error()}"


def barrier_given_up(text):
    first, _ = store_groups(2)
    record = FailureRecord(1, text, 1, "BarrierTimeoutError", text)
    first.store.set(protocol.outcome("barrier 0"), json.dumps([[1], dataclasses.asdict(record)]))
    first.store.set(protocol.passages("barrier 0"), str(-(2**40)))
    return error_of(lambda: wait_for_all(first, "barrier 0", timeout=10))


def plans_that_differ(text):
    first, second = (Consensus(group, 10) for group in store_groups(2))
    errors = at_once(lambda: first.agree("plan", "a", text), lambda: second.agree("plan", f"{text}b", text))
    return "".join(map(str, errors))


def calls_that_differ(text):
    first, second = (functools.partial(Consensus(group, 10).compare, "call", place=text) for group in store_groups(2))
    return "".join(map(str, at_once(lambda: first({text: text}), lambda: second({text: f"{text}b"}))))


def sections_that_differ(text):
    first, second = store_groups(2)
    ExclusiveSections(first).begin(text + "b", [0]).succeed()
    return error_of(ExclusiveSections(second).begin("load()", [0]).wait)


def exchanges_that_differ(text):
    store = MemoryStore()
    members = types.SimpleNamespace(name="world", process_group=types.SimpleNamespace(group_name="0"))
    store.set(protocol.deadlock("0 1 all_gather_v"), json.dumps([text]))
    return reason_of(store, Call(members, 1, "all_gather_v"))


def places_of_others(text):
    store = MemoryStore()
    store.set(protocol.beat(1), f"1.0 {text}".encode(errors="backslashreplace"))
    context = WatchContext(store, "tcp://n1:5", 0, places(2), opener=0)
    watcher = Watcher(context, WatchLimits(300.0), lambda _: None, patience=0.0)
    return "".join([*watcher.locate([1]).values(), watcher._last_seen(1), Answer(text, text, text).place])


def join_records(text):
    hints = typing.get_type_hints(JoinRecord, include_extras=True)
    shown = {name: text for name, kind in hints.items() if kind == Line}
    fields = dataclasses.asdict(join_record(1)) | shown
    others = [join_record(0), decode(json.dumps(fields), JoinRecord, "it")]
    verdict = _Verdict.unpack(_Verdict(complete(others), error=text).pack())
    peer = verdict.peers[1]
    parts = [*find_faults([*others, others[1]], 2), describe_present(others), peer, *vars(peer).values(), verdict.error]
    return "".join(map(str, parts))


def error_of_a_worker(text):
    worker = types.SimpleNamespace(index=1, pid=5, _settings=types.SimpleNamespace(device="cpu"))
    return str(DeviceWorker._error(worker, f"raised {text}", text=text))


def report_of_tests(text):
    reports = [
        RankReport(0, RankStatus.RAISED, text, text),
        RankReport(1, RankStatus.DIED, text, stdout=text, stderr=text),
    ]
    return report_failure(reports, [])


def keys_that_differ(text):
    brought = [["avg", text, [[name, text, text]]] for name in (text, "b")]
    return describe(brought[0], brought)


def malformed_message(text):
    return error_of(lambda: decode(json.dumps({text: text}), int, "it"))


SHOWS = [
    failure,
    barrier_given_up,
    plans_that_differ,
    calls_that_differ,
    sections_that_differ,
    exchanges_that_differ,
    places_of_others,
    join_records,
    error_of_a_worker,
    report_of_tests,
    keys_that_differ,
    malformed_message,
]


@pytest.mark.parametrize("show", SHOWS)
@settings(max_examples=15)
@given(TEXTS)
@example("".join(ESCAPES) + "\n[rank 0/2] forged")
@example("\x1b" * 200_000)
def test_no_message_lets_a_text_of_others_through(show, text):
    shown = show(text)
    assert shown.replace("\n", "").replace("\t", "").isprintable()
    assert len(shown) < 3_000_000
    assert show is report_of_tests or "\n[rank 0/2] forged" not in shown


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(TEXTS)
@example("".join(ESCAPES))
def test_a_hang_report_is_printable(tmp_path, caplog, text):
    write_report("rank 0 waits", 0, dict.fromkeys(range(2), Answer(text, text, text)), ["rank 0", "rank 1"], tmp_path)
    for shown in (*(path.read_text() for path in tmp_path.iterdir()), caplog.messages[-1]):
        assert shown.replace("\n", "").replace("\t", "").isprintable()


def test_a_long_text_loses_its_middle():
    text = shortened("a" * 600 + "b" * 600, 100)
    assert text == "a" * 50 + "\n... 1100 characters left out ...\n" + "b" * 50
    assert shortened("short", 100) == "short"


def test_no_codec_is_needed_that_is_not_there_yet():
    """The import of one may be cut off by the very failure that is to be shown; then it is unknown for ever."""
    program = (
        "import codecs, encodings; from distman._base.text import printable; "
        "codecs.unregister(encodings.search_function)"
    )
    done = subprocess.run(
        [sys.executable, "-c", f"{program}; print(printable('a\\x1b\\u202e'))"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "a\\x1b\\u202e\n"
