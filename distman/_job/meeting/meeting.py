"""How the ranks of a job meet: on one host, at a port, over the launcher's agents, or over MPI."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from distman._base import timing
from distman._job.meeting import address
from distman._job.meeting.job_store import JobStore
from distman._job.meeting.places import AtPorts, OnThisHost
from distman._job.meeting.secret import NO_PROTECTION, Protection
from distman.environments import LAUNCHERS, LaunchEnvironment
from distman.errors import RendezvousError


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
    launcher = LAUNCHERS[environment.launcher]
    job_id = address.job_name(environment)
    if launcher.agent is not None and launcher.agent.is_serving(environ):
        return _by_agent(environment, environ, job_id, protection, unreachable_after)
    if address.is_sent_over_mpi(environment, environ):
        from distman._job.meeting.announced import OverMpi  # here: a rank without torch does not get so far

        return OverMpi(environment, protection, unreachable_after)
    host, host_source = address.find_address(environment, environ)
    ports, port_source = address.find_ports(environ, job_id, protection.key)
    by_place = launcher.meets_on_first_node and address.given_address(environ) is None
    kind = OnThisHost if address.is_on_one_host(environment, environ) else AtPorts
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


def _by_agent(
    environment: LaunchEnvironment,
    environ: Mapping[str, str],
    job_id: str,
    protection: Protection,
    unreachable_after: float,
) -> Meeting:
    """Return the meeting of ranks whose agents serve a store; on one host they need nothing but its name."""
    variables = " and ".join(address.variable_of(environment, field) for field in ("main_address", "main_port"))
    if environment.main_address is None or environment.main_port is None:
        raise RendezvousError(
            f"{variables} must be set under {environment.launcher}, got "
            f"{environment.main_address!r} and {environment.main_port!r}. Keep what {environment.launcher} sets."
        )
    agent = LAUNCHERS[environment.launcher].agent
    restart = environ.get(agent.restart_count, "0") if agent is not None else "0"
    point = AtPorts(
        job_id=job_id,
        addresses=(environment.main_address,),
        ports=(environment.main_port,),
        source=f"{variables} of {environment.launcher}",
        is_host=environment.rank == 0,
        protection=protection,
        unreachable_after=unreachable_after,
    )
    if environment.is_on_one_node:
        return OnThisHost(**{**vars(point), "job_id": f"{job_id}/{restart}"})
    from distman._job.meeting.announced import OverAgent  # here: it takes torch, which may be what fails

    return OverAgent(point, restart)
