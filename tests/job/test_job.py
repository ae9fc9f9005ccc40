"""What a job knows of its ranks."""

from types import SimpleNamespace

import pytest
import torch

from distman._coordination.failure.record import FailureRecord
from distman._job.job import Job, Limits
from distman._job.meeting.peers import complete
from distman.environments import LaunchEnvironment
from tests.job.meeting.join_records import join_record


@pytest.mark.parametrize(
    ("changes", "told", "is_beside"),
    [
        ({}, (1, 101), True),
        ({"boot_id": "77e0"}, (1, 101), False),
        ({"host": "n2"}, (1, 101), False),
        ({}, (1, 7), False),
        ({}, (2, 101), False),
        ({}, (-1, 101), False),
    ],
)
def test_a_rank_beside_this_one_is_on_the_same_machine(changes, told, is_beside):
    peers = complete([join_record(0), join_record(1, **changes)])
    job = Job(peers[0], 2, torch.device("cpu"), "gloo", Limits(1.0, 1.0), peers, LaunchEnvironment("env", 0, 2))
    rank, pid = told
    assert job._is_beside(FailureRecord(rank, "n1", pid, "silent", "is silent").to_error()) is is_beside


@pytest.mark.parametrize(
    ("launcher", "hosts", "is_opened_here", "holds_store"),
    [
        ("slurm", 2, True, True),
        ("slurm", 2, False, False),
        ("slurm", 1, True, False),
        ("hydra", 2, True, False),
        ("env", 1, True, False),
    ],
)
def test_who_holds_the_store(launcher, hosts, is_opened_here, holds_store):
    peers = complete([join_record(0), join_record(1, host=f"n{hosts}")])
    environment, limits = LaunchEnvironment(launcher, 0, 2), Limits(1.0, 1.0)
    rendezvous = SimpleNamespace(is_opened_here=is_opened_here)
    job = Job(peers[0], 2, torch.device("cpu"), "gloo", limits, peers, environment, rendezvous)
    assert job.holds_store is holds_store
