"""PALS: mpiexec and aprun of HPE Cray systems under PBS.

Slurm and Flux set the same variables on Cray systems, for Cray's MPI to find, and say more themselves.

Source:
    HPE Cray PALS, mpiexec(1), section ENVIRONMENT VARIABLES.
"""

from __future__ import annotations

from distman.environments._launcher import Family, Launcher, OnFailure, Place


def _fake(place: Place) -> dict[str, str]:
    return {
        "PALS_APID": "00000000-0000-4000-8000-000000000000",
        "PALS_SIZE": "",
        "PALS_LOCAL_SIZE": "",
        "PMI_RANK": str(place.rank),
        "PMI_SIZE": str(place.world_size),
        "PMI_LOCAL_RANK": str(place.local_rank),
        "PMI_LOCAL_SIZE": str(place.local_world_size),
    }


PALS = Launcher(
    name="pals",
    family=Family.MPI,
    fields={
        "rank": ("PALS_RANKID",),
        "world_size": ("PALS_SIZE", "PMI_SIZE"),
        "local_rank": ("PALS_LOCAL_RANKID", "PMI_LOCAL_RANK"),
        "local_world_size": ("PALS_LOCAL_SIZE", "PMI_LOCAL_SIZE"),
        "node_rank": ("PALS_NODEID",),
        "job_id": ("PALS_APID",),
    },
    variables=("PALS_*", "PMI_*"),
    on_failure=OnFailure.WAITS,
    imitated_by=("flux", "slurm"),
    process_names=("mpiexec", "mpirun"),
    fake=_fake,
)
