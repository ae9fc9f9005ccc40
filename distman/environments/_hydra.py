"""Hydra: mpiexec of MPICH and of Intel MPI."""

from __future__ import annotations

from collections.abc import Mapping

from distman.environments._base import LaunchEnvironment
from distman.environments._fields import Fields, environment_from

FIELDS: Fields = {
    "rank": ("PMI_RANK",),
    "world_size": ("PMI_SIZE",),
    "local_rank": ("MPI_LOCALRANKID",),
    "local_world_size": ("MPI_LOCALNRANKS",),
    "job_id": ("I_MPI_HYDRA_UUID",),
}


def from_hydra(environ: Mapping[str, str]) -> LaunchEnvironment | None:
    """Return what Hydra says about this process, or None where it did not start it.

    ``PMI_RANK`` alone proves nothing: ``srun --mpi=pmi2`` and PALS set it too.

    Args:
        environ: Environment variables, usually ``os.environ``; never modified.

    Raises:
        LaunchEnvironmentError: A variable is not a number, or two contradict each other.

    Source:
        MPICH wiki, Using the Hydra Process Manager; recorded from MPICH 4 and 5 and Intel MPI 2021.
    """
    environment = environment_from("hydra", FIELDS, environ)
    return None if environment is None or environment.local_rank is None else environment
