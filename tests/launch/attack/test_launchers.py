"""Jobs of the launchers, each with its own source of a secret, while others try to get in and at the keys."""

import pytest

from ..preloaded import PYTHON, server_variables
from ..torchrun import Torchrun
from .attacking import JOB, LIMIT, assert_all_in_vain, assert_unharmed

TRIES = 100  # of each kind: what bare ranks meet a thousand times
KINDS = [
    *(f"join as rank {rank}" for rank in (-1, 0, 1, 2)),
    "replay",
    "read a key",
    "write a key",
    "delete a key",
    "count the keys",
    "false notice",
    "pickles",
]


def start_job(launcher, request, scene):
    """The running job, the hosts on which it runs, and the number of its ranks."""
    job = (JOB, str(scene.job))
    if launcher == "srun":
        cluster = request.getfixturevalue("slurm_cluster")
        return cluster.start_srun("-N2", "-n3", PYTHON, *job), cluster.hosts, 3
    hosts = request.getfixturevalue("namespace_hosts")
    if launcher == "torchrun":
        return hosts.start(Torchrun(PYTHON).command(*job, ranks=3), host="n1", env=server_variables()), hosts, 3
    mpi = request.getfixturevalue(launcher).preloaded
    if launcher == "mpich":
        return hosts.start(mpi.command(*job, ranks=3), host="n1", env=mpi.environment()), hosts, 3
    return mpi.start_on(hosts, *job, ranks_per_host=2), hosts, 4


@pytest.mark.parametrize("launcher", ["torchrun", "mpich", "openmpi", "srun"])
def test_strangers_get_nothing(launcher, request, scene):
    """The first two are on one host, and use the kernel's word; Open MPI tells a secret, and munge does under srun."""
    job, hosts, num_ranks = start_job(launcher, request, scene)
    with job as running:
        public = scene.public
        is_local = not public["url"].startswith("tcp:")
        settings = scene.settings(public, kinds=KINDS, tries=TRIES)
        with scene.attackers((hosts.enter("n1"), settings), (hosts.enter("ctl"), settings)) as results:
            pass
        (scene.job / "stop").touch()
        finished = running.wait(timeout=LIMIT)
    assert is_local is (launcher in ("torchrun", "mpich"))
    assert_unharmed(scene, finished, num_ranks=num_ranks)
    assert_all_in_vain(results[0], tries=TRIES)
    if is_local:
        assert results[1]["doors"] == 0
    else:
        assert_all_in_vain(results[1], tries=TRIES)
