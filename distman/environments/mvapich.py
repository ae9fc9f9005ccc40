"""MVAPICH2: mpirun_rsh."""

from __future__ import annotations

from collections.abc import Mapping

from distman.environments.base import LaunchEnvironment
from distman.environments.fields import Fields, environment_from

__all__ = ["FIELDS", "from_mvapich"]

FIELDS: Fields = {
    "rank": ("MV2_COMM_WORLD_RANK",),
    "world_size": ("MV2_COMM_WORLD_SIZE",),
    "local_rank": ("MV2_COMM_WORLD_LOCAL_RANK",),
    "local_world_size": ("MV2_COMM_WORLD_LOCAL_SIZE",),
    "job_id": (),
}


def from_mvapich(environ: Mapping[str, str]) -> LaunchEnvironment | None:
    """Return what MVAPICH2 says about this process, or None where it did not start it.

    Local.

    Args:
        environ: Environment variables, usually ``os.environ``; never modified.

    Raises:
        LaunchEnvironmentError: A variable is not a number, or two contradict each other.

    Source:
        MVAPICH2 user guide, section on MV2_COMM_WORLD_LOCAL_RANK.
    """
    return environment_from("mvapich", FIELDS, environ)
