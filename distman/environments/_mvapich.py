"""MVAPICH started by its own mpirun_rsh; its mpiexec is Hydra."""

from __future__ import annotations

from collections.abc import Mapping

from distman.environments._base import LaunchEnvironment
from distman.environments._fields import Fields, environment_from

FIELDS: Fields = {
    "rank": ("MV2_COMM_WORLD_RANK", "MVP_COMM_WORLD_RANK"),
    "world_size": ("MV2_COMM_WORLD_SIZE", "MVP_COMM_WORLD_SIZE"),
    "local_rank": ("MV2_COMM_WORLD_LOCAL_RANK", "MVP_COMM_WORLD_LOCAL_RANK"),
    "local_world_size": ("MV2_COMM_WORLD_LOCAL_SIZE", "MVP_COMM_WORLD_LOCAL_SIZE"),
    "node_rank": ("MV2_NODE_ID", "MVP_NODE_ID"),
    "num_nodes": ("MV2_NUM_NODES_IN_JOB", "MVP_NUM_NODES_IN_JOB"),
    "job_id": ("MPIRUN_ID",),
}


def from_mvapich(environ: Mapping[str, str]) -> LaunchEnvironment | None:
    """Return what mpirun_rsh says about this process, or None where it did not start it.

    MVAPICH 3 spells its variables ``MVP_``, MVAPICH2 ``MV2_``.

    Args:
        environ: Environment variables, usually ``os.environ``; never modified.

    Raises:
        LaunchEnvironmentError: A variable is not a number, or two contradict each other.

    Source:
        MVAPICH2, ``src/pm/mpirun/src/mpispawn.c``, setup_global_environment and setup_local_environment.
    """
    return environment_from("mvapich", FIELDS, environ)
