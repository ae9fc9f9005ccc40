"""A rank that fails on its way to the rendezvous tells the ranks that wait there."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from distman._base import timing
from distman._base.process_tree import ancestors, command_of, environ_of
from distman._coordination import protocol
from distman._coordination.failure import hook
from distman._coordination.failure.job_abort import abort_job_after, ending_of
from distman._coordination.failure.record import FailureRecord
from distman._coordination.failure.starter import write_error_file
from distman._coordination.messages import encode
from distman._coordination.timeouts import begin
from distman._job.meeting.munge import DaemonError
from distman._job.meeting.places import Endpoint, find_meeting
from distman._job.meeting.secret import find_protection
from distman._store.client import Client
from distman._store.handshake import VISITOR
from distman.environments import LAUNCHERS, LaunchEnvironment, OnFailure, detect
from distman.errors import DistmanError


def tell_of(error: BaseException) -> Callable[[], object]:
    """Tell the other ranks that this process ends by an error, before its job is up, and return what is left to do."""
    if is_started_by_rank(os.environ):
        return lambda: None
    environment = detect(os.environ).environment
    abort_job_after(error, environment)
    record = FailureRecord.of(error, environment.rank)  # which may be that of a job that this rank has run
    own = dataclasses.replace(record, rank=environment.rank)
    # A user who pressed Ctrl-C wants it to end.
    patience = 0.0 if isinstance(error, KeyboardInterrupt) else timing.EARLY_FAILURE

    def tell() -> None:
        ending = ending_of(environment)
        if not tell_waiting_ranks(own, environment, os.environ, patience) and ending is not None:
            hook.end_job_at_exit(ending)

    wait = begin(tell)  # while the error is printed
    write_error_file(environment.rank, record, None)
    return functools.partial(wait, None)  # it has a limit of its own


def is_started_by_rank(environ: Mapping[str, str]) -> bool:
    """Return whether a rank started this process, which inherits its variables, for some work of its own."""
    # Such a process does not speak for the rank. A parent that the launcher told the same place is that rank if it runs
    # Python, unless it was told to run this very program, as a wrapper such as ``conda run python train.py`` is.
    place = _place(environ)
    program = next((word for word in sys.orig_argv[1:] if not word.startswith("-")), None)
    for pid, _ in ancestors():
        if _place(environ_of(pid)) != place:
            return False
        command = command_of(pid) or [""]
        words = itertools.dropwhile(lambda word: word.startswith("-"), command[1:])
        if Path(command[0]).name.startswith(("python", "pypy")) and program not in list(words)[1:]:
            return True
    return False


def _place(environ: Mapping[str, str]) -> tuple[str, int, int] | None:
    try:
        environment = detect(environ).environment
    except (DistmanError, ValueError):
        return None
    return environment.launcher, environment.rank, environment.world_size


def tell_waiting_ranks(
    record: FailureRecord, environment: LaunchEnvironment, environ: Mapping[str, str], patience: float
) -> bool:
    """Tell the ranks of a failure of this one, and return whether they would listen to it."""
    # It is left with the store of the job, or that is opened for ``patience`` seconds to tell those to come. Nothing
    # is done where the other ranks end with this one, nor where no place is known. It needs no torch, so it also serves
    # a rank that failed to import it. The others do not listen where it cannot prove that it is a rank.
    launcher = LAUNCHERS[environment.launcher]
    has_agents_elsewhere = launcher.agent is not None and not environment.is_on_one_node  # which go on
    if environment.world_size == 1 or (launcher.on_failure is not OnFailure.WAITS and not has_agents_elsewhere):
        return True
    try:
        protection = find_protection(environment, environ)
    except DistmanError:
        return False
    try:
        meeting = find_meeting(environment, environ, protection)
        if isinstance(meeting, Endpoint):
            _leave_at(meeting, record, environment, patience)
    except DaemonError:
        return False
    except (ImportError, DistmanError, OSError):
        pass  # nobody waits, or nobody can be reached, and the traceback is printed already
    return True


def _leave_at(point: Endpoint, record: FailureRecord, environment: LaunchEnvironment, patience: float) -> None:
    """Leave a failure with the store; the rank that opens it stays until all have been told."""
    until = time.monotonic() + patience
    is_own = False
    if not point.is_host:
        client = point.find_client(environment.rank, patience, role=VISITOR)
    elif patience > 0:
        client, is_own = point.start_or_enter(environment.rank, patience)
    else:
        return
    with contextlib.closing(client):
        _leave(client, encode(record).encode())
        if not is_own:
            client.add(_key(protocol.TURNED_AWAY), 1)
            return
        told = _key(protocol.TURNED_AWAY), _key(protocol.VERDICT_HEARD)
        while sum(client.add(key, 0) for key in told) < environment.world_size - 1 and time.monotonic() < until:
            time.sleep(timing.EARLY_FAILURE_PAUSE)


def _leave(client: Client, failure: bytes) -> None:
    client.compare_set(_key(protocol.EARLY_FAILURE), b"", failure)
    client.set(_key(protocol.MEMBERSHIP_EVENT), b"failure")


def _key(name: str) -> bytes:
    return protocol.in_job(name).encode()
