"""Open MPI 4 and 5: mpirun and mpiexec.

``OMPI_COMM_WORLD_NODE_RANK`` is not read: it is the rank within the node. Version 4 tells the host of ``mpirun``, which
is taken for rank 0's host in a job of several nodes; version 5 tells none.

Source:
    Open MPI documentation, Environment variables set for MPI applications.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from distman.environments._base import read_number, read_text
from distman.environments._launcher import Family, Launcher, OnFailure, Place

_LAUNCH_NODE = "OMPI_MCA_orte_hnp_uri"
_IPV4 = re.compile(r"tcp4?://(\d+\.\d+\.\d+\.\d+)")


def _launch_node(environ: Mapping[str, str]) -> str | None:
    local = read_number(environ, "OMPI_COMM_WORLD_LOCAL_SIZE")
    if local is not None and local == read_number(environ, "OMPI_COMM_WORLD_SIZE"):
        return None
    match = _IPV4.search(read_text(environ, _LAUNCH_NODE) or "")
    return match[1] if match else None


def _fake(place: Place) -> dict[str, str]:
    return {
        _LAUNCH_NODE: "",
        "OMPI_COMM_WORLD_NODE_RANK": str(place.local_rank),
        "PMIX_HOSTNAME": place.host,
        "PMIX_NAMESPACE": "prterun-n1-1000@1",
        "PMIX_RANK": str(place.rank),
    }


OPENMPI = Launcher(
    name="openmpi",
    family=Family.MPI,
    fields={
        "rank": ("OMPI_COMM_WORLD_RANK",),
        "world_size": ("OMPI_COMM_WORLD_SIZE",),
        "local_rank": ("OMPI_COMM_WORLD_LOCAL_RANK",),
        "local_world_size": ("OMPI_COMM_WORLD_LOCAL_SIZE",),
        "main_address": (_LAUNCH_NODE,),
        "job_id": ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"),
    },
    variables=("OMPI_*", "PMIX_*", "PRTE_*"),
    on_failure=OnFailure.ENDS_JOB,
    derived={"main_address": _launch_node},
    process_names=("mpiexec", "mpirun"),
    fake=_fake,
)
