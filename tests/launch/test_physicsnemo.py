"""The example of physicsnemo's manual, under python, torchrun and mpirun, with another import line."""

from pathlib import Path

import pytest

from .preloaded import PYTHON
from .processes import launch

EXAMPLE = Path(__file__).parent / "scripts" / "physicsnemo_example.py"
LIMIT = 120


@pytest.mark.parametrize("launcher", ["python", "preloaded_torchrun", "openmpi"])
def test_example(request, launcher):
    num_ranks = 1 if launcher == "python" else 2
    if launcher == "python":
        finished = launch([PYTHON, EXAMPLE], timeout=LIMIT)
    else:
        started_by = request.getfixturevalue(launcher)
        finished = getattr(started_by, "preloaded", started_by).run(EXAMPLE, ranks=num_ranks, timeout=LIMIT)
    assert finished.returncode == 0, finished
    said = [line.split(": ") for line in sorted(finished.stdout.splitlines())]
    assert [place for place, _ in said] == [f"{rank} of {num_ranks}" for rank in range(num_ranks)]
    (trained,) = {result for _, result in said}
    assert trained.endswith(" True")
