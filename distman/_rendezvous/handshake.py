"""The handshake server of a job: a port where one rank says which job it serves and where the job's store is.

A TCPStore cannot tell that it talks to a foreign service, and waits for ever on one that keeps silent. So the ranks
probe the port first: one line of JSON each way, with a time limit. What answers something else, nothing,
or another job's name is passed by. A rank that failed on its way to the rendezvous leaves its record here.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import socket
import socketserver
import stat
import threading
import time
import weakref
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from distman._log import logger
from distman._process_state import puts_back
from distman._rendezvous.address import Endpoint
from distman.errors import RendezvousError

_MAX_LINE_BYTES = 1 << 20  # a failure with a long traceback fits; a foreign service cannot fill the memory
_PATIENCE = 3.0  # seconds: a foreign service may accept and never answer, a handshake server takes milliseconds
_QUIET = 10.0  # seconds before a word on a foreign service in the way, which may be about to end
_SHORTEST_PATIENCE = 0.2  # seconds, also where no time is left: a server on another host answers in milliseconds
_FIRST_PAUSE = 0.002  # seconds: ranks of one launch start within milliseconds of each other, and a start takes ten
_LONGEST_PAUSE = 0.5  # seconds: more would delay a job whose first rank starts late


class ForeignServiceError(Exception):
    """Something listens at the port, but it is not this job's handshake server."""


@dataclasses.dataclass(frozen=True)
class Identity:
    """What tells one job from all others: the same on its ranks, different in other jobs."""

    job: str
    user: str

    @classmethod
    def of(cls, job_id: str) -> Identity:
        """Return the identity of the job of this name under this user."""
        return cls(job=job_id, user=str(os.getuid()))


class HandshakeServer:
    """Answers probes for one job until it is closed.

    Args:
        listener: A listening socket; the server owns it from now on.
        identity: Who may enter.
        store_port: Port of the job's store on the same host; None where there is none to come.
        failure: A failure given to all who probe; later the first that a failed rank brings.
    """

    def __init__(
        self,
        listener: socket.socket,
        identity: Identity,
        *,
        store_port: int | None = None,
        failure: dict[str, Any] | None = None,
    ) -> None:
        self.port: int = listener.getsockname()[1]
        self.num_answered = 0
        self.failure = failure
        self.session = os.urandom(8).hex()
        self._identity = identity
        self._store_port = store_port
        self._server = _Server(listener, self)
        _servers.add(self)
        threading.Thread(target=self._server.serve_forever, name="distman-handshake", daemon=True).start()

    def close_in_child(self) -> None:
        """Close this process's copies of both servers' sockets after a fork: they must not outlive its parent.

        The store's own are C++'s: their numbers stay taken.
        """
        self._server.server_close()
        if self._store_port is not None:
            _release_sockets(self._store_port)

    def close(self) -> None:
        """Stop answering and free the port."""
        self._server.shutdown()
        self._server.server_close()

    def answer(self, visitor: dict[str, Any]) -> dict[str, Any]:
        """Return what a visitor is told; a foreign one learns only which job this is."""
        if (visitor.get("job"), visitor.get("user")) != (self._identity.job, self._identity.user):
            return dataclasses.asdict(self._identity)
        self.failure = self.failure or visitor.get("failure")
        self.num_answered += 1
        return {
            **dataclasses.asdict(self._identity),
            "session": self.session,
            "store_port": self._store_port,
            "failure": self.failure,
        }


_servers: weakref.WeakSet[HandshakeServer] = weakref.WeakSet()


def _release_sockets(port: int) -> None:
    """Let the file descriptors of all sockets at a local port stand for nothing."""
    nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for entry in Path("/proc/self/fd").iterdir():
        number = int(entry.name)
        with contextlib.suppress(OSError):
            if stat.S_ISSOCK(os.fstat(number).st_mode) and _local_port(number) == port:
                os.dup2(nothing, number, inheritable=False)
    os.close(nothing)


def _local_port(number: int) -> int | None:
    with socket.socket(fileno=os.dup(number)) as copy:
        is_internet = copy.family in (socket.AF_INET, socket.AF_INET6)
        return copy.getsockname()[1] if is_internet else None


@puts_back
def _close_all() -> None:
    for server in list(_servers):
        server.close()
    _servers.clear()


def _close_all_in_child() -> None:
    for server in list(_servers):
        server.close_in_child()
    _servers.clear()


os.register_at_fork(after_in_child=_close_all_in_child)


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, listener: socket.socket, server: HandshakeServer) -> None:
        super().__init__(("", 0), _Visit, bind_and_activate=False)
        self.socket.close()
        self.socket = listener
        self.server = server

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of visitors that leave or talk nonsense: they are no ranks of this job."""


class _Visit(socketserver.StreamRequestHandler):
    timeout = _PATIENCE
    server: _Server

    def handle(self) -> None:
        visitor = _parse(self.rfile.readline(_MAX_LINE_BYTES))
        self.wfile.write(_line(self.server.server.answer(visitor)))


def probe(
    address: str,
    port: int,
    identity: Identity,
    *,
    failure: dict[str, Any] | None = None,
    patience: float = _PATIENCE,
) -> dict[str, Any]:
    """Ask a handshake server, and return what it tells a member of the job.

    Args:
        address: Host of the server.
        port: Its port.
        identity: Who asks.
        failure: A failure record to leave there.
        patience: Seconds to wait for a connection, and again for an answer.

    Raises:
        ForeignServiceError: What listens there is not this job's handshake server.
        OSError: Nothing listens there, or it cannot be reached.
    """
    with socket.create_connection((address, port), timeout=patience) as connection:
        try:
            connection.sendall(_line({**dataclasses.asdict(identity), "failure": failure}))
            with contextlib.closing(connection.makefile("rb")) as reply:
                answer = _parse(reply.readline(_MAX_LINE_BYTES))
        except (OSError, ValueError) as error:
            raise ForeignServiceError(f"another program listens there ({error})") from error
    if (answer.get("job"), answer.get("user")) != (identity.job, identity.user):
        raise ForeignServiceError(f"job {answer.get('job')!r} of user {answer.get('user')!r} listens there")
    return answer


def find_server(
    point: Endpoint,
    timeout: float,
    *,
    failure: dict[str, Any] | None = None,
    left: Collection[str] = (),
) -> tuple[str, int, dict[str, Any]]:
    """Probe every address and port of the endpoint until the job's handshake server answers.

    Args:
        point: Where to look.
        timeout: Seconds to go on looking.
        failure: A failure record to leave there.
        left: Sessions that this process has taken part in before: their servers are about to close.

    Returns:
        The address and port that answered, and the answer.

    Raises:
        RendezvousError: None answered within ``timeout`` seconds.
    """
    identity = Identity.of(point.job_id)
    started = time.monotonic()
    deadline = started + timeout
    pause = _FIRST_PAUSE
    is_said = False
    while True:
        reasons, is_foreign = {}, False
        for address in point.addresses:
            for port in point.ports:
                try:
                    patience = min(max(deadline - time.monotonic(), _SHORTEST_PATIENCE), _PATIENCE)
                    answer = probe(address, port, identity, failure=failure, patience=patience)
                    if answer["session"] not in left:
                        return address, port, answer
                    reasons[f"{address}:{port}"] = "the store of an earlier start is still open"
                except (OSError, ForeignServiceError) as error:
                    reasons[f"{address}:{port}"] = explain(error)
                    is_foreign |= isinstance(error, ForeignServiceError)
        if is_foreign and not is_said and time.monotonic() - started > _QUIET:
            is_said = True
            logger.warning("waiting for %s at %s: %s", point.host, point.url, _listed(reasons))
        if time.monotonic() + pause > deadline:
            raise RendezvousError(_host_missing(point, timeout, reasons))
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)


def explain(error: Exception) -> str:
    """Return why something could not be reached, in words."""
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return text or type(error).__name__


def _host_missing(point: Endpoint, timeout: float, reasons: dict[str, str]) -> str:
    return (
        f"{point.host} must open the job's store at {point.url} within {timeout:g} s, got no answer from it "
        f"[{point.source}]. Tried {_listed(reasons)}. See whether {point.host} started, runs on {point.addresses[0]} "
        "and reached DistributedManager.initialize(); set rendezvous_timeout for slow starts."
    )


def _listed(reasons: Mapping[str, str]) -> str:
    return "; ".join(f"{place}: {reason}" for place, reason in reasons.items())


def _line(message: dict[str, Any]) -> bytes:
    return json.dumps(message).encode() + b"\n"


def _parse(line: bytes) -> dict[str, Any]:
    message = json.loads(line)
    if not isinstance(message, dict):
        raise ValueError("not a message of a handshake")
    return message
