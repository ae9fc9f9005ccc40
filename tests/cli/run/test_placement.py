import os

import pytest

from distman._cli.output import shown_ranks
from distman._cli.run.job import number_of_ranks, variables_of_ranks
from distman.environments import detect

CPUS = len(os.sched_getaffinity(0))


def test_a_number_is_as_many():
    assert number_of_ranks("7") == 7


def test_there_are_as_many_ranks_as_cpus_for_them():
    assert number_of_ranks("cpu") == CPUS


@pytest.mark.parametrize("text", ["0", "-1", "two", "", "1.5", "³"])
def test_anything_else_is_refused(text):
    with pytest.raises(ValueError, match="n must be a number of at least 1, gpu, cpu or auto, got"):
        number_of_ranks(text)


def test_a_rank_is_told_its_place_and_nothing_of_launchers_around_it():
    around = {"TORCHELASTIC_RUN_ID": "x", "RANK": "5", "PMI_RANK": "3", "OMPI_COMM_WORLD_RANK": "2", "HOME": "/h"}
    environments = variables_of_ranks(around, 3)
    found = [detect(environ).environment for environ in environments]
    assert [(one.launcher, one.rank, one.world_size, one.local_rank) for one in found] == [
        ("distman-run", rank, 3, rank) for rank in range(3)
    ]
    assert len({one.job_id for one in found}) == 1
    assert environments[0]["HOME"] == "/h"
    assert "PMI_RANK" not in environments[0]


def test_a_scheduler_around_it_is_kept():
    assert variables_of_ranks({"SLURM_JOB_ID": "7"}, 1)[0]["SLURM_JOB_ID"] == "7"


def test_threads_are_a_share_of_the_cpus_unless_told():
    assert variables_of_ranks({}, 2 * CPUS)[0]["OMP_NUM_THREADS"] == "1"
    assert variables_of_ranks({"OMP_NUM_THREADS": "5"}, 2)[0]["OMP_NUM_THREADS"] == "5"


@pytest.mark.parametrize(
    ("ranks", "words"), [([3], "rank 3"), ([1, 0], "ranks 0-1"), ([0, 2, 3, 4, 9], "ranks 0, 2-4, 9")]
)
def test_ranks_in_words(ranks, words):
    assert shown_ranks(ranks) == words
