"""The example on real data, unchanged under every launcher: accuracy, the same weights on all ranks, no noise.

Under `sbatch`, torchrun started by `srun`, MPI, and on several hosts: see `test_job_scripts`.
"""

import re
from pathlib import Path

from .mpi import without_words_of_prrte
from .preloaded import PYTHON
from .processes import launch

DIGITS = Path(__file__).parents[2] / "docs" / "examples" / "digits.py"
LIMIT = 120


def assert_learned(finished, *, ranks, nodes=1, method):
    assert finished.returncode == 0
    assert without_words_of_prrte(finished.stderr) == ""
    result = re.search(r"test accuracy ([\d.]+), weights \w+ on all (\d+) ranks", finished.stdout)
    assert result, "rank 0 prints the result"
    assert float(result[1]) >= 0.97
    assert int(result[2]) == ranks
    assert f"rank 0 of {ranks}," in finished.stdout
    assert f"node 0 of {nodes}," in finished.stdout
    assert f", {method})" in finished.stdout
    assert len(re.findall(r"^epoch ", finished.stdout, re.MULTILINE)) == 6


def test_plain_python():
    assert_learned(launch([PYTHON, DIGITS], timeout=LIMIT), ranks=1, method="single")


def test_torchrun(preloaded_torchrun):
    finished = preloaded_torchrun.run(DIGITS, ranks=2, env={"OMP_NUM_THREADS": "1"}, timeout=LIMIT)
    assert_learned(finished, ranks=2, method="torchrun")
