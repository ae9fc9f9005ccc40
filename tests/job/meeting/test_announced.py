"""Where a store is that the rank which has opened it announces."""

import dataclasses
import json

import pytest
import torch.distributed as dist

from distman._coordination.messages import MalformedMessageError, decode
from distman._job.meeting.announced import Announcement, _broadcast_over, useful_elsewhere
from distman.errors import JobFailed

PLACE = Announcement(("n1", "10.0.0.1"), 23456, "job é\n/1", "a secret")


def read(fields):
    return decode(json.dumps(fields), Announcement, "it")


def test_what_is_told_is_read():
    assert read(dataclasses.asdict(PLACE)) == PLACE


@pytest.mark.parametrize(
    "changes",
    [
        {"port": 0},
        {"port": 65536},
        {"port": "80"},
        {"addresses": ["\x1b[2J"]},
        {"addresses": ["a" * 300]},
        {"addresses": ["n1"] * 33},
        {"addresses": "n1"},
        {"job": 1},
    ],
    ids=repr,
)
def test_what_is_no_place_is_malformed(changes):
    with pytest.raises(MalformedMessageError):
        read(dataclasses.asdict(PLACE) | changes)


def test_nobody_is_sent_to_himself():
    found = useful_elsewhere(["localhost", "n1", "127.0.1.1", "::1", "10.0.0.1"])
    assert found == ("n1", "10.0.0.1")
    assert useful_elsewhere(["localhost", "127.0.1.1"]) == ("localhost", "127.0.1.1"), "there is no other"


def fail():
    raise OSError("no room")


def test_what_rank_0_has_opened_is_told_over_the_store_of_a_group():
    store = dist.HashStore()
    assert [_broadcast_over(store, "key", rank, lambda: PLACE, 1.0) for rank in (0, 1, 2)] == [PLACE] * 3


def test_what_keeps_rank_0_from_opening_it_is_told_too():
    store = dist.HashStore()
    with pytest.raises(OSError, match="no room"):
        _broadcast_over(store, "key", 0, fail, 1.0)
    with pytest.raises(JobFailed, match=r"rank 0 \(.*\) raised OSError: no room"):
        _broadcast_over(store, "key", 1, fail, 1.0)
