"""A rank that holds up the others is named in jobs of real processes, by each kind of loop."""

import json
from pathlib import Path

import pytest

from .preloaded import variables
from .processes import start

LIMIT = 120
JOB = Path(__file__).parents[1] / "slow_job.py"


def run(*options):
    """Run a job on 3 ranks of which rank 1 takes twice as long for something; return what it said of slow ranks."""
    command = ["distman", "run", "-n", "3", str(JOB), "--rank", "1", "--factor", "2", *options]
    with start(command, env={**variables(), "OMP_NUM_THREADS": "1"}) as running:
        done = running.wait(timeout=LIMIT)
    assert done.returncode == 0, done
    return json.loads(done.stdout[done.stdout.index("[") :]), done.stderr


@pytest.mark.parametrize(
    ("loop", "phase", "name"),
    [
        ("stepper", "forward", "forward"),
        ("handler", "backward", "backward"),
        ("ddp", "loading", "loading"),
        ("ddp", "backward", "computing"),
    ],
)
def test_a_slow_rank_is_named_with_the_reason(loop, phase, name):
    found, said = run("--loop", loop, "--phase", phase, "--since", "0", "--seconds", "0.02", "--steps", "120")
    assert {tuple(one[1:3]) for one in found} == {(1, name)}
    assert all(factor > 1.15 for _, _, _, factor in found)
    (line,) = [line for line in said.splitlines() if "is slow: " in line]
    assert "rank 1 (" in line
    assert f"is slow: {name} takes {found[0][3]:.2f} times as long as on the other ranks" in line
