"""Strangers who take connections of a group: gloo does not ask who connects, but Linux tells it afterwards."""

from __future__ import annotations

import contextlib
import os
import re
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch.distributed as dist

from distman._coordination.monitor.current_watcher import failure_behind
from distman._device import is_pure_gloo
from distman._job.job import Job
from distman._rendezvous.door import UNIX
from distman._store.transport import is_nobody
from distman._torch_internals import is_lost_connection
from distman.errors import DistmanError

_IS_LAZY = "TORCH_GLOO_LAZY_INIT"
"""With it gloo connects at the first message, and a connection that is missing before says nothing."""

_SOCKET = re.compile(r"socket:\[(\d+)\]")
_POLLED = re.compile(r"^tfd:.* ino:([0-9a-f]+)", re.MULTILINE)
_OTHER_ENDS = r"^ *\d+: (\w{{8}}:\w{{4}}) \w{{8}}:{port:04X} 01 \S+ \S+ \S+ +(\d+) +\d+ +([1-9]\d*) "
"""Address, user and inode of those who have connected to a port, in ``/proc/net/tcp``; a closed end has no inode."""

_REMEDY = "gloo does not ask who connects. Run the job on nodes that no other user shares (sbatch --exclusive)."


def meets_on_this_host(job: Job) -> bool:
    """Return whether all ranks of a job are on this host, and gloo alone connects them."""
    is_local = job.rendezvous is not None and job.rendezvous.job_store.url.startswith(UNIX)
    return is_local and job.backend is not None and is_pure_gloo(job.backend)


@contextlib.contextmanager
def noticed(group: str, num_others: int) -> Iterator[None]:
    """Notice strangers of this host who take a connection of a group that is made meanwhile.

    Blocking, for a second, where a connection breaks. For groups of gloo alone, whose members are all on this host.

    Args:
        group: What the group is called, for messages.
        num_others: Number of its other members.

    Raises:
        DistmanError: A stranger holds a connection, or one was closed although no rank has ended.
    """
    before = _sockets()
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, dist.DistError) or not is_lost_connection(error) or failure_behind(error, group):
            raise
        raise DistmanError(
            f"A connection of {group} was closed while the group was made, though no rank has ended. If no other rank "
            f"says why, a stranger took it: {_REMEDY} ({str(error).partition('. ')[0]})"
        ) from error
    if not is_nobody() and not os.environ.get(_IS_LAZY):
        with contextlib.suppress(OSError):  # this host shows nothing
            _check({inode: place for inode, place in _sockets().items() if inode not in before}, group, num_others)


def _check(new: Mapping[int, int], group: str, num_others: int) -> None:
    """Raise if fewer of the new sockets than there are other members lead to them, and one leads to a stranger.

    A stranger who came too late, or says what nobody waits for, is kept waiting by gloo and does no harm.
    """
    connected: dict[int, str] = {}
    strangers: dict[str, int] = {}
    for inode, descriptor in new.items():
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as one:
            if one.family == socket.AF_INET and one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                strangers |= _strangers_at(one.getsockname()[1])
            elif one.family == socket.AF_INET:
                connected[inode] = _as_in_table(*one.getpeername())
    if not strangers:
        return
    polled = _polled()
    members = [other for inode, other in connected.items() if inode in polled and other not in strangers]
    if polled and len(members) < num_others:
        users = ", ".join(map(str, sorted({*strangers.values()})))
        raise DistmanError(
            f"A stranger took a connection of {group}: a process of uid {users} on this host connected to gloo while "
            f"the group was made. {_REMEDY}"
        )


def _sockets() -> dict[int, int]:
    """Return a descriptor of each socket of this process, by inode."""
    found = {}
    for descriptor in os.listdir("/proc/self/fd"):  # noqa: PTH208 - paths of each of thousands of descriptors take long
        with contextlib.suppress(OSError):  # closed meanwhile
            if match := _SOCKET.fullmatch(os.readlink(f"/proc/self/fd/{descriptor}")):  # noqa: PTH115 - as above
                found[int(match[1])] = int(descriptor)
    return found


def _strangers_at(port: int) -> dict[str, int]:
    """Return the users other than this one who have connected to a port of this host, by their own address."""
    table = Path("/proc/self/net/tcp").read_text(encoding="ascii")
    found = re.findall(_OTHER_ENDS.format(port=port), table, re.MULTILINE)
    return {address: int(user) for address, user, _ in found if int(user) != os.geteuid()}


def _as_in_table(host: str, port: int) -> str:
    return f"{int.from_bytes(socket.inet_aton(host), 'little'):08X}:{port:04X}"


def _polled() -> set[int]:
    """Return the inodes of what this process's threads listen to, as gloo's do to the connections of its pairs."""
    found = set()
    for descriptor in os.listdir("/proc/self/fd"):  # noqa: PTH208 - as above
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{descriptor}") == "anon_inode:[eventpoll]":  # noqa: PTH115 - as above
                info = Path(f"/proc/self/fdinfo/{descriptor}").read_text(encoding="ascii")
                found |= {int(inode, 16) for inode in _POLLED.findall(info)}
    return found
