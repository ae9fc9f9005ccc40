"""Connected sockets over which processes exchange messages and file descriptors."""

from __future__ import annotations

import array
import select
import socket


def socket_pair() -> tuple[socket.socket, socket.socket]:
    """Return two connected sockets that keep messages apart."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def is_readable(*sockets: socket.socket, seconds: float = 0.0) -> bool:
    """Wait at most that long until one of the sockets has a message or was closed by the other side."""
    poller = select.poll()
    for one in sockets:
        poller.register(one, select.POLLIN)
    return bool(poller.poll(seconds * 1000))


def receive_with_descriptors(
    connection: socket.socket, num_bytes: int, num_descriptors: int, flags: int = 0
) -> tuple[bytes, list[int]]:
    """Return a message and the file descriptors sent with it, which programs started here do not inherit."""
    # ``socket.recv_fds`` of Python 3.11 ignores its flags, and so cannot set the one that closes descriptors on exec.
    descriptors = array.array("i")
    ancillary_bytes = socket.CMSG_SPACE(num_descriptors * descriptors.itemsize)
    data, ancillary, _, _ = connection.recvmsg(num_bytes, ancillary_bytes, flags | socket.MSG_CMSG_CLOEXEC)
    for level, kind, content in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            descriptors.frombytes(content[: len(content) - len(content) % descriptors.itemsize])
    return data, list(descriptors)
