"""submitit's local executor, which starts tasks on this machine; under Slurm its tasks are those of a step.

Source:
    submitit, ``submitit/local/local.py``, ``LocalJobEnvironment``.
"""

from __future__ import annotations

from collections.abc import Mapping

from distman.environments._base import read_text
from distman.environments._launcher import Family, Launcher, OnFailure

_NUM_TASKS = "SUBMITIT_LOCAL_NTASKS"
_INNER = ("SLURM_STEP_NUM_TASKS", "FLUX_JOB_SIZE", "JSM_NAMESPACE_SIZE")


def _why_not(environ: Mapping[str, str]) -> str | None:
    """A single task may start the ranks of another launcher, which inherit its variables."""
    if read_text(environ, _NUM_TASKS) != "1":
        return None
    inner = next((name for name in _INNER if read_text(environ, name) not in (None, "1")), None)
    return None if inner is None else f"its one task has started more ({inner}={read_text(environ, inner)})"


SUBMITIT = Launcher(
    name="submitit",
    family=Family.STEP,
    fields={
        "rank": ("SUBMITIT_LOCAL_GLOBALID",),
        "world_size": (_NUM_TASKS,),
        "local_rank": ("SUBMITIT_LOCAL_LOCALID",),
        "node_rank": ("SUBMITIT_LOCAL_NODEID",),
        "num_nodes": ("SUBMITIT_LOCAL_JOB_NUM_NODES",),
        "job_id": ("SUBMITIT_LOCAL_JOB_ID",),
    },
    variables=("SUBMITIT_*",),
    on_failure=OnFailure.WAITS,
    why_not=_why_not,
    may_bind_gpus=False,
)
