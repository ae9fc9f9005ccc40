"""Where a process of the job listens, as others tell it: what no resolver would take is malformed."""

from __future__ import annotations

import re
from typing import Annotated

_ADDRESS = re.compile(r"[\w.:%-]{1,253}", re.ASCII)  # what a resolver takes without raising of its own
_MOST_ADDRESSES = 32  # of a host; each may take seconds to try
_PORTS = range(1, 1 << 16)


def _checked_addresses(addresses: tuple[str, ...]) -> tuple[str, ...]:
    if len(addresses) > _MOST_ADDRESSES or not all(map(_ADDRESS.fullmatch, addresses)):
        raise ValueError(f"it must be {_MOST_ADDRESSES} names or addresses of a host at most")
    return addresses


def _checked_port(port: int) -> int:
    if port not in _PORTS:
        raise ValueError("it must be a port")
    return port


Addresses = Annotated[tuple[str, ...], _checked_addresses]
"""A field of a message: names or addresses of one host."""

Port = Annotated[int, _checked_port]
"""A field of a message."""
