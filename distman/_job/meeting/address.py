"""Where the ranks meet: address and port, and where each comes from."""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Mapping

from distman._job.meeting import mpi
from distman._job.meeting.ancestry import ancestors
from distman._job.meeting.sockets import means_loopback
from distman.environments import LAUNCHERS, Family, LaunchEnvironment, read_host
from distman.errors import RendezvousError

# Derived ports: above those of well-known services, and below 32768, from where Linux gives ports to connections.
_FIRST_PORT = 23000
_NUM_PORTS = 9000  # so many that two jobs of one host seldom derive the same one
_NUM_CANDIDATES = 8  # ports tried in turn; jobs of one host seldom take more than a few
_LOCALHOST = "127.0.0.1"


def is_on_one_host(environment: LaunchEnvironment, environ: Mapping[str, str]) -> bool:
    """Return whether all ranks run on this host: the launcher says so, or the address leads nowhere else."""
    if environment.is_on_one_node:
        return True
    address = given_address(environ) or environment.main_address
    return address is not None and means_loopback(address) and not _spans_nodes(environment)


def is_sent_over_mpi(environment: LaunchEnvironment, environ: Mapping[str, str]) -> bool:
    """Return whether rank 0 tells the others by a broadcast over MPI where they meet."""
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


def variable_of(environment: LaunchEnvironment, field: str) -> str:
    """Return the variable that says a value; a launcher may have none for it, or derive it from others."""
    names = LAUNCHERS[environment.launcher].fields.get(field)
    return names[0] if names else field


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
        return environment.main_address, f"the first node of {variable_of(environment, 'main_address')}"
    if environment.is_on_one_node:
        return _LOCALHOST, "the launcher, which says that all ranks run on one node"
    if environment.main_address is None:
        raise RendezvousError(
            f"MASTER_ADDR must be set when {environment.launcher} does not say where rank 0 runs, got nothing. "
            "Set it to the name of rank 0's node on all ranks (localhost for one node)."
        )
    without = ", which are a guess without mpi4py" if launcher.family is Family.MPI else ""
    return environment.main_address, f"the variables of {environment.launcher}{without}"


def find_ports(environ: Mapping[str, str], job_id: str, secret: bytes | None) -> tuple[tuple[int, ...], str]:
    """Return the ports at which the ranks may meet and, for messages, where they come from."""
    text = environ.get("MASTER_PORT", "")
    if not text:
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
        named = (ancestor.pid for ancestor in ancestors() if ancestor.name.startswith(process_names))  # not shells
        return f"{environment.launcher}-{next(named, os.getppid())}"
    return environment.job_id or environment.launcher


def _spans_nodes(environment: LaunchEnvironment) -> bool:
    if environment.num_nodes is not None:
        return environment.num_nodes > 1
    local = environment.local_world_size
    return local is not None and local < environment.world_size
