"""A process forked from a rank knows what the rank knew, and does nothing in its name."""

import os
import pickle
import signal
import socket

import pytest
import torch
import torch.distributed as dist

from distman import DistmanError, DistributedManager, NotInitializedError, ProcessGroupConfig, ProcessGroupNode
from distman._coordination import protocol
from distman.collectives import all_gather_v, broadcast_data
from distman.decorators import on_rank
from distman.metrics import aggregate_loss
from distman.testing import ranks

LIMIT = 30  # seconds after which a child that waits is ended


def in_child(function):
    """Return what a function returns or raises in a forked child."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(LIMIT)
        try:
            outcome = function()
        except Exception as error:  # noqa: BLE001 - the parent judges it
            outcome = f"{type(error).__name__}: {error}"
        os.write(writing, pickle.dumps(outcome))
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as answer:
        text = answer.read()
    assert os.waitpid(child, 0)[1] == 0
    return pickle.loads(text)  # noqa: S301 - our own


def tree():
    config = ProcessGroupConfig(ProcessGroupNode("world"))
    config.add_node(ProcessGroupNode("leaf", DistributedManager().world_size), parent="world")
    return config


# What concerns the other ranks, or the group that the parent is a member of.
CONCERNS_OTHERS = {
    "barrier": lambda manager: manager.barrier(),
    "request_stop": lambda manager: manager.request_stop(),
    "should_stop": lambda manager: manager.should_stop(),
    "slow_ranks": lambda manager: manager.slow_ranks(),
    "requeue": lambda manager: manager.requeue(),
    "wrap_ddp": lambda manager: manager.wrap_ddp(torch.nn.Linear(1, 1)),
    "wrap_fsdp": lambda manager: manager.wrap_fsdp(torch.nn.Linear(1, 1)),
    "subgroup": lambda manager: manager.create_process_subgroup("new", 1),
    "orthogonal": lambda manager: manager.create_orthogonal_process_group("new", "all"),
    "node": lambda manager: manager.create_group_from_node(ProcessGroupNode("new", 1)),
    "tree": lambda manager: manager.create_groups_from_config(tree()),
    "mesh": lambda manager: manager.initialize_mesh((-1,), ("new",)),
    "first use": lambda manager: manager.group("node"),
    "destroy_group": lambda manager: manager.destroy_group("all"),
    "collective": lambda _: all_gather_v(torch.ones(1)),
    "object": lambda _: broadcast_data(1),
    "metric": lambda _: aggregate_loss(1.0),
    "cleanup(barrier=True)": lambda manager: manager.cleanup(barrier=True),
}

# What is known without asking anybody.
IS_KNOWN = {
    "rank": lambda manager: manager.rank,
    "device": lambda manager: str(manager.device),
    "size": lambda manager: manager.group_size("all"),
    "ranks": lambda manager: manager.group_ranks("node"),
    "text": str,
    "on_rank": lambda _: on_rank(0)(lambda: "ran")(),
}


@ranks(1, 2)
def test_a_child_is_refused_what_concerns_the_other_ranks():
    manager = DistributedManager()
    manager.create_process_subgroup("all", manager.world_size)

    def try_all():
        return {name: _outcome(call, manager) for name, call in CONCERNS_OTHERS.items()}

    for name, outcome in in_child(try_all).items():
        assert "must be made in the process of the rank" in str(outcome), name
        assert f"in its child {os.getpid()}" not in outcome, name
    manager.barrier()
    assert all_gather_v(torch.ones(1)).sum() == manager.world_size


def _outcome(call, manager):
    try:
        return call(manager)
    except DistmanError as error:
        return str(error)


@ranks(1, 2)
def test_a_child_knows_what_its_parent_knew():
    manager = DistributedManager()
    manager.create_process_subgroup("all", manager.world_size)
    known = in_child(lambda: {name: call(manager) for name, call in IS_KNOWN.items()})
    assert known == {name: call(manager) for name, call in IS_KNOWN.items()}


@ranks(2, 3)
def test_a_child_that_cleans_up_leaves_its_parent_in_the_job(world_size):
    manager = DistributedManager()
    store = manager._state.job.rendezvous.store

    def clean_up():
        DistributedManager.cleanup()
        return DistributedManager.is_initialized()

    assert in_child(clean_up) is False
    assert not store.check([protocol.LEFT])
    assert not store.check([protocol.left(manager.rank)])
    manager.barrier()
    assert all_gather_v(torch.ones(1)).sum() == world_size
    assert dist.is_initialized()


@ranks(2)
def test_a_child_that_cleaned_up_may_be_alone_and_no_rank():
    def start_again():
        DistributedManager.cleanup()
        try:
            DistributedManager.initialize()
        except DistmanError as error:
            text = str(error)
        with pytest.raises(NotInitializedError):
            DistributedManager()
        manager = DistributedManager.initialize(use_distributed=False)
        manager.barrier()
        manager.request_stop()
        return text, manager.world_size, manager.should_stop()

    text, world_size, stops = in_child(start_again)
    assert "initialize() of a rank must be made in the process of the rank" in text
    assert (world_size, stops) == (1, True)
    DistributedManager().barrier()


def test_a_child_of_a_process_that_was_alone_may_become_a_rank():
    DistributedManager.initialize()
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]

    def become_rank():
        os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
        manager = DistributedManager.initialize(device="cpu")
        return manager.initialization_method, manager.distributed, all_gather_v(torch.ones(1)).tolist()

    assert in_child(become_rank) == ("env", True, [1.0])
    assert not DistributedManager().distributed
