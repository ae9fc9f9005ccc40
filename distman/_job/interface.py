"""The network interface through which gloo tells the other ranks to connect."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from collections.abc import Iterable
from pathlib import Path

from distman._base.process_state import puts_back
from distman._job.meeting.sockets import address_towards, addresses_of, means_loopback

_VARIABLE = "GLOO_SOCKET_IFNAME"
_SIOCGIFADDR = 0x8915  # Linux, ``linux/sockios.h``: asks for the IPv4 address of an interface
_IFREQ_BYTES = 256  # more than the structure of that call has
_ADDRESS = slice(20, 24)  # where it holds the address

_LOOPBACK = "127.0.0.1"

_is_set = False


def choose_interface(others: Iterable[str]) -> None:
    """Let gloo use the interface towards the other hosts, where it would tell them an address of the loopback."""
    # gloo takes the address that this host's name has here. Debian gives it 127.0.1.1, at which every host finds
    # itself. A variable that is set already is left alone.
    if os.environ.get(_VARIABLE) or not _is_name_loopback():
        return
    own = next((address for address in map(address_towards, others) if address is not None), None)
    if own is not None:
        _use(_interface_of(own))


def stay_on_this_host() -> None:
    """Let gloo listen where no other host reaches it: it does not ask who connects."""
    # Only for ranks that have met without a network, so that the loopback of all is one. A variable that is set already
    # is left alone.
    if not os.environ.get(_VARIABLE):
        _use(_interface_of(_LOOPBACK))


def _use(name: str | None) -> None:
    global _is_set
    if name is not None:
        os.environ[_VARIABLE] = name
        _is_set = True


@puts_back
def forget_interface() -> None:
    """Take back what was set here."""
    global _is_set
    if _is_set:
        os.environ.pop(_VARIABLE, None)
        _is_set = False


def _is_name_loopback() -> bool:
    try:
        return all(map(means_loopback, addresses_of(socket.gethostname())))
    except OSError:
        return True  # gloo takes the loopback, too, where the name is not known


def _interface_of(address: str) -> str | None:
    """Return the name of the interface that has an address of this host."""
    if ":" in address:
        return _interface_of_ipv6(address)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as question:
        for _, name in socket.if_nameindex():
            request = struct.pack(f"{_IFREQ_BYTES}s", name.encode())
            try:
                found = fcntl.ioctl(question, _SIOCGIFADDR, request)[_ADDRESS]
            except OSError:
                continue  # it has none
            if socket.inet_ntoa(found) == address:
                return name
    return None


def _interface_of_ipv6(address: str) -> str | None:
    try:
        lines = Path("/proc/net/if_inet6").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    wanted = socket.inet_pton(socket.AF_INET6, address.partition("%")[0]).hex()
    return next((line.split()[-1] for line in lines if line.startswith(wanted)), None)
