"""A launcher chosen by name, in the call or by DISTMAN_INITIALIZATION_METHOD."""

import pytest

from distman.environments import LAUNCHERS, LaunchEnvironment, detect, explain, is_env_distributed
from distman.errors import LaunchEnvironmentError
from distman.testing import fake_environment

from .recordings import recorded

METHOD = "DISTMAN_INITIALIZATION_METHOD"
STARTED = [launcher for launcher in LAUNCHERS if launcher != "single"]
ALL_AT_ONCE = {
    name: value for launcher in STARTED for name, value in fake_environment(launcher, nodes=2, tasks=4)[3].items()
}


@pytest.mark.parametrize("spelling", [str.lower, str.upper, str.title, " {} ".format])
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_method_is_the_name_of_a_launcher_in_any_case(launcher, spelling):
    method = spelling(launcher)
    by_call = detect(ALL_AT_ONCE, method).environment
    by_variable = detect(ALL_AT_ONCE | {METHOD: method}).environment
    assert by_call == by_variable
    assert by_call.launcher == ("torchrun" if launcher == "env" else launcher)
    assert (by_call.rank, by_call.world_size) == ((0, 1) if launcher == "single" else (3, 4))


@pytest.mark.parametrize("launcher", ["torchrun", "env"])
def test_env_is_torchrun_or_bare_variables(launcher):
    environ = fake_environment(launcher, tasks=2)[1]
    assert detect(environ, "ENV").environment.launcher == launcher


@pytest.mark.parametrize("launcher", ["openmpi", "hydra", "mvapich", "pals"])
def test_mpi_is_any_mpi(launcher):
    environ = fake_environment("torchrun", tasks=2)[1] | fake_environment(launcher, tasks=2)[1]
    assert detect(environ).environment.launcher == "torchrun"
    assert detect(environ, "MPI").environment.launcher == launcher


def test_single_is_one_process_whatever_the_environment_says():
    detection = detect(ALL_AT_ONCE, "single")
    assert detection.environment == LaunchEnvironment("single", 0, 1, 0, 1, 0, 1)
    assert detection.warnings == ()
    assert not is_env_distributed(ALL_AT_ONCE | {METHOD: "single"})


def test_slurm_inside_a_step_reads_the_step():
    environ = recorded("slurm-sbatch-srun-relative1")[1]
    assert detect(environ, "SLURM").environment == detect(environ).environment


@pytest.mark.parametrize("size", ["SLURM_NTASKS", "SLURM_NPROCS"])
def test_slurm_outside_a_step_reads_the_allocation(size):
    environ = {"SLURM_PROCID": "3", size: "4", "SLURM_JOB_ID": "7", "SLURM_LOCALID": "1", "SLURM_NODEID": "1"}
    environ |= {"SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "n[1-2]"}
    assert detect(environ, "SLURM").environment == LaunchEnvironment(
        "slurm", 3, 4, local_rank=1, node_rank=1, num_nodes=2, main_address="n1", job_id="slurm-7.0"
    )


def test_slurm_in_the_batch_script_is_rank_0_of_all_tasks():
    environment = detect(recorded("slurm-sbatch-nosrun")[0], "slurm").environment
    assert (environment.rank, environment.world_size, environment.main_address) == (0, 4, "n1")


def test_the_call_stands_above_the_variable():
    assert detect(ALL_AT_ONCE | {METHOD: "flux"}, "slurm").environment.launcher == "slurm"


@pytest.mark.parametrize("empty", ["", "  "])
def test_an_empty_variable_chooses_nothing(empty):
    assert detect(fake_environment("slurm")[0] | {METHOD: empty}).environment.launcher == "slurm"


@pytest.mark.parametrize("method", STARTED)
def test_a_method_that_finds_nothing_is_an_error_not_one_process(method):
    with pytest.raises(LaunchEnvironmentError) as caught:
        detect({}, method)
    assert f"got '{method}' from the call ({'torchrun' if method == 'env' else method}: " in str(caught.value)
    assert "are not set). Start the script with that launcher" in str(caught.value)


def test_a_method_of_the_variable_that_finds_nothing_names_the_variable():
    with pytest.raises(LaunchEnvironmentError, match=f"got 'openmpi' from {METHOD}"):
        detect(fake_environment("slurm")[0] | {METHOD: "openmpi"})


@pytest.mark.parametrize(
    ("environ", "method", "source"),
    [({}, "slrum", "the call"), ({METHOD: "slrum"}, None, METHOD), ({METHOD: "slurm"}, "slrum", "the call")],
)
def test_an_unknown_method_is_shown_with_its_source_and_all_valid_ones(environ, method, source):
    with pytest.raises(ValueError) as caught:
        detect(environ, method)
    assert f"got 'slrum' from {source}." in str(caught.value)
    for valid in (*LAUNCHERS, "mpi"):
        assert f" {valid}" in str(caught.value)


def test_the_explanation_says_who_asked():
    environ = fake_environment("slurm")[0]
    assert explain(environ, "Slurm").splitlines()[-1] == "Slurm was asked for by the call."
    assert explain(environ | {METHOD: "SLURM"}).splitlines()[-1] == f"SLURM was asked for by {METHOD}."
