"""Variables that make no sense: the message names the variable, its value and a remedy."""

import re

import pytest

from distman.environments import LaunchEnvironment, detect
from distman.errors import LaunchEnvironmentError
from distman.testing import fake_environment

RANK_AND_SIZE = {
    "torchrun": ("RANK", "WORLD_SIZE"),
    "openmpi": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    "hydra": ("PMI_RANK", "PMI_SIZE"),
    "mvapich": ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),
    "pals": ("PALS_RANKID", "PMI_SIZE"),
    "jsrun": ("JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE"),
    "flux": ("FLUX_TASK_RANK", "FLUX_JOB_SIZE"),
    "slurm": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
    "env": ("RANK", "WORLD_SIZE"),
}

LOCAL_RANK_AND_SIZE = {
    "torchrun": ("LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    "openmpi": ("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    "hydra": ("MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    "mvapich": ("MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE"),
    "pals": ("PALS_LOCAL_RANKID", "PMI_LOCAL_SIZE"),
    "jsrun": ("JSM_NAMESPACE_LOCAL_RANK", "JSM_NAMESPACE_LOCAL_SIZE"),
    "env": ("LOCAL_RANK", "LOCAL_WORLD_SIZE"),
}

NO_NUMBERS = ["x", "-1", "1.0", "1e3", "0x1", "1 2", "\u0661", "\u00b2", "1" * 19, "${SLURM_PROCID}"]


def message_for(environ, method=None):
    with pytest.raises(LaunchEnvironmentError) as caught:
        detect(environ, method)
    return str(caught.value)


def rank_1(launcher, **changes):
    return fake_environment(launcher, tasks=2)[1] | changes


def without(environ, name):
    return {other: value for other, value in environ.items() if other != name}


@pytest.mark.parametrize("text", NO_NUMBERS)
@pytest.mark.parametrize("launcher", RANK_AND_SIZE)
def test_a_rank_that_is_no_number_is_shown(launcher, text):
    rank, _ = RANK_AND_SIZE[launcher]
    message = message_for(rank_1(launcher, **{rank: text}))
    assert message == (
        f"{rank} must be a whole number of at least 0, got {rank}={text!r} from the environment. Correct or unset it."
    )


@pytest.mark.parametrize("text", ["0", *NO_NUMBERS])
@pytest.mark.parametrize("launcher", RANK_AND_SIZE)
def test_a_world_size_that_counts_nothing_is_shown(launcher, text):
    _, size = RANK_AND_SIZE[launcher]
    message = message_for(rank_1(launcher, **{size: text}))
    assert message == (
        f"{size} must be a whole number of at least 1, got {size}={text!r} from the environment. Correct or unset it."
    )


@pytest.mark.parametrize("launcher", RANK_AND_SIZE)
def test_a_rank_beyond_the_world_is_shown_with_both_variables(launcher):
    rank, size = RANK_AND_SIZE[launcher]
    message = message_for(rank_1(launcher, **{rank: "3"}))
    assert f"{rank} must be below {size}, got {rank}=3 and {size}=2 from the environment." in message
    assert "Correct or unset them" in message


@pytest.mark.parametrize("launcher", LOCAL_RANK_AND_SIZE)
def test_a_local_rank_beyond_its_host_is_shown_with_both_variables(launcher):
    rank, size = LOCAL_RANK_AND_SIZE[launcher]
    assert f"{rank} must be below {size}, got {rank}=2 and {size}=2" in message_for(rank_1(launcher, **{rank: "2"}))


@pytest.mark.parametrize("launcher", LOCAL_RANK_AND_SIZE)
def test_a_host_with_more_ranks_than_the_world_is_shown_with_both_variables(launcher):
    (_, world_size), (_, local_size) = RANK_AND_SIZE[launcher], LOCAL_RANK_AND_SIZE[launcher]
    message = message_for(rank_1(launcher, **{local_size: "3"}))
    assert f"{local_size} must be at most {world_size}, got {local_size}=3 and {world_size}=2" in message


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"SLURM_LOCALID": "2"}, "SLURM_LOCALID must be below SLURM_GTIDS, got SLURM_LOCALID=2 and SLURM_GTIDS=0,1"),
        ({"SLURM_NODEID": "1"}, "got SLURM_NODEID=1 and SLURM_STEP_NUM_NODES=1"),
        ({"SLURM_STEP_ID": "batch"}, "SLURM_STEP_ID must be a whole number of at least 0, got SLURM_STEP_ID='batch'"),
        ({"SLURM_STEP_NODELIST": "n[2-1]"}, "got 'n[2-1]': '2-1' is not a number, nor a range"),
        ({"SLURM_GTIDS": "", "SLURM_STEP_TASKS_PER_NODE": "2(x"}, "must look like '2(x3),1', got '2(x'"),
    ],
)
def test_what_slurm_cannot_mean_is_shown(changes, expected):
    assert expected in message_for(rank_1("slurm", **changes))


@pytest.mark.parametrize(("port", "shown"), [("65536", "MASTER_PORT=65536"), ("auto", "MASTER_PORT='auto'")])
def test_a_port_that_cannot_be_is_shown(port, shown):
    message = message_for(rank_1("env", MASTER_PORT=port))
    assert message.startswith("MASTER_PORT must be ")
    assert shown in message


ONE_SPELLING = [launcher for launcher in RANK_AND_SIZE if launcher not in ("mvapich", "pals")]


@pytest.mark.parametrize("launcher", ONE_SPELLING)
def test_a_rank_without_a_world_size_is_not_one_process(launcher):
    rank, size = RANK_AND_SIZE[launcher]
    message = message_for(without(rank_1(launcher), size))
    assert f"{size} must be set where {rank} is, got {rank}=1 and no {size} from the environment." in message
    assert f"unset {rank} to run one process" in message


def test_a_world_size_with_several_spellings_is_named_by_all():
    message = message_for(without(rank_1("pals"), "PMI_SIZE"))
    assert message.startswith("PALS_SIZE or PMI_SIZE must be set where PALS_RANKID is, got PALS_RANKID=1")
    message = message_for(without(rank_1("mvapich"), "MV2_COMM_WORLD_SIZE"))
    assert message.startswith("MV2_COMM_WORLD_SIZE or MVP_COMM_WORLD_SIZE must be set where MV2_COMM_WORLD_RANK or ")


def test_rank_alone_beside_another_launcher_is_that_launchers_business():
    assert detect(rank_1("slurm", RANK="1")).environment.launcher == "slurm"


@pytest.mark.parametrize("launcher", [launcher for launcher in RANK_AND_SIZE if launcher != "slurm"])
def test_a_method_chosen_by_name_that_finds_half_of_its_variables_names_the_other_half(launcher):
    _, size = RANK_AND_SIZE[launcher]
    message = message_for(without(rank_1(launcher), size), method=launcher)
    assert f"got '{launcher}' from the call" in message
    assert re.search(rf"{size}[\w ]* is not set", message)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"rank": 2}, "rank must be below world_size, got rank=2 and world_size=2 from slurm."),
        ({"rank": -1}, "rank must be at least 0, got rank=-1 from slurm."),
        ({"world_size": 0}, "world_size must be at least 1, got world_size=0 from slurm."),
        ({"local_rank": 1, "local_world_size": 1}, "got local_rank=1 and local_world_size=1"),
        ({"local_rank": -1}, "got local_rank=-1"),
        ({"node_rank": 3, "num_nodes": 2}, "got node_rank=3 and num_nodes=2"),
        ({"num_nodes": 0}, "num_nodes must be at least 1, got num_nodes=0"),
        (
            {"local_world_size": 3},
            "local_world_size must be at most world_size, got local_world_size=3 and world_size=2",
        ),
        ({"main_port": 0}, "main_port must be at least 1, got main_port=0"),
        ({"main_port": 65536}, "main_port must be between 1 and 65535, got main_port=65536"),
    ],
)
def test_a_launch_environment_checks_its_values(values, expected):
    with pytest.raises(LaunchEnvironmentError) as caught:
        LaunchEnvironment(**{"launcher": "slurm", "rank": 0, "world_size": 2, **values})
    assert expected in str(caught.value)


def test_a_launch_environment_knows_its_launchers():
    with pytest.raises(ValueError, match=r"launcher must be one of torchrun, distman-run, openmpi, .* got 'slrum'"):
        LaunchEnvironment("slrum", 0, 1)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"world_size": 1}, True),
        ({"num_nodes": 1}, True),
        ({"local_world_size": 4}, True),
        ({"local_world_size": 2}, False),
        ({"num_nodes": 2}, False),
        ({}, False),
    ],
)
def test_all_ranks_are_on_one_node_only_where_the_launcher_says_so(values, expected):
    environment = LaunchEnvironment(**{"launcher": "openmpi", "rank": 0, "world_size": 4, **values})
    assert environment.is_on_one_node is expected
