"""What other processes wrote: only what is well-formed is used, and nonsense is an error of the package."""

import contextlib
import dataclasses
import json
import re
from pathlib import Path

import pytest
from hypothesis import example, given, settings, strategies as st

import distman
from distman._coordination import messages, protocol
from distman._coordination.consensus import Consensus, wait_for_all
from distman._coordination.failure.record import FailureRecord
from distman._coordination.messages import (
    MalformedMessageError,
    checked,
    count,
    decode,
    decode_index,
    decode_text,
)
from distman._coordination.monitor.hang import Answer
from distman._coordination.preemption import StopAgreement
from distman._coordination.sections import ExclusiveSections
from distman._job.meeting.membership import _Verdict
from distman._job.meeting.peers import JoinRecord
from distman._job.network import read_address
from distman.errors import DistmanError

from ..job.meeting.join_records import join_record
from ..store.stores import MemoryStore
from .ranks import at_once, failure_on, store_groups

PACKAGE = Path(distman.__file__).parent

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters()),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
FIELDS = sorted({field.name for kind in (FailureRecord, Answer, JoinRecord) for field in dataclasses.fields(kind)})
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
    try:
        checked(json.loads(json.dumps(value)), kind, "it")
    except MalformedMessageError:
        return False
    return True


@settings(max_examples=60)
@given(GARBAGE)
def test_whatever_comes_is_a_message_or_an_error_of_one_type(data):
    for kind in KINDS:
        with contextlib.suppress(MalformedMessageError):
            decode(data, kind, "it")
    with contextlib.suppress(MalformedMessageError):
        assert 0 <= decode_index(data, 3, "it") < 3
    with contextlib.suppress(MalformedMessageError):
        _Verdict.unpack(data)
    with contextlib.suppress(MalformedMessageError):
        _, port = read_address(data, 1)
        assert 0 < port < 65536
    decode_text(data)


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
        ({"rank": 1}, FailureRecord, "it lacks host"),
        ({**vars(failure_on(1)), "pid": "812"}, FailureRecord, "pid: it must be int, got '812'"),
        ({"hello": "\x1b[2J"}, list[int], r"it must be list, got {'hello': '\x1b[2J'}"),
        ([1], tuple[int, int], "it must be 2 values, got [1]"),
        ([1, "a"], list[int], "it must be int, got 'a'"),
        ({"a": 1}, dict[str, str], "it must be str, got 1"),
        (vars(join_record(0)) | {"rank": -7, "visible": []}, JoinRecord, "ranks must be 0 or more"),
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


@given(GARBAGE)
def test_a_counter_that_holds_no_number_is_an_error(data):
    store = MemoryStore()
    store.set("counter", data)
    with contextlib.suppress(MalformedMessageError):
        assert count(store, "counter", 1) == int(data) + 1


def test_nobody_else_decodes_what_other_ranks_wrote():
    """Nor counts: a counter may hold a text."""
    others, found = {"_coordination/messages.py"}, []
    others.add("_coordination/time_limit.py")  # what a scheduler answers
    for folder in ("_coordination", "_rendezvous", "_groups", "_job", "_manager"):
        for path in (PACKAGE / folder).rglob("*.py"):
            if path.relative_to(PACKAGE).as_posix() not in others:
                found += re.findall(
                    r"json\.loads|pickle\.loads|store\.add\(|\.decode\(\)", path.read_text(encoding="utf-8")
                )
    assert found == []


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
    protocol.late("barrier 0"),
    protocol.nth(protocol.section(0), 0),
    protocol.done(protocol.nth(protocol.section(0), 0)),
    protocol.STOP_FIRST_STEP,
    protocol.STOP,
]


@settings(max_examples=60)
@given(st.sampled_from(sorted(COLLECTIVES)), st.dictionaries(st.sampled_from(USED), GARBAGE, min_size=1))
@example("section", {})
@example("agree", {protocol.passages("groups 0"): b"7"})
def test_where_ranks_act_together_garbage_is_an_error_of_the_package(name, planted):
    first, second = store_groups(2)
    for key, data in {protocol.nth(protocol.section(0), 0): b"?", **planted}.items():
        first.store.set(key, data)
    for result in at_once(lambda: COLLECTIVES[name](first), lambda: COLLECTIVES[name](second)):
        assert not isinstance(result, Exception) or isinstance(result, DistmanError)
