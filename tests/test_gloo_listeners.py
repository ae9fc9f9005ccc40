"""Gloo's threads are found and woken, and what other code listens to is left alone."""

import os
import random
import select
import socket
import threading
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from distman import _gloo_listeners as listeners
from distman._torch_internals import all_groups, default_store, end_group, make_group
from distman.testing import ranks


def threads():
    """What says what each of them listens to."""
    found = listeners._find()
    for one in found:
        one.close()
    return {one._info for one in found}


def wakers():
    return [thread for thread in threading.enumerate() if thread.name == "distman-wake-gloo"]


@ranks(2, 3)
@pytest.mark.parametrize("is_lazy", ["0", "1"])
def test_every_group_has_a_thread_that_is_found_until_it_ends(rank, world_size, is_lazy, monkeypatch):
    monkeypatch.setenv("TORCH_GLOO_LAZY_INIT", is_lazy)
    before = threads()
    assert before
    store = dist.PrefixStore(f"group{is_lazy}", default_store())
    group = make_group(range(world_size), rank, name="one", description="", store=store, timeout=default_pg_timeout)
    dist.all_reduce(torch.ones(1), group=group)
    (added,) = threads() - before
    with listeners.awake():
        end_group(group, aborts=False)
        del group
    assert added not in threads()
    assert wakers() == []


@ranks(2, 4)
def test_collectives_go_on_while_the_threads_are_woken(rank, world_size):
    draw = random.Random(world_size)  # noqa: S311 - no secret
    with listeners.awake():
        for size in [draw.randrange(1, 100_000) for _ in range(50)]:
            total = torch.full((size,), float(rank))
            dist.all_reduce(total)
            assert (total == sum(range(world_size))).all()


@pytest.mark.parametrize("num_others", [0, 1, 3])
def test_a_listener_is_woken_as_often_as_it_has_less_to_listen_to(num_others):
    """However much is left: what is never closed must not keep it from its end."""
    reading, writing = os.pipe2(os.O_NONBLOCK)
    with select.epoll() as poll, ExitStack() as stack:
        stack.callback(os.close, reading)
        stack.callback(os.close, writing)
        sockets = [stack.enter_context(socket.socket()) for _ in range(2 + num_others)]
        for one in (reading, *sockets):
            poll.register(one, select.EPOLLIN)
        listener = listeners.Listener(info_of(poll), writing)
        for one in sockets[2:]:
            listener.wake()
            one.close()
            listener.wake()
            assert os.read(reading, 10) == b"\0"
        late = stack.enter_context(socket.socket())
        poll.register(late, select.EPOLLIN)
        listener.wake()
        listener.wake()
        with pytest.raises(BlockingIOError):
            os.read(reading, 1)


def test_waking_one_that_has_ended_or_has_not_read_for_long_does_nothing():
    reading, writing = os.pipe2(os.O_NONBLOCK)
    others = [socket.socket() for _ in range(3)]
    with select.epoll() as poll, ExitStack() as stack:
        for one in (reading, *others):
            poll.register(one, select.EPOLLIN)
        (pipe,) = listeners._open(reading, os.fstat(reading).st_ino)
        listener = listeners.Listener(info_of(poll), pipe)
        stack.callback(listener.close)
        fill(writing)
        others.pop().close()
        listener.wake()
        os.close(writing)
        os.close(reading)
        others.pop().close()
        listener.wake()
        poll.close()
        listener.wake()
        listener.wake()
    others.pop().close()


def test_pipes_of_other_code_are_not_written_to():
    reading, writing = os.pipe2(os.O_NONBLOCK)
    with select.epoll() as poll, socket.create_server(("127.0.0.1", 0)) as server, socket.socket() as other:
        for one in (reading, server, other):
            poll.register(one, select.EPOLLIN)
        assert listeners._polled(info_of(poll))
        assert info_of(poll) not in threads()
        with pytest.raises(BlockingIOError):
            os.read(reading, 1)
    os.close(reading)
    os.close(writing)


def test_a_descriptor_that_is_another_file_by_now_is_not_opened():
    reading, writing = os.pipe()
    inode = os.fstat(reading).st_ino
    assert listeners._open(reading, inode + 1) == []
    os.close(reading)
    os.close(writing)
    assert listeners._open(reading, inode) == []


@pytest.mark.parametrize("address", [0, 2**63, 2**64 - 1])
def test_numbers_that_other_code_keeps_for_what_it_listens_to_are_no_addresses(address):
    with Path("/proc/self/mem").open("rb", buffering=0) as memory:
        assert listeners._read(memory.fileno(), address) is None


def test_a_torch_that_hides_gloo_has_no_threads_to_be_found(monkeypatch):
    monkeypatch.setattr(listeners, "_PIPE_TYPE", "_ZTV0")
    assert listeners._find() == []


@ranks(2)
def test_groups_end_where_no_thread_can_be_had(monkeypatch):
    def refuse(_):
        raise RuntimeError("can't start new thread")

    dist.barrier()
    monkeypatch.setattr(threading.Thread, "start", refuse)
    end_group(aborts=False)
    assert all_groups() == []


@pytest.mark.parametrize(("most", "is_looked"), [(-1, False), (10**6, True)])
def test_nobody_looks_where_too_many_threads_wait_for_the_cores(most, is_looked, monkeypatch):
    looks = []
    monkeypatch.setattr(listeners, "_MOST_PER_CORE", most)
    monkeypatch.setattr(listeners, "_find", lambda: looks.append(True))
    with listeners.awake():
        assert bool(looks) == is_looked
    assert wakers() == []


def test_what_was_opened_is_closed_where_the_main_thread_is_interrupted(monkeypatch):
    """The thread does it, which may still write; whatever the other one was about to do."""

    def start(thread):
        begin(thread)
        raise KeyboardInterrupt

    begin = threading.Thread.start
    reading, writing = os.pipe2(os.O_NONBLOCK)
    with select.epoll() as poll:
        listener = listeners.Listener(info_of(poll), writing)
        monkeypatch.setattr(listeners, "_MOST_PER_CORE", 10**6)
        monkeypatch.setattr(listeners, "_find", lambda: [listener])
        monkeypatch.setattr(threading.Thread, "start", start)
        with pytest.raises(KeyboardInterrupt), listeners.awake():
            pass
    assert wakers() == []
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(writing)
    assert os.read(reading, 1) == b""
    os.close(reading)


def fill(pipe):
    with suppress(BlockingIOError):
        while True:
            os.write(pipe, bytes(4096))


def info_of(poll):
    return Path(f"/proc/self/fdinfo/{poll.fileno()}")
