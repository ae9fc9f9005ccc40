"""``distman run``: the ranks of a job on this machine, started by this package."""

from __future__ import annotations

from distman.environments._bare import BARE
from distman.environments._launcher import Family, Launcher, OnFailure

RUN_ID = "DISTMAN_RUN_ID"
"""The variable that names one start of the ranks."""


DISTMAN_RUN = Launcher(
    name="distman-run",
    family=Family.ENV,
    fields={**BARE.fields, "job_id": (RUN_ID,)},
    variables=(),
    on_failure=OnFailure.ENDS_JOB,
    marks=((RUN_ID,),),
    may_bind_gpus=False,
    shows_errors=True,
)
