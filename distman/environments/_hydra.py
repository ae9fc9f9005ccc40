"""Hydra: mpiexec of MPICH and of Intel MPI.

``PMI_RANK`` alone proves nothing: ``srun --mpi=pmi2`` and PALS set it too.

Source:
    MPICH wiki, Using the Hydra Process Manager; recorded from MPICH 4 and 5 and Intel MPI 2021.
"""

from __future__ import annotations

from distman.environments._launcher import Family, Launcher, OnFailure

HYDRA = Launcher(
    name="hydra",
    family=Family.MPI,
    fields={
        "rank": ("PMI_RANK",),
        "world_size": ("PMI_SIZE",),
        "local_rank": ("MPI_LOCALRANKID",),
        "local_world_size": ("MPI_LOCALNRANKS",),
        "job_id": ("I_MPI_HYDRA_UUID",),
    },
    variables=("HYDRA_*", "I_MPI_*", "MPIR_*", "MPI_*", "PMI_*"),
    on_failure=OnFailure.NEEDS_ABORT,
    marks=(("MPI_LOCALRANKID",),),
    process_names=("hydra_pmi_proxy", "hydra_bstrap_pro", "mpiexec", "mpirun"),
    # Only Intel MPI names the job.
    fake=lambda place: {"PMI_FD": "9", "PMI_HOSTNAME": place.host, "I_MPI_HYDRA_UUID": ""},
)
