"""Jobs of the launchers, each with its own source of a secret, while others try to get in and at the keys."""

import dataclasses
import re
from contextlib import ExitStack

import pytest

from ..mpi import WORDS_OF_PRRTE
from ..preloaded import PYTHON, server_variables
from ..torchrun import Torchrun
from .attacking import JOB, LIMIT, TRIES, assert_all_in_vain, assert_unharmed

SECRET = "0123456789abcdef" * 4
OF_AGENT = ("TCPStoreLibUvBackend.cpp", "a malformed message is dropped: reading where rank 0 has opened the job's")
# The agent that serves torchrun's store may leave before another one has heard that all agents are done.
LOST_BY_AGENT = re.compile(
    r"^\[W.*\bTCPStore\.cpp.* recvValueWithTimeout failed (.*\n)+?\n|^E.*\belastic/agent/server/api\.py.*\n",
    re.MULTILINE,
)
NUMBER_OF_RANK = re.compile(r"^\d: ", re.MULTILINE)  # before each line that distman run shows
FEW = TRIES // 5  # from each place: a door is the same under all launchers, and bare ranks are tried more often


def start_job(launcher, request, scene):
    """The running job, the hosts on which it runs, and the number of its ranks."""
    job = (JOB, str(scene.job))
    if launcher == "srun":
        cluster = request.getfixturevalue("slurm_cluster")
        return cluster.start_srun("-N2", "-n3", PYTHON, *job), cluster.hosts, 3
    hosts = request.getfixturevalue("namespace_hosts")
    if launcher == "distman-run":
        command = [PYTHON, "-m", "distman", "run", "-n", "3", *job]
        return hosts.start(command, host="n1", env=server_variables()), hosts, 3
    if launcher == "torchrun":
        return hosts.start(Torchrun(PYTHON).command(*job, ranks=3), host="n1", env=server_variables()), hosts, 3
    mpi = request.getfixturevalue(launcher).preloaded
    if launcher == "mpich":
        return hosts.start(mpi.command(*job, ranks=3), host="n1", env=mpi.environment()), hosts, 3
    return mpi.start_on(hosts, *job, ranks_per_host=2), hosts, 4


def attack(scene, hosts, *, is_local):
    """Let others do all they can at the store, on the first host and from another one, and end the job.

    The other ports of a rank are no different under a launcher: bare ranks are attacked there.
    """
    public = scene.public
    assert public["url"].startswith("unix:" if is_local else "tcp://")
    (scene.job / "attacked").touch()
    with scene.attackers(
        (hosts.enter("n1"), scene.settings(public, tries=FEW)),
        (hosts.enter("ctl"), scene.settings(public, tries=FEW)),
        (hosts.enter("ctl" if not is_local else "n1"), scene.settings(public, tries=FEW, kinds=[], crowd=True)),
    ) as results:
        pass
    (scene.job / "stop").touch()
    here, elsewhere, crowd = results
    assert_all_in_vain(here, tries=FEW)
    assert_all_in_vain(crowd, tries=FEW)
    if is_local:
        assert (elsewhere["doors"], elsewhere["results"], scene.open_ports("n1")) == (0, {}, [])
    else:
        assert_all_in_vain(elsewhere, tries=FEW)


@pytest.mark.parametrize("launcher", ["distman-run", "torchrun", "mpich", "openmpi", "srun"])
def test_strangers_get_nothing(launcher, request, scene):
    """The first three are on one host and use the kernel's word; Open MPI tells a secret, and munge does under srun."""
    job, hosts, num_ranks = start_job(launcher, request, scene)
    with job as running:
        attack(scene, hosts, is_local=launcher in ("distman-run", "torchrun", "mpich"))
        finished = running.wait(timeout=LIMIT)
    said = NUMBER_OF_RANK.sub("", finished.stdout)
    finished = dataclasses.replace(finished, stdout=said, stderr=WORDS_OF_PRRTE.sub("", finished.stderr))
    assert_unharmed(scene, finished, num_ranks=num_ranks)


def test_torchrun_on_two_hosts(namespace_hosts, scene, free_port):
    with ExitStack() as stack:
        running = [start_torchrun(stack, namespace_hosts, node, free_port, scene) for node in (0, 1)]
        attack(scene, namespace_hosts, is_local=False)
        finished = [without_words_of_the_agent(one.wait(timeout=LIMIT)) for one in running]
    assert_unharmed(scene, *finished, num_ranks=3)


def without_words_of_the_agent(finished):
    """Leave out what torch's store says of guests that are gone, and the one warning of an answer that is none.

    So is what an agent says of the store that is gone when all is done: then the exit code is 0 all the same.
    """
    lines = LOST_BY_AGENT.sub("", finished.stderr).splitlines(keepends=True)
    kept = [line for line in lines if not any(words in line for words in OF_AGENT)]
    return dataclasses.replace(finished, stderr="".join(kept))


def start_torchrun(stack, hosts, node, port, scene):
    options = ["--nnodes=2", f"--node-rank={node}", "--master-addr=n1", f"--master-port={port}"]
    command = [PYTHON, "-m", "torch.distributed.run", *options, f"--nproc-per-node={2 - node}", JOB, str(scene.job)]
    env = {**server_variables(), "DISTMAN_SECRET": SECRET}
    return stack.enter_context(hosts.start(command, host=f"n{1 + node}", env=env))
