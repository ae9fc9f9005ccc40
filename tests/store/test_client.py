"""What a process may ask of its store, from any thread, whatever interrupts it, and how it hears of the store's end."""

import contextlib
import dataclasses
import errno
import os
import random
import signal
import socket
import threading
import types
from concurrent.futures import ThreadPoolExecutor

import pytest

from distman._store import client as client_module, dialing
from distman._store.client import Client
from distman._store.connection import (
    GaveUpError,
    InvalidRequestError,
    StoreLostError,
    StoreSilentError,
    StoreTimeoutError,
)
from distman._store.dialing import ForeignServiceError
from distman._store.handshake import CHALLENGE_BYTES, MAGIC, MEMBER, WATCHER, Hello
from distman._store.process import listen_on_this_host

from .stores import KINDS, PATIENCE, SECRET, door, leave_will, listen, open_store


@pytest.fixture(scope="module", params=KINDS)
def store(request):
    with open_store(request.param) as store:
        yield store


@pytest.fixture
def client(store):
    client = store.client(MEMBER, 0)
    for key in (b"a", b"b", b"c", b"counter", b"outcome", b"failure"):
        client.delete(key)
    return client


def test_every_operation_does_what_it_says(client):
    client.set(b"a", b"1")
    assert client.get(b"a", PATIENCE) == b"1"
    assert client.add(b"a", 2) == 3
    client.append(b"a", b"4")
    assert client.compare_set(b"a", b"34", b"x") == b"x"
    assert client.compare_set(b"a", b"34", b"y") == b"x"
    assert client.compare_set(b"b", b"", b"first") == b"first"
    client.multi_set([(b"b", b"2"), (b"c", b"\0" * 3)])
    assert client.multi_get([b"c", b"a", b"b"], PATIENCE) == [b"\0" * 3, b"x", b"2"]
    num_keys = client.num_keys()
    assert client.check([b"a", b"b", b"c"])
    assert client.delete(b"a")
    assert not client.delete(b"a")
    assert not client.check([b"a", b"b"])
    assert client.num_keys() == num_keys - 1
    client.wait([b"b", b"c"], 0.0)
    assert not client.delete(b"a", b"b")
    assert client.num_keys() == num_keys - 2
    assert client.multi_get([], 0.0) == []
    with pytest.raises(InvalidRequestError, match="no number of 64 bits"):
        client.add(b"c", 1)


def test_waits_end_in_time_or_with_their_key_or_with_the_one_that_ends_them(client, store):
    for wait in (
        lambda: client.wait([b"a"], 0.01),
        lambda: client.get(b"a", 0.01),
        lambda: client.multi_get([b"a"], 0.01),
        lambda: client.arrive(b"counter", 2, (b"outcome", b"open"), 0.01),
    ):
        with pytest.raises(StoreTimeoutError):
            wait()
    client.set(b"failure", b"boom")
    with pytest.raises(GaveUpError) as caught:
        client.wait([b"a"], PATIENCE, b"failure")
    assert caught.value.value == b"boom"
    other = store.client(MEMBER, 1)
    with ThreadPoolExecutor() as threads:
        waiting = threads.submit(client.get, b"a", float("inf"))
        other.set(b"a", b"there")
        assert waiting.result(PATIENCE) == b"there"


@pytest.mark.parametrize("size", [1, 2, 6])
def test_all_arrive_or_all_hear_who_gave_up(client, store, size):
    members = [store.client(MEMBER, rank) for rank in range(size)]
    with ThreadPoolExecutor(size) as threads:
        for outcome in (b"open", b"late"):
            coming = members if outcome == b"open" else members[1:]
            heard = [threads.submit(one.arrive, b"counter", size, (b"outcome", b"open"), PATIENCE) for one in coming]
            if outcome == b"late":
                client.compare_set(b"outcome", b"", b"late")
            assert {one.result(PATIENCE) for one in heard} <= {outcome}
            client.delete(b"counter")
            client.delete(b"outcome")


@pytest.mark.parametrize("num_bytes", [0, 8191, 8192, 8193, 5 << 20])
def test_values_of_any_length_arrive_whole(client, num_bytes):
    value = random.Random(num_bytes).randbytes(num_bytes)  # noqa: S311 - it is no secret
    client.set(b"a", value)
    assert client.get(b"a", PATIENCE) == value
    assert client.multi_get([b"a", b"a"], PATIENCE) == [value, value]


def test_a_wait_of_one_thread_holds_up_no_other(client):
    with ThreadPoolExecutor(4) as threads:
        waits = [threads.submit(client.wait, [b"a"], PATIENCE) for _ in range(3)]
        assert threads.submit(client.add, b"counter", 1).result(PATIENCE) == 1
        assert not any(wait.done() for wait in waits)
        client.set(b"a", b"1")
        assert [wait.result(PATIENCE) for wait in waits] == [None] * 3


def test_each_thread_sees_what_it_has_set(client):
    def write_and_read(number):
        key = b"key %d" % number
        for turn in range(100):
            client.set(key, b"%d" % turn)
            seen = client.get(key, PATIENCE) if turn % 2 else client.compare_set(key, b"nothing like it", b"")
            assert seen == b"%d" % turn
            client.add(b"counter", 1)

    with ThreadPoolExecutor(6) as threads:
        for done in [threads.submit(write_and_read, number) for number in range(6)]:
            done.result(PATIENCE)
    assert client.add(b"counter", 0) == 600


def test_what_a_thread_set_before_it_waits_is_seen_by_the_others(client):
    """They ask over another connection, which the store may read first."""
    large = b"x" * (8 << 20)  # is read in pieces

    def set_and_wait(turn):
        client.set(b"a", large)
        client.get(b"end of turn %d" % turn, PATIENCE)

    with ThreadPoolExecutor(1) as threads:
        for turn in range(20):
            waiting = threads.submit(set_and_wait, turn)
            while client._calls is not None:
                pass
            assert client.delete(b"a")
            client.set(b"end of turn %d" % turn, b"1")
            waiting.result(PATIENCE)


def test_what_was_set_is_seen_by_whom_an_arrival_lets_go(client, store):
    other = store.client(MEMBER, 1)

    def come(mine, first, second):
        for turn in range(50):
            mine.set(b"%s %d" % (first, turn), b"1")
            mine.arrive(b"counter %d" % turn, 2, (b"outcome %d" % turn, b"open"), PATIENCE)
            assert mine.check([b"%s %d" % (second, turn)])

    with ThreadPoolExecutor(2) as threads:
        for done in [threads.submit(come, client, b"a", b"b"), threads.submit(come, other, b"b", b"a")]:
            done.result(PATIENCE)


class Interrupt(BaseException):
    """What a signal raises, wherever the program is."""


@pytest.fixture
def interruptible():
    """Let SIGALRM interrupt this thread, as SIGINT does, while ``interruptible.is_on``.

    An alarm that another thread of the process receives is heard here some time after the timer has been stopped.
    """
    interruptible = types.SimpleNamespace(is_on=True)

    def interrupt(*_):
        if interruptible.is_on:
            raise Interrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    yield interruptible
    signal.setitimer(signal.ITIMER_REAL, 0.0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.usefixtures("interruptible")
def test_a_wait_that_is_interrupted_harms_no_later_call(client):
    signal.setitimer(signal.ITIMER_REAL, 0.02)
    with pytest.raises(Interrupt):
        client.get(b"a", PATIENCE)
    client.set(b"a", b"1")
    assert [client.get(b"a", PATIENCE), client.add(b"a", 1), client.get(b"a", PATIENCE)] == [b"1", 2, b"2"]


def test_calls_that_are_interrupted_anywhere_harm_no_later_call(client, interruptible):
    """Each call may be interrupted; what it was about is then not known, but the next one is answered rightly."""
    rng = random.Random(7)  # noqa: S311 - it is no secret
    num_interrupted = 0
    large = rng.randbytes(300_000)
    for turn in range(400):
        try:
            interruptible.is_on = True
            signal.setitimer(signal.ITIMER_REAL, rng.uniform(1e-6, 300e-6))
            client.set(b"a", large[: rng.choice([10, 300_000])])
            client.add(b"counter", 1)
            client.get(b"a", PATIENCE)
        except Interrupt:
            num_interrupted += 1
        finally:
            try:
                interruptible.is_on = False
            except Interrupt:
                num_interrupted += 1
        assert client.compare_set(b"b", b"no such value", b"%d" % turn) == (
            b"%d" % (turn - 1) if turn else b"no such value"
        )
        client.set(b"b", b"%d" % turn)
        assert client.get(b"b", PATIENCE) == b"%d" % turn
    assert num_interrupted > 0
    assert client.add(b"counter", 0) <= 400


def test_a_forked_child_has_no_store_and_takes_none_from_its_parent(client):
    pid = os.fork()
    if pid == 0:
        heard = []
        for call in (lambda: client.add(b"counter", 1), lambda: client.get(b"a", 1.0), lambda: client.again(WATCHER)):
            try:
                call()
            except StoreLostError as error:
                heard.append("a child that it forked" in str(error))
        os._exit(0 if heard == [True] * 3 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert client.add(b"counter", 1) == 1


def test_a_fork_while_another_thread_waits_leaves_that_wait_alone(client):
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(client.get, b"a", PATIENCE)
        pid = os.fork()
        if pid == 0:
            try:
                client.check([b"a"])
            except StoreLostError:
                os._exit(0)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        client.set(b"a", b"1")
        assert waiting.result(PATIENCE) == b"1"


def test_closing_ends_the_calls_of_other_threads(client):
    client = client.again(MEMBER)
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(client.get, b"never set", PATIENCE)
        while client._calls is not None:
            threading.Event().wait(0.001)
        client.close()
        with pytest.raises(StoreLostError, match="this process has closed its connection"):
            waiting.result(PATIENCE)
    with pytest.raises(StoreLostError, match="this process has closed its connection"):
        client.get(b"a", 1.0)


def test_closing_closes_what_another_thread_is_just_dialling(client, monkeypatch):
    client = client.again(MEMBER)
    dial = client._dial

    def dial_and_close(role):
        found = dial(role)
        client.close()
        return found

    monkeypatch.setattr(client, "_dial", dial_and_close)
    client._calls = None  # a thread waits over the first connection
    with pytest.raises(StoreLostError):
        client.num_keys()
    assert [connection._socket.fileno() for connection in client._all] == [-1, -1]


@pytest.mark.parametrize("kind", KINDS)
def test_the_end_of_the_store_ends_all_calls_and_is_named(kind):
    with open_store(kind) as store:
        client = store.client()
        client.set(b"a", b"1")
        with ThreadPoolExecutor(1) as threads:
            waiting = threads.submit(client.get, b"never set", PATIENCE)
            while client._calls is not None:
                threading.Event().wait(0.001)
            os.kill(store.process.popen.pid, signal.SIGKILL)
            for call in (lambda: waiting.result(PATIENCE), lambda: client.get(b"a", 1.0)):
                with pytest.raises(
                    StoreLostError, match=rf"the job's store \(pid {store.process.popen.pid}\) is gone: "
                ):
                    call()
        assert store.exit_code() == -signal.SIGKILL


def test_the_end_of_a_member_is_told_unless_it_has_left(client, store):
    for rank in (1, 2):
        member = store.client(MEMBER, rank)
        leave_will(member, rank)
        with ThreadPoolExecutor(1) as threads:
            waiting = threads.submit(member.get, b"never set", PATIENCE)
            while member._calls is not None:
                threading.Event().wait(0.001)
            if rank == 1:
                client.set(b"left/1", b"yes")
                client.check([b"left/1"])
            member.close()
            with pytest.raises(StoreLostError):
                waiting.result(PATIENCE)
    assert client.get(b"failure", PATIENCE) == b"2 died"
    assert client.add(b"news", 0) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_a_store_that_is_shut_serves_those_who_are_in(kind):
    with open_store(kind) as store:
        member, other = store.client(), store.client(WATCHER)
        member.shut()
        if kind == "unix":
            listen_on_this_host(store.address).close()
        with pytest.raises(ConnectionRefusedError):
            store.client()
        with pytest.raises(StoreLostError, match=r"cannot be connected to any more: .*refused"):
            member.again(WATCHER)
        assert member.add(b"counter", 1) == 1
        assert other.add(b"counter", 1) == 2
        with ThreadPoolExecutor(1) as threads:
            waiting = threads.submit(member.get, b"a", PATIENCE)
            while member._calls is not None:
                threading.Event().wait(0.001)
            with pytest.raises(StoreLostError, match=r"cannot be connected to any more: .*refused"):
                member.add(b"counter", 1)
            other.set(b"a", b"1")
            assert waiting.result(PATIENCE) == b"1"
        assert member.add(b"counter", 1) == 3
        member.close()
        assert store.exit_code() == 0


def test_another_access_is_to_the_same_store(client):
    other = client.again(WATCHER)
    other.set(b"a", b"1")
    assert client.get(b"a", PATIENCE) == b"1"
    assert other.session == client.session
    other.close()
    assert client.check([b"a"])


def test_the_key_of_a_job_is_the_same_for_its_ranks_and_for_nobody_else(client, store):
    assert client.job_key == store.client().job_key != b""
    assert SECRET not in client.job_key
    with open_store("unix", secret=None) as first, open_store("unix", secret=None) as second:
        keys = [one.job_key for one in (first.client(), first.client(), second.client())]
        assert keys[0] == keys[1] != keys[2]
        assert {len(key) for key in keys} == {32}
    with open_store("tcp", secret=None) as open_to_all:
        assert open_to_all.client().job_key == b""


def test_a_secret_is_not_shown(store):
    assert "secret" not in repr(store.door)


def test_nobody_there_is_an_error_of_the_system():
    listener, address = listen("unix")
    listener.close()
    with pytest.raises(ConnectionRefusedError):
        Client(door(address))


def test_the_handler_of_a_signal_may_ask_in_the_middle_of_a_call(client):
    """It runs between two steps of the interpreter, wherever the call is; the call goes on after it."""
    asked = []

    def ask(_number, _frame):
        signal.setitimer(signal.ITIMER_REAL, 0)  # else it would interrupt itself
        client.set(b"of the handler", b"%d" % len(asked))
        asked.append(client.get(b"of the handler", PATIENCE))
        signal.setitimer(signal.ITIMER_REAL, 0.0003)

    before = signal.signal(signal.SIGALRM, ask)
    signal.setitimer(signal.ITIMER_REAL, 0.0003)
    try:
        total = client.add(b"counter", 0)
        while len(asked) < 300:
            total += 1
            assert client.add(b"counter", 1) == total
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert asked == [b"%d" % number for number in range(len(asked))]


@pytest.mark.parametrize("seed", range(4))
def test_the_handler_of_a_signal_may_close_in_the_middle_of_a_call(store, seed):
    """As one for SIGTERM does that cleans up; the call that it has interrupted ends with an error."""
    rng = random.Random(seed)  # noqa: S311 - it is no secret

    def ask(client, num_times):
        for _ in range(num_times):
            client.add(b"counter", 1)
        client.get(b"never set", PATIENCE)

    for _ in range(20):
        client = store.client(WATCHER)
        before = signal.signal(signal.SIGALRM, lambda *_, client=client: client.close())
        try:
            signal.setitimer(signal.ITIMER_REAL, rng.uniform(1e-5, 2e-3))
            with pytest.raises(StoreLostError, match="this process has closed its connection"):
                ask(client, rng.choice([0, 1000]))
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        assert client._first._socket.fileno() == -1


def test_a_signal_that_another_thread_receives_is_heard_during_a_wait(store):
    """As one is that comes just before the wait's call of the system; neither ends that call."""
    client, done = store.client(WATCHER), threading.Event()
    receiver = threading.Thread(target=done.wait)
    receiver.start()
    before = signal.signal(signal.SIGALRM, lambda *_: client.close())
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.01)
        with pytest.raises(StoreLostError, match="this process has closed its connection"):
            client.get(b"never set", float("inf"))
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM})
        signal.signal(signal.SIGALRM, before)
        done.set()
        receiver.join()


@pytest.mark.parametrize("error", [FileNotFoundError(errno.ENOENT, "no file"), TimeoutError("too late")])
def test_an_error_of_the_system_that_a_handler_raises_is_its_own(client, error):
    def fail(*_):
        raise error

    before = signal.signal(signal.SIGALRM, fail)
    try:
        for wait in (lambda: client.get(b"a", PATIENCE), lambda: client.wait([b"a", b"b"], PATIENCE)):
            signal.setitimer(signal.ITIMER_REAL, 0.01)
            with pytest.raises(type(error)) as caught:
                wait()
            assert caught.value is error
    finally:
        signal.signal(signal.SIGALRM, before)
    client.set(b"a", b"1")
    assert client.get(b"a", PATIENCE) == b"1"


def test_an_error_that_a_handler_raises_ends_the_attempt_to_connect_again(store):
    """It might be one that a flood of strangers makes, of which the next attempt is the remedy."""
    client, error = store.client(), TimeoutError("too late")

    def fail(*_):
        raise error

    before = signal.signal(signal.SIGALRM, fail)
    os.kill(store.process.popen.pid, signal.SIGSTOP)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(TimeoutError) as caught:
            client.again(WATCHER)
        assert caught.value is error
    finally:
        os.kill(store.process.popen.pid, signal.SIGCONT)
        signal.signal(signal.SIGALRM, before)


def test_a_store_that_does_not_answer_is_given_up_by_one_that_has_no_patience(store, client):
    with contextlib.closing(client.again(WATCHER, patience=1.0)) as watching:
        os.kill(store.process.popen.pid, signal.SIGSTOP)
        try:
            with pytest.raises(StoreSilentError, match="has not answered for 1 s"):
                watching.check([b"a"])
        finally:
            os.kill(store.process.popen.pid, signal.SIGCONT)
        with pytest.raises(StoreLostError):
            watching.check([b"a"])
    assert not client.check([b"a"])


def test_a_child_that_is_forked_while_a_thread_dials_does_not_keep_the_connection():
    listener, address = listen("unix")
    listener.settimeout(PATIENCE)
    with listener, ThreadPoolExecutor(1) as threads:
        dialling = threads.submit(Client, door(address))
        accepted, _ = listener.accept()
        with accepted:
            accepted.settimeout(PATIENCE)
            assert accepted.recv(1000).startswith(MAGIC)
            reader, writer = os.pipe()
            pid = os.fork()
            if pid == 0:
                accepted.close()
                os.close(writer)
                os.read(reader, 1)  # until the test is over
                os._exit(0)
            try:
                accepted.sendall(bytes(CHALLENGE_BYTES))
                with pytest.raises(ForeignServiceError):
                    dialling.result(PATIENCE)
                assert accepted.recv(1000) == b""
            finally:
                os.close(reader)
                os.close(writer)
                os.waitpid(pid, 0)


def test_a_signal_while_others_stand_in_line_is_not_taken_for_a_connection():
    listener, address = listen("unix")
    listener.listen(0)  # there is place for one
    signals = []

    def make_room(*_):
        signals.append(1)
        if len(signals) == 3:
            listener.accept()[0].close()

    before = signal.signal(signal.SIGALRM, make_room)
    with listener, socket.socket(socket.AF_UNIX) as other:
        other.connect(address)
        signal.setitimer(signal.ITIMER_REAL, 0.02, 0.02)
        try:
            with dialing._connect(address, PATIENCE, PATIENCE) as connected:
                assert connected.getpeername() == address.encode()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)


def test_another_access_waits_for_a_store_that_does_not_get_to_it_for_long(store, monkeypatch):
    """As long as one that is known is only slow, it is no failure: a flood of strangers may stand before the door."""
    client = store.client()
    client.door = dataclasses.replace(client.door, patience=0.05)
    tries, has_tried = [], threading.Event()

    def count(*args):
        tries.append(args)
        if len(tries) > 1:
            has_tried.set()
        return Hello(*args)

    monkeypatch.setattr(client_module, "Hello", count)
    with ThreadPoolExecutor(1) as threads:
        os.kill(store.process.popen.pid, signal.SIGSTOP)
        try:
            entering = threads.submit(client.again, WATCHER)
            assert has_tried.wait(PATIENCE)
        finally:
            os.kill(store.process.popen.pid, signal.SIGCONT)
        other = entering.result(PATIENCE)
    assert other.session == client.session
    other.close()
