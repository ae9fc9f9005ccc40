"""What strangers and broken members can do to a store: nothing that its other members would notice."""

import contextlib
import dataclasses
import errno
import os
import random
import select
import socket
import struct
import threading
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from socket import AF_INET, AF_INET6

import pytest
from hypothesis import given, strategies

from distman._base import timing
from distman._store import frames, server, transport
from distman._store.client import Client
from distman._store.connection import InvalidRequestError, StoreLostError, StoreTimeoutError
from distman._store.dialing import ForeignServiceError, dial
from distman._store.frames import MalformedError
from distman._store.handshake import CHALLENGE_BYTES, MAGIC, MEMBER, WATCHER, ClientSide, Hello, door_key
from distman._store.operations import Operations
from distman._store.process import start_store
from distman._store.server import Peer
from distman._store.table import Table

from .stores import JOB, KINDS, PATIENCE, SECRET, door, leave_will, listen, open_store, served_here

HELLO = Hello(MEMBER, 1, os.getpid())


def connect(address):
    if not isinstance(address, str):
        return socket.create_connection(address, PATIENCE)
    connected = socket.socket(socket.AF_UNIX)
    try:
        connected.connect(address)
    except OSError:
        connected.close()
        raise
    connected.settimeout(PATIENCE)
    return connected


def is_sent_away(stranger):
    """Whether a store has closed a connection without another word."""
    try:
        return stranger.recv(1000) == b""
    except ConnectionResetError:
        return True


def is_over(connected):
    """Whether the other side has ended a connection, of which nothing is read."""
    poller = select.poll()
    poller.register(connected, select.POLLRDHUP)
    return bool(poller.poll(PATIENCE * 1000))


@pytest.fixture(scope="module", params=KINDS)
def store(request):
    with open_store(request.param) as store:
        store.client()  # which keeps it
        yield store


@pytest.fixture
def unix_store():
    """One store for what does not depend on how it is reached."""
    with open_store("unix") as store:
        yield store


def refusals():
    return [
        ("another job", {"job": "job-2"}),
        ("another secret", {"secret": SECRET + b"!"}),
        ("no secret", {"secret": None}),
    ]


@pytest.mark.parametrize("changed", [changed for _, changed in refusals()], ids=[name for name, _ in refusals()])
def test_who_does_not_know_job_and_secret_stays_outside(store, changed):
    with pytest.raises(ForeignServiceError, match="does not know this job, or the job's secret"):
        Client(door(store.address, **changed))


@pytest.mark.parametrize(
    "noise", [b"GET / HTTP/1.0\r\n\r\n" + b"x" * 20, b"\0" * 24, MAGIC + b"x" * 17, b"x" * 100_000]
)
def test_who_talks_something_else_is_sent_away(store, noise):
    with connect(store.address) as stranger:
        try:
            stranger.sendall(noise)
        except (BrokenPipeError, ConnectionResetError):
            return
        assert is_sent_away(stranger)


@pytest.mark.parametrize("length", [0, 1, frames.LENGTH.size + 31, 64, 65, 2**32 - 1])
def test_a_proof_that_is_none_ends_the_connection(store, length):
    with connect(store.address) as stranger:
        stranger.sendall(MAGIC + bytes(16))
        assert len(stranger.recv(1000)) == CHALLENGE_BYTES
        stranger.sendall(bytes(32) + frames.LENGTH.pack(length) + bytes(min(length, 200)))
        stranger.shutdown(socket.SHUT_WR)
        assert is_sent_away(stranger)


def test_a_thousand_strangers_of_every_kind_do_not_get_in(store):
    member = store.client()
    member.add(b"counter", 1)
    recorded = record_a_handshake(store)
    for number in range(1000):
        with connect(store.address) as stranger:
            stranger.sendall(recorded[0] if number % 2 else MAGIC + os.urandom(16))
            challenge = stranger.recv(1000)
            stranger.sendall(
                [recorded[1], challenge[-32:] + recorded[1][32:], os.urandom(32) + recorded[1][32:]][number % 3]
            )
            stranger.shutdown(socket.SHUT_WR)
            assert is_sent_away(stranger)
    assert member.add(b"counter", 1) == 2
    member.delete(b"counter")


def test_a_handshake_and_requests_may_come_in_any_pieces(store):
    with connect(store.address) as member:
        side = ClientSide(door_key(SECRET, b"job-1"), transport.other_place(member))
        send_in_pieces(member, side.opening())
        send_in_pieces(member, side.proof(member.recv(1000), HELLO))
        assert len(member.recv(1000)) > 32
        for number in range(3):
            send_in_pieces(member, frames.request(number, frames.ADD, [b"counter", frames.NUMBER.pack(1)]))
            assert frames.next_reply(member.recv(1000))[:2] == (number, frames.OK)
        member.sendall(frames.request(4, frames.SET, [b"a", b"1"]) + frames.request(5, frames.DELETE, [b"counter"]))
        assert frames.next_reply(member.recv(1000))[:2] == (5, frames.OK)


def test_the_ranks_that_are_there_are_known(store):
    member, other = store.client(MEMBER, 0), store.client(MEMBER, 3)
    with contextlib.closing(member.again(WATCHER)):
        assert member.members() - {-1} == {0, 3}
    other.close()
    while 3 in member.members():
        pass
    assert member.members() - {-1} == {0}


def test_who_proves_nothing_is_counted_whatever_keys_are_set(store):
    member = store.client()
    member.set(b"unproved", b"no number")
    before = member.num_unproved
    with connect(store.address) as stranger:
        stranger.sendall(MAGIC + bytes(16))
        assert len(stranger.recv(1000)) == CHALLENGE_BYTES
        stranger.shutdown(socket.SHUT_WR)
        assert is_sent_away(stranger)
    assert member.num_unproved == before + 1
    member.delete(b"unproved")


def send_in_pieces(connected, message):
    """Send each byte by itself, as a network may cut a message anywhere."""
    if connected.family != socket.AF_UNIX:
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for place in range(len(message)):
        connected.sendall(message[place : place + 1])


def record_a_handshake(store):
    """What a member sent that got in."""
    with connect(store.address) as member:
        side = ClientSide(door_key(SECRET, b"job-1"), transport.other_place(member))
        opening = side.opening()
        member.sendall(opening)
        proof = side.proof(member.recv(1000), HELLO)
        member.sendall(proof)
        assert len(member.recv(1000)) > 32
    return opening, proof


def test_idle_guests_take_few_descriptors_and_keep_nobody_out(store):
    member = store.client()
    before = num_descriptors(store)
    idle = [connect(store.address) for _ in range(600)]
    store.client().add(b"counter", 1)
    assert num_descriptors(store) <= before + server._MOST_GUESTS + 1
    assert is_sent_away(idle[0])  # the oldest
    assert member.add(b"counter", 1) == 2
    for guest in idle:
        guest.close()
    member.delete(b"counter")


def num_descriptors(store):
    return len(list(Path(f"/proc/{store.process.popen.pid}/fd").iterdir()))


def test_a_flood_keeps_nobody_out(store):
    stop = threading.Event()

    def flood():
        while not stop.is_set():
            try:
                with connect(store.address) as stranger:
                    stranger.sendall(b"G" * 8000)
            except OSError:
                pass

    first = store.client()
    with ThreadPoolExecutor(2) as threads:
        floods = [threads.submit(flood) for _ in range(2)]
        try:
            for _ in range(5):
                member = first.again(MEMBER)
                assert [member.compare_set(b"a", b"", b"1") for _ in range(20)] == [b"1"] * 20
                member.close()
        finally:
            stop.set()
        for one in floods:
            one.result(PATIENCE)


def test_a_guest_has_a_time_for_everything_together(monkeypatch):
    monkeypatch.setattr(timing, "GUEST", 0.05)
    with served_here() as here:
        member = Client(here)
        with connect(here.address) as silent, connect(here.address) as slow:
            slow.sendall(MAGIC + bytes(16))
            assert len(slow.recv(1000)) == CHALLENGE_BYTES
            assert is_sent_away(silent)
            assert is_sent_away(slow)
        assert member.add(b"counter", 1) == 1
        member.close()


def test_the_limit_for_a_first_member_is_over_when_it_has_come(monkeypatch):
    with served_here() as here:
        member = Client(here)
        monkeypatch.setattr(server, "monotonic", lambda: time.monotonic() + 2 * PATIENCE)
        assert [member.add(b"counter", 1) for _ in range(3)] == [1, 2, 3]
        member.close()


def test_descriptors_are_kept_back_from_connections(monkeypatch):
    monkeypatch.setattr(timing, "GUEST", 2 * PATIENCE)
    with served_here(most_descriptors=4) as here:
        members = [Client(here), Client(here)]
        with connect(here.address) as third:
            assert is_sent_away(third)
        assert members[1].add(b"counter", 1) == 1
        for member in members:
            member.close()


@pytest.mark.parametrize("number", [errno.ENFILE, errno.EMFILE, errno.ENOBUFS, errno.ENOMEM])
def test_where_the_host_can_open_nothing_the_door_rests(number, monkeypatch):
    """A stranger would stand before it all the time, and the process find that again and again."""
    rounds = []
    pause = server.Server._pause
    monkeypatch.setattr(server.Server, "_pause", lambda here: rounds.append(1) or pause(here))
    monkeypatch.setattr(timing, "LISTENER_RESTS", 0.05)
    with served_here() as here:
        member = Client(here)
        with monkeypatch.context() as full:
            full.setattr(socket.socket, "_accept", refuse_by(number), raising=False)
            with connect(here.address) as stranger:
                del rounds[:]
                with pytest.raises(StoreTimeoutError):
                    member.get(b"never set", 0.2)
                assert len(rounds) < 50
                full.undo()
                stranger.sendall(MAGIC + bytes(16))
                assert len(stranger.recv(1000)) == CHALLENGE_BYTES
        Client(here).close()
        member.close()


def refuse_by(number):
    def accept(_listener):
        raise OSError(number, os.strerror(number))

    return accept


def test_where_descriptors_are_few_the_oldest_stranger_makes_room(monkeypatch):
    monkeypatch.setattr(timing, "GUEST", 2 * PATIENCE)
    with served_here(most_descriptors=4) as here:
        first = Client(here)
        with connect(here.address) as stranger:
            second = Client(here)
            assert is_sent_away(stranger)
        for member in (first, second):
            member.close()


def test_a_host_that_does_not_answer_is_given_up(monkeypatch):
    prepared = []
    prepare = transport.prepare
    monkeypatch.setattr(transport, "prepare", lambda *args: (prepare(*args), prepared.append(args[0])))
    with served_here("tcp") as here:
        member = Client(here)
        assert len(prepared) == 2
        for one in prepared:
            limit = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
            assert (limit, one.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)) == (PATIENCE * 1000, 1)
        member.close()


@pytest.mark.parametrize(("number", "words"), [(errno.ETIMEDOUT, b"5 is lost"), (errno.ECONNRESET, b"5 died")])
def test_a_host_that_is_given_up_is_told_from_a_process_that_died(number, words, monkeypatch):
    receive = Peer.receive

    def break_down(peer):
        if peer.will is not None:
            raise OSError(number, "")
        return receive(peer)

    with served_here("tcp") as here:
        member, other = Client(here, MEMBER, 5), Client(here)
        leave_will(member, 5)
        member.check([b"a"])  # now the store has it
        monkeypatch.setattr(Peer, "receive", break_down)
        with pytest.raises(StoreLostError):
            member.check([b"a"])
        assert other.get(b"failure", PATIENCE) == words
        for client in (member, other):
            client.close()


def test_the_user_of_the_other_side_is_asked_of_the_kernel(monkeypatch):
    with served_here(secret=None) as here:
        member = Client(here)
        mine = os.geteuid()
        monkeypatch.setattr(transport, "geteuid", lambda: mine + 1)
        with pytest.raises(ForeignServiceError, match="of another user"):
            Client(here)
        with connect(here.address) as stranger:
            assert is_sent_away(stranger)
        monkeypatch.setattr(transport, "geteuid", lambda: 65534)
        with connect(here.address) as nobody:
            assert is_sent_away(nobody)
        monkeypatch.undo()
        member.close()


def test_nobody_needs_a_secret_since_the_kernel_knows_him_not(monkeypatch):
    monkeypatch.setattr(transport, "geteuid", lambda: 65534)
    with served_here(secret=SECRET) as here:
        Client(dataclasses.replace(here, asks_kernel=False)).close()


@given(strategies.floats(1e-3, 1e15))
def test_a_host_may_be_silent_for_as_long_as_one_likes(seconds):
    with socket.socket() as connection:
        transport.prepare(connection, seconds)
        limit = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
        assert limit == min(int(seconds * 1000), (1 << 31) - 1)


def test_a_service_that_passes_on_from_another_place_is_refused(store):
    listener, address = listen("unix" if isinstance(store.address, str) else "tcp")
    with listener, ThreadPoolExecutor(1) as threads:
        relaying = threads.submit(relay, listener, store.address)
        with pytest.raises(ForeignServiceError):
            dial(door(address), HELLO)
        relaying.result(PATIENCE)


def test_a_service_that_passes_on_from_the_same_port_of_ipv6_is_refused(monkeypatch):
    with open_store("tcp") as store, ThreadPoolExecutor(1) as threads:
        store.client()  # which keeps it
        port = store.address[1]
        both = [(family, 0, 0, "", (address, port)) for family, address in ((AF_INET6, "::1"), (AF_INET, "127.0.0.1"))]
        with socket.create_server(("::1", port), family=AF_INET6) as listener:
            relaying = threads.submit(relay, listener, store.address)
            with pytest.raises(ForeignServiceError):
                dial(door(("::1", port)), HELLO)
            relaying.result(PATIENCE)
            monkeypatch.setattr(socket, "getaddrinfo", lambda *_args, **_options: both)
            Client(door(("a name of both", port))).close()  # it is found, and nobody else is asked


@pytest.mark.parametrize("seed", range(5))
def test_a_name_whose_other_addresses_are_dead_or_refuse_costs_no_time(monkeypatch, seed):
    """One that is dead answers nothing at all, as behind a firewall: here its queue is full."""
    rng = random.Random(seed)  # noqa: S311 - it draws no secrets
    with open_store("tcp") as store, contextlib.ExitStack() as stack:
        store.client()  # which keeps it
        port = store.address[1]
        dead = stack.enter_context(socket.create_server(("127.0.0.2", port), backlog=0))
        for _ in range(2):
            waiting = stack.enter_context(socket.socket())
            waiting.settimeout(0)
            waiting.connect_ex(dead.getsockname())
        assert select.select([dead], [], [], PATIENCE)[0]
        addresses = ["127.0.0.1", "127.0.0.2", *rng.sample(["127.0.0.3", "127.0.0.4"], rng.randint(0, 2))]
        rng.shuffle(addresses)
        found = [(AF_INET, socket.SOCK_STREAM, 0, "", (address, port)) for address in addresses]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_args, **_options: found)
        patient = dataclasses.replace(door(("a name of several", port)), patience=1e6)
        with ThreadPoolExecutor(1) as threads:
            threads.submit(Client, patient).result(PATIENCE).close()
        found[:] = [one for one in found if one[4][0] != "127.0.0.1"]
        with pytest.raises(OSError, match=r"timed out|refused"):
            Client(dataclasses.replace(door(("a name of several", port)), patience=0.5))
        monkeypatch.undo()


def test_a_store_that_listens_to_ipv6_is_found_by_both():
    listener = socket.create_server(("::", 0), family=AF_INET6, dualstack_ipv6=True)
    port = listener.getsockname()[1]
    process = start_store(listener, job=JOB, secret=SECRET, entry_limit=PATIENCE, unreachable_after=PATIENCE)
    process.wait_until_up(PATIENCE)
    clients = [Client(door((address, port))) for address in ("127.0.0.1", "::1")]
    for client in clients:
        client.close()
    assert process.popen.wait(PATIENCE) == 0


def relay(listener, address):
    """Pass on what two say to each other, one message each."""
    guest, _ = listener.accept()
    with guest, connect(address) as target:
        target.sendall(guest.recv(1000))
        guest.sendall(target.recv(1000))


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\0" * 100])
def test_a_service_that_is_no_store_is_told_apart(answer):
    listener, address = listen("tcp")

    def serve():
        guest, _ = listener.accept()
        with guest:
            assert guest.recv(1000).startswith(MAGIC)
            guest.sendall(answer)

    with listener, ThreadPoolExecutor(1) as threads:
        serving = threads.submit(serve)
        with pytest.raises((ForeignServiceError, ConnectionResetError)):
            dial(door(address), HELLO)
        serving.result(PATIENCE)


def test_a_service_that_keeps_silent_is_given_up():
    listener, address = listen("tcp")
    with listener, pytest.raises(TimeoutError):
        dial(type(door(address))(address, "job-1", None, PATIENCE, patience=0.05), HELLO)


MALFORMED = {
    "no length": struct.pack("<IIB", 0, 1, frames.SET),
    "too long": struct.pack("<IIB", 2**32 - 1, 1, frames.SET),
    "no operation": struct.pack("<IIB", 5, 1, 99),
    "no fields": struct.pack("<IIB", 5, 1, frames.SET),
    "a field too long": struct.pack("<IIBI", 9, 1, frames.SET, 77),
    "no number": frames.request(1, frames.ADD, [b"key", b"1"]),
}


@pytest.mark.parametrize("message", MALFORMED.values(), ids=MALFORMED)
def test_a_member_that_sends_nonsense_is_told_and_named(store, message):
    other = store.client()
    member = store.client(MEMBER, 5)
    leave_will(member, 5)
    member._calls._socket.settimeout(PATIENCE)
    member._calls._socket.sendall(message)
    assert is_over(member._calls._socket)
    with pytest.raises(StoreLostError, match=r"has refused a message, "):
        member.check([b"a"])
    assert other.get(b"failure", PATIENCE) == b"5 died"
    other.delete(b"failure")


@pytest.mark.parametrize("num_bytes", [1, frames.MOST_BYTES // 2])
def test_values_that_are_too_long_together_are_refused_and_harm_nobody(unix_store, num_bytes):
    """They are told when the last one is set, by another member."""
    reader, writer = unix_store.client(), unix_store.client(MEMBER, 6)
    names = [b"a", b"b", b"c"]
    with ThreadPoolExecutor(1) as threads:
        reading = threads.submit(reader.multi_get, names, PATIENCE)
        for name in names:
            writer.set(name, bytes(num_bytes - 1))
        if num_bytes == 1:
            assert reading.result(PATIENCE) == [b""] * 3
        else:
            with pytest.raises(InvalidRequestError, match=f"values of a reply must have less than {frames.MOST_BYTES}"):
                reading.result(PATIENCE)
    for name in names:
        assert len(reader.get(name, PATIENCE)) == num_bytes - 1
        assert writer.delete(name)
    reader.wait([], PATIENCE)


def test_a_value_grows_no_longer_than_it_may_be_read(unix_store):
    first, second = unix_store.client(), unix_store.client()
    piece = bytes(frames.MOST_VALUE_BYTES // 2)
    for _ in range(2):
        append_and_ask(first, b"long", piece)
    assert second.get(b"long", PATIENCE) == piece * 2
    with pytest.raises(StoreLostError, match="refused a message, an addition to a value, which would have"):
        append_and_ask(first, b"long", b"12")
    assert len(second.get(b"long", PATIENCE)) == len(piece) * 2
    with pytest.raises(ValueError, match=f"must have less than {frames.MOST_BYTES} bytes"):
        second.set(b"long", bytes(frames.MOST_BYTES))
    assert second.delete(b"long")


def append_and_ask(client, key, value):
    client.append(key, value)
    client.check([key])


def test_a_long_value_is_told_to_all_who_wait_and_kept_once():
    value = os.urandom(16 << 20)
    with open_store("unix") as store, ThreadPoolExecutor(8) as threads:
        readers, writer = [store.client() for _ in range(8)], store.client()
        reading = [threads.submit(reader.get, b"a", PATIENCE) for reader in readers]
        writer.set(b"a", value)
        assert all(one.result(PATIENCE) == value for one in reading)
        assert resident(store, "VmHWM") < 4 * len(value) >> 10


def resident(store, name="VmRSS"):
    """KiB of memory that the store's process has."""
    status = Path(f"/proc/{store.process.popen.pid}/status").read_text(encoding="utf-8")
    (number,) = [int(line.split()[1]) for line in status.splitlines() if line.startswith(name)]
    return number


def test_a_member_that_takes_no_replies_takes_no_memory(store):
    other = store.client()
    other.set(b"large", b"x" * (4 << 20))
    greedy = store.client()
    requests = b"".join(frames.request(number, frames.GET, [bytes(8), b"large"]) for number in range(1, 101))
    greedy._calls._socket.settimeout(PATIENCE)
    greedy._calls._socket.sendall(requests)
    assert other.add(b"counter", 1) == 1
    assert resident(store) < 200 << 10  # all replies have twice that
    assert num_sent_unread(greedy._calls._socket, other) < 32 << 20
    numbers = deque(range(1, 101))
    while numbers:
        assert greedy._calls._next_reply()[0] == numbers.popleft()
    other.delete(b"large")
    other.delete(b"counter")


def num_sent_unread(connected, other):
    """How much a connection takes that is not read, until it takes nothing while others are served a hundred times."""
    connected.settimeout(0.0)
    message = frames.request(101, frames.CHECK, [bytes(1 << 16)])
    num_sent, num_refused = 0, 0
    while num_refused < 100 and num_sent < 64 << 20:
        try:
            num_sent += connected.send(message[num_sent % len(message) :])
            num_refused = 0
        except BlockingIOError:
            other.add(b"counter", 1)
            num_refused += 1
    connected.settimeout(PATIENCE)
    return num_sent


class Recorder:
    """A connection that notes what is sent over it."""

    def __init__(self):
        self.wait = self.will = None
        self.sent = []

    def send(self, *pieces):
        self.sent.append(b"".join(pieces))


FIELDS = strategies.sampled_from([b"", b"a", b"b", b"1", bytes(8), frames.NUMBER.pack(2), b"\xff" * 8])


@given(
    strategies.lists(strategies.tuples(strategies.integers(0, 18), strategies.lists(FIELDS, max_size=6)), max_size=12)
)
def test_any_request_is_answered_once_or_refused(program):
    table, peers = Table(), [Recorder(), Recorder()]
    operations = Operations(table, lambda: None)
    for number, (operation, fields) in enumerate(program):
        peer = peers[number % 2]
        del peer.sent[:]
        try:
            operations.carry_out(peer, number, operation, fields)
        except MalformedError:
            assert peer.sent == []
        else:
            is_answered = operation not in (frames.SET, frames.APPEND, frames.WILL) and peer.wait is None
            assert [frames.next_reply(reply)[0] for reply in peer.sent] == [number] * is_answered
        assert table._num_waits == sum(one.wait is not None for one in peers)
    table.expire(time.monotonic() + 2**70)
    assert table._num_waits == 0
