"""On which host Slurm puts each rank, as far as the environment of one rank tells."""

import pytest

from distman.environments import LAUNCHERS
from distman.errors import LaunchEnvironmentError
from distman.testing import fake_environment

from .recordings import recorded

expected_hosts = LAUNCHERS["slurm"].expected_hosts


@pytest.mark.parametrize(
    ("name", "hosts"),
    [
        ("slurm-srun-N2n4", ["n1", "n1", "n2", "n2"]),
        ("slurm-sbatch-srun", ["n1", "n1", "n2", "n2"]),
        ("slurm-sbatch-srun-relative1", ["n2", "n2"]),
        ("slurm-srun-n1", ["n3"]),
        ("slurm-srun-cyclic", []),
        ("slurm-sbatch-nosrun", []),
        ("openmpi5-pypi", []),
    ],
)
def test_every_rank_of_a_recording_expects_the_same_hosts(name, hosts):
    assert [expected_hosts(environ) for environ in recorded(name)] == [hosts] * len(recorded(name))


@pytest.mark.parametrize(
    ("nodes", "tasks", "hosts"),
    [(2, 3, ["n1", "n1", "n2"]), (3, 4, ["n1", "n1", "n2", "n3"]), (3, 3, ["n1", "n2", "n3"])],
)
def test_uneven_blocks_are_followed(nodes, tasks, hosts):
    for environ in fake_environment("slurm", nodes=nodes, tasks=tasks):
        assert expected_hosts(environ) == hosts


def test_cyclic_tasks_are_seen_without_the_distribution_being_named():
    for environ in recorded("slurm-srun-cyclic"):
        del environ["SLURM_DISTRIBUTION"]
        assert expected_hosts(environ) == []


@pytest.mark.parametrize(("node", "tasks_here"), [("2", "0"), ("0", "1,2"), ("1", "3")])
def test_an_arbitrary_distribution_is_seen_on_every_node(node, tasks_here):
    # srun -m arbitrary with the host file n3, n1, n1, n2
    step = {"SLURM_STEP_NODELIST": "n[1-3]", "SLURM_STEP_TASKS_PER_NODE": "2,1(x2)"}
    assert expected_hosts(step | {"SLURM_NODEID": node, "SLURM_GTIDS": tasks_here}) == []


@pytest.mark.parametrize(
    "left_out", ["SLURM_STEP_NODELIST", "SLURM_STEP_TASKS_PER_NODE", "SLURM_NODEID", "SLURM_GTIDS"]
)
def test_without_the_step_nothing_is_expected(left_out):
    environ = fake_environment("slurm", nodes=2, tasks=4)[3]
    assert expected_hosts(environ) != []
    del environ[left_out]
    assert expected_hosts(environ) == []


def test_a_node_beyond_the_step_is_expected_nowhere():
    assert expected_hosts(fake_environment("slurm")[0] | {"SLURM_NODEID": "9"}) == []


@pytest.mark.parametrize(("name", "text"), [("SLURM_STEP_NODELIST", "n[2-1]"), ("SLURM_STEP_TASKS_PER_NODE", "2(x")])
def test_lists_without_meaning_are_an_error(name, text):
    with pytest.raises(LaunchEnvironmentError):
        expected_hosts(fake_environment("slurm")[0] | {name: text})
