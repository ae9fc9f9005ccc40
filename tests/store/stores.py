"""Stores for tests: each a process of its own, at a name of this host's own or at a port."""

import contextlib
import os
import threading

from distman._job.meeting.address import bind_listener
from distman._store.client import Client
from distman._store.dialing import Door
from distman._store.process import listen_on_this_host, start_store
from distman._store.server import Server
from distman._store.torch_store import TorchStore

from .memory import Memory

PATIENCE = 30.0  # seconds for what takes milliseconds
SECRET = b"a secret that only the tests know"
JOB = "job-1"
KINDS = ("unix", "tcp")


def listen(kind):
    """A listening socket, and where it is dialled."""
    if kind == "tcp":
        listener = bind_listener("127.0.0.1", 0)
        return listener, ("127.0.0.1", listener.getsockname()[1])
    address = f"\0distman-test/{os.urandom(8).hex()}"
    return listen_on_this_host(address), address


def door(address, secret=SECRET, job=JOB):
    return Door(address, job, secret, unreachable_after=PATIENCE, patience=PATIENCE)


def leave_will(client, rank):
    """Let the store tell of the end of a client, as a rank does."""
    client.register_will(
        b"failure", b"news", unless=b"left/%d" % rank, if_closed=b"%d died" % rank, if_unreachable=b"%d is lost" % rank
    )


class MemoryStore(TorchStore):
    """A store in memory, which the threads of a test share."""

    def __init__(self):
        super().__init__(Memory())

    @property
    def members(self):
        """The ranks that are taken for connected; a test adds them."""
        return self.client.ranks


class OpenStore:
    """A store, and whoever has been let in."""

    def __init__(self, kind, *, secret=SECRET, entry_limit=PATIENCE, opener=None):
        listener, self.address = listen(kind)
        self.door = door(self.address, secret)
        self.process = start_store(
            listener,
            job=JOB,
            secret=secret,
            opener=opener,
            entry_limit=entry_limit,
            unreachable_after=PATIENCE,
        )
        self.process.wait_until_up(PATIENCE)
        self.is_over = False
        self._clients = []

    def client(self, *args):
        self._clients.append(Client(self.door, *args))
        return self._clients[-1]

    def exit_code(self):
        """How it ends; it has to do so by itself."""
        self.is_over = True
        return self.process.popen.wait(PATIENCE)

    def close(self):
        for client in self._clients:
            client.close()


@contextlib.contextmanager
def open_store(kind, **settings):
    """A store until the end of a block, and its end with its last member."""
    store = OpenStore(kind, **settings)
    try:
        yield store
        if not store.is_over:
            store.client()  # the last member, if the test had none
            store.close()
            assert store.exit_code() == 0
    finally:
        store.close()
        if not store.is_over:
            os.kill(store.process.popen.pid, 9)
            store.process.popen.wait(PATIENCE)


@contextlib.contextmanager
def served_here(kind="unix", *, secret=SECRET, most_descriptors=4096):
    """A store that a thread of this process serves until the test's last member leaves; its limits can be changed."""
    listener, address = listen(kind)
    server = Server(
        listener,
        job=JOB.encode(),
        secret=secret,
        credential=b"",
        opener=None,
        entry_limit=PATIENCE,
        unreachable_after=PATIENCE,
        most_descriptors=most_descriptors,
    )
    thread = threading.Thread(target=server.serve, daemon=True)
    thread.start()
    try:
        yield door(address, secret)
    finally:
        thread.join(PATIENCE)
        listener.close()
        assert not thread.is_alive()
