"""Where the ranks meet: address and port, and where each comes from."""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
import json
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from distman._job.meeting import mpi
from distman._job.meeting.ancestry import ancestors
from distman._job.meeting.sockets import bracketed, means_loopback
from distman.environments import LAUNCHERS, Family, LaunchEnvironment
from distman.environments._base import read_host
from distman.errors import RendezvousError

if TYPE_CHECKING:
    from distman._job.meeting.secret import Protection

# Derived ports: above those of well-known services, and below 32768, from where Linux gives ports to connections.
_FIRST_PORT = 23000
_NUM_PORTS = 9000  # so many that two jobs of one host seldom derive the same one
_NUM_CANDIDATES = 8  # ports tried in turn; jobs of one host seldom take more than a few
_LOCALHOST = "127.0.0.1"
UNREACHABLE_AFTER = 45.0  # seconds, where nobody watches: a network that is repaired sooner ends no job


@dataclasses.dataclass(frozen=True)
class Endpoint:
    """Where the ranks of a job meet."""

    job_id: str  # name of the job, the same on all its ranks
    addresses: tuple[str, ...]  # to try, in order; they are names of one host
    ports: tuple[int, ...]  # to try, in order; empty lets the host take any and tell it by other means
    source: str  # where address and port came from, for messages
    is_host: bool
    host: str = "rank 0"  # who opens the store, for messages
    has_agent: bool = False  # a launcher's agent serves a store there, where rank 0 tells the others its address
    restart: str = "0"  # how often the agent of this host has started its ranks again; each agent counts for itself
    is_on_one_host: bool = False  # then its ranks meet at a name that only this host knows
    protection: Protection | None = None  # what keeps others out; None where there is nothing
    unreachable_after: float = UNREACHABLE_AFTER  # seconds after which a host is given up that acknowledges nothing

    @property
    def local_name(self) -> str:
        """How the names begin at which its store may listen on this host; other ports mean another job."""
        told = json.dumps([self.job_id, self.ports]).encode(errors="surrogateescape")
        return f"\0distman/{os.geteuid()}/{hashlib.sha256(told).hexdigest()[:16]}."

    @property
    def url(self) -> str:
        """The endpoint in one word, such as ``tcp://n1:23145``, or ``unix:@distman/1000/5f0c81d2a9e4b377.*``."""
        if self.is_on_one_host:
            return f"unix:@{self.local_name[1:]}*"
        ports = f":{self.ports[0]}" if self.ports else ""
        return f"tcp://{bracketed(self.addresses[0])}{ports}"


def find_endpoint(
    environment: LaunchEnvironment, environ: Mapping[str, str], secret: bytes | None = None
) -> Endpoint | None:
    """Return where the ranks meet, or None where only a broadcast over MPI can tell."""
    launcher = LAUNCHERS[environment.launcher]
    job_id = environment.job_id or _anonymous_job(environment)
    if launcher.agent is not None and launcher.agent.is_serving(environ):
        return _agent_point(environment, environ, job_id)
    address, address_source = _address(environment, environ)
    if address is None:
        if launcher.family is Family.MPI:
            return None
        raise RendezvousError(_no_address(environment))
    is_given = _given(environ) is not None
    ports, port_source = _ports(environ, job_id, secret)
    by_place = launcher.meets_on_first_node and not is_given
    is_host = (environment.node_rank, environment.local_rank) == (0, 0) if by_place else environment.rank == 0
    return Endpoint(
        job_id=job_id,
        addresses=(address,),
        ports=ports,
        source=f"address from {address_source}, port {port_source}",
        is_host=is_host,
        host="the first task of the first node" if by_place and not environment.is_on_one_node else "rank 0",
        is_on_one_host=is_on_one_host(environment, environ),
    )


def is_on_one_host(environment: LaunchEnvironment, environ: Mapping[str, str]) -> bool:
    """Return whether all ranks run on this host: the launcher says so, or the address leads nowhere else."""
    if environment.is_on_one_node:
        return True
    address = _given(environ) or environment.main_address
    return address is not None and means_loopback(address) and not _spans_nodes(environment)


def is_told_over_mpi(environment: LaunchEnvironment, environ: Mapping[str, str]) -> bool:
    """Return whether rank 0 tells the others by a broadcast over MPI where they meet."""
    launcher = LAUNCHERS[environment.launcher]
    if launcher.family is not Family.MPI or _given(environ) or environment.is_on_one_node:
        return False
    if launcher.meets_on_first_node and environment.main_address is not None:
        return False
    return environment.main_address is None or mpi.is_installed()


def derive_ports(job_id: str, secret: bytes | None = None) -> tuple[int, ...]:
    """Return the ports at which a job of this name may meet, in the order in which they are tried."""
    # They lie below the range from which Linux gives ports to outgoing connections. Where the ranks know a secret
    # beforehand, nobody else can tell which they are.
    names = (f"{job_id}/{i}".encode() for i in range(_NUM_CANDIDATES))
    digests = (hmac.digest(secret, name, "sha256") if secret else hashlib.sha256(name).digest() for name in names)
    ports = (_FIRST_PORT + int.from_bytes(digest[:4], "big") % _NUM_PORTS for digest in digests)
    return tuple(dict.fromkeys(ports))


def _agent_point(environment: LaunchEnvironment, environ: Mapping[str, str], job_id: str) -> Endpoint:
    if environment.main_address is None or environment.main_port is None:
        raise RendezvousError(
            f"{_main_variables(environment)} must be set under {environment.launcher}, got "
            f"{environment.main_address!r} and {environment.main_port!r}. Keep what {environment.launcher} sets."
        )
    agent = LAUNCHERS[environment.launcher].agent
    restart = environ.get(agent.restart_count, "0") if agent is not None else "0"
    return Endpoint(
        job_id=f"{job_id}/{restart}" if environment.is_on_one_node else job_id,
        addresses=(environment.main_address,),
        ports=(environment.main_port,),
        source=f"{_main_variables(environment)} of {environment.launcher}",
        is_host=environment.rank == 0,
        has_agent=not environment.is_on_one_node,
        restart=restart,
        is_on_one_host=environment.is_on_one_node,
    )


def _main_variables(environment: LaunchEnvironment) -> str:
    return " and ".join(_variable(environment, field) for field in ("main_address", "main_port"))


def _variable(environment: LaunchEnvironment, field: str) -> str:
    """Return the variable that says a value; a launcher may have none for it, or derive it from others."""
    names = LAUNCHERS[environment.launcher].fields.get(field)
    return names[0] if names else field


def _address(environment: LaunchEnvironment, environ: Mapping[str, str]) -> tuple[str | None, str]:
    given = _given(environ)
    if given:
        if means_loopback(given) and _spans_nodes(environment):
            raise RendezvousError(
                f"MASTER_ADDR must be an address that all nodes reach, got {given!r} from the environment of "
                "a job on several nodes. Unset it, or set it to the name of rank 0's node."
            )
        return given, "MASTER_ADDR"
    launcher = LAUNCHERS[environment.launcher]
    if launcher.meets_on_first_node and environment.main_address is not None:
        return environment.main_address, f"the first node of {_variable(environment, 'main_address')}"
    if environment.is_on_one_node:
        return _LOCALHOST, "the launcher, which says that all ranks run on one node"
    if is_told_over_mpi(environment, environ):
        return None, ""
    without = ", which are a guess without mpi4py" if launcher.family is Family.MPI else ""
    return environment.main_address, f"the variables of {environment.launcher}{without}"


def _given(environ: Mapping[str, str]) -> str | None:
    return read_host(environ, "MASTER_ADDR")


def _spans_nodes(environment: LaunchEnvironment) -> bool:
    if environment.num_nodes is not None:
        return environment.num_nodes > 1
    local = environment.local_world_size
    return local is not None and local < environment.world_size


def _ports(environ: Mapping[str, str], job_id: str, secret: bytes | None) -> tuple[tuple[int, ...], str]:
    text = environ.get("MASTER_PORT", "")
    if not text:
        return derive_ports(job_id, secret), f"derived from job {job_id!r}{' and its secret' if secret else ''}"
    if not (text.isascii() and text.isdigit() and 0 < int(text) < 65536):
        raise RendezvousError(
            f"MASTER_PORT must be a number between 1 and 65535, got {text!r} from the environment. Correct or unset it."
        )
    return (int(text),), f"{text} from MASTER_PORT"


def _anonymous_job(environment: LaunchEnvironment) -> str:
    """Name a job whose launcher does not: by the process that started its ranks, where it is on this host."""
    process_names = LAUNCHERS[environment.launcher].process_names
    if process_names and environment.is_on_one_node:
        named = (ancestor.pid for ancestor in ancestors() if ancestor.name.startswith(process_names))  # not shells
        return f"{environment.launcher}-{next(named, os.getppid())}"
    return environment.launcher


def _no_address(environment: LaunchEnvironment) -> str:
    return (
        f"MASTER_ADDR must be set when {environment.launcher} does not say where rank 0 runs, got nothing. "
        "Set it to the name of rank 0's node on all ranks (localhost for one node)."
    )
