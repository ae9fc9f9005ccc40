"""Damaged checkpoints, and what else may happen to a file: permissions, and several writers."""

import contextlib
import copy
import errno
import functools
import io
import logging
import os
import random
import sys
import threading
import uuid
import zipfile
from pathlib import Path

import pytest
import torch

from distman import CheckpointError, DistributedManager
from distman.checkpoint import CheckpointFolder, _local_storage, load, load_sharded, save, save_sharded
from distman.checkpoint._local_storage import LocalStorage
from distman.checkpoint._location import locate
from distman.checkpoint._state import check_sums, write_state
from distman.testing import ranks

from .stores import disk

LARGE = {"tensor": torch.arange(100_000.0)}


def all_are_well():
    DistributedManager().barrier("well")


def step_name(step):
    return f"checkpoint-{step:08d}.pt"


def test_a_flipped_bit_is_found(tmp_path):
    save(LARGE, tmp_path / "state.pt")
    content = bytearray((tmp_path / "state.pt").read_bytes())
    content[len(content) // 2] ^= 1
    (tmp_path / "state.pt").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"is damaged or not a checkpoint: .*Bad CRC-32"):
        load(tmp_path / "state.pt")


def test_a_flipped_bit_in_a_shard_is_found(tmp_path):
    save_sharded(LARGE, tmp_path / "sharded")
    shard = tmp_path / "sharded" / "__0_0.distcp"
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"is damaged or does not fit the state: .*Bad CRC-32"):
        load_sharded({"tensor": torch.zeros(100_000)}, tmp_path / "sharded")


def test_a_checkpoint_without_checksums_is_loaded(tmp_path):
    torch.serialization.set_crc32_options(False)
    try:
        with (tmp_path / "state.pt").open("wb") as file:
            torch.save(LARGE, file)
    finally:
        torch.serialization.set_crc32_options(True)
    assert torch.equal(load(tmp_path / "state.pt")["tensor"], LARGE["tensor"])


def inflating(content, generator):
    """What torch wrote, in an archive that holds more than the file has, as its table or its compression says."""
    made = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as old, zipfile.ZipFile(made, "w") as new:
        entries, way = old.infolist(), generator.choice(["compressed", "many times", "longer", "shorter"])
        largest = max(entries, key=lambda entry: entry.file_size)
        chosen = largest if way == "many times" else generator.choice([one for one in entries if one.file_size])
        for entry in entries:
            method = generator.choice(COMPRESSIONS) if way == "compressed" and entry is chosen else zipfile.ZIP_STORED
            new.writestr(entry.filename, old.read(entry), method)
        again = new.getinfo(chosen.filename)
        if way == "many times":  # in the table, and once in the file
            new.filelist += [copy.copy(again) for _ in range(2 * len(content) // largest.file_size)]
        elif way in ("longer", "shorter"):
            again.file_size += generator.randint(1, 2**40) if way == "longer" else -again.file_size
    return made.getvalue()


COMPRESSIONS = [*[zipfile.ZIP_DEFLATED] * 20, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA]  # the last one takes long
CLAIMS_MORE = r"is compressed, which torch never does|its \d+ parts are larger than the file"


def test_no_file_is_larger_inside_than_outside(tmp_path, monkeypatch):
    """Nothing of it is read before that is known."""
    save({"tensor": torch.arange(1000.0), "text": "abc"}, tmp_path / "state.pt")
    content, generator = (tmp_path / "state.pt").read_bytes(), random.Random(6)  # noqa: S311 - no secret
    crafted = [inflating(content, generator) for _ in range(1_000)]
    monkeypatch.setattr(zipfile.ZipFile, "open", None)
    for one in crafted:
        with pytest.raises(zipfile.BadZipFile, match=CLAIMS_MORE):
            check_sums(io.BytesIO(one))
    for one in crafted[:20]:
        (tmp_path / "state.pt").write_bytes(one)
        with pytest.raises(CheckpointError, match=CLAIMS_MORE):
            load(tmp_path / "state.pt")


@pytest.mark.parametrize("seed", range(20))
def test_no_part_of_a_sharded_state_is_larger_inside_than_outside(seed, tmp_path):
    generator = random.Random(seed)  # noqa: S311 - no secret
    save_sharded({"tensor": torch.arange(10_000.0)}, tmp_path / "sharded")
    shard = tmp_path / "sharded" / "__0_0.distcp"
    content = shard.read_bytes()
    shard.write_bytes(inflating(content, generator).ljust(len(content), b"\0"))
    with pytest.raises(CheckpointError, match=f"{CLAIMS_MORE}|damaged"):
        load_sharded({"tensor": torch.zeros(10_000)}, tmp_path / "sharded")


@contextlib.contextmanager
def warnings_logged():
    """A list of what the package logs meanwhile in this process."""
    messages, handler, logger = [], logging.Handler(), logging.getLogger("distman")
    handler.emit = lambda record: messages.append(record.getMessage())
    logger.addHandler(handler)
    yield messages
    logger.removeHandler(handler)


@ranks(1, 2)
@pytest.mark.parametrize("content", [b"", b"half"])
def test_a_damaged_newest_checkpoint_gives_way_to_the_one_before(tmp_path, rank, content):
    folder = CheckpointFolder(tmp_path, background=False)
    for step in (1, 2):
        folder.save({"step": step}, step)
    if rank == 0:
        (tmp_path / step_name(2)).write_bytes(content)
    all_are_well()
    with warnings_logged() as warnings:
        assert folder.load_latest() == {"step": 1}
    skipped = f"skipping {tmp_path / step_name(2)}, and loading the checkpoint saved before it"
    assert [skipped in warning for warning in warnings] == ([True] if rank == 0 else [])
    if rank == 0:
        (tmp_path / step_name(1)).write_bytes(content)
    all_are_well()
    with pytest.raises(CheckpointError):
        folder.load_latest()
    all_are_well()


@ranks(1, 3)
@pytest.mark.parametrize("background", [False, True])
def test_a_flipped_bit_in_one_part_lets_all_ranks_load_the_one_before(tmp_path, rank, world_size, background):
    def state_of(step):
        return {"step": step, f"own {rank}": torch.full((1000,), float(step))}

    folder = CheckpointFolder(tmp_path, background=background, sharded=True)
    for step in (1, 2):
        folder.save(state_of(step), step)
    folder.wait()
    if rank == 0:
        part = tmp_path / "checkpoint-00000002" / f"__{world_size - 1}_0.distcp"
        content = bytearray(part.read_bytes())
        content[content.index(torch.full((8,), 2.0).numpy().tobytes()) + 3] ^= 1
        part.write_bytes(content)
    all_are_well()
    with warnings_logged() as warnings:
        state = folder.load_latest(state_of(0))
    assert state["step"] == 1
    assert torch.equal(state[f"own {rank}"], torch.ones(1000))
    assert ["skipping" in warning for warning in warnings] == ([True] if rank == 0 else [])
    all_are_well()


@ranks(2)
def test_an_error_that_is_no_damage_is_raised(tmp_path, rank):
    folder = CheckpointFolder(tmp_path, background=False)
    for step in (1, 2):
        folder.save({"step": step}, step)
    if rank == 0:
        (tmp_path / step_name(2)).unlink()
        (tmp_path / step_name(2)).mkdir()
    all_are_well()
    with pytest.raises(IsADirectoryError):
        folder.load_latest()
    all_are_well()


@ranks(1, 2)
@pytest.mark.parametrize("device", ["cuda:99", "xpu:99"])
def test_a_device_that_is_not_there_is_no_damage(device, tmp_path, rank):
    folder = CheckpointFolder(tmp_path, background=False)
    for step in (1, 2):
        folder.save({"weight": torch.ones(2)}, step, is_best=True)
    with warnings_logged() as warnings:
        for call in (folder.load_latest, folder.load_best, functools.partial(load, tmp_path / step_name(1))):
            with pytest.raises(ValueError, match=f"device must be one that this process can use, got {device}: "):
                call(device=device)
    assert warnings == []
    if rank == 0:
        (tmp_path / step_name(2)).write_bytes(b"half")
    all_are_well()
    with pytest.raises(ValueError, match="device must be"):
        folder.load_latest(device=device)
    assert folder.load_latest(device="cpu")["weight"].tolist() == [1, 1]


def test_permissions_survive(tmp_path):
    path = tmp_path / "state.pt"
    save({"number": 1}, path)
    path.chmod(0o600)
    save({"number": 2}, path)
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("is_sharded", [False, True])
def test_what_is_private_stays_so_while_it_is_written(tmp_path, is_sharded):
    storage, path = LocalStorage(), tmp_path / "place"
    path.mkdir() if is_sharded else path.touch()
    path.chmod(0o700 if is_sharded else 0o600)
    if is_sharded:
        new = storage.new_folder(str(path))
        assert Path(new.path).stat().st_mode & 0o777 == 0o700
        new.publish()
    else:
        with storage.create(str(path)):
            (temporary,) = tmp_path.glob(".place.*")
            assert temporary.stat().st_mode & 0o777 == 0o600
    assert path.stat().st_mode & 0o777 == (0o700 if is_sharded else 0o600)


def test_a_view_is_saved_without_the_rest_of_its_tensor(tmp_path):
    tensor = torch.arange(1_000_000.0)
    state = {"view": tensor[5:8], "again": tensor[5:8], "tied": [tensor[:10].view(2, 5).T]}
    save(state, tmp_path / "state.pt")
    assert (tmp_path / "state.pt").stat().st_size < 10_000
    loaded = load(tmp_path / "state.pt")
    assert loaded["view"].tolist() == [5, 6, 7]
    assert loaded["view"].data_ptr() == loaded["again"].data_ptr()
    assert torch.equal(loaded["tied"][0], state["tied"][0])


def test_a_file_system_without_permissions_of_its_own_takes_a_second_save(tmp_path, monkeypatch):
    def refuse(*_args):
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "fchmod", refuse)
    for number in (1, 2):
        save({"number": number}, tmp_path / "state.pt")
    assert load(tmp_path / "state.pt") == {"number": 2}


def test_a_temporary_file_that_another_writer_took_for_abandoned_is_made_again(tmp_path, monkeypatch):
    lock, left = _local_storage._lock, [tmp_path]

    def lock_late(file):
        while left:
            _local_storage._remove_leftovers(left.pop(), ".+")
        lock(file)

    monkeypatch.setattr(_local_storage, "_lock", lock_late)
    save({"number": 1}, tmp_path / "state.pt")
    assert load(tmp_path / "state.pt") == {"number": 1}


@pytest.mark.parametrize("kind", ["path", "disk", "memory"])
def test_threads_may_save_to_one_path(tmp_path, kind):
    path = {"path": str(tmp_path), "disk": disk(tmp_path), "memory": f"memory://{uuid.uuid4().hex}"}[kind] + "/state.pt"
    found = locate(path)
    errors = []

    def write(number):
        try:
            for _ in range(25):
                write_state({"number": number}, found)
        except Exception as error:  # noqa: BLE001 - the test shows it
            errors.append(error)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert load(path)["number"] in range(4)
    if kind != "memory":
        assert [one.name for one in tmp_path.iterdir()] == ["state.pt"]


class LooksAt:
    """Trace function that looks for leftovers in a folder before one line of the storage's code, by number."""

    def __init__(self, folder, number):
        self._folder, self._left, self.is_done = folder, number, False

    def __call__(self, frame, event, _):
        if frame.f_code.co_filename != _local_storage.__file__:
            return None
        if event == "line":
            self._left -= 1
            if self._left < 0 and not self.is_done:
                self.is_done = True
                sys.settrace(None)
                LocalStorage().remove_leftovers(self._folder)
        return self


def write_file(storage, place, content):
    with storage.create(str(place)) as file:
        file.write(content.encode())


def write_folder(storage, place, content):
    folder = storage.new_folder(str(place))
    (Path(folder.path) / "part").write_text(content)
    folder.publish()


def write_link(storage, place, content):
    place.parent.mkdir(exist_ok=True)
    place.with_name(content).touch()
    storage.link(str(place), content)


def content_of(place):
    return place.readlink().name if place.is_symlink() else (place / "part" if place.is_dir() else place).read_text()


@pytest.mark.parametrize("write", [write_file, write_folder, write_link])
@pytest.mark.parametrize("exchanges", [True, False])
def test_nothing_is_taken_for_a_leftover_at_any_moment_of_its_being_written(write, exchanges, tmp_path, monkeypatch):
    """A thread that saves, and another process, may look for leftovers while this one writes."""
    if not exchanges:
        monkeypatch.setattr(_local_storage, "_exchange", lambda *_: False)
    storage, number, is_done = LocalStorage(), 0, True
    while is_done:
        place = tmp_path / str(number) / "place"
        for content in ("first", "second"):
            looks, before = LooksAt(place.parent, number), sys.gettrace()
            sys.settrace(looks)
            try:
                write(storage, place, content)
            finally:
                sys.settrace(before)
            assert content_of(place) == content
            assert [one.name for one in place.parent.iterdir() if one.name.startswith(".")] == []
            is_done = looks.is_done
        number += 1
    assert number > 20


@pytest.mark.parametrize("exchanges", [True, False])
def test_an_old_folder_that_was_removed_in_part_is_in_nobodys_way_and_never_comes_back(
    exchanges, tmp_path, monkeypatch
):
    if not exchanges:
        monkeypatch.setattr(_local_storage, "_exchange", lambda *_: False)
    storage, place, old = LocalStorage(), tmp_path / "place", tmp_path / ".place.old"
    write_folder(storage, place, "first")
    for content in ("second", "third"):
        old.mkdir()  # as a writer leaves it that is killed while it removes it
        (old / "rest").touch()
        write_folder(storage, place, content)
        assert content_of(place) == content
        assert [one.name for one in tmp_path.iterdir()] == ["place"]
    old.mkdir()
    storage.remove(str(place))
    assert storage.folder(str(place)) == str(place)
    assert [*tmp_path.iterdir()] == []


class FailedElsewhereError(Exception):
    """What the watcher raises in this program, between any two of its instructions."""


@pytest.mark.parametrize("name", ["open", "mkdir", "symlink_to"])
def test_nothing_is_left_where_a_failure_is_raised_as_soon_as_something_was_made(name, tmp_path, monkeypatch):
    make = getattr(Path, name)

    def make_and_fail(path, *args, **kwargs):
        made = make(path, *args, **kwargs)
        if ".tmp" in path.suffixes:
            if made is not None:
                made.close()
            raise FailedElsewhereError
        return made

    def write(storage, place):
        with storage.create(place):
            pass

    storage, place = LocalStorage(), str(tmp_path / "state.pt")
    calls = {
        "open": [lambda: write(storage, place), lambda: storage.new_folder(place)],
        "mkdir": [lambda: storage.new_folder(place)],
        "symlink_to": [lambda: storage.link(place, "other.pt")],
    }[name]
    monkeypatch.setattr(Path, name, make_and_fail)
    for call in calls:
        with pytest.raises(FailedElsewhereError):
            call()
        assert [*tmp_path.iterdir()] == []
