"""How the ranks of a job meet: on one host, at a port, or over MPI."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from distman._base import timing
from distman._job.meeting import address
from distman._job.meeting.job_store import JobStore
from distman._job.meeting.places import AtPorts, OnThisHost
from distman._job.meeting.secret import NO_PROTECTION, Protection
from distman.environments import LAUNCHERS, LaunchEnvironment


class Meeting(Protocol):
    """One rank opens the store of the job, the others find it."""

    @property
    def is_host(self) -> bool: ...  # whether this rank opens the store

    @property
    def source(self) -> str: ...  # where the place comes from, for messages

    def open(self, rank: int, timeout: float, meanwhile: Callable[[], None]) -> JobStore: ...

    def find(self, rank: int, timeout: float) -> JobStore: ...


def find_meeting(
    environment: LaunchEnvironment,
    environ: Mapping[str, str],
    protection: Protection = NO_PROTECTION,
    unreachable_after: float = timing.UNREACHABLE_UNWATCHED,
) -> Meeting:
    """Return how the ranks of a job meet, as the variables tell every rank alike."""
    if address.is_sent_over_mpi(environment, environ):
        from distman._job.meeting.announced import over_mpi  # here: a rank without torch does not get so far

        return over_mpi(environment, protection, unreachable_after)
    launcher = LAUNCHERS[environment.launcher]
    is_on_one_host = address.is_on_one_host(environment, environ)
    job_id = address.job_name(environment)
    host, host_source = address.find_address(environment, environ)
    if launcher.agent is not None and launcher.agent.is_serving(environ):  # at the port that MASTER_PORT says
        restart = environ.get(launcher.agent.restart_count, "0")  # each agent counts restarts for itself
        job_id = "/".join([job_id, environ.get("MASTER_PORT", ""), *([restart] if is_on_one_host else [])])
        ports, port_source = address.derived_ports(job_id, protection.key)
    else:
        ports, port_source = address.find_ports(environ, job_id, protection.key)
    by_place = launcher.meets_on_first_node and address.given_address(environ) is None
    kind = OnThisHost if is_on_one_host else AtPorts
    return kind(
        job_id=job_id,
        addresses=(host,),
        ports=ports,
        source=f"address from {host_source}, port {port_source}",
        is_host=(environment.node_rank, environment.local_rank) == (0, 0) if by_place else environment.rank == 0,
        opener="the first task of the first node" if by_place and not environment.is_on_one_node else "rank 0",
        protection=protection,
        unreachable_after=unreachable_after,
    )
