"""What both ends of a store's connections ask of their sockets."""

from __future__ import annotations

import _socket
import errno
from posix import O_RDONLY, close, geteuid, open, read
from struct import Struct

TYPE_CHECKING = False  # typing takes longer to load than the process that serves a store takes to start
if TYPE_CHECKING:
    from typing import Any

    Address = str | tuple[str, int]

BACKLOG = 4096  # connections: all ranks of a large job come at once
FEW_BYTES = 8192  # read at once; a larger buffer costs a call of malloc that asks the kernel for memory
MANY_BYTES = 1 << 20  # read at once of a long message: the buffer is made before anything has come
TIME = Struct("ll")  # seconds and microseconds, as the system takes limits of a socket

_CREDENTIALS = Struct("iII")  # process, user and group
_OVERFLOW_UID = "/proc/sys/kernel/overflowuid"
_USUAL_OVERFLOW_UID = 65534  # where the host does not show its own
_IPV4_SEEN_BY_IPV6 = "::ffff:"
_DIGITS = 32  # more than the number of any user has
_MILLISECONDS = 1000
_PROBES = 3  # of a silent connection, before it is given up
_MOST_BETWEEN_PROBES = 32_767  # seconds; Linux takes no more
_LONGEST_SILENCE = (1 << 31) - 1  # milliseconds; Linux takes no more


def own_place(connected: _socket.socket) -> bytes:
    """Return what a handshake calls the place to which this end of a connection belongs."""
    return _place_of(connected.family, connected.getsockname())


def other_place(connected: _socket.socket) -> bytes:
    """Return what a handshake calls the place that was dialled."""
    try:
        return _place_of(connected.family, connected.getpeername())
    except OSError as error:
        if error.errno != errno.ENOTCONN:
            raise
        raise ConnectionResetError(errno.ECONNRESET, "it has ended the connection") from error  # as a later call says


def _place_of(family: int, name: Any) -> bytes:
    """Return a name of this host's own as it is; else port and version of IP, whatever the host is called."""
    # One port may belong to two programs, of one user for IPv4 and of another one for IPv6.
    if family == _socket.AF_UNIX:
        return b"unix " + bytes(name)
    version = 4 if family == _socket.AF_INET or name[0].startswith(_IPV4_SEEN_BY_IPV6) else 6
    return b"tcp%d %d" % (version, name[1])


def is_nobody() -> bool:
    """Return whether this process's user cannot be told from others by the kernel's word."""
    # A namespace shows one number for all users whom it does not know: it is equal to nobody, not even to itself.
    try:
        shown = open(_OVERFLOW_UID, O_RDONLY)
    except OSError:
        return geteuid() == _USUAL_OVERFLOW_UID
    try:
        return geteuid() == int(read(shown, _DIGITS))
    finally:
        close(shown)


def is_of_this_user(connection: _socket.socket) -> bool:
    """Return whether the kernel says that a process of this user is at the other end of a Unix socket."""
    # It names the processes that listened and connected, whichever have the sockets since.
    packed = connection.getsockopt(_socket.SOL_SOCKET, _socket.SO_PEERCRED, _CREDENTIALS.size)
    uid: int = _CREDENTIALS.unpack(packed)[1]
    return uid == geteuid() and not is_nobody()


def prepare(connection: _socket.socket, unreachable_after: float) -> None:
    """Let a connection break when the other host does not acknowledge anything for so many seconds."""
    # The system acknowledges for a process that is stopped or busy, so that a host which does not has lost power or its
    # network. On one host there is nothing to lose.
    if connection.family == _socket.AF_UNIX:
        return
    connection.setsockopt(_socket.IPPROTO_TCP, _socket.TCP_NODELAY, 1)
    connection.setsockopt(_socket.SOL_SOCKET, _socket.SO_KEEPALIVE, 1)
    pause = max(1, int(min(unreachable_after / _PROBES, _MOST_BETWEEN_PROBES)))
    silence = int(min(unreachable_after * _MILLISECONDS, _LONGEST_SILENCE))
    connection.setsockopt(_socket.IPPROTO_TCP, _socket.TCP_KEEPIDLE, pause)
    connection.setsockopt(_socket.IPPROTO_TCP, _socket.TCP_KEEPINTVL, pause)
    connection.setsockopt(_socket.IPPROTO_TCP, _socket.TCP_USER_TIMEOUT, silence)
