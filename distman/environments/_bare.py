"""Bare RANK and WORLD_SIZE: torch.distributed.launch, Kubeflow, DeepSpeed, or set by hand.

How many nodes there are, and which this is, goes by too many names to be read here: the ranks find it out when they
meet.

Source:
    PyTorch documentation, torch.distributed, Environment variable initialization.
"""

from __future__ import annotations

from collections.abc import Mapping

from distman.environments._launcher import Family, Launcher, OnFailure


def is_complete(environ: Mapping[str, str]) -> bool:
    """Return whether ``RANK``, ``LOCAL_RANK`` and ``WORLD_SIZE`` are all set, as a launcher sets them."""
    return all(environ.get(name, "").strip() for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"))


BARE = Launcher(
    name="env",
    family=Family.ENV,
    fields={
        "rank": ("RANK",),
        "world_size": ("WORLD_SIZE",),
        "local_rank": ("LOCAL_RANK",),
        "local_world_size": ("LOCAL_WORLD_SIZE",),
        "main_address": ("MASTER_ADDR",),
        "main_port": ("MASTER_PORT",),
    },
    variables=("NODE_RANK",),
    on_failure=OnFailure.WAITS,
    fake=lambda _place: {"MASTER_PORT": ""},  # some set one, but not all
)
