"""A rank that fails on its way to the rendezvous tells the ranks that wait there."""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Mapping
from typing import Any

from distman._rendezvous.address import Endpoint, find_endpoint
from distman._rendezvous.ancestry import ancestors
from distman._rendezvous.handshake import HandshakeServer, Identity, find_server
from distman._rendezvous.sockets import bind_listener
from distman.environments import LAUNCHERS, OnFailure, detect
from distman.errors import DistmanError

_PATIENCE = 10.0
"""Seconds to wait for ranks that were started at the same time, and come later."""

_PAUSE = 0.02
"""Seconds between two looks at how many ranks have heard: no more than the end of this rank may be late."""


def is_started_by_rank(environ: Mapping[str, str]) -> bool:
    """Return whether a rank started this process, which inherits its variables, for some work of its own.

    Such a process does not speak for the rank. A parent that the launcher told the same place is that rank if it runs
    Python, unless it was told to run this very program, as a wrapper such as ``conda run python train.py`` is.

    Args:
        environ: Environment variables, usually ``os.environ``; never modified.
    """
    place = _place(environ)
    program = next((word for word in sys.orig_argv[1:] if not word.startswith("-")), None)
    for ancestor in ancestors():
        if _place(ancestor.environ) != place:
            return False
        words = itertools.dropwhile(lambda word: word.startswith("-"), ancestor.command[1:])
        if ancestor.is_python and program not in list(words)[1:]:
            return True
    return False


def _place(environ: Mapping[str, str]) -> tuple[str, int, int] | None:
    try:
        environment = detect(environ).environment
    except (DistmanError, ValueError):
        return None
    return environment.launcher, environment.rank, environment.world_size


def tell_waiting_ranks(failure: dict[str, Any], environ: Mapping[str, str], *, patience: float = _PATIENCE) -> None:
    """Leave the failure with the handshake server of the job, or run such a server for some seconds.

    Nothing is done where the other ranks end with this one, nor where no endpoint is known. It needs no torch, so
    it also serves a rank that failed to import it.

    Args:
        failure: The fields of a ``RankFailedError``.
        environ: Environment variables, usually ``os.environ``; never modified.
        patience: Seconds to wait for ranks that come later; 0 tells those that are there.
    """
    try:
        environment = detect(environ).environment
        others_stay = LAUNCHERS[environment.launcher].on_failure is OnFailure.WAITS
        if not others_stay or environment.world_size == 1:
            return
        point = find_endpoint(environment, environ)
        if point is None:
            return
        failure = {**failure, "rank": environment.rank}
        if not point.is_host:
            find_server(point, patience, failure=failure)
        elif patience > 0:
            _hold_server(point, failure, environment.world_size - 1, patience)
    except (DistmanError, OSError):
        return  # nobody waits, or nobody can be reached, and the traceback is printed already


def _hold_server(point: Endpoint, failure: dict[str, Any], num_others: int, patience: float) -> None:
    server = _open_server(point, failure)
    if server is None:
        return
    until = time.monotonic() + patience
    while server.num_answered < num_others and time.monotonic() < until:
        time.sleep(_PAUSE)
    server.close()


def _open_server(point: Endpoint, failure: dict[str, Any]) -> HandshakeServer | None:
    for port in point.ports:
        try:
            listener = bind_listener(point.addresses[0], port, is_on_one_host=point.is_on_one_host)
        except OSError:
            continue
        return HandshakeServer(listener, Identity.of(point.job_id), failure=failure)
    return None
