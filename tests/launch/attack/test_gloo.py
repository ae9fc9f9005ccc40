"""Another user of the host connects to gloo's listeners while a group is made: what it ends, and what it does not."""

import secrets
from contextlib import ExitStack

import pytest

from ..preloaded import PYTHON
from ..processes import poll, start
from .attacking import HERE, LIMIT, TRIES

NUM_RANKS = 4
PLACES = ["start", "group"]


def run_chased(scene, hosts, place, kind, at_each):
    """Run a job while another user chases its listeners; return what the ranks said and how often he has tried."""
    count, told = scene.theirs / "count", scene.theirs / "end"
    chase = {"kind": kind, "at_each": at_each, "count": str(count), "end": str(told)}
    arguments = [str(scene.job), str(count), place, str(secrets.randbelow(NUM_RANKS))]
    variables = {"WORLD_SIZE": str(NUM_RANKS), "MASTER_ADDR": "localhost", "DISTMAN_JOB_ID": "grouping"}
    with ExitStack() as stack:
        ranks = []
        if place == "group":
            ranks = start_ranks(stack, hosts, arguments, variables)
            assert poll(lambda: all((scene.job / f"up {rank}").exists() for rank in range(NUM_RANKS)), LIMIT)
        chased = stack.enter_context(scene.attackers((hosts.enter("n1"), scene.settings(chase=chase, kinds=[]))))
        assert poll(count.exists, LIMIT)
        ranks = ranks or start_ranks(stack, hosts, arguments, variables)
        try:
            finished = [rank.wait(timeout=LIMIT) for rank in ranks]
        finally:
            told.touch()
    return finished, chased


def start_ranks(stack, hosts, arguments, variables):
    command = [*hosts.enter("n1"), PYTHON, HERE / "grouping.py", *arguments]
    return [
        stack.enter_context(start(command, env={**hosts.environment, **variables, "RANK": str(rank)}))
        for rank in range(NUM_RANKS)
    ]


@pytest.mark.parametrize("place", PLACES)
def test_a_stranger_who_closes_at_once_ends_the_job_on_all_ranks_or_on_none(namespace_hosts, scene, place):
    """Whether he has taken a connection is a matter of luck: gloo may have waited for another number."""
    finished, _ = run_chased(scene, namespace_hosts, place, "number, closed", NUM_RANKS)
    assert len({one.returncode == 0 for one in finished}) == 1


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", ["silent", "malformed", "small"])
def test_strangers_who_say_what_nobody_waits_for_end_nothing(namespace_hosts, scene, place, kind):
    finished, chased = run_chased(scene, namespace_hosts, place, kind, TRIES // (NUM_RANKS - 1) + 1)
    assert [(one.returncode, one.stderr) for one in finished] == [(0, "")] * NUM_RANKS
    ((tries, _),) = chased[0]["results"].values()
    assert tries >= TRIES
