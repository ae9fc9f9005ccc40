"""What other processes wrote: only what is well-formed is used, and nonsense at any key ends nothing."""

import contextlib
import dataclasses
import itertools
import json
import math
import re
import threading
import types
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import distman
from distman import DistributedManager
from distman._coordination import messages, protocol, tracking
from distman._coordination.barrier import wait_for_all
from distman._coordination.consensus import Consensus
from distman._coordination.failure.record import FailureRecord
from distman._coordination.messages import (
    MalformedMessageError,
    add_to,
    checked,
    claim,
    count,
    decode,
    decode_index,
    decode_row,
    decode_text,
    unless_malformed,
)
from distman._coordination.monitor import context as context_module
from distman._coordination.monitor.calls import Call
from distman._coordination.monitor.context import WatchContext, WatchLimits
from distman._coordination.monitor.hang import Answer, HangWatch
from distman._coordination.monitor.peer_connection import read_address
from distman._coordination.monitor.peer_monitor import PeerMonitor
from distman._coordination.monitor.watcher import NO_ANSWER, Watcher
from distman._coordination.preemption import StopAgreement
from distman._coordination.sections import ExclusiveSections
from distman._job.meeting.join_record import JoinRecord, Origin
from distman._job.meeting.membership import _Verdict
from distman._job.meeting.peers import Peer, complete
from distman.collectives import all_gather_v
from distman.errors import DistmanError
from distman.testing import ranks

from ..job.meeting.join_records import join_record
from ..store.stores import MemoryStore
from .ranks import at_once, failure_on, places, store_groups

PACKAGE = Path(distman.__file__).parent

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters()),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
FIELDS = sorted(
    {field.name for kind in (FailureRecord, Answer, JoinRecord, Origin) for field in dataclasses.fields(kind)}
)
ALMOST = st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=8)  # the right names, and whatever they hold
GARBAGE = (
    st.binary(max_size=64)
    | (JSON | ALMOST).map(lambda value: json.dumps(value).encode())
    | st.sampled_from(
        [b"[" * 100_000, b"9" * 10_000, b"1e999", b"NaN", b'{"hello": 1}', b'"\\ud800"', b"-", b"-1", b"\0"]
    )
)
KINDS = [
    int,
    float,
    bool,
    str,
    FailureRecord,
    Answer,
    JoinRecord,
    list[int],
    dict[str, str],
    tuple[str, FailureRecord | None],
    tuple[list[str], int, str],
]


def is_kind(value, kind):
    """Whether a value has a type, as far as these messages need one."""
    return unless_malformed(lambda: checked(json.loads(json.dumps(value)), kind, "it")) is not None


@given(GARBAGE, st.sampled_from(KINDS))
def test_whatever_comes_is_a_message_or_an_error_of_one_type(data, kind):
    with contextlib.suppress(MalformedMessageError):
        decode(data, kind, "it")
    with contextlib.suppress(MalformedMessageError):
        assert 0 <= decode_index(data, 3, "it") < 3
    with contextlib.suppress(MalformedMessageError):
        decode_row(data, Peer, "it")
    with contextlib.suppress(MalformedMessageError):
        _Verdict.unpack(data)
    with contextlib.suppress(MalformedMessageError):
        _, port, _ = read_address(data, 1)
        assert 0 < port < 65536
    decode_text(data)
    FailureRecord.told(data).to_error()


@pytest.mark.parametrize(
    "message",
    [
        failure_on(1, "a\x1b[2J\ud800 text"),
        Answer("in barrier at a.py:1", "thread\n  File", "a.py:1"),
        join_record(1, device="cuda:1", visible=("GPU-1",), local_rank=0),
        FailureRecord(-1, "n1", 0, "died", "it died"),
    ],
)
def test_what_was_written_is_read(message):
    fields = dataclasses.asdict(message)
    assert decode(json.dumps(fields), type(message), "it") == message
    assert decode(json.dumps({**fields, "of_a_later_release": [1]}), type(message), "it") == message


@pytest.mark.parametrize(
    ("value", "kind", "reason"),
    [
        ("text", int, "it must be int, got 'text'"),
        (True, int, "it must be int, got True"),
        (1, bool, "it must be bool, got 1"),
        (2**63, int, "it must be a number of 64 bits, got 9223372036854775808"),
        (math.inf, float, "it must be a number of ordinary size, got inf"),
        (1e300, float, "it must be a number of ordinary size"),
        ({"rank": 1}, FailureRecord, "it lacks host"),
        ({**vars(failure_on(1)), "pid": "812"}, FailureRecord, "pid: it must be int, got '812'"),
        ({"hello": "\x1b[2J"}, list[int], r"it must be list, got {'hello': '\x1b[2J'}"),
        ([1], tuple[int, int], "it must be 2 values, got [1]"),
        ([1, "a"], list[int], "it must be int, got 'a'"),
        ({"a": 1}, dict[str, str], "it must be str, got 1"),
        (
            vars(join_record(0)) | {"rank": -7, "origin": vars(join_record(0).origin), "visible": []},
            JoinRecord,
            "ranks must be 0 or more",
        ),
    ],
)
def test_what_is_wrong_with_a_message_is_said(value, kind, reason):
    with pytest.raises(MalformedMessageError) as caught:
        checked(value, kind, "the report of rank 3")
    assert str(caught.value).startswith("reading the report of rank 3 failed: ")
    assert reason in str(caught.value)
    assert str(caught.value).isprintable()


def test_a_huge_message_is_not_read(monkeypatch):
    monkeypatch.setattr(messages, "_MOST_BYTES", 100)
    with pytest.raises(MalformedMessageError, match="it has 102 bytes"):
        decode(json.dumps("a" * 100), str, "it")


def test_what_is_shown_on_a_line_is_printable():
    record = dataclasses.asdict(join_record(0, host="n1\x1b]0;x\x07\n[rank 1/2] \u202e"))
    assert decode(json.dumps(record), JoinRecord, "it").host == r"n1\x1b]0;x\x07\n[rank 1/2] \u202e"
    rows = complete([join_record(0, 1, host="n\r1")])
    assert str(rows[0]) == r"rank 0 (n\r1, pid 100)"


def test_there_is_one_warning_for_each_thing_that_is_malformed(caplog):
    messages._forget_warnings()  # of other tests
    for _ in range(3):
        assert unless_malformed(lambda: decode(b"?", int, "the first to leave")) is None
        assert unless_malformed(lambda: decode(b"?", int, "who serves it")) is None
    for number in range(1000):
        unless_malformed(lambda: decode(b"?", int, f"answer {number}"))  # noqa: B023 - called at once
    texts = [record.getMessage() for record in caplog.records]
    assert texts[0].startswith("a malformed message is dropped: reading the first to leave failed: ")
    assert texts[1].startswith("a malformed message is dropped: reading who serves it failed: ")
    assert len(texts) == 100


@given(GARBAGE)
def test_garbage_does_not_keep_a_message_out(data):
    store = MemoryStore()
    store.set("key", data)
    kept = unless_malformed(lambda: decode_index(data, 3, "it"))
    assert claim(store, "key", "2", lambda found: decode_index(found, 3, "it")) == (2 if kept is None else kept)
    failure = MemoryStore()
    failure.set(protocol.FAILURE, data)
    assert failure_on(1).publish(failure) == FailureRecord.read(failure)


@given(GARBAGE)
def test_a_counter_that_holds_no_number_begins_again(data):
    store = MemoryStore()
    store.set("counter", data)
    first = count(store, "counter", 1)
    assert add_to(store, "counter", 1) == first + 1


def test_who_lets_a_counter_begin_again_forgets_nobody_who_was_counted_meanwhile():
    store = MemoryStore()
    for place in range(200):
        store.set(f"counter {place}", "no number")
        gate = threading.Barrier(4)

        def come(name=f"counter {place}", gate=gate):
            gate.wait(60)
            return count(store, name, 1)

        assert sorted(at_once(*[come] * 4)) == [1, 2, 3, 4]


def test_nobody_else_decodes_what_other_ranks_wrote():
    """Nor counts: a counter may hold a text."""
    others, found = {"_coordination/messages.py", "_coordination/abortable_store.py"}, []
    for folder in ("_coordination", "_rendezvous", "_groups", "_job", "_manager"):
        for path in (PACKAGE / folder).rglob("*.py"):
            if path.relative_to(PACKAGE).as_posix() not in others:
                found += re.findall(
                    r"json\.loads|pickle\.loads|store\.add\(|\.decode\(\)", path.read_text(encoding="utf-8")
                )
    assert found == []


# Every key of the protocol, and those who read it.

PLANTED = sorted(
    {
        protocol.NEWS,
        protocol.FAILURE,
        protocol.FAILURE_SEEN,
        protocol.QUERIES,
        protocol.QUERY_NUMBERS,
        protocol.query(1),
        protocol.answered(1),
        protocol.answer(1, 1),
        protocol.HANG_REPORTER,
        protocol.FIRST_TO_LEAVE,
        protocol.GONE,
        protocol.beat(0),
        protocol.beat(1),
        protocol.peer_address(1),
        protocol.asker("barrier 0"),
        protocol.places("barrier 0"),
        protocol.waiting(1),
        protocol.suspected(0),
        protocol.deadlock("0 1 all_reduce"),
    }
)


class Members:
    """The group of a call that waits; nothing carries its messages."""

    name, rank, ranks = "world", 0, range(2)
    process_group = types.SimpleNamespace(group_name="0")


class LastingCall(Call):
    """A call that lasts, and has no connections to close."""

    def interrupt(self):
        pass


@pytest.fixture
def watched(tmp_path, monkeypatch):
    """What begins a job of two ranks, as rank 0 watches it while it waits in a call; reports go to a folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(context_module, "interval", lambda _: 0.0)  # nobody answers, so nobody has to be waited for
    with contextlib.ExitStack() as stack:

        def begin():
            store = MemoryStore()
            context = WatchContext(store, "tcp://n1:5", 0, places(2), is_one_host=True)
            hangs = HangWatch(context, 0.0, 0.0)
            monitor = PeerMonitor(
                store, context, WatchLimits(300.0), hangs, threading.Event(), clock=itertools.count().__next__
            )
            stack.callback(monitor.close)
            return store, context, monitor

        with tracking.TrackedWait("all_reduce") as wait:
            wait.call = LastingCall(Members(), 1, "all_reduce", since=-math.inf)
            yield begin


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(planted=st.dictionaries(st.sampled_from(PLANTED), GARBAGE, min_size=1))
@example(planted=dict.fromkeys(PLANTED, b'{"hello":1}'))
@example(planted=dict.fromkeys(PLANTED, b"\xff\xfe"))
@example(planted=dict.fromkeys(PLANTED, b""))
@example(planted=dict.fromkeys(PLANTED, b"9223372036854775807"))
@example(planted={protocol.QUERIES: b"1000000000000,x,-1,1," * 1000})
@example(planted={protocol.peer_address(1): b'[["\\u0000"], 80, ""]'})
@example(planted={protocol.peer_address(1): json.dumps([["." * 300], 80, ""]).encode()})
def test_garbage_at_any_key_ends_no_watching(watched, planted):
    store, context, monitor = watched()
    for key, data in planted.items():
        store.set(key, data)
    for _ in range(2):
        monitor.wake()
        monitor.look()
    monitor.wait_until_others_know()
    watcher = Watcher(context, WatchLimits(300.0), lambda _: None, patience=0.0)
    watcher._departure("barrier 0")
    assert all(place.isprintable() for place in watcher.locate("barrier 0", [1]).values())
    store.set(protocol.FAILURE, b"garbage")  # which does not keep a failure out
    failure_on(1).publish(store)
    count(store, protocol.NEWS, 1)
    monitor.wake()
    assert monitor.look() == failure_on(1)


COLLECTIVES = {
    "barrier": lambda group: wait_for_all(group, "barrier 0", timeout=0.02),
    "agree": lambda group: Consensus(group, 0.02).agree("groups 0", "digest", "text"),
    "compare": lambda group: Consensus(group, 0.02).compare("groups 0", {"name": "value"}, place="a.py:1"),
    "require_success": lambda group: Consensus(group, 0.02).require_success("groups 0", None),
    "section": lambda group: ExclusiveSections(group).begin("save()", [0]).wait(),
    "stop": lambda group: StopAgreement(group).decide(0),
}
USED = [
    protocol.FAILURE,
    protocol.LEFT,
    *(
        key(operation)
        for operation in ("barrier 0", "groups 0")
        for key in (protocol.arrived, protocol.outcome, protocol.passages, protocol.first_proposal)
    ),
    *(key("groups 0") for key in (protocol.other_proposal, protocol.failure_of, protocol.read_by)),
    protocol.call("groups 0", 1),
    protocol.looker("barrier 0", "late"),
    protocol.nth(protocol.section(0), 0),
    protocol.done(protocol.nth(protocol.section(0), 0)),
    protocol.STOP_FIRST_STEP,
    protocol.STOP,
]


@settings(max_examples=60)
@given(st.sampled_from(sorted(COLLECTIVES)), st.dictionaries(st.sampled_from(USED), GARBAGE, min_size=1))
@example("section", {})
@example("barrier", {protocol.outcome("barrier 0"): b"open"})
@example("agree", {protocol.passages("groups 0"): b"7"})
@example("barrier", {protocol.passages("barrier 0"): str(2**41).encode()})
def test_where_ranks_act_together_garbage_is_an_error_of_the_package(name, planted):
    first, second = store_groups(2)
    for key, data in {protocol.nth(protocol.section(0), 0): b"?", **planted}.items():
        first.store.set(key, data)
    for result in at_once(lambda: COLLECTIVES[name](first), lambda: COLLECTIVES[name](second)):
        assert not isinstance(result, Exception) or isinstance(result, DistmanError)


def test_no_barrier_opens_because_something_stands_where_its_outcome_would():
    first, _ = store_groups(2)
    first.store.set(protocol.outcome("barrier 0"), "open")
    with pytest.raises(MalformedMessageError, match="the outcome of barrier 0 failed: it was there before all ranks"):
        wait_for_all(first, "barrier 0", timeout=10)


@ranks(2)
def test_a_job_goes_on_with_garbage_in_its_store(rank):
    manager = DistributedManager()
    store, other = manager._state.job.rendezvous.store, 1 - rank
    context = WatchContext(store, "the store", rank, manager.roll_call, is_one_host=True)
    watcher = Watcher(context, WatchLimits(300.0), lambda _: None)
    watcher.start()
    if rank == 1:
        for key in PLANTED:
            store.set(key, '{"hello":1}')
    for number in range(3):
        manager.barrier()
        place = watcher.locate(f"{number} of rank {rank}", [other])[other]
        assert number == 0 or not place.startswith(NO_ANSWER)  # it watches on; a first question may fall on the garbage
    assert all_gather_v(torch.full((1,), float(rank)), [1, 1]).tolist() == [0.0, 1.0]
    manager.barrier()
    assert watcher.record is None
    watcher.stop()
    watcher.close()
