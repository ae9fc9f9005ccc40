"""Addresses of this host: where to listen, and whether a name means this host."""

from __future__ import annotations

import contextlib
import socket

from distman._store.transport import BACKLOG

_OUTSIDE = "192.0.2.1"  # an address of no host, to which the way leads out
_LOOPBACK = "127.0.0.1"
_LOOPBACK_NAMES = ("localhost", "localhost.localdomain", "localhost4", "localhost6", "ip6-localhost")


def bind_listener(address: str, port: int) -> socket.socket:
    """Return a socket that listens at the port; port 0 takes any free one."""
    # IPv4 is preferred where the address has both; clients try all addresses. One of the loopback is listened to
    # alone, so that nobody outside reaches the port, unless it is one to this host only: Debian lets the name of each
    # host mean 127.0.1.1 there, and others come by that name.
    family, resolved = min(_resolve(address), key=lambda place: place[0] != socket.AF_INET)
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((resolved if means_loopback(address) else "", port))
        listener.listen(BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


def means_loopback(name: str) -> bool:
    """Return whether a name or an address means, on every host, that host itself."""
    return name in _LOOPBACK_NAMES or _is_loopback(name)


def bracketed(host: str) -> str:
    """Return the name or address of a host as it stands in a URL, before the port."""
    return f"[{host}]" if ":" in host else host


def addresses_of(name: str) -> list[str]:
    """Return the addresses of a name as this host sees them; raise OSError if it is not known."""
    return list(dict.fromkeys(address for _, address in _resolve(name)))


def is_own(address: str) -> bool:
    """Return whether a socket can have the address, which only a host's own can."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as one:
            one.bind((address, 0))
    except OSError:
        return False
    return True


def address_towards(name: str) -> str | None:
    """Return the address of this host on the way to another one; None where there is no way, or it is the loopback."""
    # The name of a host at which others meet leads back to it: then it is the address by which they come.
    try:
        family, address = _resolve(name)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((address, 9))  # sends nothing
            own = str(probe.getsockname()[0])
    except OSError:
        return None
    return None if _is_loopback(own) else own


def own_addresses(towards: str | None = None) -> list[str]:
    """Return names and addresses by which other hosts may reach this one, the likeliest first."""
    # The way to where all hosts of the job have met may be the only one that this host has.
    found, host = list[str](), socket.gethostname()
    with contextlib.suppress(OSError):  # its name is not known
        found += [host, *addresses_of(host)]
    found += [address for name in (towards, _OUTSIDE) if name and (address := address_towards(name))]
    return list(dict.fromkeys(found)) or [_LOOPBACK]


def _resolve(name: str) -> list[tuple[socket.AddressFamily, str]]:
    try:
        # For a text, Python loads the codec of other alphabets, which takes 3 ms.
        found = socket.getaddrinfo(name.encode() if name.isascii() else name, None, type=socket.SOCK_STREAM)
    except UnicodeError as error:  # a name may be too long or empty in parts
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known") from error
    return [(family, str(place[0])) for family, _, _, _, place in found]


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"
