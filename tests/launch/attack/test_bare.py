"""Bare ranks, on one host and on two, while other users of their hosts and another host do what they can."""

from contextlib import ExitStack

from distman._job.meeting.address import derive_ports
from distman._job.meeting.places import OnThisHost

from ..preloaded import PYTHON
from ..processes import start
from .attacking import HERE, LIMIT, TRIES, assert_all_in_vain, assert_unharmed, rank_command

SECRET = "0123456789abcdef" * 4
JOINS = [f"join as rank {rank}" for rank in (-1, 0, 1, 2)]
HALF = TRIES // 2
NUM_NAMES = 1_000


def start_rank(stack, hosts, host, scene, rank, **env):
    variables = {"RANK": str(rank), "WORLD_SIZE": "3", **hosts.environment, **env}
    return stack.enter_context(start([*hosts.enter(host), *rank_command(scene)], env=variables))


TURN_IS_HELD = "opening the job's store without a look at who else does: some process holds "
"""What the rank says that opens the store where a squatter holds its names."""


def end(scene, *ranks):
    (scene.job / "stop").touch()
    return [rank.wait(timeout=LIMIT) for rank in ranks]


def test_one_host(namespace_hosts, scene):
    job = {"DISTMAN_JOB_ID": "attacked", "MASTER_ADDR": "localhost"}
    prefix = OnThisHost("attacked", (), derive_ports("attacked"), "", is_host=False).prefix
    here, elsewhere = namespace_hosts.enter("n1"), namespace_hosts.enter("ctl")
    with ExitStack() as stack:
        names = scene.squatter(here, prefix=prefix, num_names=NUM_NAMES, job="attacked/0")
        squatted = stack.enter_context(names)
        ranks = [start_rank(stack, namespace_hosts, "n1", scene, 0, **job)]
        with scene.attackers((here, scene.settings(waits=True, kinds=JOINS))) as before:
            pass
        ranks += [start_rank(stack, namespace_hosts, "n1", scene, rank, **job) for rank in (1, 2)]
        public = scene.public
        (scene.job / "attacked").touch()
        with scene.attackers(
            (here, scene.settings(public, others=scene.open_ports())),
            (here, scene.settings(public, kinds=[], crowd=True)),
            (elsewhere, scene.settings(public)),
        ) as after:
            pass
        finished = end(scene, *ranks)
    assert_unharmed(scene, *finished, num_ranks=3, told=TURN_IS_HELD)
    for found in (*before, *after[:2]):
        assert_all_in_vain(found)
    assert after[2]["doors"] == 0
    assert after[2]["results"] == {}
    assert scene.open_ports("n1") == [], "of gloo"
    assert squatted["guests"] >= NUM_NAMES
    assert squatted["secrets"] == 0


def test_two_hosts(namespace_hosts, scene):
    """Two of the ports at which the ranks look first are taken: by one who poses as the store, and by a relay to it."""
    job = {"DISTMAN_JOB_ID": "attacked", "MASTER_ADDR": "n1", "DISTMAN_SECRET": SECRET}
    *taken, port = derive_ports("attacked", SECRET.encode())[:3]  # which they may know from another start
    here, there, elsewhere = map(namespace_hosts.enter, ("n1", "n2", "ctl"))
    address = {"addresses": [["n1", port]]}
    with ExitStack() as stack:
        squatted = stack.enter_context(scene.squatter(here, ports=taken, real=[["n1", port]], job="attacked"))
        ranks = [start_rank(stack, namespace_hosts, "n1", scene, 0, **job)]
        with scene.attackers((here, scene.settings(waits=True, kinds=JOINS, **address))) as before:
            pass
        ranks += [start_rank(stack, namespace_hosts, host, scene, rank, **job) for rank, host in ((1, "n1"), (2, "n2"))]
        public = scene.public
        (scene.job / "attacked").touch()
        with scene.attackers(
            (here, scene.settings(public, tries=HALF, others=scene.open_ports())),
            (elsewhere, scene.settings(public, tries=HALF, crowd=True)),
            (there, scene.settings(public, tries=HALF, kinds=[], others=scene.open_ports("n1"))),
        ) as after:
            dialled = start(
                [*there, PYTHON, HERE / "dials.py", str(TRIES), *map(str, taken)],
                env={"RANK": "1", "WORLD_SIZE": "3", **namespace_hosts.environment, **job},
            )
            refused = stack.enter_context(dialled).wait(timeout=LIMIT)
        finished = end(scene, *ranks)
    assert_unharmed(scene, *finished, num_ranks=3)
    for found in (*before, *after):
        assert_all_in_vain(found, tries=HALF)
    assert refused.stdout == f"{TRIES} refused\n", refused
    assert squatted["guests"] >= TRIES
    assert squatted["relayed"] >= TRIES // 2
    assert squatted["secrets"] == 0
