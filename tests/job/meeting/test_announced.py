"""Where a store is that the rank which has opened it announces."""

import dataclasses
import json

import pytest

from distman._coordination.messages import MalformedMessageError, decode
from distman._job.meeting.announced import Announcement, useful_elsewhere

PLACE = Announcement(("n1", "10.0.0.1"), 23456, "job é\n/1")


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
