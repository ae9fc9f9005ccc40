"""A rank that fails on its way to the rendezvous tells the ranks that wait there."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from distman._rendezvous.address import Endpoint, find_endpoint
from distman._rendezvous.handshake import HandshakeServer, Identity, bind_listener, find_server
from distman.environments import LAUNCHERS, OnFailure, detect
from distman.errors import DistmanError

_PATIENCE = 10.0
"""Seconds to wait for ranks that were started at the same time, and come later."""

_PAUSE = 0.02
"""Seconds between two looks at how many ranks have heard: no more than the end of this rank may be late."""


def tell_waiting_ranks(failure: dict[str, Any], environ: Mapping[str, str]) -> None:
    """Leave the failure with the handshake server of the job, or run such a server for some seconds.

    Nothing is done where the other ranks end with this one, nor where no endpoint is known. It needs no torch, so
    it also serves a rank that failed to import it.

    Args:
        failure: The fields of a ``RankFailedError``.
        environ: Environment variables, usually ``os.environ``; never modified.
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
        if point.is_host:
            _hold_server(point, failure, environment.world_size - 1)
        else:
            find_server(point, _PATIENCE, failure=failure)
    except (DistmanError, OSError):
        return  # nobody waits, or nobody can be reached, and the traceback is printed already


def _hold_server(point: Endpoint, failure: dict[str, Any], num_others: int) -> None:
    server = _open_server(point, failure)
    if server is None:
        return
    until = time.monotonic() + _PATIENCE
    while server.num_answered < num_others and time.monotonic() < until:
        time.sleep(_PAUSE)
    server.close()


def _open_server(point: Endpoint, failure: dict[str, Any]) -> HandshakeServer | None:
    for port in point.ports:
        try:
            listener = bind_listener(point.addresses[0], port)
        except OSError:
            continue
        return HandshakeServer(listener, Identity.of(point.job_id), failure=failure)
    return None
