"""The collectives in a real job, on its own device: CPUs over gloo, and GPUs over NCCL where there are some."""

from pathlib import Path

import pytest
import torch

from .preloaded import PYTHON

SCRIPT = Path(__file__).parent / "scripts" / "check_collectives.py"
LARGE = SCRIPT.with_name("exchange_large.py")
LIMIT = 120


@pytest.mark.parametrize("num_ranks", [1, 4])
def test_on_cpus(preloaded_torchrun, num_ranks):
    variables = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    finished = preloaded_torchrun.run(SCRIPT, ranks=num_ranks, env=variables, timeout=LIMIT)
    assert (finished.returncode, finished.stderr) == (0, "")
    assert finished.stdout.count("on cpu: as on one process") == num_ranks


def test_the_compiler_of_torch_may_be_loaded(preloaded_torchrun):
    variables = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    finished = preloaded_torchrun.run(SCRIPT, "torch._dynamo", ranks=2, env=variables, timeout=LIMIT)
    assert (finished.returncode, finished.stderr) == (0, "")
    assert finished.stdout.count("on cpu: as on one process") == 2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_gpus(preloaded_torchrun):
    num_ranks = min(torch.cuda.device_count(), 4)
    finished = preloaded_torchrun.run(SCRIPT, ranks=num_ranks, env={"OMP_NUM_THREADS": "1"}, timeout=LIMIT)
    assert finished.returncode == 0
    assert finished.stdout.count("on cuda:") == finished.stdout.count("as on one process") == num_ranks


def test_large_pieces_go_through_memory_under_mpi(any_mpi):
    finished = any_mpi.preloaded.run(LARGE, ranks=3, env={"OMP_NUM_THREADS": "1"}, timeout=LIMIT)
    assert (finished.returncode, finished.stderr) == (0, "")
    assert sorted(finished.lines) == [f"rank {rank} of 3: through memory" for rank in range(3)]


@pytest.mark.parametrize(("nodes", "way"), [(2, "through memory"), (4, "over sockets")])
def test_large_pieces_go_through_memory_within_each_node_of_slurm(slurm_cluster, nodes, way):
    options = [f"--nodes={nodes}", "--ntasks=4", "--overcommit"]
    finished = slurm_cluster.srun(*options, PYTHON, LARGE, env={"OMP_NUM_THREADS": "1"}, timeout=LIMIT)
    assert (finished.returncode, finished.stderr) == (0, "")
    assert sorted(finished.lines) == [f"rank {rank} of 4: {way}" for rank in range(4)]
