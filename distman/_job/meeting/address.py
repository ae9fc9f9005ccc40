"""Where the ranks meet: address and port, and where each comes from."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import socket
from collections.abc import Mapping

from distman._base.process_tree import ancestors
from distman._job.meeting import mpi
from distman._store.transport import BACKLOG
from distman.environments import LAUNCHERS, Family, LaunchEnvironment, read_host, read_text
from distman.errors import RendezvousError

# Derived ports: above those of well-known services, and below 32768, from where Linux gives ports to connections.
_FIRST_PORT = 23000
_NUM_PORTS = 9000  # so many that two jobs of one host seldom derive the same one
_NUM_CANDIDATES = 8  # ports tried in turn; jobs of one host seldom take more than a few
_LOOPBACK = "127.0.0.1"


def is_on_one_host(environment: LaunchEnvironment, environ: Mapping[str, str]) -> bool:
    """Return whether all ranks run on this host: the launcher says so, or the address leads nowhere else."""
    if environment.is_on_one_node:
        return True
    address = given_address(environ) or environment.main_address
    return address is not None and means_loopback(address) and not _spans_nodes(environment)


def is_sent_over_mpi(environment: LaunchEnvironment, environ: Mapping[str, str]) -> bool:
    launcher = LAUNCHERS[environment.launcher]
    if launcher.family is not Family.MPI or given_address(environ) or environment.is_on_one_node:
        return False
    if launcher.meets_on_first_node and environment.main_address is not None:
        return False
    return environment.main_address is None or mpi.is_installed()


def derive_ports(job_id: str, secret: bytes | None = None) -> tuple[int, ...]:
    """Return the ports at which a job of this name may meet, in the order in which they are tried."""
    # Where the ranks know a secret beforehand, nobody else can tell which they are.
    names = (f"{job_id}/{i}".encode() for i in range(_NUM_CANDIDATES))
    digests = (hmac.digest(secret, name, "sha256") if secret else hashlib.sha256(name).digest() for name in names)
    ports = (_FIRST_PORT + int.from_bytes(digest[:4], "big") % _NUM_PORTS for digest in digests)
    return tuple(dict.fromkeys(ports))


def given_address(environ: Mapping[str, str]) -> str | None:
    return read_host(environ, "MASTER_ADDR")


def find_address(environment: LaunchEnvironment, environ: Mapping[str, str]) -> tuple[str, str]:
    """Return the address where the ranks meet and, for messages, where it comes from."""
    given, launcher = given_address(environ), LAUNCHERS[environment.launcher]
    if given:
        if (
            means_loopback(given) and _spans_nodes(environment) and launcher.agent is None
        ):  # whose agents have met there
            raise RendezvousError(
                f"MASTER_ADDR must be an address that all nodes reach, got {given!r} from the environment of "
                "a job on several nodes. Unset it, or set it to the name of rank 0's node."
            )
        return given, "MASTER_ADDR"
    if launcher.meets_on_first_node and environment.main_address is not None:
        names = launcher.fields.get("main_address")  # none where it is derived from others
        return environment.main_address, f"the first node of {names[0] if names else 'main_address'}"
    if environment.is_on_one_node:
        return _LOOPBACK, "the launcher, which says that all ranks run on one node"
    if environment.main_address is None:
        raise RendezvousError(
            f"MASTER_ADDR must be set when {environment.launcher} does not say where rank 0 runs, got nothing. "
            "Set it to the name of rank 0's node on all ranks (localhost for one node)."
        )
    without = ", which are a guess without mpi4py" if launcher.family is Family.MPI else ""
    return environment.main_address, f"the variables of {environment.launcher}{without}"


def find_ports(environ: Mapping[str, str], job_id: str, secret: bytes | None) -> tuple[tuple[int, ...], str]:
    text = read_text(environ, "MASTER_PORT")  # as detect() reads it
    if text is None:
        return derived_ports(job_id, secret)
    if not (text.isascii() and text.isdigit() and 0 < int(text) < 65536):
        raise RendezvousError(
            f"MASTER_PORT must be a number between 1 and 65535, got {text!r} from the environment. Correct or unset it."
        )
    return (int(text),), f"{text} from MASTER_PORT"


def derived_ports(job_id: str, secret: bytes | None) -> tuple[tuple[int, ...], str]:
    return derive_ports(job_id, secret), f"derived from job {job_id!r}{' and its secret' if secret else ''}"


def job_name(environment: LaunchEnvironment) -> str:
    """Return the name of a job, which is that of the process that started its ranks, where its launcher gives none."""
    process_names = LAUNCHERS[environment.launcher].process_names
    if not environment.job_id and process_names and environment.is_on_one_node:
        named = (pid for pid, name in ancestors() if name.startswith(process_names))  # not shells
        return f"{environment.launcher}-{next(named, os.getppid())}"
    return environment.job_id or environment.launcher


def _spans_nodes(environment: LaunchEnvironment) -> bool:
    if environment.num_nodes is not None:
        return environment.num_nodes > 1
    local = environment.local_world_size
    return local is not None and local < environment.world_size


_OUTSIDE = "192.0.2.1"  # an address of no host, to which the way leads out
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
