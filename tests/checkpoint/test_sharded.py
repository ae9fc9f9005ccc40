"""States of which each rank has a part: on other numbers of ranks, with errors on one, and with bombs."""

import functools
import os
import pickle

import pytest
import torch
import torch.distributed as dist
from torch.distributed import checkpoint
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from distman import CheckpointError, DistributedManager, RankFailedError
from distman.checkpoint import _sharded, load_sharded, save, save_sharded
from distman.testing import ranks

from ..smaller_jobs import job
from .bombs import Bomb

ROWS = torch.arange(30.0).reshape(10, 3)


def state_of(value, world_size):
    """Return a state whose tensors hold their places, times a value."""
    mesh = init_device_mesh("cpu", (world_size,))
    return {
        "model": {
            "by rows": distribute_tensor(ROWS * value, mesh, [Shard(0)]),
            "by columns": distribute_tensor(ROWS * value, mesh, [Shard(1)]),
            "copies": distribute_tensor(ROWS * value, mesh, [Replicate()]),
            "plain": ROWS * value,
        },
        "groups": [{"lr": 0.5 * value}],
        "step": 7 * value,
    }


def assert_is(state, value):
    for tensor in state["model"].values():
        full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        assert torch.equal(full, ROWS * value)
    assert (state["groups"], state["step"]) == ([{"lr": 0.5 * value}], 7 * value)


def all_are_well():
    DistributedManager().barrier("well")


@ranks(4, manager=False)
def test_what_two_ranks_saved_is_loaded_by_four_and_by_one(tmp_path, rank):
    dist.destroy_process_group()
    for world_size, value in ((2, 1), (4, 0), (1, 0)):
        if rank < world_size:
            with job(world_size, rank, tmp_path / f"store {world_size}"):
                state = state_of(value, world_size)
                if value:
                    save_sharded(state, tmp_path / "sharded")
                else:
                    load_sharded(state, tmp_path / "sharded")
                assert_is(state, 1)


@ranks(1, 2)
def test_a_new_one_takes_the_place_of_the_old_one(tmp_path, world_size):
    folder = tmp_path / "new" / "sharded"
    for value in (1, 2):
        save_sharded(state_of(value, world_size), folder)
        state = state_of(0, world_size)
        load_sharded(state, folder)
        assert_is(state, value)
    assert [path.name for path in folder.parent.iterdir()] == ["sharded"]


@ranks(1, 2)
@pytest.mark.parametrize(
    ("name", "background"), [("train.log", False), (".env", True), ("figures/loss.png", True), (".metadata", False)]
)
def test_a_folder_of_something_else_is_refused_and_stays_as_it_is(name, background, tmp_path, rank):
    file, state = tmp_path / "out" / name, {"step": 1}
    if rank == 0:
        file.parent.mkdir(parents=True)
        file.write_text("precious")
        (tmp_path / "empty").mkdir()
    all_are_well()
    for path, message in (
        (
            tmp_path / "out",
            rf"must be new or empty(?s:.*)got a folder with {file.relative_to(tmp_path / 'out').parts[0]}",
        ),
        (file, "the place of a folder must not be a file"),
    ):
        with pytest.raises((OSError, RankFailedError), match=message):
            save_sharded(state, path, background=background)
    assert file.read_text() == "precious"
    for path in (tmp_path / "empty", tmp_path / "out" / "checkpoint", tmp_path / "empty"):
        pending = save_sharded(state, path, background=background)
        if pending is not None:
            pending.wait()
        load_sharded(state, path)
    all_are_well()


def test_a_process_that_is_alone_needs_no_manager(tmp_path):
    save_sharded({"weight": ROWS, "step": 3}, tmp_path / "sharded")
    state = {"weight": torch.zeros(10, 3), "step": 0}
    load_sharded(state, tmp_path / "sharded")
    assert torch.equal(state["weight"], ROWS)
    assert state["step"] == 3


@ranks(4)
def test_tensors_of_fewer_rows_than_ranks(tmp_path):
    """The empty parts of the last ranks do not take the place of the first one."""
    mesh = init_device_mesh("cpu", (4,))
    full = {f"{rows} rows": torch.arange(3.0 * rows).reshape(rows, 3) + 1 for rows in range(6)}
    save_sharded({name: distribute_tensor(one, mesh, [Shard(0)]) for name, one in full.items()}, tmp_path / "sharded")
    plain = {name: torch.zeros_like(one) for name, one in full.items()}
    parts = {name: distribute_tensor(torch.zeros_like(one), mesh, [Shard(0)]) for name, one in full.items()}
    for state in (plain, parts):
        load_sharded(state, tmp_path / "sharded")
    for name, one in full.items():
        assert torch.equal(plain[name], one)
        assert torch.equal(parts[name].full_tensor(), one)


@ranks(3)
def test_each_rank_may_have_names_of_its_own(tmp_path, rank):
    save_sharded({f"rng {rank}": torch.full((2,), rank), "all": 1}, tmp_path / "sharded")
    state = {f"rng {rank}": torch.zeros(2, dtype=torch.int64), "all": 0}
    load_sharded(state, tmp_path / "sharded")
    assert state[f"rng {rank}"].tolist() == [rank, rank]


@ranks(2)
@pytest.mark.parametrize("keys", [(0, 1), (None, 0.5), (True, "2"), ((1, 2), "a.b")], ids=str)
def test_what_is_under_keys_that_are_not_strings_is_replaced(keys, tmp_path):
    def state_of(value):
        inner = {key: value + number for number, key in enumerate(keys)}
        return {"inner": inner, "list": [{"tensor": torch.full((2,), value), keys[0]: [value]}], "step": value}

    save_sharded(state_of(1), tmp_path / "sharded")
    state = state_of(5)
    inner = state["inner"]
    load_sharded(state, tmp_path / "sharded")
    assert repr(state) == repr(state_of(1))
    assert state["inner"] is inner


@ranks(1, 2)
@pytest.mark.parametrize("background", [False, True])
def test_a_shard_whose_memory_was_freed_is_an_error_on_all_and_the_old_folder_stays(background, tmp_path, world_size):
    folder, state = tmp_path / "sharded", state_of(1, world_size)
    save_sharded(state, folder)
    state["model"]["by rows"].to_local().untyped_storage().resize_(0)
    with pytest.raises((ValueError, RankFailedError), match=r"state\['model'\]\['by rows'\] must have memory"):
        save_sharded(state, folder, background=background)
    state = state_of(0, world_size)
    load_sharded(state, folder)
    assert_is(state, 1)
    all_are_well()


STEPS = 3


def resumed(optimizer_of, path, *, make_room):
    """Train for some steps, save, and as many again; return the weights, and those of the second half after loading."""
    weights = []
    for is_resumed in (False, True):
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 2)
        optimizer = optimizer_of(model.parameters())

        def step(factor=1.0, model=model, optimizer=optimizer):
            optimizer.zero_grad()
            (factor * model(torch.ones(4, 3)).square().mean()).backward()
            optimizer.step()

        if is_resumed:
            if make_room:
                step(0.0)
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            load_sharded(state, path)
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
        else:
            for _ in range(STEPS):
                step()
            save_sharded({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
        for _ in range(STEPS):
            step()
        weights.append(model.weight.detach())
    return weights


@ranks(2)
@pytest.mark.parametrize("kind", [torch.optim.Adam, functools.partial(torch.optim.SGD, momentum=0.9)], ids=str)
def test_an_optimizer_without_room_for_what_was_saved_is_refused_and_one_step_makes_room(kind, tmp_path):
    for make in (kind, lambda parameters: kind(parameters, lr=0.1, weight_decay=0.1)):
        whole, again = resumed(make, tmp_path / "sharded", make_room=True)
        assert torch.equal(whole, again)
        with pytest.raises(ValueError, match=r"state\['optimizer'\]\['state'\] must have room .*optimizer\.state\.0\."):
            resumed(make, tmp_path / "sharded", make_room=False)


@ranks(2)
def test_what_a_list_or_an_empty_dict_has_no_room_for_is_an_error_on_all(tmp_path, rank):
    saved = {"groups": [{"lr": 1.0}, {"lr": 2.0}], "own": {"0": 1.0, "1": 2.0}, "rest": [3], "a.b": 4}
    save_sharded(saved, tmp_path / "sharded")
    for state, where in (
        ({"groups": [{"lr": 0.0}]}, r"state\['groups'\] .* groups\.1\.lr"),
        ({"own": {}}, r"state\['own'\] .* own\.0"),
    ):
        with pytest.raises(ValueError if rank == 1 else RankFailedError, match=where):
            load_sharded(state if rank == 1 else dict(saved), tmp_path / "sharded")
    for state, filled in (
        ({}, {}),
        ({"own": {str(rank): 0.0}, "rest": []}, {"own": {str(rank): 1.0 + rank}, "rest": [3]}),
        ({"a": {}, "a.b": 0}, {"a": {}, "a.b": 4}),
    ):
        load_sharded(state, tmp_path / "sharded")
        assert state == filled
    all_are_well()


@ranks(2)
def test_an_error_on_one_rank_is_an_error_on_all_and_the_old_folder_stays(tmp_path, rank, world_size):
    folder = tmp_path / "sharded"
    save_sharded(state_of(1, world_size), folder)
    bad = state_of(2, world_size) | ({"function": print} if rank == 1 else {})
    with pytest.raises(ValueError if rank == 1 else RankFailedError, match=r"state\['function'\] must be a tensor"):
        save_sharded(bad, folder)
    clashing = {"a": {"b": 1}, "a.b": 2} if rank == 1 else {"a": {"b": 1}}
    with pytest.raises(ValueError if rank == 1 else RankFailedError, match=r"duplicated flatten key a\.b"):
        save_sharded(clashing, folder)
    state = state_of(0, world_size)
    load_sharded(state, folder)
    assert_is(state, 1)
    assert [path.name for path in tmp_path.iterdir()] == ["sharded"]
    all_are_well()


@ranks(2)
def test_what_rank_0_cannot_write_is_an_error_on_all(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises((OSError, RankFailedError), match=r"(exists|Not a directory)"):
        save_sharded({"step": 1}, tmp_path / "file" / "sharded")
    all_are_well()


@ranks(1, 2)
def test_a_full_disk_is_one_error_on_all_and_the_old_folder_stays(small_disk, world_size):
    save_sharded({"step": 1}, small_disk / "sharded")
    mesh = init_device_mesh("cpu", (world_size,))
    too_large = {"weight": distribute_tensor(torch.zeros(1_000_000), mesh, [Shard(0)]), "step": 2}
    with pytest.raises((OSError, RankFailedError), match=r"No space left on device: '.*distcp'"):
        save_sharded(too_large, small_disk / "sharded")
    state = {"step": 0}
    load_sharded(state, small_disk / "sharded")
    assert state == {"step": 1}
    assert [path.name for path in small_disk.iterdir()] == ["sharded"]
    all_are_well()


@ranks(2)
def test_an_error_at_loading_on_one_rank_is_an_error_on_all(tmp_path, rank):
    folder = tmp_path / "sharded"
    save_sharded({"weight": ROWS, "step": 1}, folder)
    with pytest.raises(FileNotFoundError if rank == 1 else RankFailedError, match=r"no sharded checkpoint at .*other"):
        load_sharded({"weight": torch.zeros(10, 3)}, tmp_path / "other" if rank == 1 else folder)
    with pytest.raises(CheckpointError if rank == 1 else RankFailedError, match=r"Missing key(?s:.*): bias"):
        load_sharded({"bias" if rank == 1 else "weight": torch.zeros(10, 3)}, folder)
    with pytest.raises(CheckpointError, match="is damaged or does not fit the state"):
        load_sharded({"weight": torch.zeros(2, 3)}, folder)
    all_are_well()


@ranks(2)
def test_a_folder_that_torch_has_written_is_for_torch(tmp_path):
    checkpoint.save({"model": {"weight": torch.ones(2)}}, checkpoint_id=tmp_path / "of_torch")
    with pytest.raises(FileNotFoundError, match="torch wrote this folder: load it by torch"):
        load_sharded({"model": {"weight": torch.zeros(2)}}, tmp_path / "of_torch")


@ranks(2)
def test_half_a_file_is_no_checkpoint(tmp_path, rank):
    folder = tmp_path / "sharded"
    save_sharded({"weight": ROWS}, folder)
    if rank == 0:
        for path in folder.glob("*.distcp"):
            os.truncate(path, path.stat().st_size // 2)
    all_are_well()
    with pytest.raises((CheckpointError, RankFailedError), match="sharded is damaged or does not fit the state"):
        load_sharded({"weight": torch.zeros(10, 3)}, folder)
    if rank == 0:
        os.truncate(folder / "contents.jsonl", 20)
    all_are_well()
    with pytest.raises(CheckpointError, match=r"contents\.jsonl is damaged: its checksum differs"):
        load_sharded({"weight": torch.zeros(10, 3)}, folder)


@ranks(1, 2)
def test_the_pickle_beside_the_table_is_not_read(tmp_path, rank):
    folder, crater = tmp_path / "sharded", tmp_path / "crater"
    save_sharded({"step": 1}, folder)
    if rank == 0:
        (folder / ".metadata").write_bytes(pickle.dumps(Bomb(crater)))
    all_are_well()
    state = {"step": 0}
    load_sharded(state, folder)
    assert state == {"step": 1}
    assert not crater.exists()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_bomb_in_place_of_a_number_is_refused_and_does_nothing(tmp_path, monkeypatch):
    folder, crater = tmp_path / "sharded", tmp_path / "crater"
    with monkeypatch.context() as patched:
        patched.setattr(_sharded, "check_state", lambda *_, **__: None)
        save_sharded({"step": Bomb(crater)}, folder)
    with pytest.raises(CheckpointError, match=r"is damaged or does not fit the state: got \S+"):
        load_sharded({"step": 0}, folder)
    assert not crater.exists()


@ranks(2)
def test_a_part_is_not_taken_for_the_whole(tmp_path, world_size):
    with pytest.raises(
        (ValueError, RankFailedError), match=r"state\['model'\]\['by rows'\] must be a full tensor(?s:.*)save_sharded"
    ):
        save(state_of(1, world_size), tmp_path / "state.pt")


def test_a_folder_whose_writer_was_killed_between_two_renames_is_put_back(tmp_path):
    folder = tmp_path / "sharded"
    save_sharded({"step": 1}, folder)
    folder.rename(tmp_path / ".sharded.old")
    (tmp_path / ".sharded.12-00ff00ff.tmp").mkdir()
    state = {"step": 0}
    load_sharded(state, folder)
    assert state == {"step": 1}
    folder.rename(tmp_path / ".sharded.old")
    save_sharded({"step": 2}, folder)
    load_sharded(state, folder)
    assert state == {"step": 2}
    assert [path.name for path in tmp_path.iterdir()] == ["sharded"]
