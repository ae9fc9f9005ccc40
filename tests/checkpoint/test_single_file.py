"""Saving and loading on several ranks, and what becomes of errors."""

import os
import pickle
from collections import OrderedDict

import pytest
import torch

from distman import CheckpointError, DistributedManager, RankFailedError
from distman.checkpoint import CheckpointFolder, load, load_sharded, save, save_sharded
from distman.checkpoint._local_storage import _remove_leftovers
from distman.testing import ranks

from .bombs import Bomb


def state_of(number):
    return {
        "model": OrderedDict(weight=torch.full((3, 2), float(number)), empty=torch.empty(0, 4)),
        "optimizer": {"state": {0: {"step": torch.tensor(number)}}, "groups": [{"lr": 0.1, "betas": (0.9, 0.99)}]},
        "rng": torch.arange(5, dtype=torch.uint8),
        "step": number,
        "note": "é",
        "flags": [True, False, None, -1, 2.5, float("inf")],
    }


def assert_same(one, other):
    assert type(one) is type(other)
    if isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)
    elif isinstance(one, dict):
        assert list(one) == list(other)
        for key in one:
            assert_same(one[key], other[key])
    elif isinstance(one, list | tuple):
        assert len(one) == len(other)
        for left, right in zip(one, other, strict=True):
            assert_same(left, right)
    else:
        assert one == other


def save_and_wait(state, path, *, background):
    pending = save(state, path, background=background)
    if pending is not None:
        pending.wait()


def all_are_well():
    DistributedManager().barrier("well")


@pytest.fixture
def blocked(tmp_path):
    (tmp_path / "file").touch()
    return tmp_path / "file" / "state.pt"


@ranks(1, 2, 4)
@pytest.mark.parametrize("background", [False, True])
def test_all_ranks_load_what_rank_0_saved(tmp_path, rank, background):
    path = tmp_path / "new" / "folders" / "state.pt"
    for number in (1, 2):
        save_and_wait(state_of(number if rank == 0 else -1), path, background=background)
        assert_same(load(path), state_of(number))
    assert [one.name for one in path.parent.iterdir()] == ["state.pt"]


@ranks(2)
def test_a_local_save_waits_for_nobody(tmp_path, rank):
    if rank == 1:
        save(state_of(7), tmp_path / "mine.pt", local=True)
        assert torch.load(tmp_path / "mine.pt")["step"] == 7
        with pytest.raises(ValueError, match="background must be False for a local save"):
            save(state_of(7), tmp_path / "mine.pt", local=True, background=True)


def test_a_process_that_is_alone_needs_no_manager(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save(state_of(3), "state.pt")
    assert_same(load("state.pt"), state_of(3))
    with pytest.raises(FileNotFoundError, match=r"no checkpoint at .*none\.pt\. Correct"):
        load("none.pt")


@ranks(3)
@pytest.mark.parametrize("background", [False, True])
def test_what_could_not_be_loaded_is_refused_by_all_when_it_is_saved(tmp_path, rank, background):
    path = tmp_path / "state.pt"
    save({"step": 1}, path)
    with pytest.raises((ValueError, RankFailedError), match=r"state\['optimizer'\]\[1\] must be a tensor") as caught:
        save({"optimizer": [0.1, lambda: 0]}, path, background=background)
    assert isinstance(caught.value, ValueError if rank == 0 else RankFailedError)
    assert load(path) == {"step": 1}
    assert [one.name for one in tmp_path.iterdir()] == ["state.pt"]
    all_are_well()


@ranks(1, 3)
def test_what_rank_0_cannot_write_is_an_error_on_all(blocked, rank):
    with pytest.raises(OSError if rank == 0 else RankFailedError, match=r"(exists|Not a directory)") as caught:
        save({}, blocked)
    assert isinstance(caught.value, OSError if rank == 0 else RankFailedError)
    pending = save({}, blocked, background=True)
    for _ in range(2):
        with pytest.raises(OSError if rank == 0 else RankFailedError, match=r"(exists|Not a directory)"):
            pending.wait()
    all_are_well()


@ranks(2)
def test_an_error_in_the_background_is_raised_by_the_next_save_to_the_same_path(blocked):
    save({"number": 1}, blocked, background=True)
    with pytest.raises((CheckpointError, RankFailedError), match=r"the previous background save to .*state\.pt failed"):
        save({"number": 2}, blocked)
    blocked.parent.unlink(missing_ok=True)
    DistributedManager().barrier("no file in the way")
    save({"number": 3}, blocked)
    assert load(blocked) == {"number": 3}


@ranks(1, 2)
def test_what_is_loaded_is_what_was_saved_last(tmp_path, rank):
    """Large enough that a load which did not wait would find the file before."""
    path, folder = tmp_path / "state.pt", CheckpointFolder(tmp_path / "run")
    for number in range(2):
        save({"tensor": torch.full((4_000_000,), float(number))}, path, background=True)
        assert load(path, device="cpu")["tensor"][-1] == number
        folder.save({"tensor": torch.full((4_000_000,), float(number))}, number)
        assert load(folder.path / "latest.pt", device="cpu")["tensor"][-1] == number
        state = {f"tensor {rank}": torch.full((4_000_000,), float(number))}
        save_sharded(state, tmp_path / "sharded", background=True)
        state[f"tensor {rank}"] = torch.zeros(4_000_000)
        load_sharded(state, tmp_path / "sharded")
        assert state[f"tensor {rank}"][-1] == number
    all_are_well()


@ranks(2)
def test_a_load_after_a_save_that_failed_says_so_once(blocked, rank):
    save({"number": 1}, blocked, background=True)
    with pytest.raises((CheckpointError, RankFailedError), match=r"background save to .* failed: .*load again"):
        load(blocked)
    with pytest.raises(FileNotFoundError if rank == 0 else (FileNotFoundError, RankFailedError)):
        load(blocked)
    all_are_well()


@ranks(1, 2)
@pytest.mark.parametrize("background", [False, True])
def test_a_full_disk_is_one_error_on_all_and_the_old_file_stays(small_disk, rank, background):
    path = small_disk / "state.pt"
    save({"number": 1}, path)
    too_large = {"tensor": torch.zeros(1_000_000)}
    with pytest.raises((OSError, RankFailedError), match=r"No space left on device: '.*state\.pt'") as caught:
        save_and_wait(too_large, path, background=background)
    assert isinstance(caught.value, OSError if rank == 0 else RankFailedError)
    assert [one.name for one in small_disk.iterdir()] == ["state.pt"]
    assert load(path) == {"number": 1}
    all_are_well()


@ranks(4)
def test_an_error_at_loading_on_one_rank_is_an_error_on_all(tmp_path, rank):
    save({"number": 1}, tmp_path / "state.pt")
    with pytest.raises(FileNotFoundError if rank == 2 else RankFailedError, match=r"no checkpoint at .*other\.pt"):
        load(tmp_path / ("other.pt" if rank == 2 else "state.pt"))
    assert load(tmp_path / "state.pt") == {"number": 1}
    all_are_well()


@ranks(2)
@pytest.mark.parametrize("part", [0.0, 0.3, 0.99])
def test_half_a_file_is_no_checkpoint(tmp_path, rank, part):
    path = tmp_path / "state.pt"
    save(state_of(1), path)
    if rank == 0:
        content = path.read_bytes()
        path.write_bytes(content[: int(part * len(content))])
    all_are_well()
    with pytest.raises(CheckpointError, match=r"state\.pt is damaged or not a checkpoint: \d+ bytes"):
        load(path)


@ranks(2)
@pytest.mark.parametrize("is_plain_pickle", [False, True])
def test_a_bomb_is_refused_and_does_nothing(tmp_path, rank, is_plain_pickle):
    path, crater = tmp_path / "state.pt", tmp_path / "crater"
    if rank == 0 and is_plain_pickle:
        path.write_bytes(pickle.dumps({"weights": Bomb(crater)}, protocol=2))
    elif rank == 0:
        torch.save({"weights": Bomb(crater)}, path)
    all_are_well()
    with pytest.raises(
        CheckpointError, match=r"must hold tensors, numbers and strings, got .*\. Nothing in it was run"
    ):
        load(path)
    assert not crater.exists()


@ranks(1, 2)
def test_tensors_may_change_while_they_are_written(tmp_path):
    path = tmp_path / "state.pt"
    weight = torch.arange(4_000_000.0)
    expected = weight.clone()
    state = {"weight": weight, "view": weight[:10], "groups": [{"lr": 0.1}]}
    pending = save(state, path, background=True)
    weight.zero_()
    state["groups"][0]["lr"] = 0.0
    pending.wait()
    loaded = load(path)
    assert torch.equal(loaded["weight"], expected)
    assert torch.equal(loaded["view"], expected[:10])
    assert loaded["groups"] == [{"lr": 0.1}]


def test_what_is_saved_in_the_background_is_of_the_same_types(tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    model[0].bias = model[1].bias  # tied
    state = {"model": model.state_dict(), "parameter": model[0].weight, "shape": torch.Size([1]), "set": {1, 2}}
    save(state, tmp_path / "one.pt")
    save(state, tmp_path / "two.pt", background=True).wait()
    one, two = load(tmp_path / "one.pt"), load(tmp_path / "two.pt")
    assert_same(one, two)
    assert one["model"]._metadata == two["model"]._metadata == state["model"]._metadata
    assert isinstance(two["parameter"], torch.nn.Parameter)
    assert two["model"]["0.bias"].data_ptr() == two["model"]["1.bias"].data_ptr()


def test_a_link_stays_a_link_and_rights_are_those_of_any_file(tmp_path):
    (tmp_path / "link.pt").symlink_to("state.pt")
    save({"number": 1}, tmp_path / "link.pt")
    assert (tmp_path / "link.pt").is_symlink()
    assert load(tmp_path / "state.pt") == {"number": 1}
    (tmp_path / "other").touch()
    assert (tmp_path / "state.pt").stat().st_mode == (tmp_path / "other").stat().st_mode


def test_what_a_killed_process_left_behind_is_removed_but_not_what_is_being_written(tmp_path):
    path = tmp_path / "state.pt"
    (tmp_path / ".state.pt.1-00000000.tmp").write_bytes(b"half")
    others = tmp_path / ".other.pt.1-00000000.tmp"
    others.touch()
    pending = save({"tensor": torch.zeros(4_000_000)}, path, background=True)
    while not list(tmp_path.glob(".state.pt.*.tmp")):
        pass
    _remove_leftovers(tmp_path, "state.pt")
    pending.wait()
    assert {one.name for one in tmp_path.iterdir()} == {"state.pt", others.name}


def test_a_process_forked_while_something_is_written_does_not_wait_for_it(tmp_path):
    pending = save({"tensor": torch.zeros(4_000_000)}, tmp_path / "state.pt", background=True)
    child = os.fork()
    if child == 0:
        pending.wait()
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    pending.wait()
