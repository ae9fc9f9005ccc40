"""Which launcher is chosen where several have left their variables."""

import pytest

from distman.environments import detect, is_env_distributed, should_use_distributed
from distman.errors import LaunchEnvironmentError
from distman.testing import fake_environment

from .recordings import recorded

MPI = ("openmpi", "hydra", "mvapich", "pals")
STEPS = ("submitit", "jsrun", "flux", "slurm")
INNERMOST_FIRST = ("torchrun", *MPI, *STEPS, "env")
BATCH_SCRIPT_STEP = "4294967291"
INTERACTIVE_STEP = "4294967290"


def rank_of(launcher, rank=1, nodes=2, tasks=4):
    return fake_environment(launcher, nodes=nodes, tasks=tasks)[rank]


def allocation(num_tasks, num_nodes, **changes):
    """A shell inside an allocation, as salloc and sbatch make it."""
    nodes = "n1" if num_nodes == 1 else f"n[1-{num_nodes}]"
    environ = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": nodes, "SLURM_JOB_NUM_NODES": str(num_nodes)}
    return environ | {"SLURM_NTASKS": str(num_tasks), "SLURM_NPROCS": str(num_tasks)} | changes


def place(detection):
    return detection.environment.launcher, detection.environment.rank, detection.environment.world_size


@pytest.mark.parametrize("launcher", INNERMOST_FIRST)
def test_one_launcher_alone_is_found(launcher):
    assert place(detect(rank_of(launcher))) == (launcher, 1, 4)


@pytest.mark.parametrize(
    ("inner", "outer"),
    [
        *(("torchrun", outer) for outer in (*MPI, *STEPS)),
        *((inner, outer) for inner in MPI for outer in STEPS),
        *(("submitit", outer) for outer in ("jsrun", "flux", "slurm")),
        ("jsrun", "flux"),
        ("jsrun", "slurm"),
        ("flux", "slurm"),
    ],
)
def test_the_innermost_launcher_wins(inner, outer):
    environ = rank_of(outer, rank=0, tasks=2) | rank_of(inner, rank=3)
    assert place(detect(environ)) == (inner, 3, 4)


@pytest.mark.parametrize("inner", ["jsrun", "flux", "slurm"])
def test_ranks_that_a_single_task_of_submitit_has_started_are_their_launchers(inner):
    environ = rank_of("submitit", rank=0, nodes=1, tasks=1) | rank_of(inner, rank=3)
    assert place(detect(environ)) == (inner, 3, 4)


@pytest.mark.parametrize("name", ["slurm-sbatch-mpirun-openmpi4", "slurm-netns-sbatch-mpirun-openmpi5"])
def test_a_remote_rank_of_mpirun_is_no_task_of_the_step_that_carries_its_daemon(name):
    environ = recorded(name)[3]
    assert (environ["SLURM_PROCID"], environ["SLURM_STEP_NUM_TASKS"]) == ("0", "1")
    assert place(detect(environ)) == ("openmpi", 3, 4)


def test_srun_with_pmi2_is_slurm():
    environ = rank_of("slurm") | {"PMI_RANK": "1", "PMI_SIZE": "4", "PMI_FD": "9"}
    assert place(detect(environ)) == ("slurm", 1, 4)


@pytest.mark.parametrize("launcher", ["flux", "slurm"])
def test_whoever_sets_the_variables_of_pals_too_is_believed_where_both_agree(launcher):
    assert place(detect(rank_of(launcher, rank=3) | rank_of("pals", rank=3))) == (launcher, 3, 4)


def test_pals_is_not_taken_for_hydra_though_both_set_pmi_rank():
    assert rank_of("pals")["PMI_RANK"] == rank_of("hydra")["PMI_RANK"]
    assert place(detect(rank_of("pals"))) == ("pals", 1, 4)


def test_no_variables_are_one_process():
    detection = detect({})
    assert place(detection) == ("single", 0, 1)
    assert detection.warnings == ()


@pytest.mark.parametrize(
    "stale",
    [
        {"SLURM_CONF": "/etc/slurm/slurm.conf", "SLURM_CLUSTER_NAME": "big"},
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"},
        {"PMI_RANK": "0", "PMI_SIZE": "4", "PMI_FD": "9"},
        {"PMI_RANK": "0"},
        {"PMIX_RANK": "0", "PMIX_NAMESPACE": "slurm.pmix.8.0", "PMIX_SERVER_URI2": "1.0;tcp4://127.0.0.1:38005"},
        {"OMPI_MCA_btl_tcp_if_include": "lo", "OMPI_ALLOW_RUN_AS_ROOT": "1"},
        {"MASTER_ADDR": "n1", "MASTER_PORT": "29500"},
        {"WORLD_SIZE": "4"},
        {"LOCAL_RANK": "0"},
        {"RANK": "", "WORLD_SIZE": " "},
    ],
    ids=lambda stale: "+".join(stale),
)
def test_variables_left_over_in_a_shell_are_one_process_without_a_word(stale):
    detection = detect(stale)
    assert place(detection) == ("single", 0, 1)
    assert detection.warnings == ()


@pytest.mark.parametrize(
    "environ",
    [
        allocation(4, 2),
        allocation(1, 2),
        allocation(4, 1),
        allocation(4, 2, SLURM_PROCID="0", SLURM_LOCALID="0", SLURM_NODEID="0", SLURM_GTIDS="0"),
        allocation(4, 2, SLURM_PROCID="0", SLURM_STEP_ID=INTERACTIVE_STEP, SLURM_STEP_NUM_TASKS="1"),
        allocation(4, 2, SLURM_PROCID="0", SLURM_STEP_ID=BATCH_SCRIPT_STEP),
        recorded("slurm-sbatch-nosrun")[0],
    ],
    ids=["salloc", "one task", "one node", "sbatch", "interactive step", "batch step", "recorded"],
)
def test_python_without_srun_in_an_allocation_is_one_process_and_is_told_of_srun(environ):
    detection = detect(environ)
    assert place(detection) == ("single", 0, 1)
    (warning,) = detection.warnings
    assert "Slurm allocation 7 " in warning
    assert "start it with: srun python" in warning


@pytest.mark.parametrize("rank", range(3))
def test_tasks_that_are_not_told_their_step_are_no_lone_processes(rank):
    detection = detect({"SLURM_PROCID": str(rank), "SLURM_LOCALID": "0", "SLURM_NTASKS": "3"})
    assert place(detection) == ("slurm", rank, 3)
    (warning,) = detection.warnings
    assert f"SLURM_PROCID={rank} and SLURM_NTASKS=3 are believed, although SLURM_STEP_ID" in warning
    assert warning in detection.explanation


@pytest.mark.parametrize("rank", [1, 3])
def test_a_task_that_knows_its_allocation_but_not_its_step_does_not_run_alone(rank):
    """The batch script, too, knows the allocation and no step, but it is task 0."""
    with pytest.raises(
        LaunchEnvironmentError, match=r"SLURM_STEP_ID .* must be set in a task of srun, got SLURM_PROCID"
    ):
        detect(allocation(4, 2, SLURM_PROCID=str(rank), SLURM_LOCALID="0", SLURM_NODEID="0"))


LONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}


@pytest.mark.parametrize("launcher", ["slurm", "flux", "jsrun"])
def test_a_task_of_several_does_not_run_alone_because_of_variables_from_elsewhere(launcher):
    with pytest.raises(LaunchEnvironmentError, match=f"WORLD_SIZE must not be 1 in a task of several.*{launcher} says"):
        detect(rank_of(launcher) | LONE)
    assert place(detect(fake_environment(launcher, tasks=1)[0] | LONE)) == (launcher, 0, 1)
    assert place(detect(rank_of(launcher) | LONE, "env")) == ("env", 0, 1)


@pytest.mark.parametrize("launcher", ["slurm", "openmpi", "flux"])
def test_one_rank_of_torchrun_in_each_task_is_told_that_it_is_alone(launcher):
    detection = detect(rank_of(launcher) | fake_environment("torchrun", tasks=1)[0])
    assert place(detection) == ("torchrun", 0, 1)
    (warning,) = detection.warnings
    assert f"This is the only rank of its job: {launcher} says" in warning
    assert detect(rank_of(launcher) | fake_environment("torchrun", tasks=2)[0]).warnings == ()


def test_the_warning_counts_tasks_and_nodes():
    assert "(4 tasks on 2 nodes)" in detect(allocation(4, 2)).warnings[0]


def test_an_allocation_of_one_task_is_no_reason_to_warn():
    assert detect(allocation(1, 1)).warnings == ()


@pytest.mark.parametrize("launcher", [*MPI, *STEPS])
def test_an_address_exported_beside_a_launcher_is_normal(launcher):
    exported = {"MASTER_ADDR": "n7", "MASTER_PORT": "29500", "WORLD_SIZE": "8"}
    alone, beside = detect(rank_of(launcher)), detect(rank_of(launcher) | exported)
    assert beside.environment == alone.environment
    assert len(beside.warnings) == (launcher == "slurm"), "of WORLD_SIZE, the number of tasks"


def test_a_world_size_that_is_not_the_number_of_tasks_gets_a_warning():
    three = {"SLURM_PROCID": "1", "SLURM_LOCALID": "1", "SLURM_NTASKS": "4"}
    bare = {"RANK": "1", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "6"}
    for environ, launcher in ((rank_of("slurm"), "slurm"), (three, "slurm"), (allocation(4, 2) | bare, "env")):
        detection = detect(environ | {"WORLD_SIZE": "6"})
        assert detection.environment.launcher == launcher
        expected = f"WORLD_SIZE=6 and SLURM_NTASKS=4 contradict each other: {launcher} is believed"
        assert expected in detection.warnings[-1]
    for size in ("4", "8"):
        detection = detect(allocation(4, 2) | bare | {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": "4"})
        assert detection.warnings == ()
    assert detect(rank_of("slurm") | {"WORLD_SIZE": "4"}).warnings == ()
    assert detect(rank_of("slurm") | {"WORLD_SIZE": "x"}).warnings == ()


@pytest.mark.parametrize("launcher", [*MPI, *STEPS])
def test_bare_variables_that_say_the_same_are_no_contradiction(launcher):
    same = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "4"}
    detection = detect(rank_of(launcher) | same)
    assert place(detection) == (launcher, 1, 4)
    assert detection.warnings == ()


@pytest.mark.parametrize("launcher", [*MPI, *STEPS])
@pytest.mark.parametrize("left_out", ["RANK", "LOCAL_RANK", "WORLD_SIZE"])
def test_bare_variables_that_are_not_complete_contradict_nobody(launcher, left_out):
    bare = {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8"}
    bare.pop(left_out)
    assert place(detect(rank_of(launcher) | bare)) == (launcher, 1, 4)


@pytest.mark.parametrize("launcher", STEPS)
def test_a_launcher_inside_a_step_that_sets_bare_variables_wins_and_the_user_is_told(launcher):
    detection = detect(rank_of(launcher) | {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "MASTER_ADDR": "n1"})
    assert place(detection) == ("env", 5, 8)
    assert detection.environment.main_address == "n1"
    (warning,) = detection.warnings
    assert f"RANK=5 and WORLD_SIZE=8, but {launcher} says " in warning
    assert f"DISTMAN_INITIALIZATION_METHOD={launcher}" in warning
    assert f"{launcher} was passed over: {warning}" in detection.explanation


def test_bare_variables_that_contradict_mpi_are_an_error_that_shows_both_and_how_to_choose():
    environ = rank_of("openmpi") | {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8"}
    with pytest.raises(LaunchEnvironmentError) as caught:
        detect(environ)
    message = str(caught.value)
    assert "RANK=5 and WORLD_SIZE=8" in message
    assert "OMPI_COMM_WORLD_RANK=1 and OMPI_COMM_WORLD_SIZE=4" in message
    assert "DISTMAN_INITIALIZATION_METHOD=env or DISTMAN_INITIALIZATION_METHOD=openmpi" in message


@pytest.mark.parametrize("mpi", MPI)
@pytest.mark.parametrize("method", ["env", "mpi"])
def test_naming_a_method_settles_the_contradiction(mpi, method):
    environ = rank_of(mpi) | {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8"}
    with pytest.raises(LaunchEnvironmentError):
        detect(environ)
    assert place(detect(environ, method)) == (("env", 5, 8) if method == "env" else (mpi, 1, 4))


@pytest.mark.parametrize("launcher", INNERMOST_FIRST)
def test_the_users_job_id_stands_above_the_launchers(launcher):
    assert detect(rank_of(launcher) | {"DISTMAN_JOB_ID": "mine"}).environment.job_id == "mine"


def test_two_steps_of_one_slurm_job_have_different_job_ids():
    ids = [detect(rank_of("slurm") | {"SLURM_STEP_ID": step}).environment.job_id for step in "01"]
    assert ids == ["slurm-1000.0", "slurm-1000.1"]


def test_the_parts_of_a_heterogeneous_step_share_the_job_id():
    parts = [{"SLURM_JOB_ID": job, "SLURM_HET_JOB_ID": "50"} for job in ("50", "51")]
    assert {detect(rank_of("slurm") | part).environment.job_id for part in parts} == {"slurm-50.0"}


@pytest.mark.parametrize("launcher", INNERMOST_FIRST)
def test_a_launcher_makes_a_job_of_one_rank_too(launcher):
    environ = rank_of(launcher, rank=0, nodes=1, tasks=1)
    assert is_env_distributed(environ)
    assert not should_use_distributed(use_distributed=None, environ=environ)
    assert should_use_distributed(use_distributed=True, environ=environ)


@pytest.mark.parametrize(("use_distributed", "expected"), [(None, True), (True, True), (False, False)])
def test_the_wish_decides_whether_a_job_of_several_ranks_is_distributed(use_distributed, expected):
    assert should_use_distributed(use_distributed, rank_of("slurm")) is expected


@pytest.mark.parametrize("use_distributed", [None, False])
def test_without_a_launcher_nothing_is_distributed(use_distributed):
    assert not is_env_distributed({})
    assert should_use_distributed(use_distributed, {}) is False


def test_to_insist_without_a_launcher_is_an_error_that_shows_what_was_looked_for():
    with pytest.raises(LaunchEnvironmentError) as caught:
        should_use_distributed(use_distributed=True, environ=allocation(4, 2))
    message = str(caught.value)
    assert "Start the script with torchrun, mpirun or srun" in message
    assert "srun python" in message
    assert "openmpi was passed over" in message


def test_to_rule_it_out_reads_nothing():
    assert should_use_distributed(use_distributed=False, environ={"RANK": "broken"}) is False


def test_the_process_own_environment_is_the_default(monkeypatch):
    monkeypatch.setenv("DISTMAN_INITIALIZATION_METHOD", "env")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert is_env_distributed()
    assert should_use_distributed(None)
