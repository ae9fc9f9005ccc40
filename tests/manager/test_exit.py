"""What exit handlers are told that come after the rank has left its job, as those registered before initialize() do."""

import os

import pytest

from distman import DistmanError, DistributedManager, NotInitializedError
from distman._process_state import reset
from distman.decorators import on_rank
from distman.testing import ranks

from .test_forks import CONCERNS_OTHERS, IS_KNOWN


@pytest.fixture(autouse=True)
def fresh_process():
    reset()
    yield
    reset()


def leave_at_exit():
    """Do what the exit handler of the package does."""
    DistributedManager._cleanup_at_exit(os.getpid())


@ranks(1, 2)
def test_an_exit_handler_that_comes_later_still_gets_answers():
    manager = DistributedManager()
    manager.create_process_subgroup("all", manager.world_size)
    known = {name: call(manager) for name, call in IS_KNOWN.items()}
    leave_at_exit()
    assert DistributedManager.is_initialized()
    assert {name: call(DistributedManager()) for name, call in IS_KNOWN.items()} == known
    ran = []
    on_rank(0)(lambda: ran.append(manager.rank))()
    assert ran == [0] * (manager.rank == 0)


@pytest.mark.parametrize("name", CONCERNS_OTHERS)
@ranks(2)
def test_an_exit_handler_that_comes_later_is_refused_what_concerns_the_other_ranks(name):
    manager = DistributedManager()
    manager.create_process_subgroup("all", manager.world_size)
    leave_at_exit()
    with pytest.raises(DistmanError, match="must be made before the rank leaves its job at the end of the program"):
        CONCERNS_OTHERS[name](manager)


@ranks(1, 2)
def test_a_cleanup_in_an_exit_handler_that_comes_later_forgets():
    manager = DistributedManager()
    leave_at_exit()
    leave_at_exit()
    DistributedManager.cleanup()
    with pytest.raises(NotInitializedError):
        _ = manager.rank
