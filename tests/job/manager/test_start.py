"""A start that fails after the ranks have met leaves no trace, and can be repeated."""

import random
import socket
from datetime import timedelta

import numpy as np
import pytest
import torch
import torch.distributed as dist

from distman import DistributedManager, JobFailed
from distman._base.log import logger
from distman._coordination.monitor.watcher import is_watching
from distman._torch_internals import gloo_timeout, shortest_timeout
from distman.testing import ranks


@pytest.fixture
def port():
    with socket.create_server(("localhost", 0)) as server:
        return server.getsockname()[1]


class BrokenError(Exception):
    pass


def break_down(*_):
    raise BrokenError("at the end of the start")


def make_nothing(*_):
    """Stand for torch, which would wait for the other ranks in native code, so that the process would end."""


def start_and_wait():
    DistributedManager.initialize(seed=0)
    DistributedManager().barrier()


@pytest.mark.parametrize("place", ["distman.manager.StopAgreement", "distman._job.start._meet_in_process_group"])
@ranks(3, manager=False)
def test_a_start_that_fails_late_can_be_repeated(monkeypatch, port, rank, world_size, place):
    dist.destroy_process_group()
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", str(port))
    is_broken = rank == world_size - 1
    with monkeypatch.context() as broken:
        broken.setattr("distman._job.start._meet_in_process_group", make_nothing)
        if is_broken:
            broken.setattr(place, break_down)
        with pytest.raises(BrokenError if is_broken else JobFailed, match="at the end of the start"):
            start_and_wait()
    DistributedManager.cleanup()
    assert not DistributedManager.is_initialized()
    assert not dist.is_initialized()
    assert not is_watching()
    start_and_wait()
    assert DistributedManager().world_size == world_size


@pytest.mark.parametrize("options", [{"device": "mps:0"}, {"device": "meta:0", "backend": "gloo"}], ids=str)
@ranks(2, manager=False)
def test_a_device_of_no_use_is_refused_before_the_ranks_meet(monkeypatch, port, world_size, options):
    dist.destroy_process_group()
    monkeypatch.setenv("MASTER_PORT", str(port))
    with monkeypatch.context() as alone:
        alone.setattr("distman._job.start.join", break_down)
        with pytest.raises(ValueError, match="device must be one of cpu, cuda, xpu, got"):
            DistributedManager.initialize(**options)
    start_and_wait()
    assert DistributedManager().world_size == world_size


@pytest.mark.parametrize("place", ["distman.manager.StopAgreement", "distman.manager.watch"])
@ranks(2, manager=False)
def test_a_failed_start_leaves_the_group_of_other_code(monkeypatch, rank, place):
    """The group of the tests is there before."""
    with monkeypatch.context() as broken:
        broken.setattr(place, break_down)
        with pytest.raises((BrokenError, JobFailed), match="at the end of the start"):
            DistributedManager.initialize()
    assert dist.is_initialized()
    assert not is_watching()
    start_and_wait()
    assert DistributedManager().rank == rank


@ranks(2, 3, manager=False)
def test_a_host_has_one_first_rank_though_all_say_that_they_are_the_first(monkeypatch, rank, world_size):
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    told = []
    monkeypatch.setattr(logger, "warning", lambda text, *values: told.append(text % values))
    manager = DistributedManager.initialize()
    assert (manager.local_rank, manager.local_world_size, manager.is_local_main) == (rank, world_size, rank == 0)
    assert manager.ranks_with_local_rank(0) == [0]
    assert sum("must have local ranks of their own, got 0 for rank 1 (" in text for text in told) == (rank == 0)


@pytest.mark.parametrize(
    ("options", "variable", "seconds"), [({}, None, 43), ({}, "71", 71), ({"timeout": 97}, "71", 97)], ids=str
)
@ranks(2, manager=False)
def test_an_adopted_group_hands_on_its_timeout_unless_the_program_says_another(
    monkeypatch, port, rank, options, variable, seconds
):
    dist.destroy_process_group()
    there = {"init_method": f"tcp://localhost:{port}", "rank": rank, "world_size": 2}
    dist.init_process_group("gloo", timeout=timedelta(seconds=43), **there)
    if variable:
        monkeypatch.setenv("DISTMAN_TIMEOUT", variable)
    manager = DistributedManager.initialize(**options)
    assert manager._state.job.limits.collective == seconds  # of barriers, too
    for group in (manager.group("node"), manager.initialize_mesh((2, 1), ("data", "model")).get_group("data")):
        assert gloo_timeout(group) == shortest_timeout(group) == seconds
    assert gloo_timeout(dist.group.WORLD) == 43


@pytest.mark.parametrize("seed", [0, 2**32 - 1, 2**64 - 1, 2**256 - 1], ids=hex)  # each plus one is the next class
@ranks(2, manager=False)
def test_a_seed_may_be_any_number_and_each_rank_has_the_next(rank, seed):
    DistributedManager.initialize(seed=seed)
    generator = torch.Generator().manual_seed((seed + rank) % 2**64)
    assert torch.equal(torch.rand(3), torch.rand(3, generator=generator))
    assert random.random() == random.Random(seed + rank).random()  # noqa: S311 - no secret
    assert np.random.rand() == np.random.RandomState((seed + rank) % 2**32).rand()
