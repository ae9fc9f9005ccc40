"""How the ranks of a group on one host connect to each other: they agree over gloo where each listens, and dial there.

A rank listens at a path in a folder of its own, which other users cannot enter, and which other network namespaces see;
and at an abstract name, which other mount namespaces see. The kernel says whose process is at the other end, and both
sides prove that they know the job's key and what was agreed. Pairs that cannot connect go on over gloo.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import socket
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from hmac import compare_digest
from pathlib import Path
from struct import Struct
from typing import NamedTuple

import torch
import torch.distributed as dist

from distman._groups.registry import Group
from distman._store.handshake import MAC_BYTES, NO_SECRET, NONCE_BYTES, mac
from distman._store.transport import BACKLOG, is_of_this_user
from distman._torch_internals import batch_isend_irecv
from distman.collectives._transport._backend import process_group_of
from distman.collectives._transport._segments import is_wanted
from distman.manager import DistributedManager

_TAG = 2**31 - 2  # of the messages by which the ranks agree; those of collectives are drawn from as many numbers
_SEND_BYTES = 212_992  # the kernel makes twice as many: with its default, 256 KiB take five times as long
_PATIENCE = 3.0  # seconds to connect, where strangers stand in line
_MOST_PATH_BYTES = 107
_PLACE = Struct(f"=?{NONCE_BYTES}s{_MOST_PATH_BYTES}s")


class _Place(NamedTuple):
    """Where a rank listens: at a path, if it has one, and at a name made of what it has drawn for this meeting."""

    listens: bool
    nonce: bytes
    path: bytes  # zeros may follow


class Meeting:
    """What the ranks of a group on this host do, once, to connect to each other. Collective over these ranks.

    Attributes:
        sockets: The connections, by rank in the group.
        all_listen: Whether all members of the group are of this host, and each has a place where it listens.
    """

    def __init__(self, group: Group) -> None:
        self.sockets: dict[int, socket.socket] = {}
        self._group = group
        rendezvous = DistributedManager()._state.job.rendezvous
        self._key = (rendezvous.job_store.key if rendezvous is not None else b"") or NO_SECRET
        here = group.neighbours.ranks
        self._others = [rank for rank in range(group.size) if rank != group.rank and group.ranks[rank] in here]
        with contextlib.ExitStack() as stack:  # what ends this early closes all
            self._meet(stack)
            stack.pop_all()

    def _meet(self, stack: contextlib.ExitStack) -> None:
        with _listening(os.urandom(NONCE_BYTES)) as (listeners, mine):
            found = self._swap([_PLACE.pack(*mine)] * len(self._others))
            places = {rank: _Place(*_PLACE.unpack(row)) for rank, row in zip(self._others, found, strict=True)}
            are_all_here = len(self._others) == self._group.size - 1
            self.all_listen = are_all_here and all(place.listens for place in (mine, *places.values()))
            dialled = self._dial_all(mine, places, stack) if mine.listens else {}
            callers = self._swap_flags(dialled)
            accepted = self._accept(listeners, mine, {rank: places[rank] for rank in callers}, stack)
            known = self._swap_flags(accepted)
        for rank, one in dialled.items():
            if rank not in known:
                one.close()
            elif not compare_digest(_told(one), self._proof(b"server", self._group.rank, mine, places[rank])):
                raise RuntimeError(f"rank {rank} of the group must prove that it belongs to the job, and did not")
        self.sockets = {rank: one for rank, one in {**dialled, **accepted}.items() if one.fileno() != -1}

    def _dial_all(
        self, mine: _Place, places: Mapping[int, _Place], stack: contextlib.ExitStack
    ) -> dict[int, socket.socket]:
        """Connect to the ranks before this one that listen, wherever the kernel lets this one pass."""
        dialled: dict[int, socket.socket] = {}
        for rank, place in places.items():
            addresses = (place.path.rstrip(b"\0"), _name_of(place.nonce)) if rank < self._group.rank else ()
            for address in addresses if place.listens else ():
                with contextlib.suppress(OSError):
                    one = _dial_at(address, self._proof(b"client", self._group.rank, mine, place))
                    dialled[rank] = stack.enter_context(one)
                    break
        return dialled

    def _accept(
        self,
        listeners: Sequence[socket.socket],
        mine: _Place,
        callers: Mapping[int, _Place],
        stack: contextlib.ExitStack,
    ) -> dict[int, socket.socket]:
        """Let in the ranks that have dialled, who have said all they had to."""
        accepted: dict[int, socket.socket] = {}
        for listener in listeners:
            while len(accepted) < len(callers):
                try:
                    one = _checked(listener.accept()[0])
                except OSError:  # nobody else stands in line, or no more files can be opened
                    break
                rank = self._caller(one, mine, callers)
                if rank >= 0 and rank not in accepted:
                    accepted[rank] = stack.enter_context(one)
                    one.sendall(self._proof(b"server", rank, callers[rank], mine))
                else:
                    one.close()
        return accepted

    def _caller(self, one: socket.socket, mine: _Place, callers: Mapping[int, _Place]) -> int:
        """Return the rank that has connected; -1 for a stranger."""
        with contextlib.suppress(OSError):
            if is_of_this_user(one):
                told = _told(one)
                for rank, place in callers.items():
                    if compare_digest(told, self._proof(b"client", rank, place, mine)):
                        return rank
        return -1

    def _proof(self, who: bytes, dialling: int, client: _Place, server: _Place) -> bytes:
        return mac(self._key, b"transport", who, b"%d" % dialling, client.nonce, server.nonce)

    def _swap_flags(self, mine: Mapping[int, object]) -> set[int]:
        """Say yes to some ranks and no to the others, and return those that say yes to this one."""
        found = self._swap([bytes([rank in mine]) for rank in self._others])
        return {rank for rank, (flag,) in zip(self._others, found, strict=True) if flag}

    def _swap(self, rows: Sequence[bytes]) -> list[bytes]:
        """Send a row of bytes to each of the others, and return what they send."""
        sent = torch.tensor([list(row) for row in rows], dtype=torch.uint8, device="cpu")
        received = torch.empty_like(sent)
        operations = [
            dist.P2POp(operation, row, self._group.ranks[rank], process_group_of(self._group), _TAG)
            for operation, full in ((dist.irecv, received), (dist.isend, sent))
            for rank, row in zip(self._others, full.unbind(), strict=True)
        ]
        for work in batch_isend_irecv(operations):
            work.wait()
        return [bytes(row) for row in received.tolist()]


@contextlib.contextmanager
def _listening(nonce: bytes) -> Iterator[tuple[list[socket.socket], _Place]]:
    """Listen at a path and a name for the length of a ``with`` block, which yields the sockets and where they are.

    Where a place cannot be had, there is one socket less.
    """
    with contextlib.ExitStack() as stack:
        found: dict[bytes, socket.socket] = {}
        path = b""
        with contextlib.suppress(OSError):
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="distman-", ignore_cleanup_errors=True))
            path = os.fsencode(Path(folder) / "socket")
        for address in filter(None, (path, _name_of(nonce)) if is_wanted() else ()):
            with contextlib.suppress(OSError):
                found[address] = stack.enter_context(_listener(address))
        yield [*found.values()], _Place(bool(found), nonce, path if path in found else b"")


def _listener(address: bytes) -> socket.socket:
    with _closed_by_errors(_new_socket()) as one:
        one.bind(address)
        one.listen(BACKLOG)
        return one


def _dial_at(address: bytes, proof: bytes) -> socket.socket:
    with _closed_by_errors(_new_socket()) as one:
        one.settimeout(_PATIENCE)
        one.connect(address)
        if not is_of_this_user(one):
            raise PermissionError("another user listens there")
        one.sendall(proof)
        one.setblocking(False)
        return one


def _told(one: socket.socket) -> bytes:
    return one.recv(MAC_BYTES, socket.MSG_DONTWAIT)


def _name_of(nonce: bytes) -> bytes:
    return b"\0distman-" + nonce.hex().encode()


def _new_socket() -> socket.socket:
    return _checked(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))


def _checked(one: socket.socket) -> socket.socket:
    """Return a socket for large messages, unless it is one of too many: half of the files are left to the program."""
    with _closed_by_errors(one):
        if one.fileno() > resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2:
            raise OSError(errno.EMFILE, "more than half of the files that this process may have are open")
        one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BYTES)
        one.setblocking(False)
        return one


@contextlib.contextmanager
def _closed_by_errors(one: socket.socket) -> Iterator[socket.socket]:
    try:
        yield one
    except BaseException:
        one.close()
        raise
