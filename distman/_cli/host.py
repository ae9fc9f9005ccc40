"""What this host answers: names, interfaces, cores and limits, each within a short time."""

from __future__ import annotations

import os
import resource
import socket
import threading
from collections.abc import Sequence
from pathlib import Path

from distman._job.meeting.sockets import addresses_of, is_own
from distman.environments._diagnostics import Host

_LIMIT = 1.0
"""Seconds that a question over the network may take."""


def this_host() -> Host:
    """Return what this host answers; what a check asks over the network takes a second at most."""
    soft_limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return Host(
        name=socket.gethostname(),
        interfaces=[name for _, name in socket.if_nameindex()],
        num_cores=os.cpu_count() or 1,
        num_usable_cores=len(os.sched_getaffinity(0)),
        num_gpus=len([*Path("/dev").glob("nvidia[0-9]*")]),
        first_open_port=_first_open_port(),
        max_open_files=None if soft_limit == resource.RLIM_INFINITY else soft_limit,
        resolve=_resolve,
        is_own=is_own,
        is_reachable=_is_reachable,
    )


def _first_open_port() -> int:
    limit = Path("/proc/sys/net/ipv4/ip_unprivileged_port_start")
    return int(limit.read_text()) if os.geteuid() != 0 and limit.exists() else 1


def _resolve(name: str) -> Sequence[str] | None:
    """Ask in a thread, which is left behind where no answer comes: the library knows no time limit."""
    found: list[Sequence[str]] = []
    thread = threading.Thread(target=lambda: found.append(_addresses(name)), daemon=True)
    thread.start()
    thread.join(_LIMIT)
    return found[0] if found else None


def _addresses(name: str) -> list[str]:
    try:
        return addresses_of(name)
    except OSError:
        return []


def _is_reachable(address: str, port: int) -> bool:
    try:
        socket.create_connection((address, port), timeout=_LIMIT).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return True
