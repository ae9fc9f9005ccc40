"""jsrun: the job step manager of IBM LSF. It does not say where rank 0 runs.

Source:
    IBM Job Step Manager, jsrun, section Environment variables.
"""

from __future__ import annotations

from collections.abc import Mapping

from distman.environments._base import read_text
from distman.environments._launcher import Family, Launcher, OnFailure


def _job_id(environ: Mapping[str, str]) -> str | None:
    """Name the job step: the name space of PMIx tells two steps of one LSF job apart."""
    job, step = read_text(environ, "LSB_JOBID"), read_text(environ, "PMIX_NAMESPACE")
    return job if job is None or step is None else f"{job}.{step}"


JSRUN = Launcher(
    name="jsrun",
    family=Family.STEP,
    fields={
        "rank": ("JSM_NAMESPACE_RANK",),
        "world_size": ("JSM_NAMESPACE_SIZE",),
        "local_rank": ("JSM_NAMESPACE_LOCAL_RANK",),
        "local_world_size": ("JSM_NAMESPACE_LOCAL_SIZE",),
        "job_id": ("LSB_JOBID",),
    },
    variables=("JSM_*", "PMIX_*"),
    on_failure=OnFailure.WAITS,
    marks=(),
    derived={"job_id": _job_id},
    why_not=None,
    imitated_by=(),
    allocation=None,
    meets_on_first_node=False,
    agent=None,
    process_names=(),
    expected_hosts=None,
    cancel_command=None,
    may_bind_gpus=True,
    has_own_gpus=None,
    gives_terminals=False,
    uses_munge=False,
    shows_errors=False,
    ends_leftovers=False,
    fake=None,
)
