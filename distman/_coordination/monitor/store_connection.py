"""How long the connections to the store may stay without any answer from its host."""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING

import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch.distributed import Store


_MAPPED = "::ffff:"  # an IPv4 address that is seen through an IPv6 socket
_MILLISECONDS = 1000


def limit_unanswered(store: Store, seconds: float) -> None:
    """Let all connections of this process to the store break when its host does not acknowledge what was sent.

    The system acknowledges for a process that is stopped or busy, so that a host which does not has lost power or its
    network. torch sets no limit, and hands out no socket. Only Linux has the option; elsewhere nothing happens.

    Args:
        store: The store, or a part of it; only TCPStore has connections.
        seconds: How long the host may not answer.
    """
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    if not isinstance(store, dist.TCPStore) or not hasattr(socket, "TCP_USER_TIMEOUT"):
        return
    with contextlib.suppress(OSError):  # the name is known no more; then the silence decides
        addresses = {str(entry[4][0]) for entry in socket.getaddrinfo(store.host, store.port)}
        for connection in _connections():
            peer = connection.getpeername()
            if peer[1] == store.port and peer[0].removeprefix(_MAPPED) in addresses:
                option = socket.TCP_USER_TIMEOUT
                connection.setsockopt(socket.IPPROTO_TCP, option, int(seconds * _MILLISECONDS))


def _connections() -> Iterator[socket.socket]:
    """Yield this process's connected sockets of the internet, each as another descriptor of it."""
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile, or not connected
            if not entry.readlink().name.startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(entry.name))) as connection:
                if connection.family in (socket.AF_INET, socket.AF_INET6):
                    connection.getpeername()
                    yield connection
