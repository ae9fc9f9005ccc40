"""Flux: flux run and flux submit. It does not say where rank 0 runs.

Source:
    flux-environment(7), section Task environment.
"""

from __future__ import annotations

from distman.environments._launcher import Family, Launcher, OnFailure

FLUX = Launcher(
    name="flux",
    family=Family.STEP,
    fields={
        "rank": ("FLUX_TASK_RANK",),
        "world_size": ("FLUX_JOB_SIZE",),
        "local_rank": ("FLUX_TASK_LOCAL_ID",),
        "num_nodes": ("FLUX_JOB_NNODES",),
        "job_id": ("FLUX_JOB_ID",),
    },
    variables=("FLUX_*", "PMI_*"),
    on_failure=OnFailure.WAITS,
    fake=lambda place: {"FLUX_JOB_ID": f"f{place.job_id}"},  # letters and digits after an f
)
