"""A table in this process, asked as a :class:`Client` is asked."""

import threading
import types

from distman._store import frames
from distman._store.client import Client, limit_of
from distman._store.connection import StoreTimeoutError, value_of
from distman._store.operations import Operations
from distman._store.table import Table


class Memory(Client):
    """A store for the threads of one process, of whose end nobody hears."""

    session = ""
    job_key = b""
    door = types.SimpleNamespace(unreachable_after=0.0, secret=None)

    def __init__(self):  # it dials nobody
        self._table = Table()
        self._operations = Operations(self._table, shut=self.close)
        self.ranks = self._operations.members
        self._lock = threading.RLock()  # a signal's handler may ask in the middle of a call

    def again(self, _role, _patience=0.0):
        """Return access for another thread: the same."""
        return self

    def close(self):
        """Do nothing: there is no connection."""

    def _call(self, operation, *fields):
        caller = self._ask(operation, *fields)
        return b"" if operation in frames.UNANSWERED else caller.value()

    def _wait_for(self, operation, seconds, *fields):
        caller = self._ask(operation, limit_of(seconds), *fields)
        try:
            caller.is_answered.wait(min(seconds, threading.TIMEOUT_MAX))
        finally:
            with self._lock:
                if caller.wait is not None:
                    self._table.cancel(caller.wait)
        return caller.value()

    def _ask(self, operation, *fields):
        caller = _Caller()
        with self._lock:
            self._operations.carry_out(caller, 0, operation, fields)
        return caller


class _Caller:
    """A thread that asks once."""

    def __init__(self):
        self.wait = None
        self.will = None
        self.is_answered = threading.Event()
        self._reply = b""

    def send(self, *pieces):
        self._reply = b"".join(pieces)
        self.is_answered.set()

    def value(self):
        """Return the value of the reply; raise StoreTimeoutError where there is none yet."""
        found = frames.next_reply(self._reply)
        if found is None:
            raise StoreTimeoutError
        _, status, value, _ = found
        return value_of(status, value)
