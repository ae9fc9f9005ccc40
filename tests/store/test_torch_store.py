"""The store as torch uses it: through its C++ classes, for groups and meshes, and what stands over these."""

import contextlib
import gc
import os
import signal
import socket
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from distman._store.client import Client
from distman._store.connection import Connection, GaveUpError
from distman._store.frames import UNANSWERED
from distman._store.handshake import MEMBER, WATCHER
from distman._store.torch_store import AbortableStore, TorchStore
from distman._torch_internals import is_lost_connection, make_group, meeting_in_few_calls
from distman.testing import ranks

from .stores import KINDS, PATIENCE, MemoryStore, open_store

SOON = timedelta(milliseconds=20)


@pytest.fixture(scope="module")
def opened():
    with open_store("unix") as store:
        store.client()  # which keeps it
        yield store


@pytest.fixture(params=["process", "memory"])
def store(opened, request):
    whole = TorchStore(opened.client(MEMBER, 0)) if request.param == "process" else MemoryStore()
    return whole.part(os.urandom(4).hex())


def use(store):
    """Everything that torch's C++ asks of a store."""
    store.set("a", "1")
    assert store.get("a") == b"1"
    assert store.add("a", 2) == 3
    store.append("a", "4")
    assert store.compare_set("a", "34", "x") == b"x"
    assert store.compare_set("a", "34", "y") == b"x"
    store.multi_set(["b", "c"], ["2", "3"])
    assert store.multi_get(["c", "a"]) == [b"3", b"x"]
    assert store.check(["a", "b", "c"])
    store.wait(["a", "b"])
    store.wait(["a", "b"], SOON)
    before = store.num_keys()
    assert store.delete_key("a")
    assert not store.delete_key("a")
    assert not store.check(["a", "b"])
    assert store.num_keys() == before - 1
    store.delete_key("b")
    store.delete_key("c")
    assert store.num_keys() == before - 3
    assert store.has_extended_api()


def test_every_operation_is_reached_from_python_and_through_c(store):
    use(store)
    use(dist.PrefixStore("prefix", store))
    use(dist.PrefixStore("outer", dist.PrefixStore("inner", store)))


def test_a_part_has_the_keys_of_a_prefix_store(store):
    part = store.part("x")
    assert store.part("x") is part
    part.set("a", "1")
    part.part("y").set("b", "2")
    assert dist.PrefixStore("x", store).get("a") == b"1"
    assert dist.PrefixStore("x", store).get("y/b") == b"2"
    assert part.client.check([part.full_key("a")])


def test_a_wait_ends_in_time(store):
    for one in (store, dist.PrefixStore("prefix", store)):
        for wait in (lambda one=one: one.wait(["nothing"], SOON), lambda one=one: get_soon(one)):
            with pytest.raises(dist.DistStoreError, match=r"wait timeout.*nothing"):
                wait()


def get_soon(store):
    before = store.timeout
    store.set_timeout(SOON)
    try:
        store.get("nothing")
    finally:
        store.set_timeout(before)


def test_a_wait_is_ended_by_a_key_of_another_part(store):
    store.part("job").set("failure", "boom")
    unless = store.part("job").full_key("failure")
    with pytest.raises(GaveUpError) as caught:
        store.part("group").wait(["nothing"], unless=unless)
    assert caught.value.value == b"boom"


def test_all_arrive(store):
    stores = [store, store.again(WATCHER), store.again(WATCHER)]
    with ThreadPoolExecutor(3) as threads:
        came = [threads.submit(one.arrive, "counter", 3, ("outcome", "open"), PATIENCE) for one in stores]
        assert {one.result(PATIENCE) for one in came} == {b"open"}
    for one in stores[1:]:
        one.close()


def test_what_is_no_number_is_no_error_of_the_store(store):
    store.set("a", "x")
    with pytest.raises(ValueError, match="it is no number"):
        store.add("a", 1)


def test_clones_and_parts_live_as_long_as_their_store(opened):
    store = TorchStore(opened.client(MEMBER, 0)).part(os.urandom(4).hex())
    prefixed = [dist.PrefixStore("prefix", store.part("p")), dist.PrefixStore("prefix", store).clone()]
    gc.collect()
    for one in prefixed:
        use(one)
    store.close()
    with pytest.raises(dist.DistNetworkError):
        prefixed[1].check(["a"])


def test_a_store_that_is_gone_is_a_lost_connection():
    with open_store("unix") as opened:
        store = TorchStore(opened.client())
        os.kill(opened.process.popen.pid, signal.SIGKILL)
        assert opened.exit_code() == -signal.SIGKILL
        with pytest.raises(dist.DistNetworkError, match=r"\(pid \d+\) is gone") as caught:
            dist.PrefixStore("prefix", store).add("a", 1)
        assert is_lost_connection(caught.value)


@pytest.fixture(params=KINDS)
def door(request):
    with open_store(request.param) as opened:
        opened.client()  # which keeps it
        yield opened.door


@contextlib.contextmanager
def default_group(door, rank, world_size):
    """torch's default group, over a store of the job's instead of the test's own."""
    dist.destroy_process_group()
    store = TorchStore(Client(door, MEMBER, rank))
    store.set_timeout(timedelta(seconds=PATIENCE))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    yield store
    dist.destroy_process_group()
    store.close()


@ranks(2, 3, manager=False)
@pytest.mark.parametrize("is_lazy", ["0", "1"])
def test_groups_and_meshes(rank, world_size, door, is_lazy, monkeypatch):
    monkeypatch.setenv("TORCH_GLOO_LAZY_INIT", is_lazy)
    everybody = range(world_size)
    with default_group(door, rank, world_size):
        for make in (
            lambda: None,
            lambda: dist.new_group(everybody),
            lambda: dist.new_group(everybody, use_local_synchronization=True),
            lambda: init_device_mesh("cpu", (world_size,)).get_group(),
            lambda: init_device_mesh("cpu", (world_size, 1), mesh_dim_names=("a", "b"))["a"].get_group(),
        ):
            total = torch.ones(4)
            dist.all_reduce(total, group=make())
            assert total.tolist() == [world_size] * 4
        told = [rank]
        dist.broadcast_object_list(told)
        assert told == [0]
        dist.barrier()
        dist.monitored_barrier(timeout=timedelta(seconds=PATIENCE))


@ranks(2, 5, manager=False)
def test_a_group_meets_in_as_many_calls_whatever_its_size(rank, world_size, door, monkeypatch):
    replies = []
    make_call = Connection.call

    def counted(connection, operation, *fields):
        reply = make_call(connection, operation, *fields)
        if operation not in UNANSWERED:
            replies.append(reply)
        return reply

    monkeypatch.setattr(Connection, "call", counted)
    with default_group(door, rank, world_size) as store:
        replies.clear()
        members = AbortableStore(store, "failure", PATIENCE)
        limit = timedelta(seconds=PATIENCE)
        group = make_group(range(world_size), rank, name="one", description="", store=members, timeout=limit)
        assert 1 <= len(replies) <= 3
        host_and_address = len(socket.gethostname()) + 168  # without 8 bytes for each other rank
        assert sum(map(len, replies)) < world_size * host_and_address
        total = torch.ones(1)
        dist.all_reduce(total, group=group)
        assert total.item() == world_size


@pytest.mark.parametrize("before", [None, "0"])
def test_what_gloo_is_told_stays_as_long_as_a_group_is_being_made(monkeypatch, before):
    names = ("GLOO_ENABLE_STORE_V2_API", "GLOO_ENABLE_RANK_AS_SEQUENCE_NUMBER")
    for name in names:
        monkeypatch.delenv(name, raising=False)
        if before is not None:
            monkeypatch.setenv(name, before)
    first, second = meeting_in_few_calls(), meeting_in_few_calls()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert [os.environ[name] for name in names] == ["1", "1"]
    second.__exit__(None, None, None)
    assert [os.environ.get(name) for name in names] == [before, before]


@ranks(2, manager=False)
def test_models_and_checkpoints(rank, world_size, door, tmp_path):
    with default_group(door, rank, world_size):
        example = torch.ones(2, 4)
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
        model(example).sum().backward()
        sharded = torch.nn.Linear(4, 4)
        fully_shard(sharded, mesh=init_device_mesh("cpu", (world_size,)))
        sharded(example).sum().backward()
        state = {"model": model.state_dict()}
        dcp.save(state, checkpoint_id=tmp_path / "one")
        dcp.load(state, checkpoint_id=tmp_path / "one")
        dcp.async_save(state, checkpoint_id=tmp_path / "two").result()
        dist.barrier()


@ranks(2, manager=False)
def test_a_rank_that_does_not_come_is_missed_in_time(rank, world_size, door):
    with default_group(door, rank, world_size) as store:
        group = dist.new_group([0, 1], timeout=timedelta(seconds=0.2))
        if rank == 0:
            with pytest.raises(RuntimeError, match="Rank 1 failed to pass monitoredBarrier"):
                dist.monitored_barrier(group, timeout=timedelta(seconds=0.1))
            with pytest.raises(RuntimeError, match=r"[Tt]imed out|timeout"):
                dist.all_reduce(torch.ones(1), group=group)
            store.set("rank 0 has given up", "1")
        store.wait(["rank 0 has given up"])
