"""The examples of NNHandler's documents, under python and torchrun, with other import lines."""

from pathlib import Path

import pytest

from .preloaded import PYTHON
from .processes import launch

EXAMPLES = Path(__file__).parent / "scripts" / "nnhandler_examples.py"
LIMIT = 120


@pytest.mark.parametrize("launcher", ["python", "preloaded_torchrun"])
def test_examples(request, launcher, tmp_path):
    num_ranks = 1 if launcher == "python" else 2
    command = (EXAMPLES, str(num_ranks), tmp_path)
    if launcher == "python":
        finished = launch([PYTHON, *command], timeout=LIMIT)
    else:
        finished = request.getfixturevalue(launcher).run(*command, ranks=num_ranks, timeout=LIMIT)
    assert finished.returncode == 0, finished
    assert finished.stdout.count("done\n") == num_ranks
    assert finished.stdout.count("Checkpoint saved to checkpoint.pth") == 1, "on rank 0 alone"
    assert finished.stdout.count("epoch 10/10: ") == 1
