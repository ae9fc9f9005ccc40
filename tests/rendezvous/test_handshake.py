"""The handshake tells its own job from foreign services, and those from silence."""

import dataclasses
import os
import signal
import socket
import threading

import pytest

from distman._process_state import reset
from distman._rendezvous import handshake
from distman._rendezvous.address import Endpoint
from distman._rendezvous.handshake import (
    ForeignServiceError,
    HandshakeServer,
    Identity,
    find_server,
    probe,
)
from distman._rendezvous.sockets import bind_listener
from distman.errors import RendezvousError

MINE = Identity.of("job-1")


@pytest.fixture
def server():
    server = HandshakeServer(bind_listener("127.0.0.1", 0), MINE, store_port=4321)
    yield server
    server.close()


@pytest.fixture
def silent_port():
    with bind_listener("127.0.0.1", 0) as listener:
        yield listener.getsockname()[1]


def point(*ports):
    return Endpoint("job-1", ("127.0.0.1",), ports, "the test", is_host=False)


def test_a_member_learns_where_the_store_is(server):
    assert probe("127.0.0.1", server.port, MINE)["store_port"] == 4321


def test_another_job_learns_nothing_but_the_name(server):
    with pytest.raises(ForeignServiceError, match=r"job 'job-1' of user .* listens there"):
        probe("127.0.0.1", server.port, Identity("job-2", MINE.user))


def test_another_user_is_foreign(server):
    with pytest.raises(ForeignServiceError):
        probe("127.0.0.1", server.port, Identity("job-1", MINE.user + "1"))


def test_a_failure_left_at_the_server_is_told_to_all_who_come_later(server):
    failure = {"rank": 1, "error_text": "boom"}
    assert probe("127.0.0.1", server.port, MINE, failure=failure)["failure"] == failure
    assert probe("127.0.0.1", server.port, MINE)["failure"] == failure
    assert server.failure == failure


def test_a_listener_that_never_answers_is_foreign(silent_port):
    with pytest.raises(ForeignServiceError, match="timed out"):
        probe("127.0.0.1", silent_port, MINE, patience=0.2)


@pytest.mark.parametrize("reply", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n", b"[1]\n", b"\xff\xfe\n"])
def test_a_listener_that_talks_something_else_is_foreign(reply):
    with bind_listener("127.0.0.1", 0) as listener:

        def serve():
            connection, _ = listener.accept()
            with connection:
                connection.recv(1000)
                connection.sendall(reply)

        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(ForeignServiceError):
            probe("127.0.0.1", listener.getsockname()[1], MINE)
        thread.join()


@pytest.mark.parametrize("noise", [b"", b"GET / HTTP/1.0\r\n\r\n", b"\x00" * 5000 + b"\n", b"[]\n", b"{}\n"])
def test_foreign_clients_do_not_disturb_the_server(server, noise):
    with socket.create_connection(("127.0.0.1", server.port)) as foreign:
        foreign.sendall(noise)
    assert probe("127.0.0.1", server.port, MINE)["store_port"] == 4321


def test_foreign_services_before_the_server_are_passed_by(server, silent_port):
    address, port, answer = find_server(point(silent_port, server.port), timeout=20)
    assert (address, port, answer["store_port"]) == ("127.0.0.1", server.port, 4321)


def test_a_server_that_opens_late_is_found():
    listener = bind_listener("127.0.0.1", 0)
    port = listener.getsockname()[1]
    listener.close()
    opened = []

    def open_later():
        opened.append(HandshakeServer(bind_listener("127.0.0.1", port), MINE, store_port=1))

    timer = threading.Timer(0.2, open_later)
    timer.start()
    try:
        assert find_server(point(port), timeout=20)[1] == port
    finally:
        timer.join()
        opened[0].close()


def test_who_waits_behind_a_foreign_service_says_so_once(server, monkeypatch, caplog):
    monkeypatch.setattr(handshake, "_QUIET", 0.0)
    monkeypatch.setattr(handshake, "_LONGEST_PAUSE", 0.01)
    with pytest.raises(RendezvousError, match="rank 0 must open the job's store"):
        find_server(dataclasses.replace(point(server.port), job_id="job-2"), timeout=0.2)
    (record,) = caplog.records
    assert "waiting for rank 0 at tcp://127.0.0.1" in record.getMessage()
    assert "job 'job-1' of user" in record.getMessage()


def test_nobody_there_says_what_was_tried_and_where_it_came_from(silent_port):
    with pytest.raises(RendezvousError) as caught:
        find_server(point(silent_port, 1), timeout=0.1)
    text = str(caught.value)
    assert "rank 0 must open the job's store" in text
    assert f"127.0.0.1:{silent_port}: another program listens there" in text
    assert "127.0.0.1:1: Connection refused" in text
    assert "[the test]" in text


def test_the_port_is_free_after_closing(server):
    server.close()
    bind_listener("127.0.0.1", server.port).close()


def test_the_server_of_an_earlier_start_is_not_taken_for_the_new_one(server):
    _, _, answer = find_server(point(server.port), timeout=5)
    with pytest.raises(RendezvousError, match="the store of an earlier start is still open"):
        find_server(point(server.port), timeout=0.1, left={answer["session"]})


def test_a_forked_child_forgets_the_server(server):
    child = os.fork()
    if child == 0:
        signal.alarm(30)  # the thread that would end the server's shutdown is the parent's
        reset()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert probe("127.0.0.1", server.port, MINE)["store_port"] == 4321
