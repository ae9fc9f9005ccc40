"""Starts the process that serves a store, which outlives whoever started it and ends with its last member."""

from __future__ import annotations

import atexit
import contextlib
import marshal
import os
import select
import socket
import subprocess
import sys
import time
from pathlib import Path

from distman._process_state import puts_back
from distman._store.server import UP

_PROGRAM = """
import sys
package = sys.modules["distman"] = type(sys)("distman")  # of which it needs nothing but the path
package.__path__ = [sys.argv[1]]
from distman._store.server import main
main()
"""
_BACKLOG = 4096  # connections: all ranks of a large job come at once
_MOST_ERROR_BYTES = 500
_MILLISECONDS = 1000

_started: list[subprocess.Popen[bytes]] = []


class StoreStartError(Exception):
    """The process that should serve the store did not start."""


class StoreProcess:
    """The process of a store, as seen by the one that started it.

    Args:
        process: The process.
    """

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def wait_until_up(self, timeout: float) -> None:
        """Wait until the process serves, which takes some ten milliseconds from its start.

        Blocking.

        Args:
            timeout: Seconds to wait.

        Raises:
            StoreStartError: It ended, or is not there in time; then it ends as soon as it is.
        """
        with self._process.stderr as pipe:  # type: ignore[union-attr]
            words = _read_words(pipe.fileno(), time.monotonic() + timeout)
        if words != UP:
            shown = words[-_MOST_ERROR_BYTES:].decode(errors="replace").strip() or f"nothing within {timeout:g} s"
            raise StoreStartError(f"starting the store's process failed: {sys.executable} said: {shown}")

    def wait(self, timeout: float) -> int:
        """Wait for its end, and return its exit code.

        Blocking.

        Raises:
            subprocess.TimeoutExpired: It goes on.
        """
        return self._process.wait(timeout)


def listen_on_this_host(name: str) -> socket.socket:
    """Return a socket that listens at a name which only this host knows, in the kernel and not in a folder.

    It reaches as far as 127.0.0.1 does, and the kernel says who is at the other end. A process of any user can take a
    name first, and is known by that word.

    Raises:
        OSError: The name is taken.
    """
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.bind(name)
        listener.listen(_BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


def start_store(
    listener: socket.socket,
    *,
    job: str,
    secret: bytes | None = None,
    credential: bytes = b"",
    opener: int | None = None,
    entry_limit: float,
    unreachable_after: float,
    failure: bytes = b"",
) -> StoreProcess:
    """Start the process that serves a store, and do not wait for it: it is dialled like any other.

    The process holds nothing of this one: no files, no terminal, no session. The secret goes through a pipe.

    Args:
        listener: A listening socket, which belongs to the process from now on, and is closed here.
        job: Name of the job.
        secret: Its secret; None where there is none.
        credential: What it sends to all who come, for them to find out the secret; empty for nothing.
        opener: The rank that starts it and will dial it: until then it does not end, though others may have come and
            gone. None waits for nobody.
        entry_limit: Seconds within which a first member must come.
        unreachable_after: Seconds after which a host is given up that acknowledges nothing.
        failure: What all who come are told, as if a rank that failed had left it; empty for nothing.

    Raises:
        StoreStartError: It did not start.
    """
    reap()
    settings = {
        "listener": listener.fileno(),
        "job": job.encode(),
        "secret": secret,
        "credential": credential,
        "opener": None if opener is None else (opener, os.getpid()),
        "entry_limit": entry_limit,
        "failure": failure,
        "unreachable_after": unreachable_after,
    }
    with listener:
        process = _spawn(listener.fileno(), secret)
    _started.append(process)
    with contextlib.suppress(BrokenPipeError), process.stdin as pipe:  # type: ignore[union-attr]
        pipe.write(marshal.dumps(settings))  # if it has ended, its last words say why
    return StoreProcess(process)


@atexit.register
def _let_go() -> None:
    """Leave the processes to the system at the end of this one; Python would warn that nobody has waited for them."""
    for process in _started:
        process.returncode = process.returncode or 0


@puts_back
def reap() -> None:
    """Take note of the processes that have ended, which the system keeps until then; the others go on."""
    _started[:] = [process for process in _started if process.poll() is None]


def _spawn(listener: int, secret: bytes | None) -> subprocess.Popen[bytes]:
    if not sys.executable:
        raise StoreStartError("starting the store's process failed: this interpreter has no program of its own.")
    environ = {name: value for name, value in os.environb.items() if not (secret and secret in value)}
    try:
        return subprocess.Popen(
            [sys.executable, *_options(), "-c", _PROGRAM, str(Path(__file__).parent.parent)],
            env=environ,
            cwd="/",  # a folder that the process were in could not be unmounted
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            pass_fds=[listener],
            start_new_session=True,
        )
    except OSError as error:
        raise StoreStartError(f"starting the store's process failed: {sys.executable}: {error.strerror}.") from error


def _read_words(pipe: int, deadline: float) -> bytes:
    """Return what a process says at its start, up to the word that it is up, or its end."""
    words = b""
    poller = select.poll()
    poller.register(pipe, select.POLLIN)
    while words != UP and poller.poll(max(0.0, deadline - time.monotonic()) * _MILLISECONDS):
        piece = os.read(pipe, _MOST_ERROR_BYTES)
        if not piece:
            return words or b"it has ended without a word"
        words += piece
    return words


def _options() -> list[str]:
    """Return the options of an interpreter that loads nothing but what it is told to, from the same compiled files."""
    cache = ["-X", f"pycache_prefix={sys.pycache_prefix}"] if sys.pycache_prefix else []
    return ["-I", "-S", *cache, *(["-B"] if sys.dont_write_bytecode else [])]
