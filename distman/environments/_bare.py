"""Bare RANK and WORLD_SIZE: torch.distributed.launch, Kubeflow, DeepSpeed, or set by hand."""

from __future__ import annotations

from collections.abc import Mapping

from distman.environments._base import LaunchEnvironment
from distman.environments._fields import Fields, environment_from

FIELDS: Fields = {
    "rank": ("RANK",),
    "world_size": ("WORLD_SIZE",),
    "local_rank": ("LOCAL_RANK",),
    "local_world_size": ("LOCAL_WORLD_SIZE",),
    "main_address": ("MASTER_ADDR",),
    "main_port": ("MASTER_PORT",),
    "job_id": (),
}


def from_bare(environ: Mapping[str, str]) -> LaunchEnvironment | None:
    """Return what bare ``RANK`` and ``WORLD_SIZE`` say, or None where one of them is unset.

    How many nodes there are, and which this is, goes by too many names to be read here: the roll call
    finds it out.

    Args:
        environ: Environment variables, usually ``os.environ``; never modified.

    Raises:
        LaunchEnvironmentError: A variable is not a number, or two contradict each other.

    Source:
        PyTorch documentation, torch.distributed, Environment variable initialization.
    """
    return environment_from("env", FIELDS, environ)


def is_complete(environ: Mapping[str, str]) -> bool:
    """Return whether ``RANK``, ``LOCAL_RANK`` and ``WORLD_SIZE`` are all set, as a launcher sets them."""
    return all(environ.get(name, "").strip() for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"))
