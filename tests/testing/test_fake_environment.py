"""What a fake environment promises: the launcher is found in it, with every rank in its place."""

import pytest

from distman.environments import LAUNCHERS, LaunchEnvironment, detect
from distman.testing import fake_environment

STARTED = [launcher for launcher in LAUNCHERS if launcher != "single"]
SIZES = [
    (1, 1, [1]),
    (1, 3, [3]),
    (2, 2, [1, 1]),
    (2, 3, [2, 1]),
    (2, 4, [2, 2]),
    (3, 7, [3, 2, 2]),
]
NOT_FAKED = {("openmpi", "main_address")}


def told(launcher, **values):
    """Return the values of those fields that the launcher sets in a fake environment."""
    fields = {field for field in LAUNCHERS[launcher].fields if (launcher, field) not in NOT_FAKED}
    return {field: value for field, value in values.items() if field in fields}


@pytest.mark.parametrize(("nodes", "tasks", "counts"), SIZES)
@pytest.mark.parametrize("launcher", STARTED)
def test_detect_reads_back_every_rank(launcher, nodes, tasks, counts):
    places = [(node, local) for node, count in enumerate(counts) for local in range(count)]
    environs = fake_environment(launcher, nodes=nodes, tasks=tasks)
    assert len(environs) == tasks
    for rank, (environ, (node, local)) in enumerate(zip(environs, places, strict=True)):
        detection = detect(environ)
        environment = detection.environment
        assert detection.warnings == ()
        assert environment == LaunchEnvironment(
            launcher,
            rank=rank,
            world_size=tasks,
            main_port=environment.main_port,
            job_id=environment.job_id,
            **told(
                launcher,
                local_rank=local,
                local_world_size=counts[node],
                node_rank=node,
                num_nodes=nodes,
                main_address="n1",
            ),
        )


@pytest.mark.parametrize("launcher", STARTED)
def test_all_ranks_have_the_same_address_port_and_job_id(launcher):
    environments = [detect(environ).environment for environ in fake_environment(launcher, nodes=2, tasks=4)]
    assert len({(one.main_address, one.main_port, one.job_id) for one in environments}) == 1


def test_one_process_without_a_launcher_has_no_variables():
    assert fake_environment("single") == [{}]


def test_the_caller_may_change_what_it_gets():
    fake_environment("slurm")[0]["SLURM_PROCID"] = "7"
    assert fake_environment("slurm")[0]["SLURM_PROCID"] == "0"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"launcher": "slrum"}, r"launcher must be one of torchrun, .*, single, got 'slrum'\."),
        ({"launcher": "slurm", "nodes": 0}, "nodes must be between 1 and tasks, got 0 nodes and 1 tasks"),
        ({"launcher": "slurm", "nodes": 3, "tasks": 2}, "got 3 nodes and 2 tasks"),
        ({"launcher": "slurm", "tasks": 0}, "got 1 nodes and 0 tasks"),
        ({"launcher": "single", "tasks": 2}, "tasks must be 1 without a launcher, got 2"),
    ],
)
def test_a_job_that_cannot_be_is_an_error(arguments, message):
    with pytest.raises(ValueError, match=message):
        fake_environment(**arguments)
