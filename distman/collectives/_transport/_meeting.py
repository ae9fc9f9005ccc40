"""How the ranks of a group on one host connect to each other: they agree over gloo where each listens, and dial there.

A rank listens at an abstract name, which is in no folder. The kernel says whose process is at the other end, and both
sides prove that they know the job's key and what was agreed. Pairs that cannot connect, since they are in different
network namespaces for example, go on over gloo.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import socket
from collections.abc import Iterator, Sequence
from hmac import compare_digest

import torch
import torch.distributed as dist

from distman._base import timing
from distman._job.groups.registry import Group, process_group_of
from distman._store.handshake import MAC_BYTES, NO_SECRET, NONCE_BYTES, mac
from distman._store.transport import BACKLOG, is_of_this_user
from distman._torch_internals import batch_isend_irecv
from distman.collectives._transport._segments import is_wanted
from distman.manager import DistributedManager

_TAG = 2**31 - 2  # of the messages by which the ranks agree; those of collectives are drawn from as many numbers
_SEND_BYTES = 212_992  # the kernel makes twice as many: with its default, 256 KiB take five times as long
_NOWHERE = bytes(NONCE_BYTES)  # what a rank that does not listen says


class Meeting:
    """What the ranks of a group on this host do, once, to connect to each other. Collective over these ranks."""

    def __init__(self, group: Group) -> None:
        self.sockets: dict[int, socket.socket] = {}  # by rank in the group
        self.all_listen = False  # all members of the group, which are of this host
        self._group, self._me = group, group.rank
        rendezvous = DistributedManager()._state.job.rendezvous
        self._key = (rendezvous.key if rendezvous is not None else b"") or NO_SECRET
        here = group.neighbours
        self._others = [rank for rank in range(group.size) if rank != group.rank and group.ranks[rank] in here]
        with contextlib.ExitStack() as self._stack:  # what ends this early closes all
            self._meet()
            self._stack.pop_all()

    def _meet(self) -> None:
        drawn = os.urandom(NONCE_BYTES)
        with contextlib.ExitStack() as stack:
            listener = None
            with contextlib.suppress(OSError):  # the name cannot be had
                listener = stack.enter_context(_listener(_name_of(drawn))) if is_wanted() else None
            mine = drawn if listener is not None else _NOWHERE
            found = self._swap([mine] * len(self._others))
            self._nonces = dict(zip(self._others, found, strict=True)) | {self._me: mine}
            self.all_listen = len(self._nonces) == self._group.size and _NOWHERE not in self._nonces.values()
            for rank in self._others if listener is not None else ():
                if rank < self._me and self._nonces[rank] != _NOWHERE:
                    self._dial(rank)
            self._accept(listener, {rank for rank in self._swap_flags() if rank > self._me})
            known = self._swap_flags()
        for rank in {rank for rank in self.sockets if rank < self._me}:
            if rank not in known:
                self.sockets.pop(rank).close()
            elif not compare_digest(self.sockets[rank].recv(MAC_BYTES), self._proof(b"server", self._me, rank)):
                raise RuntimeError(f"rank {rank} of the group must prove that it belongs to the job, and did not")

    def _dial(self, rank: int) -> None:
        """Connect to a rank, if the kernel lets this one."""
        with contextlib.suppress(OSError):
            one = _dial_at(_name_of(self._nonces[rank]), self._proof(b"client", self._me, rank))
            self.sockets[rank] = self._stack.enter_context(one)

    def _accept(self, listener: socket.socket | None, callers: set[int]) -> None:
        """Let in the ranks that have dialled and said all they had to."""
        while callers and listener is not None:
            try:
                one = _checked(listener.accept()[0])
            except OSError:  # no other caller waits, or no more files can be opened
                break
            rank = self._caller(one, callers)
            if rank in callers:
                callers.discard(rank)
                self.sockets[rank] = self._stack.enter_context(one)
                one.sendall(self._proof(b"server", rank, self._me))
            else:
                one.close()

    def _caller(self, one: socket.socket, callers: set[int]) -> int:
        """Return the rank that has connected; -1 for a stranger."""
        with contextlib.suppress(OSError):
            told = one.recv(MAC_BYTES) if is_of_this_user(one) else b""
            proofs = {rank: self._proof(b"client", rank, self._me) for rank in callers}
            return next((rank for rank, proof in proofs.items() if compare_digest(told, proof)), -1)
        return -1

    def _proof(self, who: bytes, dialling: int, listening: int) -> bytes:
        nonces = self._nonces[dialling], self._nonces[listening]
        return mac(self._key, b"transport", who, b"%d %d" % (dialling, listening), *nonces)

    def _swap_flags(self) -> set[int]:
        """Tell the other ranks whether this one has a connection to them, and return those that have one to it."""
        found = self._swap([bytes([rank in self.sockets]) for rank in self._others])
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


def _listener(address: bytes) -> socket.socket:
    with _closed_by_errors(_new_socket()) as one:
        one.bind(address)
        one.listen(BACKLOG)
        return one


def _dial_at(address: bytes, proof: bytes) -> socket.socket:
    with _closed_by_errors(_new_socket()) as one:
        one.settimeout(timing.TRANSPORT_CONNECT)
        one.connect(address)
        if not is_of_this_user(one):
            raise PermissionError("another user listens there")
        one.sendall(proof)
        one.settimeout(0)
        return one


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
        one.settimeout(0)
        return one


@contextlib.contextmanager
def _closed_by_errors(one: socket.socket) -> Iterator[socket.socket]:
    try:
        yield one
    except BaseException:
        one.close()
        raise
