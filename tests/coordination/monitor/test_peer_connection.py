"""The connection between neighbours: it breaks when one dies, and nothing else breaks it."""

import contextlib
import os
import resource
import select
import socket
import threading
from collections import namedtuple

import pytest

from distman._coordination import protocol
from distman._coordination.monitor import peer_connection
from distman._coordination.monitor.peer_connection import PeerConnection, connect, own_addresses

from ...store.stores import MemoryStore
from ..ranks import failure_on

Place = namedtuple("Place", "rank host pid")
PEERS = [Place(rank, "n1", 100 + rank) for rank in range(3)]


@contextlib.contextmanager
def connections(num_ranks, patience=45.0):
    store = MemoryStore()
    made = [
        PeerConnection(store, rank, PEERS[:num_ranks], is_one_host=True, patience=patience) for rank in range(num_ranks)
    ]
    try:
        yield store, made
    finally:
        for connection in made:
            connection.close()


@contextlib.contextmanager
def no_more_files():
    """Let this process open no more files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest_free = os.open(os.devnull, os.O_RDONLY)
    os.close(lowest_free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def turn(made, times=3):
    """Let every rank look around; return who found whom dead."""
    found = [(rank, connection.wait(0.01)) for _ in range(times) for rank, connection in enumerate(made) if connection]
    return {(rank, died.rank) for rank, died in found if died is not None}


def test_a_rank_that_dies_is_found_by_the_one_before():
    with connections(3) as (_, made):
        assert turn(made) == set()
        made[1].close()
        assert turn([made[0], None, made[2]]) == {(0, 1)}


def test_a_rank_that_leaves_is_passed_over():
    with connections(3) as (store, made):
        turn(made)
        store.set(protocol.left(1), "yes")
        made[1].close()
        assert turn([made[0], None, made[2]]) == set()
        assert made[0].watched == 2
        made[2].close()
        assert turn([made[0], None, None]) == {(0, 2)}


def test_the_last_rank_watches_nobody():
    with connections(2) as (store, made):
        turn(made)
        store.set(protocol.left(1), "yes")
        made[1].close()
        assert turn([made[0], None]) == set()
        assert made[0].watched is None
        assert turn([made[0], None]) == set()


def test_a_rank_that_died_before_it_was_connected_to_is_found():
    with connections(2) as (_, made):
        made[1].close()
        assert turn([made[0], None]) == {(0, 1)}


def test_strangers_do_not_push_out_the_rank_that_watches():
    with connections(2) as (_, made):
        turn(made)
        port = made[1]._listener.getsockname()[1]
        with contextlib.ExitStack() as stack:
            for _ in range(200):
                stranger = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
                stranger.sendall(b"GET / HTTP/1.0\r\n\r\n")
                made[1].wait(0)
            assert turn(made) == set()
        made[1].close()
        assert turn([made[0], None]) == {(0, 1)}


def test_strangers_who_came_first_do_not_keep_out_the_rank_that_watches():
    with connections(2) as (_, made), contextlib.ExitStack() as stack:
        address = "127.0.0.1", made[1]._listener.getsockname()[1]
        for number in range(100):
            stranger = stack.enter_context(socket.create_connection(address))
            stranger.sendall(b"GET / HTTP/1.0\r\n\r\n" if number % 2 else b"")
            made[1].wait(0)
        assert turn(made) == set()
        made[1].tell(failure_on(2))
        assert made[0].hear(60) == failure_on(2)


def test_a_flood_of_strangers_takes_little_of_the_watchers_time(monkeypatch):
    pauses = []
    monkeypatch.setattr(PeerConnection, "_wait_for_the_rest", lambda _, seconds: pauses.append(seconds))
    with connections(2) as (_, made), contextlib.ExitStack() as stack:
        turn(made)
        place = made[1]._listener.getsockname()
        for number in range(2 * peer_connection._MAX_GUESTS):
            stack.enter_context(socket.create_connection(place))
            made[1].wait(10.0)
            num_guests = 1 + number + 1  # one rank is there already
            assert len(pauses) == max(0, num_guests - peer_connection._MAX_GUESTS + 1)
        assert {*pauses} == {peer_connection._PAUSE}
        assert turn(made) == set()


def test_a_guest_who_cannot_be_let_in_for_lack_of_files_does_not_keep_the_watcher_busy():
    with connections(2) as (_, made), socket.socket() as guest:
        turn(made)
        num_guests = len(made[1]._guests)
        guest.connect(("127.0.0.1", made[1]._listener.getsockname()[1]))
        with no_more_files():
            waiting = threading.Thread(target=made[1].wait, args=(60,))
            waiting.start()
            waiting.join(0.5)
            is_waiting = waiting.is_alive()
            made[1].wake()
            waiting.join(60)
        assert is_waiting
        assert not waiting.is_alive(), "it was woken"
        turn(made)
        assert len(made[1]._guests) == num_guests + 1


@pytest.mark.parametrize(("teller", "hearer"), [(1, 0), (0, 1)])
def test_neighbours_tell_each_other_why_the_job_fails(teller, hearer):
    with connections(3) as (_, made):
        turn(made)
        made[teller].tell(failure_on(2))
        made[teller].close()  # what it told before stays
        assert made[hearer].hear(60) == failure_on(2)


def test_a_notice_is_read_before_its_teller_is_taken_for_dead():
    with connections(3) as (_, made):
        turn(made)
        made[1].tell(failure_on(2))
        made[1].close()
        while made[0].notice is None:
            assert made[0].wait(60) is None
        assert made[0].notice == failure_on(2)


def test_a_huge_error_makes_a_short_notice():
    with connections(2) as (_, made):
        turn(made)
        made[1].tell(failure_on(2, text="x" * 10_000_000))
        assert made[0].hear(60).error_text.startswith("x" * 2_000)


def test_a_stranger_tells_nothing():
    with connections(2) as (_, made), socket.socket() as stranger:
        stranger.connect(("127.0.0.1", made[1]._listener.getsockname()[1]))
        stranger.sendall(b"guess\n" + failure_on(2).to_json().encode() + b"\n")
        assert made[1].hear(0.1) is None


def test_a_stranger_is_told_nothing():
    with connections(2) as (_, made), socket.socket() as stranger:
        turn(made)
        stranger.connect(("127.0.0.1", made[1]._listener.getsockname()[1]))
        stranger.sendall(b"guess\n")
        made[1].tell(failure_on(2))
        made[1].close()
        heard = b""
        with contextlib.suppress(ConnectionResetError):
            heard = stranger.recv(1)
        assert heard == b""
        assert made[0].hear(60) == failure_on(2)


def test_what_no_release_of_the_package_tells_is_passed_over():
    with connections(2) as (_, made):
        turn(made)
        for text in (b"\xff\n", b"[]\n", b'{"rank": 1}\n', b"{\n"):
            made[1]._guests[0].send(text)
        made[1].tell(failure_on(2))
        assert made[0].hear(60) == failure_on(2)


def test_waking_ends_the_wait():
    with connections(2) as (_, made):
        made[0].wake()
        assert made[0].wait(60) is None


def test_a_host_that_does_not_answer_holds_the_watcher_up_for_a_bounded_time(monkeypatch):
    timeouts = []

    def never(_, timeout):
        timeouts.append(timeout)
        raise TimeoutError

    monkeypatch.setattr(socket, "create_connection", never)
    with pytest.raises(TimeoutError):
        connect(["n2", "127.0.1.1", "192.0.2.1", "192.0.2.2", "2001:db8::1"], 5, is_one_host=False)
    assert len(timeouts) == 4
    assert sum(timeouts) <= peer_connection._PATIENCE


@pytest.mark.parametrize("patience", [1e-3, 1e6, 1e12])
def test_a_host_may_be_silent_for_as_long_as_one_likes(patience):
    with connections(2, patience) as (_, made):
        assert turn(made) == set()
        made[1].tell(failure_on(2))
        assert made[0].hear(60) == failure_on(2)


NONSENSE = [
    b'{"hello": 1}\n',
    b"\xff\xfe\n",
    b"\n" * 1000,
    b"[" * 100_000 + b"\n",
    b'{"rank": "1"}\n',
    b"x" * 3_000_000,
]


@pytest.mark.parametrize("said", NONSENSE)
def test_nonsense_over_a_connection_is_dropped(said):
    with connections(2) as (_, made), contextlib.ExitStack() as stack:
        this = made[0]
        theirs, ours = map(stack.enter_context, socket.socketpair())
        ours.settimeout(0)

        def send(data):
            theirs.settimeout(0)
            while data:
                with contextlib.suppress(BlockingIOError):
                    data = data[theirs.send(data) :]
                while has_come(ours):
                    this._take_notice(ours, this._word)

        for start in (b"", f"\n{this._word}\n".encode()):
            send(start + said)
            assert len(this._received[ours]) <= 1_000_000
            assert this.notice is None
        send(b"\n" + failure_on(1).to_json().encode() + b"\n")
        assert this.notice == failure_on(1)


def has_come(end):
    return bool(select.select([end], [], [], 0)[0])


@pytest.mark.parametrize(
    "address", ["", "?", "[]", '[["127.0.0.1"], 0, ""]', '[["127.0.0.1"], 70000, ""]', '[["\\u0000"], 80, ""]']
)
def test_an_address_that_is_none_is_passed_over(address):
    with connections(2) as (store, made):
        store.set(protocol.peer_address(1), address)
        assert turn(made) == set()


def test_the_way_to_where_the_hosts_have_met_gives_an_address_where_no_other_way_leads_out():
    assert "127.0.0.1" in own_addresses("127.0.0.2")
    assert own_addresses("no-such-host.invalid") == own_addresses()
