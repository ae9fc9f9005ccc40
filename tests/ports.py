"""Ports for jobs whose tests run at one time."""

import os
import secrets
import socket
from contextlib import suppress

_PORTS = range(10_000, 23_000)  # that nobody gets who asks Linux, or `derive_ports`, for any
_handed_out: set[int] = set()


def find_free_port() -> int:
    """Return a port that was free a moment ago, which no test that runs beside this one gets.

    None is handed out twice: the store of an earlier job, whose name has the port in it, may outlive a failure.
    """
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    while True:
        port = secrets.choice([port for port in _PORTS[worker::workers] if port not in _handed_out])
        _handed_out.add(port)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
