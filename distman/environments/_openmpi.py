"""Open MPI 4 and 5: mpirun and mpiexec."""

from __future__ import annotations

import re
from collections.abc import Mapping

from distman.environments._base import LaunchEnvironment, read_count, read_text
from distman.environments._fields import Fields, environment_from

_LAUNCH_NODE = "OMPI_MCA_orte_hnp_uri"
_IPV4 = re.compile(r"tcp4?://(\d+\.\d+\.\d+\.\d+)")

FIELDS: Fields = {
    "rank": ("OMPI_COMM_WORLD_RANK",),
    "world_size": ("OMPI_COMM_WORLD_SIZE",),
    "local_rank": ("OMPI_COMM_WORLD_LOCAL_RANK",),
    "local_world_size": ("OMPI_COMM_WORLD_LOCAL_SIZE",),
    "main_address": (_LAUNCH_NODE,),
    "job_id": ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"),
}


def from_openmpi(environ: Mapping[str, str]) -> LaunchEnvironment | None:
    """Return what Open MPI says about this process, or None where it did not start it.

    ``OMPI_COMM_WORLD_NODE_RANK`` is not read: it is the rank within the node. Version 4 tells the host
    of ``mpirun``, which is taken for rank 0's host in a job of several nodes; version 5 tells none.

    Args:
        environ: Environment variables, usually ``os.environ``; never modified.

    Raises:
        LaunchEnvironmentError: A variable is not a number, or two contradict each other.

    Source:
        Open MPI documentation, Environment variables set for MPI applications.
    """
    return environment_from("openmpi", FIELDS, environ, main_address=_launch_node(environ))


def _launch_node(environ: Mapping[str, str]) -> str | None:
    local = read_count(environ, *FIELDS["local_world_size"])
    if local is not None and local == read_count(environ, *FIELDS["world_size"]):
        return None
    match = _IPV4.search(read_text(environ, _LAUNCH_NODE) or "")
    return match[1] if match else None
