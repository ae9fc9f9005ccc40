"""PALS: mpiexec and aprun of HPE Cray systems under PBS."""

from __future__ import annotations

from collections.abc import Mapping

from distman.environments._base import LaunchEnvironment
from distman.environments._fields import Fields, environment_from

FIELDS: Fields = {
    "rank": ("PALS_RANKID",),
    "world_size": ("PALS_SIZE", "PMI_SIZE"),
    "local_rank": ("PALS_LOCAL_RANKID", "PMI_LOCAL_RANK"),
    "local_world_size": ("PALS_LOCAL_SIZE", "PMI_LOCAL_SIZE"),
    "node_rank": ("PALS_NODEID",),
    "job_id": ("PALS_APID",),
}


def from_pals(environ: Mapping[str, str]) -> LaunchEnvironment | None:
    """Return what PALS says about this process, or None where it did not start it.

    Slurm and Flux set the same variables on Cray systems, for Cray's MPI to find, and say more themselves:
    they are believed where they agree.

    Args:
        environ: Environment variables, usually ``os.environ``; never modified.

    Raises:
        LaunchEnvironmentError: A variable is not a number, or two contradict each other.

    Source:
        HPE Cray PALS, mpiexec(1), section ENVIRONMENT VARIABLES.
    """
    return environment_from("pals", FIELDS, environ)
