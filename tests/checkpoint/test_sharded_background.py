"""Parts that threads of all ranks write: what is in them, what becomes of errors, and what ends wait for."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from distman import CheckpointError, DistributedManager, RankFailedError
from distman.checkpoint import CheckpointFolder, _location as location, load_sharded, save_sharded
from distman.checkpoint._local_storage import LocalStorage
from distman.testing import ranks

from ..smaller_jobs import job

ROWS = torch.arange(33.0).reshape(11, 3)


def state_of(value, world_size):
    mesh = init_device_mesh("cpu", (world_size,))
    return {
        "rows": distribute_tensor(ROWS * value, mesh, [Shard(0)]),
        "copies": distribute_tensor(ROWS * value, mesh, [Replicate()]),
        "plain": ROWS * value,
        "half": (ROWS * value).t()[1:].to(torch.bfloat16),
        "groups": [{"lr": 0.5 * value}],
    }


def loaded(path):
    """Return what a process that is alone reads."""
    state = {"rows": torch.zeros(11, 3), "copies": torch.zeros(11, 3), "plain": torch.zeros(11, 3)}
    state |= {"half": torch.zeros(2, 11, dtype=torch.bfloat16), "groups": [{"lr": 0.0}]}
    load_sharded(state, path)
    return state


def assert_is(state, value):
    for name in ("rows", "copies", "plain"):
        assert torch.equal(state[name], ROWS * value)
    assert torch.equal(state["half"], (ROWS * value).t()[1:].to(torch.bfloat16))
    assert state["groups"] == [{"lr": 0.5 * value}]


@ranks(1, 2, 3)
def test_what_changes_after_the_call_is_not_saved(tmp_path, world_size):
    path = tmp_path / "sharded"
    for value in (1, 2):
        state = state_of(value, world_size)
        pending = save_sharded(state, path, background=True)
        for name in ("rows", "copies"):
            state[name].to_local().fill_(-1)
        state["plain"].fill_(-1)
        state["half"].fill_(-1)
        state["groups"][0]["lr"] = -1.0
        pending.wait()
        assert pending.path == path
        assert_is(loaded(path), value)
    assert [one.name for one in tmp_path.iterdir()] == ["sharded"]


def test_a_process_that_is_alone_needs_no_manager(tmp_path):
    pending = save_sharded({"weight": ROWS, "step": 3}, tmp_path / "sharded", background=True)
    pending.wait()
    pending.wait()
    state = {"weight": torch.zeros(11, 3), "step": 0}
    load_sharded(state, tmp_path / "sharded")
    assert torch.equal(state["weight"], ROWS)
    assert state["step"] == 3


@ranks(3, manager=False)
def test_leaving_the_job_waits_until_all_parts_are_there(tmp_path, rank):
    dist.destroy_process_group()
    with job(3, rank, tmp_path / "store"):
        save_sharded(state_of(5, 3), tmp_path / "sharded", background=True)
        CheckpointFolder(tmp_path / "run", sharded=True).save(state_of(6, 3), 1)
    if rank == 0:
        with job(1, 0, tmp_path / "store of one"):
            assert_is(loaded(tmp_path / "sharded"), 5)
            assert_is(loaded(tmp_path / "run" / "latest"), 6)


class FullForOne(LocalStorage):
    """A disk that has no room for the part of one rank."""

    def __init__(self, rank):
        self.rank = rank

    def resolve(self, path):
        return super().resolve(path.removeprefix("full-for-one://"))

    def create(self, place):
        if place.rpartition("/")[2].startswith(f"__{self.rank}_"):
            raise OSError(28, "No space left on device", place)
        return super().create(place)


@ranks(3)
@pytest.mark.parametrize("guilty", [0, 2])
def test_an_error_that_nobody_waited_for_is_told_once_by_the_next_load(tmp_path, rank, guilty, monkeypatch):
    path = f"full-for-one://{tmp_path}/sharded"
    storage = FullForOne(-1)
    monkeypatch.setattr(location, "_from_fsspec", lambda _: storage)
    save_sharded(state_of(1, 3), path)
    storage.rank = guilty
    save_sharded(state_of(2, 3), path, background=True)
    with pytest.raises(CheckpointError if rank in (0, guilty) else RankFailedError, match="previous background save"):
        load_sharded(state_of(0, 3), path)
    storage.rank = -1
    assert_is(loaded(tmp_path / "sharded"), 1)
    save_sharded(state_of(3, 3), path)
    assert_is(loaded(tmp_path / "sharded"), 3)
    DistributedManager().barrier("well")


@ranks(3)
@pytest.mark.parametrize("guilty", [0, 2])
def test_a_part_that_cannot_be_written_is_an_error_on_all_and_the_old_folder_stays(tmp_path, rank, guilty, monkeypatch):
    path = f"full-for-one://{tmp_path}/sharded"
    storage = FullForOne(-1)
    monkeypatch.setattr(location, "_from_fsspec", lambda _: storage)
    save_sharded(state_of(1, 3), path)
    storage.rank = guilty
    pending = save_sharded(state_of(2, 3), path, background=True)
    with pytest.raises(OSError if rank == guilty else RankFailedError, match="No space left") as caught:
        pending.wait()
    if rank != guilty:
        assert caught.value.rank == guilty
    save_sharded(state_of(2, 3), path, background=True)
    with pytest.raises(CheckpointError if rank in (0, guilty) else RankFailedError, match="previous background save"):
        save_sharded(state_of(3, 3), path, background=True)
    assert_is(loaded(tmp_path / "sharded"), 1)
    assert [one.name for one in tmp_path.iterdir()] == ["sharded"]
    DistributedManager().barrier("well")
