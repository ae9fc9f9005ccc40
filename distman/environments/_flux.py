"""Flux: flux run and flux submit."""

from __future__ import annotations

from collections.abc import Mapping

from distman.environments._base import LaunchEnvironment
from distman.environments._fields import Fields, environment_from

FIELDS: Fields = {
    "rank": ("FLUX_TASK_RANK",),
    "world_size": ("FLUX_JOB_SIZE",),
    "local_rank": ("FLUX_TASK_LOCAL_ID",),
    "num_nodes": ("FLUX_JOB_NNODES",),
    "job_id": ("FLUX_JOB_ID",),
}


def from_flux(environ: Mapping[str, str]) -> LaunchEnvironment | None:
    """Return what Flux says about this process, or None where it did not start it.

    On several nodes ``MASTER_ADDR`` must be set: Flux does not say where rank 0 runs.

    Args:
        environ: Environment variables, usually ``os.environ``; never modified.

    Raises:
        LaunchEnvironmentError: A variable is not a number, or two contradict each other.

    Source:
        flux-environment(7), section Task environment.
    """
    return environment_from("flux", FIELDS, environ)
