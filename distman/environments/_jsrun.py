"""jsrun: the job step manager of IBM LSF."""

from __future__ import annotations

from collections.abc import Mapping

from distman.environments._base import LaunchEnvironment, read_text
from distman.environments._fields import Fields, environment_from

FIELDS: Fields = {
    "rank": ("JSM_NAMESPACE_RANK",),
    "world_size": ("JSM_NAMESPACE_SIZE",),
    "local_rank": ("JSM_NAMESPACE_LOCAL_RANK",),
    "local_world_size": ("JSM_NAMESPACE_LOCAL_SIZE",),
    "job_id": ("LSB_JOBID",),
}


def from_jsrun(environ: Mapping[str, str]) -> LaunchEnvironment | None:
    """Return what jsrun says about this process, or None where it did not start it.

    On several nodes ``MASTER_ADDR`` must be set: jsrun does not say where rank 0 runs.

    Args:
        environ: Environment variables, usually ``os.environ``; never modified.

    Raises:
        LaunchEnvironmentError: A variable is not a number, or two contradict each other.

    Source:
        IBM Job Step Manager, jsrun, section Environment variables.
    """
    return environment_from("jsrun", FIELDS, environ, job_id=_job_id(environ))


def _job_id(environ: Mapping[str, str]) -> str | None:
    """Name the job step: the name space of PMIx tells two steps of one LSF job apart."""
    job, step = read_text(environ, *FIELDS["job_id"]), read_text(environ, "PMIX_NAMESPACE")
    return job if job is None or step is None else f"{job}.{step}"
