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
    fake=_fake,
)
