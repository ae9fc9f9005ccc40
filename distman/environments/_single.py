"""No launcher: one process."""

from __future__ import annotations

from distman.environments._launcher import Family, Launcher, OnFailure, Place


def _fake(place: Place) -> dict[str, str]:
    if place.world_size > 1:
        raise ValueError(
            f"tasks must be 1 for one process without a launcher, got {place.world_size}. Name a launcher."
        )
    return {}


SINGLE = Launcher(
    name="single",
    family=Family.NONE,
    fields={},
    variables=(),
    on_failure=OnFailure.ENDS_JOB,
    marks=(),
    derived={},
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
    fake=_fake,
)
