"""Strangers who take connections of a group: gloo does not ask who connects, but Linux tells it afterwards."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import select
import socket
import stat
import struct
from collections.abc import Iterator
from pathlib import Path

from distman._job.device import is_pure_gloo
from distman._job.job import Job
from distman._job.meeting.door import UNIX
from distman._store.transport import is_nobody
from distman.errors import DistmanError

_IS_LAZY = "TORCH_GLOO_LAZY_INIT"
"""With it gloo connects at the first message, and a connection that is missing before says nothing."""

_POLLED = re.compile(r"^tfd:.* events: *([0-9a-f]+) .* ino:([0-9a-f]+)", re.MULTILINE)

# Linux, ``linux/netlink.h``, ``linux/sock_diag.h`` and ``linux/inet_diag.h``
_SOCK_DIAG, _BY_FAMILY, _REQUEST = 4, 20, 1
_HEAD = struct.Struct("=IHHII")  # length, type, flags, number, process
_QUESTION = struct.Struct("=BBBBI")  # family, protocol, what more to tell, padding, states
_ENDS = struct.Struct("!HH16s16sI8s")  # ports, addresses, interface, cookie
_OWNER = struct.Struct("=64xII")  # behind the ends and three numbers: user, inode
_ERROR = struct.Struct("=i")
_ANY_STATE, _NO_COOKIE = 0xFFFFFFFF, b"\xff" * 8
_MOST_BYTES = 4096

Address = tuple[str, int]

_REMEDY = "gloo does not ask who connects. Run the job on nodes that no other user shares (sbatch --exclusive)."


def meets_on_this_host(job: Job) -> bool:
    """Return whether all ranks of a job are on this host, and gloo alone connects them."""
    is_local = job.rendezvous is not None and job.rendezvous.job_store.url.startswith(UNIX)
    return is_local and job.backend is not None and is_pure_gloo(job.backend)


@contextlib.contextmanager
def noticed(group: str, num_others: int) -> Iterator[None]:
    """Notice strangers of this host who take a connection of a group that is made meanwhile."""
    # For groups of gloo alone, whose members are all on this host. It blocks for a moment.
    before = _sockets()
    yield
    if not is_nobody() and not os.environ.get(_IS_LAZY):
        with contextlib.suppress(OSError):  # this host does not show its connections
            new = {inode: descriptor for inode, descriptor in _sockets().items() if inode not in before}
            _check(new, group, num_others)


def _check(new: dict[int, int], group: str, num_others: int) -> None:
    """Raise if gloo listens to a process of another user instead of a member."""
    # ``new`` has the descriptors, by inode, of sockets that were opened while the group was made. A stranger who came
    # too late, or says what nobody waits for, does no harm. Nothing is concluded from a missing connection alone: other
    # threads may have opened and closed files meanwhile.
    ports, ends = _ends(new)
    heard = {inode: ends[inode] for inode in ends.keys() & _polled()}
    users = {
        inode: _user_of(other, own) for inode, (own, other) in heard.items() if own[1] in ports
    }  # as gloo asks none
    strangers = {user for user in users.values() if user not in (None, os.geteuid())}
    num_members = len(heard) - sum(user != os.geteuid() for user in users.values())
    if strangers and num_members < num_others:
        raise DistmanError(
            f"A stranger took a connection of {group}: a process of uid {', '.join(map(str, strangers))} on this host "
            f"connected to gloo while the group was made. {_REMEDY}"
        )


def _sockets() -> dict[int, int]:
    """Return the descriptors of sockets, which are given again when one is closed, by inodes, which are not."""
    found = {}
    for descriptor in _descriptors():
        with contextlib.suppress(OSError):  # closed meanwhile
            status = os.fstat(descriptor)
            if stat.S_ISSOCK(status.st_mode):
                found[status.st_ino] = descriptor
    return found


def _ends(sockets: dict[int, int]) -> tuple[set[int], dict[int, tuple[Address, Address]]]:
    """Return the ports at which sockets listen, and of the others, by inode, the addresses of both ends."""
    ports, ends = set(), {}
    for inode, descriptor in sockets.items():
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as one:  # closed, or not connected
            if one.family == socket.AF_INET and one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                ports.add(one.getsockname()[1])
            elif one.family == socket.AF_INET:
                ends[inode] = one.getsockname(), one.getpeername()
    return ports, ends


def _user_of(own: Address, other: Address) -> int | None:
    """Return the user who has this end of a connection on this host; None where no process has it any more."""
    # It asks by sock_diag(7). ``/proc/net/tcp`` says the same, but takes milliseconds.
    ends = _ENDS.pack(own[1], other[1], socket.inet_aton(own[0]), socket.inet_aton(other[0]), 0, _NO_COOKIE)
    question = _QUESTION.pack(socket.AF_INET, socket.IPPROTO_TCP, 0, 0, _ANY_STATE) + ends
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _SOCK_DIAG) as linux:
        linux.send(_HEAD.pack(_HEAD.size + len(question), _BY_FAMILY, _REQUEST, 0, 0) + question)
        answer = linux.recv(_MOST_BYTES)
    if _HEAD.unpack_from(answer)[1] != _BY_FAMILY:
        (error,) = _ERROR.unpack_from(answer, _HEAD.size)
        if error != -errno.ENOENT:
            raise OSError(-error, os.strerror(-error))
        return None
    user, inode = _OWNER.unpack_from(answer, _HEAD.size)
    return user if inode else None


def _descriptors() -> set[int]:
    """Return the open files of this process; none where the host does not show them."""
    try:
        return {int(name) for name in os.listdir("/proc/self/fd")}  # noqa: PTH208 - there may be thousands
    except OSError:
        return set()


def _polled() -> set[int]:
    """Return the inodes of what this process's threads listen to, as gloo's do to the connections of its pairs."""
    # A connection whose number somebody else has said before is polled no more, but still in the table.
    found = set()
    for descriptor in _descriptors():
        with contextlib.suppress(OSError):  # closed meanwhile, or not shown
            if os.readlink(f"/proc/self/fd/{descriptor}") == "anon_inode:[eventpoll]":  # noqa: PTH115 - many, as above
                info = Path(f"/proc/self/fdinfo/{descriptor}").read_text(encoding="ascii")
                polled = [(int(events, 16), int(inode, 16)) for events, inode in _POLLED.findall(info)]
                found |= {inode for events, inode in polled if events & select.EPOLLIN}
    return found
