"""Starts the process that serves a store, which outlives the rank that started it and ends with its last member."""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import marshal
import os
import select
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, BinaryIO

from distman._base.process_state import puts_back
from distman._store.server import UP
from distman._store.transport import BACKLOG

_PROGRAM = """
import sys
package = sys.modules["distman"] = type(sys)("distman")  # of which it needs nothing but the path
package.__path__ = [sys.argv[1]]
from distman._store.server import main
main()
"""
_OF_THIS_INTERPRETER = b"PYTHONHOME"  # where its library is, in installations that were moved
_MOST_ERROR_BYTES = 500  # of what it says last: the error of an interpreter, without the way there
_READ_BYTES = 1 << 16  # at a time: all that a pipe holds
_MILLISECONDS = 1000

_started: list[subprocess.Popen[bytes]] = []


class StoreStartError(Exception):
    """The process that should serve the store did not start."""


_NUM_STANDARD = 3
"""Descriptors that a new process gets anew: where the program has closed its own, other files have their numbers."""


class StoreProcess:
    """The process of a store, as seen by the one that started it."""

    def __init__(self, process: subprocess.Popen[bytes], word: BinaryIO) -> None:
        self.popen = process
        self._word = word

    def wait_until_up(self, timeout: float) -> None:
        """Wait until the process serves, which takes some ten milliseconds from its start."""
        with self._word as word, self.popen.stderr as errors:  # type: ignore[union-attr]  # it is a pipe
            is_up, said = _is_up(word.fileno(), errors.fileno(), time.monotonic() + timeout)
        if not is_up:
            shown = said.decode(errors="replace").strip() or f"nothing within {timeout:g} s"
            raise StoreStartError(f"starting the store's process failed: {sys.executable} said: {shown}")

    def end(self) -> None:
        """End it at once, with whatever it has started: nobody shall find it."""
        self._word.close()
        self.popen.stderr.close()  # type: ignore[union-attr]  # it is a pipe
        if self.popen.poll() is None:
            os.killpg(self.popen.pid, signal.SIGKILL)  # it leads a session of its own
            self.popen.wait()


def listen_on_this_host(name: str) -> socket.socket:
    """Return a socket that listens at a name which only this host knows, in the kernel and not in a folder."""
    # It reaches as far as 127.0.0.1 does, and the kernel says who is at the other end. A process of any user can take a
    # name first, and is known by that word.
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.bind(name)
        listener.listen(BACKLOG)
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
) -> StoreProcess:
    """Start the process that serves a store, and do not wait for it: it is dialled like any other."""
    # The process holds nothing of this one: no files, no terminal, no session. The secret goes through a pipe. The
    # listener belongs to the process from now on, and is closed here. The arguments are those of :class:`Server`.
    reap()
    settings = {
        "listener": listener.fileno(),
        "job": job.encode(),
        "secret": secret,
        "credential": credential,
        "opener": None if opener is None else (opener, os.getpid()),
        "entry_limit": entry_limit,
        "unreachable_after": unreachable_after,
    }
    with listener:
        process, word = _spawn(settings, secret)
    _started.append(process)
    with contextlib.suppress(BrokenPipeError), process.stdin as pipe:  # type: ignore[union-attr]
        pipe.write(marshal.dumps(settings))  # if it has ended, its last words say why
    return StoreProcess(process, word)


@atexit.register
def _let_go() -> None:
    """Leave the processes to the system at the end of this one; Python would warn that nobody has waited for them."""
    for process in _started:
        process.returncode = process.returncode or 0


@puts_back
def reap() -> None:
    """Take note of the processes that have ended, which the system keeps until then; the others go on."""
    _started[:] = [process for process in _started if process.poll() is None]


def _spawn(settings: dict[str, Any], secret: bytes | None) -> tuple[subprocess.Popen[bytes], BinaryIO]:
    """Return the process, and the end of the pipe where it says that it is up; the settings name what it gets."""
    if not sys.executable:
        raise StoreStartError("starting the store's process failed: this interpreter has no program of its own.")
    try:
        number, up = os.pipe()
    except OSError as error:
        raise StoreStartError(f"starting the store's process failed: {error.strerror}.") from error
    word, passed = os.fdopen(number, "rb"), [up]
    try:
        for name, descriptor in (("listener", settings["listener"]), ("up", up)):
            settings[name] = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, _NUM_STANDARD)
            passed.append(settings[name])
        return subprocess.Popen(
            [sys.executable, *_options(), "-c", _PROGRAM, str(Path(__file__).parent.parent)],
            env=_environment(secret),
            cwd="/",  # a folder that the process were in could not be unmounted
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            pass_fds=[settings["listener"], settings["up"]],
            start_new_session=True,
        ), word
    except OSError as error:
        word.close()
        raise StoreStartError(f"starting the store's process failed: {sys.executable}: {error.strerror}.") from error
    finally:
        for descriptor in passed:
            os.close(descriptor)


def _is_up(word: int, errors: int, deadline: float) -> tuple[bool, bytes]:
    """Return whether a process says in time that it is up, and the end of what it, or its loader, says beside that."""
    heard, said = b"", b""
    poller = select.poll()
    poller.register(word, select.POLLIN)
    poller.register(errors, select.POLLIN)
    while heard != UP and (ready := poller.poll(max(0.0, deadline - time.monotonic()) * _MILLISECONDS)):
        numbers = [number for number, _ in ready]
        if errors in numbers:  # first: the word is closed when all of it is here
            piece = os.read(errors, _READ_BYTES)
            said = (said + piece)[-_MOST_ERROR_BYTES:]
            if not piece:
                poller.unregister(errors)
        elif piece := os.read(word, len(UP)):
            heard += piece
        else:
            return False, said or b"it has ended without a word"
    return heard == UP, said


def _options() -> list[str]:
    """Return the options of an interpreter that loads nothing but what it is told to, from the same compiled files."""
    cache = ["-X", f"pycache_prefix={sys.pycache_prefix}"] if sys.pycache_prefix else []
    alone = ["-s", "-P"] if _needs_home() else ["-I"]  # which would leave that out too
    return [*alone, "-S", *cache, *(["-B"] if sys.dont_write_bytecode else [])]


def _environment(secret: bytes | None) -> dict[bytes, bytes]:
    """Return the variables of the process: no secret, and none that tells an interpreter what to load."""
    return {
        name: value
        for name, value in os.environb.items()
        if not (secret and secret in value)
        and (not name.startswith(b"PYTHON") or (name == _OF_THIS_INTERPRETER and _needs_home()))
    }


def _needs_home() -> bool:
    return _OF_THIS_INTERPRETER in os.environb and not sys.flags.ignore_environment
