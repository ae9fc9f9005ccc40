"""The door tells its own job from strangers, and strangers from silence."""

import socket
import threading

import pytest

from distman.errors import RendezvousError
from distman.rendezvous.address import MeetingPoint
from distman.rendezvous.door import Door, Identity, StrangerError, bind_listener, find_door, knock

MINE = Identity.of("job-1")


@pytest.fixture
def door():
    door = Door(bind_listener("127.0.0.1", 0), MINE, store_port=4321)
    yield door
    door.close()


@pytest.fixture
def silent_port():
    with bind_listener("127.0.0.1", 0) as listener:
        yield listener.getsockname()[1]


def point(*ports):
    return MeetingPoint("job-1", ("127.0.0.1",), ports, "the test", is_host=False)


def test_a_member_learns_where_the_store_is(door):
    assert knock("127.0.0.1", door.port, MINE)["store_port"] == 4321


def test_another_job_learns_nothing_but_the_name(door):
    with pytest.raises(StrangerError, match=r"job 'job-1' of user .* listens there"):
        knock("127.0.0.1", door.port, Identity("job-2", MINE.user))


def test_another_user_is_a_stranger(door):
    with pytest.raises(StrangerError):
        knock("127.0.0.1", door.port, Identity("job-1", MINE.user + "1"))


def test_a_failure_left_at_the_door_is_told_to_all_who_come_later(door):
    notice = {"rank": 1, "error_text": "boom"}
    assert knock("127.0.0.1", door.port, MINE, failure=notice)["failure"] == notice
    assert knock("127.0.0.1", door.port, MINE)["failure"] == notice
    assert door.failure == notice


def test_a_listener_that_never_answers_is_a_stranger(silent_port):
    with pytest.raises(StrangerError, match="timed out"):
        knock("127.0.0.1", silent_port, MINE, patience=0.2)


@pytest.mark.parametrize("reply", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n", b"[1]\n", b"\xff\xfe\n"])
def test_a_listener_that_talks_something_else_is_a_stranger(reply):
    with bind_listener("127.0.0.1", 0) as listener:

        def serve():
            connection, _ = listener.accept()
            with connection:
                connection.recv(1000)
                connection.sendall(reply)

        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(StrangerError):
            knock("127.0.0.1", listener.getsockname()[1], MINE)
        thread.join()


@pytest.mark.parametrize("noise", [b"", b"GET / HTTP/1.0\r\n\r\n", b"\x00" * 5000 + b"\n", b"[]\n", b"{}\n"])
def test_strangers_at_the_door_do_not_disturb_it(door, noise):
    with socket.create_connection(("127.0.0.1", door.port)) as stranger:
        stranger.sendall(noise)
    assert knock("127.0.0.1", door.port, MINE)["store_port"] == 4321


def test_strangers_before_the_door_are_passed_by(door, silent_port):
    address, port, answer = find_door(point(silent_port, door.port), timeout=20)
    assert (address, port, answer["store_port"]) == ("127.0.0.1", door.port, 4321)


def test_a_door_that_opens_late_is_found():
    listener = bind_listener("127.0.0.1", 0)
    port = listener.getsockname()[1]
    listener.close()
    opened = []

    def open_later():
        opened.append(Door(bind_listener("127.0.0.1", port), MINE, store_port=1))

    timer = threading.Timer(0.2, open_later)
    timer.start()
    try:
        assert find_door(point(port), timeout=20)[1] == port
    finally:
        timer.join()
        opened[0].close()


def test_nobody_there_says_what_was_tried_and_where_it_came_from(silent_port):
    with pytest.raises(RendezvousError) as caught:
        find_door(point(silent_port, 1), timeout=0.1)
    text = str(caught.value)
    assert "rank 0 must open the job's store" in text
    assert f"127.0.0.1:{silent_port}: another program listens there" in text
    assert "127.0.0.1:1: Connection refused" in text
    assert "[the test]" in text


def test_loopback_listens_to_this_host_only():
    with bind_listener("localhost", 0) as listener:
        assert listener.family == socket.AF_INET
        assert listener.getsockname()[0] == "127.0.0.1"


def test_the_port_is_free_after_closing(door):
    door.close()
    bind_listener("127.0.0.1", door.port).close()


def test_the_door_of_an_earlier_start_is_not_taken_for_the_new_one(door):
    _, _, answer = find_door(point(door.port), timeout=5)
    with pytest.raises(RendezvousError, match="the store of an earlier start is still open"):
        find_door(point(door.port), timeout=0.1, left={answer["session"]})
