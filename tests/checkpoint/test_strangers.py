"""Checkpoints that a stranger wrote: whatever stands in them, they are read and nothing else."""

import argparse
import contextlib
import io
import random
import secrets
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.tensor  # it lets torch make meshes out of files
from torch.distributed.checkpoint import metadata as torchs
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.device_mesh import DeviceMesh

from distman import CheckpointError
from distman.checkpoint import _sharded, load, load_sharded, save, save_sharded
from distman.checkpoint._contents import checksum, encoded, read_contents
from distman.checkpoint._location import locate

from .strangers import mutated


def table_of(folder):
    return folder / "sharded" / "contents.jsonl"


def write_table(folder, content):
    table_of(folder).parent.mkdir(exist_ok=True)
    table_of(folder).write_bytes(content)
    return locate(folder / "sharded")


def test_reading_does_nothing_else():
    """Thousands of tries, most of which are no checkpoints; the output quotes the seed."""
    command = [sys.executable, "-m", "tests.checkpoint.strangers", "--tries", "4000"]
    root = Path(__file__).parents[2]
    finished = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False, timeout=300)
    assert "nothing was done but reading" in finished.stdout, finished.stdout + finished.stderr
    assert finished.returncode == 0


class MakesMesh:
    """What torch's reader for weights alone makes without a question: groups of processes."""

    def __reduce__(self):
        return DeviceMesh, ("cpu", [0])


@pytest.mark.parametrize("is_old", [False, True])
def test_no_file_makes_process_groups(tmp_path, is_old):
    with (tmp_path / "state.pt").open("wb") as file:
        torch.save({"weight": torch.ones(2), "mesh": MakesMesh()}, file, _use_new_zipfile_serialization=not is_old)
    with pytest.raises(CheckpointError, match=r"got torch\.distributed\.device_mesh\.DeviceMesh"):
        load(tmp_path / "state.pt")
    assert not dist.is_initialized()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_no_entry_of_a_folder_makes_process_groups(tmp_path, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(_sharded, "check_state", lambda *_, **__: None)
        save_sharded({"mesh": MakesMesh()}, tmp_path / "sharded")
    with pytest.raises(CheckpointError, match=r"got torch\.distributed\.device_mesh\.DeviceMesh"):
        load_sharded({"mesh": 0}, tmp_path / "sharded")
    assert not dist.is_initialized()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torch_reads_what_is_saved(tmp_path):
    state = {"weight": torch.arange(6.0), "nested": {"list": [torch.ones(2), 7]}, "step": 3}
    save_sharded(state, tmp_path / "ours")
    empty = {"weight": torch.zeros(6), "nested": {"list": [torch.zeros(2), 0]}, "step": 0}
    dist.checkpoint.load(empty, checkpoint_id=tmp_path / "ours")
    assert torch.equal(empty["weight"], state["weight"])
    assert torch.equal(empty["nested"]["list"][0], torch.ones(2))
    assert (empty["nested"]["list"][1], empty["step"]) == (7, 3)


def test_a_table_says_what_it_was_made_of(tmp_path):
    table = torchs.Metadata(
        {"": torchs.BytesStorageMetadata(), "ö" * 300: torchs.TensorStorageMetadata(
            torchs.TensorProperties(torch.float8_e5m2), torch.Size([2**40, 0]),
            [torchs.ChunkStorageMetadata(torch.Size([0, 0]), torch.Size([2**40, 0]))])},
        planner_data={"a.0": ("a", 0)},
        storage_data={torchs.MetadataIndex("", index=3): _place("__0_0.distcp", 2**33, 5)},
    )  # fmt: skip
    found = read_contents(write_table(tmp_path, _table_of(table)))
    assert found == table
    assert [one.index for one in found.storage_data] == [3]


def _table_of(table):
    return encoded(table, [[WriteResult(index, 0, place) for index, place in table.storage_data.items()]])


def _place(*args):
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    return _StorageInfo(*args)


@pytest.mark.parametrize("path", ["", ".", "..", "../other", "/etc/passwd", "a/b", "part\0"])
def test_a_part_is_a_file_in_the_folder(tmp_path, path):
    table = torchs.Metadata({}, planner_data={}, storage_data={torchs.MetadataIndex("a"): _place(path, 0, 1)})
    with pytest.raises(CheckpointError, match="must name files in its own folder"):
        read_contents(write_table(tmp_path, _table_of(table)))


@pytest.mark.parametrize(
    ("contents", "complaint"),
    [
        (b"[" * 100_000, "recursion"),
        (b"{}", "it lacks tensors"),
        (b"{nothing", "Expecting property name"),
        (b'{"tensors": {"a": {"dtype": "load", "size": [], "chunks": []}}}', "'load' is not a data type"),
        (b'{"tensors": {"a": {"dtype": "int8", "size": [-1], "chunks": []}}}', "-1 is not a size"),
        (b'{"tensors": {}, "objects": [], "paths": {"a": [null]}, "rows": []}', "names and numbers"),
        (b'{"tensors": {}, "objects": [], "paths": {}, "rows": [["a"]]}', "it must be 7 values"),
    ],
)
def test_what_is_no_table_is_refused(tmp_path, contents, complaint):
    with pytest.raises(CheckpointError, match=rf"contents\.jsonl is damaged: .*{complaint}"):
        read_contents(write_table(tmp_path, contents + b"\n" + checksum(contents)))


_STATE = {"weight": torch.arange(2000.0), "names": ["a", "b"], "step": 7}


def _is_state(found):
    return torch.equal(found["weight"], _STATE["weight"]) and found["names"] == ["a", "b"] and found["step"] == 7


def test_no_part_of_a_file_is_taken_for_it(tmp_path):
    save(_STATE, tmp_path / "state.pt")
    content = (tmp_path / "state.pt").read_bytes()
    table = content.index(b"PK\1\2")  # with which torch finds the rest: every way of cutting it off is tried
    for end in {*range(0, table, 31), *range(table, len(content))}:
        (tmp_path / "part.pt").write_bytes(content[:end])
        with pytest.raises(CheckpointError, match="is damaged or not a checkpoint"):
            load(tmp_path / "part.pt", device="cpu")


@pytest.mark.parametrize("name", ["contents.jsonl", "__0_0.distcp"])
def test_no_part_of_a_folder_is_taken_for_it(tmp_path, name):
    save_sharded(_STATE, tmp_path / "sharded")
    path = tmp_path / "sharded" / name
    content = path.read_bytes()
    for end in {*range(0, len(content), 97), *range(len(content) - 40, len(content))}:
        path.write_bytes(content[:end])
        with pytest.raises(CheckpointError):
            load_sharded({"weight": torch.zeros(2000), "names": ["", ""], "step": 0}, tmp_path / "sharded")


@pytest.mark.parametrize("name", ["contents.jsonl", "__0_0.distcp", "state.pt"])
def test_what_is_damaged_is_refused_or_of_no_account(tmp_path, name):
    seed = secrets.randbelow(10**6)
    draw = random.Random(seed)  # noqa: S311 - tries are to be drawn again
    save(_STATE, tmp_path / "state.pt")
    save_sharded(_STATE, tmp_path / "sharded")
    path = tmp_path / name if name == "state.pt" else tmp_path / "sharded" / name
    content = path.read_bytes()
    for number in range(400 if name == "state.pt" else 200):  # a folder takes several times as long
        changed = bytearray(content)
        changed[draw.randrange(len(changed))] ^= 1 << draw.randrange(8)
        path.write_bytes(changed if number % 2 else mutated(draw, content))
        found = {"weight": torch.zeros(2000), "names": ["", ""], "step": 0}
        try:
            if name == "state.pt":
                found = load(path, device="cpu")
            else:
                load_sharded(found, tmp_path / "sharded")
        except CheckpointError:
            continue
        assert _is_state(found), f"seed {seed}, try {number}"


def test_no_bit_of_what_an_archive_says_of_a_tensor_changes_it(tmp_path):
    save(_STATE, tmp_path / "state.pt")
    content = (tmp_path / "state.pt").read_bytes()
    start = content.rindex(b"PK\1\2", 0, content.rindex(b"archive/data/0"))
    for bit in range(8 * 46):
        changed = bytearray(content)
        changed[start + bit // 8] ^= 1 << bit % 8
        (tmp_path / "state.pt").write_bytes(changed)
        torch.full((2000,), 7.0)  # what memory holds that is given out next
        with contextlib.suppress(CheckpointError):
            assert _is_state(load(tmp_path / "state.pt", device="cpu")), bit


def test_archives_that_hold_other_pickles_are_searched(tmp_path):
    file = io.BytesIO()
    torch.save({"a": MakesMesh()}, file)
    with zipfile.ZipFile(file) as old, zipfile.ZipFile(tmp_path / "state.pt", "w") as new:
        for entry in old.infolist():
            new.writestr(entry.filename.replace("archive", "other"), old.read(entry))
    with pytest.raises(CheckpointError, match="DeviceMesh"):
        load(tmp_path / "state.pt")


def test_a_program_may_allow_its_own_classes(tmp_path):
    with torch.serialization.safe_globals([argparse.Namespace]):
        save({"arguments": argparse.Namespace(layers=3)}, tmp_path / "state.pt")
        assert load(tmp_path / "state.pt") == {"arguments": argparse.Namespace(layers=3)}
