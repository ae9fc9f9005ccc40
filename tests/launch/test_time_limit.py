"""All ranks stop at the same step before the time of their job is up."""

import time

import pytest

from .preloaded import variables
from .processes import start

LIMIT = 60
PROGRAM = """
import time
from distman import DistributedManager

manager = DistributedManager.initialize()
step = 0
while not manager.should_stop(step):
    step += 1
    time.sleep(0.01)
print(f"stops at {step} with time {manager.time_left() > 0}", flush=True)
"""


@pytest.mark.parametrize("launcher", [["distman", "run", "-n", "2"], ["torchrun", "--nproc-per-node=2"]])
def test_ranks_stop_together_before_the_end(launcher, tmp_path, free_port):
    (tmp_path / "train.py").write_text(PROGRAM)
    command = [*launcher, *([f"--master-port={free_port}"] if launcher[0] == "torchrun" else []), "train.py"]
    env = {**variables(), "DISTMAN_END_TIME": str(time.time() + 20), "DISTMAN_STOP_MARGIN": "15"}
    with start(command, env=env, cwd=tmp_path) as running:
        done = running.wait(timeout=LIMIT)
    assert done.returncode == 0
    (said,) = {line.removeprefix("0: ").removeprefix("1: ") for line in done.stdout.splitlines()}
    assert said.startswith("stops at ")
    assert said.endswith(" with time True")
