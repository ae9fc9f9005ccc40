"""What gloo's groups leave behind at their end, and what of other code they leave alone."""

import os
import select
import socket
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from distman import _torch_internals as internals
from distman._torch_internals import default_store, end_group
from distman.testing import ranks

PIPE_AND_LISTENER = 2  # what each of gloo's threads listens to beside its connections


def num_polled():
    """What each thread of gloo listens to, but for those that run at this moment."""
    polls = [poll for poll in internals.gloo_polls() if poll is not None]
    return [Path(f"/proc/self/fdinfo/{poll}").read_text().count("tfd:") for poll in polls]


def wait_until(condition):
    while not condition():
        time.sleep(0.001)


@ranks(2, 3, 4)
def test_gloo_finds_its_connections_broken(world_size):
    """So it need not close one after the other, and wait for its own thread each time."""
    dist.new_group([0, 1])
    num_groups = len(internals.all_groups())
    wait_until(lambda: PIPE_AND_LISTENER + world_size - 1 in num_polled())
    default_store().add("looked", 1)
    wait_until(lambda: default_store().add("looked", 0) == world_size)
    internals._hang_up()
    wait_until(lambda: num_polled() == [PIPE_AND_LISTENER] * num_groups)
    end_group(aborts=False)
    assert internals.gloo_polls() == []


@ranks(2, 3)
def test_gloo_of_other_code_goes_on(rank, world_size):
    store = dist.PrefixStore("other", default_store())
    other = dist.ProcessGroupGloo(store, rank, world_size, timedelta(seconds=20))
    internals._hang_up()
    total = torch.ones(1)
    other.allreduce([total]).wait()
    assert total == world_size


@ranks(2)
def test_connections_of_the_program_go_on():
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as there:
        here, _ = server.accept()
        with here, select.epoll() as poll:
            for one in (server, here, there):
                poll.register(one)
            internals._hang_up()
            there.sendall(b"word")
            assert here.recv(4) == b"word"


@pytest.mark.parametrize("is_same", [True, False])
def test_a_connection_that_has_taken_the_place_of_another_one_goes_on(is_same):
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as there:
        here, _ = server.accept()
        with here:
            inode = os.fstat(here.fileno()).st_ino
            internals._shut_down(here.fileno(), inode if is_same else inode + 1)
            there.settimeout(0.05 if not is_same else 20)
            if is_same:
                assert there.recv(1) == b""
            else:
                with pytest.raises(TimeoutError):
                    there.recv(1)


def test_what_is_no_connection_is_left_alone():
    reading, writing = os.pipe()
    before = sorted(Path("/proc/self/fd").iterdir())
    with socket.create_server(("127.0.0.1", 0)) as server:
        for descriptor in (reading, server.fileno()):
            internals._shut_down(descriptor, os.fstat(descriptor).st_ino)
        os.write(writing, b"x")
        assert os.read(reading, 1) == b"x"
        with socket.create_connection(server.getsockname()):
            server.accept()[0].close()
    assert sorted(Path("/proc/self/fd").iterdir()) == before
    for descriptor in (reading, writing):
        os.close(descriptor)
        internals._shut_down(descriptor, 0)
