"""One connection to the store of a job, for one call at a time; no torch."""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import resource
import socket
import threading
import traceback
import weakref

from distman._base import timing
from distman._base.process_state import puts_back
from distman._base.text import printable
from distman._store import frames
from distman._store.frames import MalformedError
from distman._store.handshake import Answer
from distman._store.transport import FEW_BYTES, MANY_BYTES, TIME

_NUM_HIGHEST = 32  # descriptors for connections to the store: a process has a few
_MOST_DESCRIPTORS = 1 << 16  # more than collectives need; the system keeps a table up to the highest one, 8 bytes each
_MOST_NUMBER = (1 << 32) - 1  # of a request: it travels in 32 bits, and begins again
_MOST_REASON_BYTES = 500  # that are shown of what the store says: a sentence or two
_HERE = __name__.rpartition(".")[0] + "."


class StoreLostError(ConnectionError):
    """The store does not answer any more, and never will."""


class StoreSilentError(StoreLostError):
    """The store is there, and has not answered for longer than this process waits for it."""


class StoreTimeoutError(TimeoutError):
    """What was waited for was not there in time."""


class GaveUpError(Exception):
    """A wait was ended by the key that ends it."""

    def __init__(self, value: bytes) -> None:
        super().__init__("the wait was given up")
        self.value = value


class InvalidRequestError(ValueError):
    """The store has refused a request."""


def value_of(status: int, value: bytes) -> bytes:
    if status == frames.OK:
        return value
    if status == frames.TIMED_OUT:
        raise StoreTimeoutError
    if status == frames.GIVEN_UP:
        raise GaveUpError(value)
    raise InvalidRequestError(_shown(value))


class Connection:
    """A connection whose other end has proved that it is the store of the job."""

    # An error that is raised in the middle of a call, by a signal say, harms no later call. It comes between two steps
    # of the interpreter: so what is sent or received is noted within one step, by ``extend`` and ``map``. A reply that
    # nobody waited for is known by its number.
    #
    # A signal ends a call of the system only where the thread that waits receives it, and receives it in that call, not
    # just before. So a wait looks up once in a while, for the handler of a signal to run.

    def __init__(self, connected: socket.socket, answer: Answer) -> None:
        self.answer = answer
        self.patience = math.inf  # seconds for a reply, of those in which this process runs
        self.has_unanswered = False  # whether something was sent since the last reply that needs none
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, TIME.pack(timing.SOCKET_DEAF, 0))
        self._socket = connected
        self._lock = threading.Lock()
        self._number = 0
        self._sending: tuple[bytes, list[int]] | None = None
        self._pieces: list[bytes] = []
        self._loss = ""
        self._is_closed = False
        _connections.add(self)

    def call(self, operation: int, *fields: bytes) -> bytes:
        """Return the value of the reply to a request, empty if it has no reply; raise one of the errors above."""
        return value_of(*self._take_turn(operation, fields))

    def raise_if_lost(self) -> None:
        """Refuse to be used when the connection was lost or closed, or belongs to the process that forked this one."""
        if self._loss:
            raise StoreLostError(self._loss)

    def close(self) -> None:
        """Close the connection; a call in another thread, or one that a signal has interrupted, ends with an error."""
        self._loss = self._loss or "this process has closed its connection to the job's store"
        self._is_closed = True
        with contextlib.suppress(OSError):  # the other side was faster, or it is closed already
            self._socket.shutdown(socket.SHUT_RDWR)
        self._close_if_idle()

    def _take_turn(self, operation: int, fields: tuple[bytes, ...]) -> tuple[int, bytes]:
        """Keep other threads out during an exchange, and close at its end what was to be closed meanwhile."""
        # A close must not wait for that: its caller may be the handler of a signal, in the interrupted thread.
        is_unanswered = operation in frames.UNANSWERED
        try:
            with self._lock:
                self.has_unanswered = self.has_unanswered or is_unanswered
                reply = self._exchange(operation, fields)
                self.has_unanswered = is_unanswered
                return reply
        finally:
            if self._is_closed:
                self._close_if_idle()

    def _close_if_idle(self) -> None:
        if self._lock.acquire(blocking=False):
            try:
                self._socket.close()
            finally:
                self._lock.release()

    def _exchange(self, operation: int, fields: tuple[bytes, ...]) -> tuple[int, bytes]:
        self.raise_if_lost()
        try:
            self._send(operation, fields)
            return (frames.OK, b"") if operation in frames.UNANSWERED else self._wait_for_reply()
        except MalformedError as error:
            raise self._gone(str(error)) from error
        except OSError as error:
            if isinstance(error, StoreLostError) or is_of_a_handler(error):
                raise
            self._hear_the_end()
            raise self._gone(str(error.strerror)) from error

    def _hear_the_end(self) -> None:
        """Note what the store has said before it ended the connection: that it has refused an earlier message, say."""
        with contextlib.suppress(OSError, MalformedError):
            self._socket.settimeout(0)
            while True:
                self._receive()

    def _gone(self, reason: str) -> StoreLostError:
        return self._lost(f"is gone: {reason}. See what ended it, or the connection to its host")

    def _lost(self, what: str) -> StoreLostError:
        self._loss = self._loss or f"the process that serves the job's store (pid {self.answer.pid}) {what}."
        return StoreLostError(self._loss)

    def _send(self, operation: int, fields: tuple[bytes, ...]) -> None:
        if self._sending is not None:
            self._finish_sending(*self._sending)  # of a call that was interrupted
        self._number = self._number % _MOST_NUMBER + 1
        message = frames.request(self._number, operation, fields)
        num_sent: list[int] = []
        self._sending = (message, num_sent)
        num_sent.extend(map(self._socket.send, (message,)))
        if num_sent[0] < len(message):
            self._finish_sending(message, num_sent)
        self._sending = None

    def _finish_sending(self, message: bytes, num_sent: list[int]) -> None:
        while rest := memoryview(message)[sum(num_sent) :]:
            num_sent.extend(map(self._socket.send, (rest,)))

    def _wait_for_reply(self) -> tuple[int, bytes]:
        seconds = 0  # by its own looks, not by the clock: when the whole job was suspended, nobody is late
        while seconds < self.patience:
            try:
                return self._receive()
            except BlockingIOError as error:
                if is_of_a_handler(error):
                    raise
                seconds += timing.SOCKET_DEAF
        raise StoreSilentError(str(self._lost(f"has not answered for {seconds} s")))

    def _receive(self) -> tuple[int, bytes]:
        """Return status and value of the reply to the last request."""
        while True:
            number, status, value = self._next_reply()
            if status == frames.MALFORMED:
                what = f"has refused a message, {_shown(value)}. See that all hosts have one release of distman"
                raise self._lost(what)
            if number == self._number:
                return status, value

    def _next_reply(self) -> tuple[int, int, bytes]:
        """Return number, status and value of the next reply to any request."""
        missing = 0 if self._pieces else 1
        while True:
            if missing:
                self._read(missing)
            received = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
            found = frames.next_reply(received)
            if found is not None:
                number, status, value, end = found
                self._pieces = [received[end:]] if end < len(received) else []
                return number, status, value
            missing = frames.num_missing(received)

    def _read(self, missing: int) -> None:
        while missing > 0:
            self._pieces.extend(map(self._socket.recv, (min(max(missing, FEW_BYTES), MANY_BYTES),)))
            if not self._pieces[-1]:
                raise ConnectionError(0, "it has closed the connection")
            missing -= len(self._pieces[-1])


def is_of_a_handler(error: BaseException) -> bool:
    """Return whether the handler of a signal has raised an error in the middle of this folder's code."""
    # It may run inside of any call, that of a socket for instance, and raise whatever it likes: only the functions
    # tell, through which the error has come here.
    modules = {str(frame.f_globals.get("__name__")) for frame, _ in traceback.walk_tb(error.__traceback__)}
    return not all(module == socket.__name__ or module.startswith(_HERE) for module in modules)


def _shown(reason: bytes) -> str:
    return printable(reason[:_MOST_REASON_BYTES].decode(errors="replace"))


_connections: weakref.WeakSet[Connection] = weakref.WeakSet()
_dialled: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def new_socket(family: int) -> socket.socket:
    """Return a socket for a connection, which a forked child closes even if the store has yet to be reached."""
    created = _moved_up(socket.socket(family))
    _dialled.add(created)
    return created


def _moved_up(created: socket.socket) -> socket.socket:
    """Return a socket with one of the highest descriptors that this process may have; the same where none is free."""
    # Of a process that dies, Linux closes the highest ones first: so the store knows of a death before another
    # connection breaks, and a rank that leaves because of that finds it there.
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MOST_DESCRIPTORS if soft == resource.RLIM_INFINITY else min(soft, _MOST_DESCRIPTORS)
    try:
        number = fcntl.fcntl(created.fileno(), fcntl.F_DUPFD_CLOEXEC, max(0, most - _NUM_HIGHEST))
    except OSError:
        return created
    created.close()
    return socket.socket(fileno=number)


@puts_back
def _close_all() -> None:
    for connection in list(_connections):
        connection.close()
    _connections.clear()
    _dialled.clear()


def _close_all_in_child() -> None:
    loss = f"process {os.getppid()} is connected to the job's store, and this is a child that it forked"
    for connection in list(_connections):
        connection._loss, connection._lock = loss, threading.Lock()  # some thread of the parent may have the other one
    _connections.clear()
    for dialled in list(_dialled):
        dialled.close()
    _dialled.clear()


os.register_at_fork(after_in_child=_close_all_in_child)
