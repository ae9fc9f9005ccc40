"""DistributedManager: one state in all instances, on one process and on several."""

import datetime
import gc
import os
import queue
import sys
from logging.handlers import QueueHandler

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from distman import (
    BarrierTimeoutError,
    DistmanError,
    DistributedManager,
    LaunchEnvironmentError,
    NotInitializedError,
    RankFailedError,
    initialize_ddp,
)
from distman._base.log import logger
from distman._coordination.failure import hook
from distman.testing import fake_environment, ranks


def pretend(monkeypatch, environ):
    for name, value in environ.items():
        monkeypatch.setenv(name, value)


def test_one_process_knows_its_place():
    manager = DistributedManager.initialize()
    assert (manager.rank, manager.world_size, manager.local_rank, manager.local_world_size) == (0, 1, 0, 1)
    assert (manager.node_rank, manager.num_nodes) == (0, 1)
    assert (manager.is_main, manager.is_local_main) == (True, True)
    assert (manager.distributed, manager.backend, manager.initialization_method) == (False, None, "single")
    assert [peer.pid for peer in manager.roll_call] == [os.getpid()]
    assert not dist.is_initialized()
    assert str(manager).startswith("DistributedManager(rank 0 of 1, local rank 0 of 1 on ")
    manager.barrier("alone")


def test_asking_too_early_says_what_to_call():
    with pytest.raises(NotInitializedError, match=r"Call DistributedManager\.initialize\(\) once"):
        DistributedManager()


def test_all_instances_share_one_state_also_over_a_new_start():
    first = DistributedManager.initialize(device="cpu")
    DistributedManager.cleanup()
    assert not DistributedManager.is_initialized()
    for ask in (lambda: first.rank, lambda: first.broadcast_buffers, lambda: str(first), DistributedManager):
        with pytest.raises(NotInitializedError):
            ask()
    second = DistributedManager.initialize(device="cpu")
    second.find_unused_parameters = True
    assert (first.rank, first.find_unused_parameters) == (0, True)


def test_resetting_the_shared_state_forgets_everything():
    DistributedManager.initialize()
    DistributedManager._shared_state = {}
    assert not DistributedManager.is_initialized()


def test_what_is_not_there_is_an_attribute_error():
    manager = DistributedManager.initialize()
    with pytest.raises(AttributeError, match="has no attribute 'rnak'"):
        _ = manager.rnak


def test_a_second_start_warns_and_changes_nothing(caplog):
    manager = DistributedManager.initialize()
    assert DistributedManager.initialize(method="no such method").roll_call == manager.roll_call
    assert "already initialized" in caplog.text


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"method": "nonsense"}, ValueError, "method must be one of"),
        ({"timeout": -1}, ValueError, "timeout must be a positive number of seconds, got -1 from the call"),
        ({"rendezvous_timeout": datetime.timedelta(0)}, ValueError, "timeout must be a positive number"),
        ({"backend": "mpi"}, ValueError, r"backend must be one that this torch supports \(gloo.*\), got 'mpi'"),
        ({"backend": "cpu:gloo,cpu:gloo"}, ValueError, "supports .*gloo.*, got 'cpu:gloo,cpu:gloo'"),
        ({"device": "nonsense"}, ValueError, "device must be a string such as"),
        ({"device": 3}, TypeError, "device must be"),
        ({"use_distributed": True}, LaunchEnvironmentError, "use_distributed must be None or False"),
    ],
)
def test_a_failed_start_leaves_no_trace_and_can_be_repeated(options, error, text):
    with pytest.raises(error, match=text):
        DistributedManager.initialize(**options)
    assert not DistributedManager.is_initialized()
    assert DistributedManager.initialize().world_size == 1


def test_half_an_environment_is_an_error_and_not_one_process(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(LaunchEnvironmentError, match="WORLD_SIZE must be set"):
        DistributedManager.initialize()


@pytest.mark.parametrize("variable", [f"DISTMAN_{name}TIMEOUT" for name in ("", "RENDEZVOUS_", "SILENCE_", "HANG_")])
def test_a_timeout_that_is_no_number_names_its_variable(monkeypatch, variable):
    for text in ("soon", "-1", "nan"):
        monkeypatch.setenv(variable, text)
        with pytest.raises(ValueError, match=f"positive number of seconds, got '{text}' from {variable}"):
            DistributedManager.initialize()


def test_a_misspelt_variable_is_told_at_the_start(monkeypatch, caplog):
    monkeypatch.setenv("DISTMAN_TIMEUOT", "3")
    DistributedManager.initialize()
    assert [record.getMessage() for record in caplog.records] == [
        "DISTMAN_TIMEUOT has no effect, because distman reads no such variable: did you mean DISTMAN_TIMEOUT?"
    ]


@ranks(3)
def test_rank_zero_alone_tells_of_a_misspelt_variable(rank):
    DistributedManager.cleanup()
    os.environ["DISTMAN_TIMEUOT"] = "3"
    told = queue.SimpleQueue()
    handler = QueueHandler(told)
    logger.addHandler(handler)
    try:
        DistributedManager.initialize()
    finally:
        logger.removeHandler(handler)
    assert told.qsize() == (rank == 0)


def test_use_distributed_false_is_one_process_whatever_the_environment_says(monkeypatch):
    pretend(monkeypatch, fake_environment("slurm", nodes=2, tasks=4)[3])
    assert DistributedManager.initialize(use_distributed=False).world_size == 1


def test_one_process_among_others_tells_nobody_of_its_failure(monkeypatch):
    told = []
    monkeypatch.setattr(hook, "_hook", None)
    monkeypatch.setattr(sys, "excepthook", lambda *_: None)
    hook.install(told.append)
    DistributedManager.initialize(use_distributed=False)
    sys.excepthook(ValueError, ValueError("boom"), None)
    assert told == []


def test_an_allocation_without_a_step_is_one_process_with_a_warning(monkeypatch, caplog):
    pretend(monkeypatch, {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_JOB_NUM_NODES": "2", "SLURM_PROCID": "0"})
    assert DistributedManager.initialize().world_size == 1
    assert "srun did not start it" in caplog.text


def test_the_environment_is_not_touched():
    before = dict(os.environ)
    DistributedManager.initialize(seed=1)
    DistributedManager.cleanup()
    assert dict(os.environ) == before


def test_seeds_only_when_asked():
    torch.manual_seed(7)
    expected = torch.rand(1)
    torch.manual_seed(7)
    DistributedManager.initialize()
    assert torch.equal(torch.rand(1), expected)
    DistributedManager.cleanup()
    DistributedManager.initialize(seed=7)
    assert torch.equal(torch.rand(1), expected)


def test_initialize_ddp_returns_what_it_found_and_then_none():
    assert initialize_ddp(timeout=datetime.timedelta(minutes=1)) == (False, 0, 0, 1, DistributedManager().device)
    assert initialize_ddp() is None


@pytest.mark.parametrize(("value", "expected"), [("1", True), ("TRUE", True), ("0", False), ("", False)])
def test_unused_parameters_follow_their_variable(monkeypatch, value, expected):
    monkeypatch.setenv("DDP_FIND_UNUSED_PARAMETERS", value)
    assert DistributedManager.initialize().find_unused_parameters is expected


def test_one_process_keeps_its_module():
    module = torch.nn.Linear(2, 1)
    assert DistributedManager.initialize().wrap_ddp(module) is module


@ranks(1, 2)
def test_one_process_refuses_to_wrap_what_several_do():
    manager, linear = DistributedManager(), torch.nn.Linear(1, 1)
    with pytest.raises(TypeError, match=r"got find_unused_parameter=True\. Did you mean find_unused_parameters\?"):
        manager.wrap_ddp(linear, find_unused_parameter=True)
    with pytest.raises(TypeError, match=r"xyz must be an option that wrap_ddp\(\) takes, got xyz=1\. It takes b"):
        manager.wrap_ddp(linear, xyz=1)
    with pytest.raises(TypeError, match=r"module must be a torch\.nn\.Module, got a str\. Pass the model"):
        manager.wrap_ddp("x")
    for module in (torch.nn.ReLU(), linear.requires_grad_(requires_grad=False)):
        with pytest.raises(ValueError, match="module must have a parameter that requires a gradient, got none"):
            manager.wrap_ddp(module)


@ranks(1, 2, 3)
def test_a_group_that_was_there_is_adopted(rank, world_size):
    manager = DistributedManager()
    assert (manager.rank, manager.world_size, manager.distributed) == (rank, world_size, True)
    assert (manager.local_rank, manager.local_world_size, manager.num_nodes) == (rank, world_size, 1)
    assert [peer.rank for peer in manager.roll_call] == list(range(world_size))
    assert len({peer.pid for peer in manager.roll_call}) == world_size
    DistributedManager.cleanup()
    assert dist.is_initialized()
    assert DistributedManager.initialize().roll_call[rank].pid == os.getpid()


@ranks(2)
def test_adoption_derives_the_place_where_the_environment_disagrees(rank):
    DistributedManager.cleanup()
    os.environ |= {"RANK": "5", "WORLD_SIZE": "9", "LOCAL_RANK": "5", "LOCAL_WORLD_SIZE": "9"}
    manager = DistributedManager.initialize()
    assert (manager.rank, manager.world_size, manager.local_rank) == (rank, 2, rank)


@ranks(2)
def test_ddp_averages_gradients_over_the_ranks(rank):
    manager = DistributedManager()
    torch.manual_seed(rank)
    module = manager.wrap_ddp(torch.nn.Linear(3, 1))
    assert isinstance(module, DistributedDataParallel)
    assert not module.find_unused_parameters
    module(torch.full((1, 3), float(rank + 1))).sum().backward()
    assert torch.equal(module.module.weight.grad, torch.full((1, 3), 1.5))
    shared = [torch.empty_like(module.module.weight) for _ in range(2)]
    dist.all_gather(shared, module.module.weight.detach())
    assert torch.equal(*shared)


@ranks(2)
def test_options_of_the_call_go_before_the_managers_own():
    DistributedManager().find_unused_parameters = True
    module = DistributedManager().wrap_ddp(torch.nn.Linear(1, 1), find_unused_parameters=False)
    assert module.find_unused_parameters is False


@ranks(3)
def test_a_barrier_names_who_did_not_come(rank):
    manager = DistributedManager()
    manager.barrier()
    manager.barrier("save")
    if rank != 1:
        with pytest.raises(BarrierTimeoutError, match=r"barrier 0 'load'.*did not come: rank 1 \(.*, pid \d+\)"):
            manager.barrier("load", timeout=0.3)
    manager.barrier("save")  # those of each name are counted by themselves
    manager.barrier()


@pytest.mark.parametrize("reason", ["no Slurm job", "no clients of Slurm"])
@ranks(1, 2)
def test_what_keeps_a_job_from_being_queued_again_is_raised_on_all_ranks(rank, reason, tmp_path):
    manager = DistributedManager()
    if reason != "no Slurm job":
        os.environ |= {"SLURM_JOB_ID": "7", "PATH": str(tmp_path)}
    text = "only a Slurm job can be requeued" if reason == "no Slurm job" else "Install Slurm's clients"
    for _ in range(2):
        with pytest.raises(DistmanError if rank == 0 else RankFailedError, match=text):
            manager.requeue()
    manager.barrier()


@ranks(2)
def test_barriers_leave_nothing_in_the_store():
    manager = DistributedManager()
    store = manager._state.job.rendezvous.store
    manager.barrier()
    dist.barrier()
    num_keys = store.num_keys()
    for _ in range(20):
        manager.barrier("again")
    dist.barrier()
    assert store.num_keys() <= num_keys + len(manager.roll_call)


def test_a_simulated_group_is_adopted_without_asking_anyone(monkeypatch):
    from torch.testing._internal.distributed.fake_pg import FakeStore

    pretend(monkeypatch, {"RANK": "3", "WORLD_SIZE": "1024"})
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # torch wraps it for good
    dist.init_process_group("fake", store=FakeStore(), rank=3, world_size=1024)
    try:
        manager = DistributedManager.initialize()
        assert (manager.rank, manager.world_size, len(manager.roll_call)) == (3, 1024, 1)
        manager.barrier()
    finally:
        DistributedManager.cleanup()
        dist.destroy_process_group()


@ranks(2, manager=False)
def test_a_group_that_is_written_in_python_is_adopted(rank):
    class WrittenInPython(dist.ProcessGroup):
        """A group without a store of its own, as other libraries make them."""

        def getBackendName(self):  # noqa: N802 - torch's name
            return "written-in-python"

        @property
        def group_name(self):
            return "world"

    store = dist.PrefixStore("python", dist.distributed_c10d._get_default_store())
    dist.destroy_process_group()
    dist.Backend.register_backend(
        "written-in-python", lambda _store, rank, size, _timeout: WrittenInPython(rank, size), devices=["cpu"]
    )
    dist.init_process_group("written-in-python", store=store, rank=rank, world_size=2)
    manager = DistributedManager.initialize(device="cpu")
    assert isinstance(dist.group.WORLD, WrittenInPython)
    assert [peer.rank for peer in manager.roll_call] == [0, 1]
    manager.barrier()


@ranks(2)
def test_a_forked_child_does_not_collect_a_dropped_group():
    DistributedManager.create_process_subgroup("both", 2)
    gc.collect()
    gc.disable()
    wrapped = DistributedManager().wrap_ddp(torch.nn.Linear(1, 1), process_group=DistributedManager().group("both"))
    wrapped.cycle = wrapped
    DistributedManager().destroy_group("both")
    del wrapped
    child = os.fork()
    if child == 0:
        gc.collect()
        os._exit(0)
    gc.enable()
    assert os.waitpid(child, 0)[1] == 0
