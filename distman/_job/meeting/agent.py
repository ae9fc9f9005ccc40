"""Whether a stranger who reaches the launcher's agents can run code as the user."""

from __future__ import annotations

import enum
from collections.abc import Mapping

from distman.environments import LAUNCHERS, LaunchEnvironment

_PATIENCE = 3.0  # seconds for an answer of the agent, which serves its store on this host

WARNING = (
    "Nothing shows that the launcher's agents meet by a static rendezvous. By any other one (c10d, --standalone, or "
    "torchrun on one node without --master-port) every user and host that reaches an agent's port can run code as you. "
    "On one host, start the job with `distman run`; otherwise pass torchrun --rdzv-backend=static, --node-rank, "
    "--master-addr and --master-port, and no UUID as --rdzv-id."
)
"""True of every rendezvous that is not known to be static."""

UNTOLD = "if torchrun's rendezvous is static, which its variables do not tell; `distman check` finds out"


class Meeting(enum.Enum):
    """How the launcher's agents meet: nothing in a static rendezvous is unpickled."""

    STATIC = "static"
    NOT_STATIC = "not static, or not known to be"
    UNTOLD = "not told by the variables"


def find_meeting(environment: LaunchEnvironment, environ: Mapping[str, str]) -> Meeting | None:
    """Return how the launcher's agents meet, as far as the variables tell; None where it has no agents."""
    agent = LAUNCHERS[environment.launcher].agent
    if agent is None:
        return None
    may_be_safe = agent.may_be_safe(environ, _told_job_id(environment, environ))
    return Meeting.UNTOLD if may_be_safe else Meeting.NOT_STATIC


def ask_agent(environment: LaunchEnvironment, environ: Mapping[str, str]) -> Meeting:
    """Return how the launcher's agents meet, as the store of the one on the first host tells. It takes torch."""
    from distman._torch_internals import is_static_rendezvous

    if environment.main_address is None or environment.main_port is None or environment.node_rank is None:
        return Meeting.NOT_STATIC
    place = (environment.main_address, environment.main_port)
    is_static = is_static_rendezvous(place, _told_job_id(environment, environ), environment.node_rank, _PATIENCE)
    return Meeting.STATIC if is_static else Meeting.NOT_STATIC


def _told_job_id(environment: LaunchEnvironment, environ: Mapping[str, str]) -> str:
    """Return the job id of the launcher, whatever the user calls the job."""
    names = LAUNCHERS[environment.launcher].fields.get("job_id", ())
    return next((environ[name] for name in names if name in environ), "")
