"""The explanation: what was chosen, from which variables, and why the others were not."""

import os

import pytest

from distman.environments import LAUNCHERS, detect, explain
from distman.testing import fake_environment

from .recordings import RECORDINGS, recorded

INNERMOST_FIRST = [launcher for launcher in LAUNCHERS if launcher != "single"]


def test_the_first_sentence_gives_each_value_with_the_variable_it_came_from():
    assert detect(fake_environment("slurm", nodes=2, tasks=3)[2]).explanation[0] == (
        "slurm was chosen: rank 2 (SLURM_PROCID=2), world_size 3 (SLURM_STEP_NUM_TASKS=3), "
        "local_rank 0 (SLURM_LOCALID=0), local_world_size 1 (SLURM_GTIDS=2), node_rank 1 (SLURM_NODEID=1), "
        "num_nodes 2 (SLURM_STEP_NUM_NODES=2), main_address n1 (SLURM_STEP_NODELIST=n[1-2]), "
        "job_id slurm-1000.0 (SLURM_JOB_ID=1000)."
    )


def test_what_the_launcher_does_not_say_is_left_out():
    assert detect({"RANK": "0", "WORLD_SIZE": "2"}).explanation[0] == (
        "env was chosen: rank 0 (RANK=0), world_size 2 (WORLD_SIZE=2)."
    )


def test_the_users_own_job_id_is_the_source_of_the_job_id():
    environ = fake_environment("flux")[0] | {"DISTMAN_JOB_ID": "mine"}
    assert "job_id mine (DISTMAN_JOB_ID=mine)." in explain(environ)


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_every_launcher_is_either_chosen_or_passed_over(launcher):
    sentences = detect(fake_environment(launcher)[0]).explanation
    assert sentences[0].startswith(f"{launcher} was chosen: ")
    passed_over = [sentence.split(" was passed over: ")[0] for sentence in sentences[1:]]
    assert passed_over == [other for other in INNERMOST_FIRST if other != launcher]


@pytest.mark.parametrize(
    ("name", "rank", "sentence"),
    [
        ("slurm-srun-N2n4", 3, "openmpi was passed over: OMPI_COMM_WORLD_RANK, OMPI_COMM_WORLD_SIZE are not set."),
        (
            "slurm-sbatch-mpirun-openmpi4",
            3,
            "slurm was passed over: openmpi comes first (SLURM_PROCID=0 and SLURM_STEP_NUM_TASKS=1).",
        ),
        (
            "slurm-sbatch-nosrun",
            0,
            "slurm was passed over: SLURM_STEP_ID or SLURM_STEPID, SLURM_STEP_NUM_TASKS are not set.",
        ),
        ("torchrun-standalone", 1, "env was passed over: torchrun comes first (RANK=1 and WORLD_SIZE=2)."),
    ],
)
def test_the_reason_names_what_is_missing_or_who_comes_first(name, rank, sentence):
    assert sentence in detect(recorded(name)[rank]).explanation


def test_pals_is_the_reason_why_hydra_is_not_chosen():
    sentences = detect(fake_environment("pals")[0]).explanation
    assert "hydra was passed over: MPI_LOCALRANKID is not set." in sentences


def test_the_shell_of_salloc_is_no_step_of_srun():
    environ = recorded("slurm-salloc-interactive-step-srun")[0] | {"SLURM_STEP_ID": "4294967290"}
    sentences = detect(environ).explanation
    assert sentences[0] == "single was chosen: no launcher speaks."
    assert any(sentence.startswith("slurm was passed over: the step is Slurm's own") for sentence in sentences)


def test_the_warning_is_part_of_the_explanation():
    detection = detect(recorded("slurm-sbatch-nosrun")[0])
    assert detection.explanation[1] == detection.warnings[0]


def test_explain_is_the_explanation_a_sentence_a_line():
    environ = recorded("slurm-srun-cyclic")[2]
    assert explain(environ).splitlines() == list(detect(environ).explanation)


def test_explain_reads_the_process_own_environment(monkeypatch):
    for name in list(os.environ):
        monkeypatch.delenv(name)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert explain().startswith("env was chosen: rank 1 (RANK=1), world_size 2 (WORLD_SIZE=2).")


@pytest.mark.parametrize("name", RECORDINGS)
def test_every_sentence_is_one(name):
    for environ in recorded(name):
        for sentence in detect(environ).explanation:
            assert sentence.endswith((".", "srun python ..."))
            assert "\n" not in sentence
            assert "None" not in sentence
