"""torchrun and every other front end of torch.distributed.elastic."""

from __future__ import annotations

from collections.abc import Mapping

from distman.environments._base import LaunchEnvironment
from distman.environments._fields import Fields, environment_from

MARK = "TORCHELASTIC_RUN_ID"
"""The variable that only the elastic agent sets."""

FIELDS: Fields = {
    "rank": ("RANK",),
    "world_size": ("WORLD_SIZE",),
    "local_rank": ("LOCAL_RANK",),
    "local_world_size": ("LOCAL_WORLD_SIZE",),
    "node_rank": ("GROUP_RANK",),
    "num_nodes": ("GROUP_WORLD_SIZE",),
    "main_address": ("MASTER_ADDR",),
    "main_port": ("MASTER_PORT",),
    "job_id": (MARK,),
}


def from_torchrun(environ: Mapping[str, str]) -> LaunchEnvironment | None:
    """Return what torchrun says about this process, or None where it did not start it.

    Args:
        environ: Environment variables, usually ``os.environ``; never modified.

    Raises:
        LaunchEnvironmentError: A variable is not a number, or two contradict each other.

    Source:
        PyTorch documentation, torchrun, section Environment Variables.
    """
    return environment_from("torchrun", FIELDS, environ) if MARK in environ else None
