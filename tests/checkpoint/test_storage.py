"""Checkpoints behind URLs: the same promises in a store without renames, on several ranks, and when the store fails."""

import ast
import contextlib
import os
import random
import tempfile
import uuid
from pathlib import Path

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFile
from fsspec.registry import known_implementations

import distman.checkpoint
from distman import CheckpointError, DistributedManager, RankFailedError
from distman.checkpoint import (
    CheckpointFolder,
    _location as location,
    load,
    load_sharded,
    save,
    save_sharded,
)
from distman.checkpoint._local_storage import LocalStorage
from distman.testing import ranks

from .stores import DiskFileSystem, disk, full, kill_in_the_middle, never_replacing

LARGE = {"tensor": torch.arange(100_000.0)}


def all_are_well():
    DistributedManager().barrier("well")


def save_and_wait(state, path, *, background):
    pending = save(state, path, background=background)
    if pending is not None:
        pending.wait()


def step_name(step):
    return f"checkpoint-{step:08d}.pt"


@pytest.fixture
def memory():
    """A folder in fsspec's memory, which only this process sees."""
    url = f"memory://{uuid.uuid4().hex}"
    yield url
    fs, path = fsspec.core.url_to_fs(url)
    if fs.exists(path):
        fs.rm(path, recursive=True)


@pytest.fixture(params=["memory", "disk", "file", "path"])
def place(request, tmp_path, memory):
    """A folder in each kind of storage."""
    return {"memory": memory, "disk": disk(tmp_path), "file": f"file://{tmp_path}", "path": str(tmp_path)}[
        request.param
    ]


def everything_in(place):
    """The paths of all files below a folder, seen by fsspec itself."""
    fs, path = fsspec.core.url_to_fs(place)
    fs.invalidate_cache()
    return sorted(found.removeprefix(path).lstrip("/") for found in fs.find(path))


@pytest.mark.parametrize("background", [False, True])
def test_a_state_comes_back_from_every_kind_of_storage(place, background):
    path = f"{place}/new/folder/state.pt"
    for number in (1, 2):
        pending = save({"number": number}, path, background=background)
        if pending is not None:
            pending.wait()
            assert str(pending.path) == path.removeprefix("file://")
        assert load(path) == {"number": number}
    assert everything_in(place) == ["new/folder/state.pt"]


def test_a_missing_one_is_a_missing_file_in_every_kind_of_storage(place):
    with pytest.raises(FileNotFoundError, match=r"no checkpoint at .*none\.pt\. Correct the path"):
        load(f"{place}/none.pt")
    with pytest.raises(FileNotFoundError, match=r"no sharded checkpoint at"):
        load_sharded({}, f"{place}/none")
    folder = CheckpointFolder(f"{place}/none")
    assert (folder.latest(), folder.best(), folder.load_latest()) == (None, None, None)


@pytest.mark.parametrize("background", [False, True])
def test_the_last_ones_and_the_best_are_kept_in_every_kind_of_storage(place, background):
    folder = CheckpointFolder(f"{place}/run", keep=2, background=background)
    for step in range(10, 60, 10):
        folder.save({"step": step}, step, is_best=step == 20)
        assert str(folder.latest()).endswith(f"/run/{step_name(step)}")
    folder.wait()
    assert folder.load_latest() == load(f"{place}/run/latest.pt") == {"step": 50}
    assert folder.load_best() == load(f"{place}/run/best.pt") == {"step": 20}
    assert everything_in(f"{place}/run") == ["best.pt", *map(step_name, (20, 40, 50)), "latest.pt"]


@pytest.mark.parametrize("background", [False, True])
def test_the_last_ones_and_the_best_are_kept_in_parts_in_every_kind_of_storage(place, background):
    folder = CheckpointFolder(f"{place}/run", keep=2, background=background, sharded=True)
    for step in range(10, 60, 10):
        folder.save({"step": step}, step, is_best=step == 20)
        assert str(folder.latest()).endswith(f"/run/checkpoint-{step:08d}")
    folder.wait()
    assert folder.load_latest({"step": 0}) == {"step": 50}
    assert folder.load_best({"step": 0}) == {"step": 20}
    for found in (f"{place}/run/best", folder.best()):
        state = {"step": 0}
        load_sharded(state, found)
        assert state == {"step": 20}
    run = location.locate(f"{place}/run")
    kept = [f"checkpoint-{step:08d}" for step in (20, 40, 50)]
    assert sorted(run.storage.list(run.place)) == ["best", *kept, "latest"]


def test_a_link_to_a_file_that_is_gone_leads_nowhere_in_every_kind_of_storage(place):
    folder = CheckpointFolder(f"{place}/run", background=False)
    folder.save({"step": 1}, 1, is_best=True)
    fs, path = fsspec.core.url_to_fs(f"{place}/run/{step_name(1)}")
    fs.rm(path)
    assert (folder.latest(), folder.best(), folder.load_latest(), folder.load_best()) == (None, None, None, None)
    with pytest.raises(FileNotFoundError, match=r"no checkpoint at"):
        load(f"{place}/run/best.pt")


TARGETS = ["../outside.pt", "../outside", "..", ".", "", "/outside.pt", "a/../../outside.pt", "current/../../outside"]


def draw_target(generator):
    """What somebody may write into the object that stands for a link."""
    pieces = [
        "..",
        ".",
        "/",
        "//",
        "outside",
        ".pt",
        "::",
        "memory://",
        "disk://",
        "*",
        "?",
        "\0",
        "\n",
        "\u202e",
        " ",
        "a",
    ]
    return generator.choice(TARGETS) if generator.random() < 0.3 else "".join(generator.choices(pieces, k=3))


@pytest.mark.parametrize("kind", ["memory", "disk"])
def test_no_link_leads_out_of_its_folder(kind, tmp_path, memory):
    url, generator = {"memory": memory, "disk": disk(tmp_path)}[kind], random.Random(7)  # noqa: S311 - no secret
    save({"step": 1}, f"{url}/outside.pt")
    save_sharded({"step": 1}, f"{url}/outside")
    fs, path = fsspec.core.url_to_fs(url)
    fs.makedirs(f"{path}/run")
    found = location.locate(url).storage
    for name in ("latest.pt", "best.pt", "latest", "best", "current"):
        for target in (*TARGETS, *(draw_target(generator) for _ in range(200))):
            fs.pipe_file(f"{path}/run/{name}", b"distman link to " + target.encode())
            assert found.linked(f"{url}/run/{name}") is None
            assert found.folder(f"{url}/run") == f"{url}/run"
        with pytest.raises(FileNotFoundError, match="no checkpoint at"):
            load(f"{url}/run/{name}")
    for sharded in (False, True):
        folder = CheckpointFolder(f"{url}/run", sharded=sharded)
        assert (folder.latest(), folder.best()) == (None, None)
    with pytest.raises(FileNotFoundError, match="no sharded checkpoint at"):
        load_sharded({"step": 0}, f"{url}/run/latest")


@pytest.mark.parametrize("target", ["..", "../..", "/", "../outside.pt", "../outside"])
def test_a_link_on_the_disk_does_not_let_a_folder_take_what_is_elsewhere_for_its_own(target, tmp_path):
    save({"step": 1}, tmp_path / "outside.pt")
    save_sharded({"step": 1}, tmp_path / "outside")
    for sharded, suffix in ((False, ".pt"), (True, "")):
        folder = CheckpointFolder(tmp_path / "run", sharded=sharded)
        (tmp_path / "run").mkdir(exist_ok=True)
        for name in ("latest", "best"):
            (tmp_path / "run" / f"{name}{suffix}").unlink(missing_ok=True)
            (tmp_path / "run" / f"{name}{suffix}").symlink_to(target)
        assert folder.latest() is None
        assert folder.best() in (None, tmp_path / "run" / Path(target).name)
        with contextlib.suppress(OSError, RankFailedError, CheckpointError):
            assert folder.load_best(*([{"step": 0}] if sharded else [])) is None


def test_a_sharded_state_comes_back_from_every_kind_of_storage_and_leaves_nothing_old(place):
    for number in (1, 2):
        save_sharded({"step": number, "tensor": torch.full((3,), float(number))}, f"{place}/sharded")
        state = {"step": 0, "tensor": torch.zeros(3)}
        load_sharded(state, f"{place}/sharded")
        assert state["step"] == number
        assert torch.equal(state["tensor"], torch.full((3,), float(number)))
    names = [name.rpartition("/")[2] for name in everything_in(place)]
    assert sorted(set(names) - {"current"}) == [".metadata", "__0_0.distcp", "contents.jsonl"]
    assert len(names) <= 4


@ranks(2, 3)
def test_several_ranks_save_and_load_through_one_file_system(tmp_path, rank):
    url = disk(tmp_path)
    save({"number": 1 if rank == 0 else -1}, f"{url}/state.pt")
    assert load(f"{url}/state.pt") == {"number": 1}
    folder = CheckpointFolder(f"{url}/run", keep=1)
    for step in (1, 2):
        folder.save({"step": step}, step)
    assert folder.latest() == f"{url}/run/{step_name(2)}"
    assert folder.load_latest() == {"step": 2}
    for step in (1, 2):
        save_sharded({f"of rank {rank}": rank + step}, f"{url}/sharded")
    state = {f"of rank {rank}": -1}
    load_sharded(state, f"{url}/sharded")
    assert state == {f"of rank {rank}": rank + 2}
    all_are_well()


@ranks(1, 2)
@pytest.mark.parametrize("background", [False, True])
def test_a_store_that_fails_in_the_middle_is_one_error_on_all_and_the_old_file_stays(tmp_path, rank, background):
    save({"number": 1}, f"{disk(tmp_path)}/state.pt")
    with pytest.raises((OSError, RankFailedError), match="No space left on device") as caught:
        save_and_wait(LARGE, f"{full(tmp_path)}/state.pt", background=background)
    assert isinstance(caught.value, OSError if rank == 0 else RankFailedError)
    assert [path.name for path in tmp_path.iterdir()] == ["state.pt"]
    assert load(f"{disk(tmp_path)}/state.pt") == {"number": 1}
    all_are_well()


@ranks(1, 2)
def test_a_store_that_fails_in_the_middle_leaves_the_old_sharded_state(tmp_path):
    save_sharded({"step": 1}, f"{disk(tmp_path)}/sharded")
    all_are_well()
    before = everything_in(str(tmp_path))
    with pytest.raises((OSError, RankFailedError), match="No space left on device"):
        save_sharded({"step": 2}, f"{full(tmp_path)}/sharded")
    state = {"step": 0}
    load_sharded(state, f"{disk(tmp_path)}/sharded")
    assert state == {"step": 1}
    assert everything_in(str(tmp_path)) == before
    all_are_well()


def test_a_rename_that_does_not_replace_is_an_error(tmp_path):
    path = f"{never_replacing(tmp_path)}/state.pt"
    save({"number": 1}, path)
    with pytest.raises(OSError, match=r"the file there could not be replaced, since .* does not replace"):
        save({"number": 2}, path)
    assert load(path) == {"number": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["state.pt"]


@pytest.fixture
def broken_memory(monkeypatch):
    """Let fsspec's memory take a thousand bytes of a file, then fail."""
    written = MemoryFile.write if "write" in vars(MemoryFile) else super(MemoryFile, MemoryFile).write

    def write(self, data):
        written(self, data[:1000])
        raise OSError("the store is gone")

    return lambda: monkeypatch.setattr(MemoryFile, "write", write, raising=False)


def test_an_object_that_came_in_part_is_never_seen(memory, broken_memory):
    path = f"{memory}/state.pt"
    save({"number": 1}, path)
    broken_memory()
    with pytest.raises(OSError, match="the store is gone"):
        save(LARGE, path)
    assert load(path) == {"number": 1}
    with pytest.raises(OSError, match="the store is gone"):
        save(LARGE, f"{memory}/other.pt")
    assert everything_in(memory) == ["state.pt"]


def write_half(found):
    with found.storage.create(found.place) as file:
        file.write(b"half")
        raise KeyboardInterrupt


def test_a_program_that_fails_while_it_makes_a_state_leaves_the_old_object(memory):
    path = f"{memory}/state.pt"
    save({"number": 1}, path)
    found = location.locate(path)
    with pytest.raises(KeyboardInterrupt):
        write_half(found)
    assert load(path) == {"number": 1}


@pytest.fixture
def temporary(tmp_path_factory, monkeypatch):
    """The temporary folder of this host."""
    folder = tmp_path_factory.mktemp("host")
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def test_what_passes_through_the_temporary_folder_has_no_name_there(place, temporary):
    found = location.locate(f"{place}/state.pt")
    with found.storage.create(found.place) as file:
        file.write(b"content")
        assert list(temporary.iterdir()) == []
    with found.storage.open(found.place) as file:
        assert list(temporary.iterdir()) == []
        assert (file.read(4), file.tell(), file.seek(0), file.read()) == (b"cont", 4, 0, b"content")


def test_what_was_saved_behind_a_url_survives_a_kill_in_the_middle(tmp_path, temporary):
    """The child is killed by itself, when half of the file has been uploaded."""
    save({"number": 1}, f"{disk(tmp_path)}/state.pt")
    child = os.fork()
    if child == 0:
        kill_in_the_middle()
        save(LARGE, f"{disk(tmp_path)}/state.pt")
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -9
    assert len(list(tmp_path.iterdir())) == 2
    assert list(temporary.iterdir()) == []
    assert load(f"{disk(tmp_path)}/state.pt") == {"number": 1}
    save({"number": 2}, f"{disk(tmp_path)}/state.pt")
    assert [path.name for path in tmp_path.iterdir()] == ["state.pt"]


def test_half_written_files_are_no_checkpoints_and_go_with_the_next_save(tmp_path):
    folder = CheckpointFolder(disk(tmp_path), background=False)
    folder.save({"step": 1}, 1)
    (tmp_path / f".{step_name(2)}.12-00ff00ff.tmp").write_bytes(b"half")
    assert folder.load_latest() == {"step": 1}
    folder.save({"step": 3}, 3)
    assert everything_in(str(tmp_path)) == [step_name(1), step_name(3), "latest.pt"]


@pytest.mark.parametrize("is_sharded", [False, True])
def test_what_other_programs_write_under_hidden_names_stays(is_sharded, tmp_path):
    folder = CheckpointFolder(tmp_path, background=False, sharded=is_sharded)
    name = folder._name(1)
    others = {".cache.v1.tmp", ".metrics.csv.tmp", f".{name}.tmp", f".{name}.12-00FF.tmp", f".{name}.12-00ff00ff.tmp2"}
    for other in others:
        (tmp_path / other).mkdir()
        (tmp_path / other / "tokens.bin").touch()
    (tmp_path / f".{name}.12-00ff00ff.tmp").mkdir()
    (tmp_path / f".{name}.13-00ff00ff.tmp").symlink_to(name)
    (tmp_path / f".{name}.14-00ff00ff.tmp.lock").touch()
    folder.save({"step": 1}, 1)
    hidden = {path.name for path in tmp_path.iterdir() if path.name.startswith(".")}
    assert hidden == others
    assert all((tmp_path / other / "tokens.bin").exists() for other in others)


def test_what_another_process_writes_under_a_name_that_begins_alike_stays(tmp_path):
    others = {f".{name}.12-00ff00ff.tmp" for name in ("state.pt", "states")}
    for name in others:
        (tmp_path / name).write_bytes(b"half")
    save({"step": 1}, f"{disk(tmp_path)}/state")
    assert {path.name for path in tmp_path.iterdir()} == {"state", *others}


@pytest.mark.parametrize("shards", [False, True])
def test_a_sharded_state_without_its_marker_does_not_count(tmp_path, shards):
    url = f"{disk(tmp_path)}/sharded"
    save_sharded({"step": 1}, url)
    torn = tmp_path / "sharded" / "saved-00ff00ff"
    torn.mkdir()
    (torn / ("__0_0.distcp" if shards else "contents.jsonl")).write_bytes(b"half")
    state = {"step": 0}
    load_sharded(state, url)
    assert state == {"step": 1}
    save_sharded({"step": 2}, url)
    assert not torn.exists()


def test_a_sharded_state_is_saved_although_the_old_one_cannot_be_removed(tmp_path, monkeypatch):
    url = f"{disk(tmp_path)}/sharded"

    def fail(*_args, **_options):
        raise PermissionError("nothing may be removed")

    save_sharded({"step": 1}, url)
    with monkeypatch.context() as patched:
        patched.setattr(DiskFileSystem, "rm", fail)
        save_sharded({"step": 2}, url)
    state = {"step": 0}
    load_sharded(state, url)
    assert state == {"step": 2}
    assert len(list(tmp_path.glob("sharded/saved-*"))) == 2
    save_sharded({"step": 3}, url)
    assert len(list(tmp_path.glob("sharded/saved-*"))) == 1


@pytest.mark.parametrize("path", ["s4://bucket/x.pt", "simplecache::memory://x.pt"])
def test_an_unknown_scheme_is_refused_before_anything_is_written(tmp_path, monkeypatch, path):
    monkeypatch.chdir(tmp_path)
    for act in (
        lambda: save({}, path),
        lambda: load(path),
        lambda: CheckpointFolder(path),
        lambda: save_sharded({}, path),
    ):
        with pytest.raises(ValueError, match=r"path must have a scheme that is known, got .*://\. Use one of fsspec's"):
            act()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("path", [Path("s3://bucket/x.pt"), "s3:/bucket/x.pt", Path("foo://bucket")])
def test_a_url_that_lost_a_slash_is_refused(tmp_path, monkeypatch, path):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"path must keep both slashes of a URL, got '(s3|foo):/bucket"):
        save({}, path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("path", ["memory://", "memory:///", "file://relative.pt"])
def test_a_url_without_a_file_in_it_is_refused(path):
    with pytest.raises(ValueError, match=r"path must (name a file|be absolute)"):
        save({}, path)


def test_a_colon_elsewhere_in_a_path_is_only_a_colon(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for path in ("12:30.pt", "run/a:/x.pt", tmp_path / "b:" / "x.pt"):
        save({"number": 1}, path)
        assert load(path) == {"number": 1}


def test_a_scheme_whose_package_is_missing_says_what_to_install():
    known_implementations["absent"] = {"class": "no_such_package.FS", "err": "Install no_such_package"}
    try:
        with pytest.raises(ImportError, match=r"absent:// needs a package .*Install no_such_package\.$"):
            save({}, "absent://bucket/x.pt")
    finally:
        del known_implementations["absent"]


def test_without_fsspec_the_package_is_named(tmp_path, monkeypatch):
    location._from_fsspec.cache_clear()
    monkeypatch.setitem(__import__("sys").modules, "fsspec", None)
    with pytest.raises(ImportError, match=r"memory:// needs fsspec.*pip install fsspec"):
        save({}, "memory://x.pt")
    save({"number": 1}, tmp_path / "x.pt")


class ShortWrites(LocalStorage):
    """A disk whose files take a few bytes at once, as a file without a buffer may."""

    def resolve(self, path):
        return super().resolve(path.removeprefix("short://"))

    @contextlib.contextmanager
    def create(self, place):
        with super().create(place) as file:
            yield _ShortFile(file)


class _ShortFile:
    def __init__(self, file):
        self._file = file

    def write(self, data):
        return self._file.write(memoryview(data)[:100])

    def tell(self):
        return self._file.tell()


def test_a_file_that_takes_a_few_bytes_at_once_gets_all_of_them(tmp_path, monkeypatch):
    monkeypatch.setattr(location, "_from_fsspec", lambda _: ShortWrites())
    save({"step": 1}, f"short://{tmp_path}/state.pt")
    assert load(tmp_path / "state.pt") == {"step": 1}
    save_sharded({"step": 2, "tensor": torch.arange(100.0)}, f"short://{tmp_path}/sharded")
    state = {"step": 0, "tensor": torch.zeros(100)}
    load_sharded(state, tmp_path / "sharded")
    assert state["step"] == 2


STORAGES = {"_local_storage", "_fsspec_storage", "_location"}
ALLOWED = {"os.PathLike", "os.fspath", "os.getpid"}  # types and numbers; nothing that touches a disk
MODULES = [path for path in Path(distman.checkpoint.__path__[0]).glob("*.py") if path.stem not in STORAGES]


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_only_storages_touch_files(path):
    tree = ast.parse(path.read_text())
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert imported & {"shutil", "glob", "tempfile", "fsspec", "fcntl"} == set()
    attributes = [
        node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
    ]
    assert {f"os.{node.attr}" for node in attributes if node.value.id == "os"} <= ALLOWED
    called = [node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
    assert {"open", "Path"}.isdisjoint(called)
