"""No launcher: one process."""

from __future__ import annotations

from distman.environments._launcher import Family, Launcher, OnFailure

SINGLE = Launcher(
    name="single",
    family=Family.NONE,
    fields={},
    variables=(),
    on_failure=OnFailure.ENDS_JOB,
)
