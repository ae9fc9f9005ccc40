"""Numbered checkpoints: which are kept, what the links say, and what is done about what kills leave behind."""

import functools
import os

import pytest
import torch

from distman import CheckpointError, DistributedManager, RankFailedError
from distman.checkpoint import CheckpointFolder, load, load_sharded
from distman.testing import ranks


def names(folder):
    return sorted(path.name for path in folder.path.iterdir())


def numbered(*steps):
    return [f"checkpoint-{step:08d}.pt" for step in steps]


def name(path):
    return None if path is None else path.name


@ranks(1, 3)
@pytest.mark.parametrize("background", [False, True])
def test_the_last_ones_and_the_best_are_kept(tmp_path, rank, background):
    folder = CheckpointFolder(tmp_path / "new" / "run", keep=2, background=background)
    assert (folder.latest(), folder.best(), folder.load_latest(), folder.load_best()) == (None, None, None, None)
    for step in range(10, 60, 10):
        folder.save({"step": step if rank == 0 else -1}, step, is_best=step == 20)
        assert folder.latest() == folder.path / numbered(step)[0]
        assert name(folder.best()) == (None if step < 20 else numbered(20)[0])
    folder.wait()
    assert names(folder) == ["best.pt", *numbered(20, 40, 50), "latest.pt"]
    assert folder.load_latest() == {"step": 50}
    assert folder.load_best() == {"step": 20}
    assert (folder.path / "latest.pt").readlink() == (folder.path / numbered(50)[0]).relative_to(folder.path)
    assert load(folder.path / "best.pt") == {"step": 20}


@ranks(1, 3)
@pytest.mark.parametrize("background", [False, True])
def test_the_last_ones_and_the_best_are_kept_of_states_in_parts(tmp_path, rank, background):
    def empty():
        return {"step": 0, "rows": torch.zeros(5), f"own {rank}": 0}

    folder = CheckpointFolder(tmp_path / "new" / "run", keep=2, background=background, sharded=True)
    assert (folder.latest(), folder.best()) == (None, None)
    assert (folder.load_latest(empty()), folder.load_best(empty())) == (None, None)
    for step in range(10, 60, 10):
        folder.save({"step": step, "rows": torch.full((5,), step), f"own {rank}": rank}, step, is_best=step == 20)
        assert name(folder.latest()) == f"checkpoint-{step:08d}"
    folder.wait()
    assert names(folder) == ["best", *(f"checkpoint-{step:08d}" for step in (20, 40, 50)), "latest"]
    latest, best = folder.load_latest(empty()), folder.load_best(empty())
    assert (latest["step"], latest["rows"].tolist(), latest[f"own {rank}"]) == (50, [50] * 5, rank)
    assert (best["step"], best["rows"].tolist()) == (20, [20] * 5)
    state = empty()
    load_sharded(state, folder.path / "latest")
    assert state["step"] == 50
    with pytest.raises(TypeError, match="state must be a dict to fill with sharded=True, got NoneType"):
        folder.load_latest()


@ranks(2)
def test_checkpoints_of_the_other_kind_are_refused_and_not_overlooked(tmp_path):
    for sharded in (False, True):
        path = tmp_path / str(sharded)
        CheckpointFolder(path, sharded=sharded, background=False).save({"step": 1}, 1)
        other = CheckpointFolder(path, sharded=not sharded)
        for use in (other.latest, functools.partial(other.save, {"step": 2}, 2)):
            with pytest.raises(
                (CheckpointError, RankFailedError), match=r"must hold checkpoints of one kind, got checkpoint-00000001"
            ):
                use()
    with pytest.raises(TypeError, match="state must be left out with sharded=False, got dict"):
        CheckpointFolder(tmp_path / "False").load_latest({})


def test_a_folder_without_a_table_of_contents_is_no_checkpoint(tmp_path):
    folder = CheckpointFolder(tmp_path, sharded=True, background=False)
    folder.save({"step": 1}, 1)
    folder.save({"step": 2}, 2)
    (tmp_path / "checkpoint-00000002" / "contents.jsonl").unlink()
    (tmp_path / ".checkpoint-00000003.12-00ff00ff.tmp").mkdir()
    assert folder.load_latest({"step": 0}) == {"step": 1}
    folder.save({"step": 4}, 4)
    assert name(folder.latest()) == "checkpoint-00000004"
    assert [one for one in names(folder) if one.startswith(".")] == []


@ranks(1, 3)
def test_an_error_in_the_background_is_raised_by_wait_or_by_the_next_save(tmp_path, rank):
    (tmp_path / "run").touch()
    folder = CheckpointFolder(tmp_path / "run")
    folder.save({}, 1)
    with pytest.raises((OSError, RankFailedError), match="exists") as caught:
        folder.wait()
    assert isinstance(caught.value, OSError if rank == 0 else RankFailedError)
    folder.wait()
    folder.save({}, 2)
    assert folder.latest() is None
    with pytest.raises((CheckpointError, RankFailedError), match=r"the previous background save to .*run failed"):
        folder.save({}, 3)
    DistributedManager().barrier("well")


@ranks(2)
def test_what_cannot_be_saved_is_refused_at_once(tmp_path):
    folder = CheckpointFolder(tmp_path / "run")
    with pytest.raises((ValueError, RankFailedError), match=r"state\['a'\] must be a tensor"):
        folder.save({"a": print}, 1)
    with pytest.raises((ValueError, RankFailedError), match="step must be at least 0, got -1"):
        folder.save({}, -1)
    with pytest.raises((TypeError, RankFailedError)):
        folder.save({}, 1.5)
    assert folder.latest() is None


@pytest.mark.parametrize("keep", [0, -1])
def test_at_least_one_is_kept(tmp_path, keep):
    with pytest.raises(ValueError, match="keep must be at least 1"):
        CheckpointFolder(tmp_path, keep=keep)


def test_none_keeps_all(tmp_path):
    folder = CheckpointFolder(tmp_path, keep=None, background=False)
    for step in range(5):
        folder.save({}, step)
    assert names(folder) == [*numbered(*range(5)), "latest.pt"]


@pytest.fixture
def folder(tmp_path):
    """A folder with checkpoints 1, 2 and 3; 2 is the best."""
    made = CheckpointFolder(tmp_path, background=False)
    for step in (1, 2, 3):
        made.save({"step": step}, step, is_best=step == 2)
        age = (10 - step) * 10**9
        os.utime(made.path / numbered(step)[0], ns=(0, made.path.stat().st_mtime_ns - age))
    return made


def test_without_links_the_highest_number_is_the_latest(folder):
    (folder.path / "latest.pt").unlink()
    (folder.path / "best.pt").unlink()
    assert (name(folder.latest()), folder.best()) == (numbered(3)[0], None)


def test_a_link_that_leads_nowhere_counts_as_none(folder):
    (folder.path / numbered(3)[0]).unlink()
    (folder.path / numbered(2)[0]).unlink()
    assert (name(folder.latest()), folder.best()) == (numbered(1)[0], None)


def test_a_checkpoint_that_a_kill_left_without_a_link_is_the_latest(folder):
    (folder.path / numbered(4)[0]).write_bytes((folder.path / numbered(3)[0]).read_bytes())
    assert name(folder.latest()) == numbered(4)[0]
    assert folder.load_latest() == {"step": 3}


def test_after_going_back_the_checkpoint_saved_last_is_the_latest_and_stays(folder):
    again = CheckpointFolder(folder.path, keep=2, background=False)
    again.save({"step": 1.5}, 1)
    assert name(again.latest()) == numbered(1)[0]
    assert names(again) == ["best.pt", *numbered(1, 2, 3), "latest.pt"]
    again.save({"step": 2.5}, 2)
    assert names(again) == ["best.pt", *numbered(1, 2), "latest.pt"]


def test_what_killed_writers_left_is_removed_by_the_next_save_and_nothing_else(folder):
    for left in (f".{numbered(4)[0]}.12-00ff00ff.tmp", ".state.pt.12-00ff00ff.tmp"):
        (folder.path / left).write_bytes(b"half")
    (folder.path / ".latest.pt.12-00ff00ff.tmp").symlink_to(numbered(4)[0])
    for own in ("notes.txt", ".hidden", "checkpoint-5.pt", "checkpoint-00000009.pt.backup"):
        (folder.path / own).touch()
    assert name(folder.latest()) == numbered(3)[0]
    folder.save({"step": 4}, 4)
    others = {".hidden", "notes.txt", "checkpoint-5.pt", "checkpoint-00000009.pt.backup"}
    assert set(names(folder)) == {"best.pt", "latest.pt", *numbered(2, 3, 4), *others}


def test_copies_in_place_of_links_are_taken_for_what_they_are(folder):
    content = (folder.path / "best.pt").read_bytes()
    for link in ("best.pt", "latest.pt"):
        (folder.path / link).unlink()
        (folder.path / link).write_bytes(content)
    assert folder.load_best() == {"step": 2}
    assert name(folder.latest()) == numbered(3)[0]
    folder.save({"step": 4}, 4)
    assert name(folder.latest()) == numbered(4)[0]
    assert folder.load_best() == {"step": 2}
