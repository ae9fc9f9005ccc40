"""The collectives in a real job, on its own device: CPUs over gloo, and GPUs over NCCL where there are some."""

from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parent / "scripts" / "check_collectives.py"
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
