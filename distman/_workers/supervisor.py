"""The process between the program and the fork server, which ends what either of them has left running.

A process whose parent has ended becomes a child of its nearest ancestor that asked for such orphans. Server and
supervisor both ask, and each kills its descendants when the other, or the program, is gone: what a worker started can
survive only if both are killed by force at once. The workers themselves end with the server in any case.
"""

from __future__ import annotations

import importlib
import os
import signal
from collections.abc import Sequence

from distman._base import timing
from distman._base.process_tree import adopt_orphans, end_descendants
from distman._workers.fork_server import Entry, serve_requests
from distman._workers.output import whole_process


def main(control: int, program: int, entry: str, options: Sequence[object]) -> None:
    """Start the fork server, and wait until it has ended or the program is gone."""
    # The caller has one thread, and ends when this returns. The entry is imported here, since a fork ends the threads
    # that an import may start.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    module, _, name = entry.partition(":")
    prepare: Entry = getattr(importlib.import_module(module), name)
    adopt_orphans()
    supervisor = os.getpid()
    server = os.fork()
    if server == 0:
        _become_server(control, supervisor, prepare, options)
    os.close(control)
    while (is_running := _is_running(server)) and os.getppid() == program:
        signal.sigtimedwait({signal.SIGCHLD}, timing.WORKER_POLL)
    if is_running:  # the server too notices that the program is gone, and removes what it has made
        signal.sigtimedwait({signal.SIGCHLD}, timing.SERVER_END)
    end_descendants()


def _become_server(control: int, supervisor: int, prepare: Entry, options: Sequence[object]) -> None:
    with whole_process():
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
        adopt_orphans()
        with prepare(*options) as work:
            try:
                serve_requests(control, supervisor, work)
            finally:
                end_descendants()


def _is_running(server: int) -> bool:
    """Wait for all children that have ended; False if the server is one of them."""
    while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG)) is not None:
        if ended.si_pid == server:
            return False
    return True
