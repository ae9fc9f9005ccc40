"""Who is let in where ranks of one host connect: nobody else's process, and none that does not know the job's key."""

import contextlib
import os
import socket
import subprocess
import sys

import pytest

from distman.collectives._transport import _meeting
from distman.collectives._transport._meeting import _dial_at, _listener, _name_of, _new_socket
from distman.collectives._validation import resolve_group
from distman.testing import ranks

NONCE = bytes(range(16))


def meeting_of(group, key=b"k" * 32):
    """Return a meeting that has not begun."""
    meeting = object.__new__(_meeting.Meeting)
    meeting._me, meeting._key, meeting._stack = group.rank, key, contextlib.ExitStack()
    meeting._nonces = {group.rank: NONCE, 1 - group.rank: NONCE[::-1]}
    meeting.sockets = {}
    return meeting


@pytest.mark.gloo_only("nobody listens there")
@ranks(2)
def test_a_caller_proves_that_it_is_a_rank_of_the_job_in_this_meeting(rank):
    mine, other = meeting_of(resolve_group(None)), 1 - rank
    true = mine._proof(b"client", other, rank)
    foreign = [
        mine._proof(b"server", other, rank),
        meeting_of(resolve_group(None), key=b"another key")._proof(b"client", other, rank),
        mine._proof(b"client", rank, other),
        b"",
        os.urandom(_meeting.MAC_BYTES),
        true[:-1],
    ]
    for expected, told in [(other, true), *((-1, one) for one in foreign)]:
        ends = socket.socketpair()
        ends[1].sendall(told)
        ends[0].settimeout(0)
        assert mine._caller(ends[0], {other}) == expected
        for end in ends:
            end.close()


STRANGER = """
import os, socket, sys
os.setgroups([]); os.setgid(65533); os.setuid(65533)
one = socket.socket(socket.AF_UNIX)
one.connect(b"\\0" + sys.argv[1].encode())
one.sendall(b"x" * 52)
print("in", flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be somebody else")
@pytest.mark.gloo_only("nobody listens there")
@ranks(2)
def test_another_user_is_not_listened_to(rank):
    if rank != 0:
        return
    mine = meeting_of(resolve_group(None))
    with _listener(_name_of(NONCE)) as listener:
        command = [sys.executable, "-c", STRANGER, _name_of(NONCE)[1:].decode()]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as stranger:
            assert stranger.stdout.readline() == "in\n"
            with _dial_at(_name_of(NONCE), mine._proof(b"client", 1, 0)) as true, mine._stack:
                mine._accept(listener, {1})
                assert set(mine.sockets) == {1}
                mine._accept(listener, {1})  # the stranger is sent away
                assert set(mine.sockets) == {1}
                assert true.recv(_meeting.MAC_BYTES) == mine._proof(b"server", 1, 0)
            stranger.stdin.close()


SQUATTER = """
import os, socket, sys
os.setgroups([]); os.setgid(65533); os.setuid(65533)
one = socket.socket(socket.AF_UNIX)
one.bind(b"\\0" + sys.argv[1].encode())
one.listen()
print("listens", flush=True)
found, _ = one.accept()
print(len(found.recv(100)))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be somebody else")
def test_nothing_is_told_to_another_user_that_listens_at_the_name():
    command = [sys.executable, "-c", SQUATTER, _name_of(NONCE)[1:].decode()]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as squatter:
        assert squatter.stdout.readline() == "listens\n"
        with pytest.raises(PermissionError, match="another user listens there"):
            _dial_at(_name_of(NONCE), b"secret")
        assert squatter.stdout.read() == "0\n"


def test_nothing_is_left_of_the_name():
    with _listener(_name_of(NONCE)):
        pass
    with pytest.raises(ConnectionRefusedError), _new_socket() as one:
        one.connect(_name_of(NONCE))
