"""Where the store is, as rank 0 announces it in a store into which anybody can write."""

import itertools
import json
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from distman._coordination import protocol
from distman._coordination.messages import MalformedMessageError
from distman._job.meeting import announced
from distman._job.meeting.announced import Announcement, OverAgent, UnprovedError, useful_elsewhere
from distman._job.meeting.places import AtPorts
from distman._job.meeting.secret import Protection, Source
from distman.errors import RendezvousError

SECRET = b"0123456789abcdef" * 4
KEY = "distman/job/start 0"
PLACE = Announcement(("n1", "10.0.0.1"), 23456, "job é\n/1")
SECRETS = [SECRET, None]


@pytest.mark.parametrize("secret", SECRETS)
def test_what_is_told_is_read(secret):
    assert Announcement.unseal(PLACE.seal(KEY, secret).encode(), KEY, secret, "it") == PLACE


@pytest.mark.parametrize(
    ("told", "key", "secret"),
    [
        (PLACE, KEY, None),
        (PLACE, KEY, SECRET + b"!"),
        (PLACE, "distman/job/start 1", SECRET),
    ],
    ids=["nobody's", "another secret's", "of another start"],
)
def test_an_answer_of_somebody_else_is_told_apart(told, key, secret):
    with pytest.raises(UnprovedError):
        Announcement.unseal(told.seal(key, secret).encode(), KEY, SECRET, "it")


@pytest.mark.parametrize("field", ["addresses", "port", "job"])
def test_no_field_can_be_changed(field):
    message = json.loads(PLACE.seal(KEY, SECRET))
    message["place"][field] = {"addresses": ["10.0.0.2"], "port": 1, "job": "job"}[field]
    with pytest.raises(UnprovedError):
        Announcement.unseal(json.dumps(message).encode(), KEY, SECRET, "it")


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
    message = json.loads(PLACE.seal(KEY, SECRET))
    message["place"] |= changes
    with pytest.raises(MalformedMessageError):
        Announcement.unseal(json.dumps(message).encode(), KEY, SECRET, "it")


def test_nobody_is_sent_to_himself():
    found = useful_elsewhere(["localhost", "n1", "127.0.1.1", "::1", "10.0.0.1"])
    assert found == ("n1", "10.0.0.1")
    assert useful_elsewhere(["localhost", "127.0.1.1"]) == ("localhost", "127.0.1.1"), "there is no other"


@pytest.fixture
def agent(monkeypatch):
    """A store that anybody can reach, and how the ranks of a job see it."""
    monkeypatch.setattr(announced, "_starts", itertools.repeat(0))
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    protection = Protection(Source.VARIABLE, SECRET)
    point = AtPorts("job", ("127.0.0.1",), (store.port,), "the test", is_host=False, protection=protection)
    return store, OverAgent(point, "0"), protocol.store_address("job", 0)


def test_false_answers_lead_nobody_astray_and_the_true_one_is_found(agent):
    store, meeting, key = agent
    false = Announcement(("127.0.0.1",), 1, "job")
    with ThreadPoolExecutor(1) as threads:
        for message in (false.seal(key, None), "\x1b[2J", b"\x80\x04."):
            store.set(key, message)
            with pytest.raises(RendezvousError, match="must tell where it has opened the job's store"):
                meeting.find(1, 0.5)
        store.set(key, false.seal(key, b"another secret" * 4))
        joining = threads.submit(meeting.find, 1, 30.0)
        opened = meeting.open(0, 30.0)
        joined = joining.result(30.0)
    opened.store.set("key", "value")
    assert joined.store.get("key") == b"value"
    for one in (joined, opened):
        one.close()


def test_who_has_another_secret_says_so(agent):
    store, meeting, key = agent
    store.set(key, PLACE.seal(key, b"another secret" * 4))
    with pytest.raises(RendezvousError, match="got an answer of somebody who does not know this job's secret"):
        meeting.find(1, 0.5)
