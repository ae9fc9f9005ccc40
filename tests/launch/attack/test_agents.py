"""torchrun's agents, in whose stores every user of the host writes pickles: c10d opens them, a static rendezvous none.

The first tests show what the pages warn of, which torch may mend one day.
"""

import dataclasses
import os
from contextlib import ExitStack

import pytest

from ..preloaded import PYTHON, server_variables
from ..processes import poll
from .attacking import IS_MARKED, JOB, LIMIT, TRIES, assert_all_in_vain, assert_unharmed

C10D = ["--rdzv-backend=c10d", "--rdzv-id=attacked"]
STATIC = ["--rdzv-backend=static", "--rdzv-id=attacked"]
SECRET = "0123456789abcdef" * 4
WAIT = "import sys, time, pathlib\nwhile not pathlib.Path(sys.argv[1]).exists(): time.sleep(0.05)\n"


def start_agent(stack, hosts, *arguments):
    command = [PYTHON, "-m", "torch.distributed.run", "--nproc-per-node=2", *arguments]
    variables = {**server_variables(), "DISTMAN_SECRET": SECRET}
    return stack.enter_context(hosts.start(command, host="n1", env=variables))


def plant(scene, hosts, where="where c10d looks", tries=TRIES):
    """Let another user of the host write pickles into whatever listens there to all interfaces."""
    settings = scene.settings(plants=where, tries=tries)
    with scene.attackers((hosts.enter("n1"), settings)) as results:
        pass
    return results[0]


def script(scene):
    """A program that other ranks wait for: it knows nothing of distman."""
    path = scene.job / "wait.py"
    path.write_text(WAIT)
    return path, scene.job / "stop"


@pytest.mark.parametrize(
    "arguments",
    [[*C10D, "--nnodes=2", "--rdzv-endpoint=localhost:{port}"], ["--standalone"], []],
    ids=["c10d before the second agent", "standalone", "no options"],
)
def test_agents_run_the_code_of_strangers(namespace_hosts, scene, free_port, arguments):
    with ExitStack() as stack:
        options = [option.format(port=free_port) for option in arguments]
        running = start_agent(stack, namespace_hosts, *options, *script(scene))
        marker = scene.theirs / IS_MARKED

        def is_run():
            if not marker.exists():
                plant(scene, namespace_hosts, tries=12)
            return marker.exists()

        assert poll(is_run, LIMIT), running.stderr
        assert marker.stat().st_uid == os.geteuid()


def start_static(stack, hosts, port, node, logs, *script):
    """Start one of two agents of a static rendezvous; both are on one host."""
    place = ["--nnodes=2", f"--node-rank={node}", "--master-addr=n1", f"--master-port={port}"]
    apart = ["--redirects=2", f"--log-dir={logs}"]  # for an agent says of its own that the other one has left before it
    return start_agent(stack, hosts, *STATIC, *place, *apart, *script)


def test_a_static_rendezvous_unpickles_nothing(namespace_hosts, scene, free_port, tmp_path):
    """Not before the second agent has come, and not while the job runs, which goes on."""
    with ExitStack() as stack:
        agents = [start_static(stack, namespace_hosts, free_port, 0, tmp_path, JOB, str(scene.job))]
        before = plant(scene, namespace_hosts)
        agents += [start_static(stack, namespace_hosts, free_port, 1, tmp_path, JOB, str(scene.job))]
        assert scene.public["url"].startswith("tcp://")
        (scene.job / "attacked").touch()
        after = plant(scene, namespace_hosts)
        (scene.job / "stop").touch()
        finished = [one.wait(timeout=LIMIT) for one in agents]
    for found in (before, after):
        assert_all_in_vain(found)
    said = [log.read_text() for log in tmp_path.rglob("stderr.log")]
    assert said == [""] * 4
    assert_unharmed(scene, *[dataclasses.replace(one, stderr="") for one in finished], num_ranks=4)


@pytest.mark.parametrize("comes_first", [True, False], ids=["before the second agent", "while the ranks run"])
def test_a_static_rendezvous_unpickles_nothing_from_any_key(namespace_hosts, scene, free_port, tmp_path, comes_first):
    """Strangers who spoil every key that the agents have may end the job, but run nothing."""
    with ExitStack() as stack:
        agents = [start_static(stack, namespace_hosts, free_port, 0, tmp_path, *script(scene))]
        found = [plant(scene, namespace_hosts, "everywhere")] if comes_first else []
        agents += [start_static(stack, namespace_hosts, free_port, 1, tmp_path, *script(scene))]
        found += [plant(scene, namespace_hosts, "everywhere")] if not comes_first else []
        (scene.job / "stop").touch()
        agents[0].wait(timeout=LIMIT)  # the other one may wait for it, and is ended with the block
    ((reached, gains),) = found[0]["results"].values()
    assert (reached > 0, gains) == (True, 0)
    assert not (scene.theirs / IS_MARKED).exists()
