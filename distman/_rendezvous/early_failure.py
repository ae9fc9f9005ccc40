"""A rank that fails on its way to the rendezvous tells the ranks that wait there."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from distman._rendezvous.address import MeetingPoint, find_meeting_point
from distman._rendezvous.handshake import HandshakeServer, Identity, bind_listener, find_server
from distman.environments import detect
from distman.errors import DistmanError

_PATIENCE = 10.0
_PAUSE = 0.02
_ENDED_BY_LAUNCHER = ("torchrun", "openmpi", "hydra", "mvapich", "single")


def tell_waiting_ranks(failure: dict[str, Any], environ: Mapping[str, str]) -> None:
    """Tell the handshake server of the job, or be that server for those who come, for some seconds.

    Nothing is done where the launcher ends the whole job after a failure, nor where no meeting point
    is known. It needs no torch, so it also serves a rank that failed to import it.

    Args:
        failure: The fields of a ``RankFailedError``.
        environ: Environment variables, usually ``os.environ``; never modified.
    """
    try:
        environment = detect(environ).environment
        if environment.launcher in _ENDED_BY_LAUNCHER or environment.world_size == 1:
            return
        point = find_meeting_point(environment, environ)
        if point is None:
            return
        failure = {**failure, "rank": environment.rank}
        if point.is_host:
            _hold_server(point, failure, environment.world_size - 1)
        else:
            find_server(point, _PATIENCE, failure=failure)
    except (DistmanError, OSError):
        return  # nobody is waiting, or nobody can be reached: the traceback is already printed


def _hold_server(point: MeetingPoint, failure: dict[str, Any], num_others: int) -> None:
    server = _open_server(point, failure)
    if server is None:
        return
    until = time.monotonic() + _PATIENCE
    while server.num_answered < num_others and time.monotonic() < until:
        time.sleep(_PAUSE)
    server.close()


def _open_server(point: MeetingPoint, failure: dict[str, Any]) -> HandshakeServer | None:
    for port in point.ports:
        try:
            listener = bind_listener(point.addresses[0], port)
        except OSError:
            continue
        return HandshakeServer(listener, Identity.of(point.job_id), failure=failure)
    return None
