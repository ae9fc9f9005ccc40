"""Files that concern their owner alone, where somebody has planted links, files and folders."""

import contextlib
import os
import stat
import tempfile
from pathlib import Path

import pytest

from distman._cli import main
from distman._cli.check import shared_folder
from distman._coordination.monitor.hang import Answer, write_report
from distman._private_files import open_itself, private_folder, write_new


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture(params=[0o000, 0o022, 0o777], ids=oct)
def umask(request):
    """The file belongs to its owner alone whatever is asked of the process as a whole."""
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    """The folder for temporary files, which anybody may write to."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


PLANTED = {
    "a link to a file": lambda path, other: path.symlink_to(other),
    "a link to nowhere": lambda path, other: path.symlink_to(other.with_name("nowhere")),
    "a hard link": lambda path, other: path.hardlink_to(other),
    "a file": lambda path, _: path.touch(),
    "a folder": lambda path, _: path.mkdir(),
    "a pipe": lambda path, _: os.mkfifo(path),
}


@pytest.mark.parametrize("plant", PLANTED.values(), ids=PLANTED)
def test_what_is_planted_is_not_written_to(plant, tmp_path):
    other, path = tmp_path / "other", tmp_path / "path"
    other.write_text("kept")
    plant(path, other)
    with pytest.raises(FileExistsError):
        write_new(path, "text")
    assert other.read_text() == "kept"
    assert not (tmp_path / "nowhere").exists()


def test_a_file_is_its_owners(tmp_path, umask):
    path = tmp_path / "file"
    write_new(path, "text \ud800")
    assert mode(path) == 0o600 & ~umask
    path.chmod(0o600)
    assert path.read_text() == r"text \ud800"


def test_a_folder_for_temporary_files_is_its_owners(temporary):
    folder = private_folder()
    assert folder == private_folder() == temporary / f"distman-{os.getuid()}"
    assert mode(folder) == 0o700


HELD = {
    "a link to a folder": lambda name: name.symlink_to(name.parent.parent),
    "a file": lambda name: name.touch(),
    "a folder that others read": lambda name: (name.mkdir(), name.chmod(0o750)),
    "a folder that others write to": lambda name: (name.mkdir(), name.chmod(0o702)),
}


@pytest.mark.parametrize("hold", HELD.values(), ids=HELD)
def test_a_name_that_somebody_else_holds_is_passed_by(hold, temporary):
    name = temporary / f"distman-{os.getuid()}"
    hold(name)
    found = private_folder()
    assert found != name
    assert found.parent == temporary
    assert mode(found) == 0o700


def test_a_folder_of_another_user_is_passed_by(temporary, monkeypatch):
    folder, uid = private_folder(), os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: uid + 1)
    folder.rename(temporary / f"distman-{uid + 1}")
    assert private_folder() != temporary / f"distman-{uid + 1}"


def test_a_hang_report_is_its_owners_wherever_it_goes(temporary, tmp_path):
    for folder in (tmp_path / "run", tmp_path / "missing"):
        if folder.name == "run":
            folder.mkdir()
        write_report("rank 0 waits", 0, {0: Answer("in barrier", "stack", "a.py:1")}, ["rank 0"], folder)
    reports = [*tmp_path.glob("run/*"), *temporary.glob("*/*")]
    assert [mode(path) for path in reports] == [0o600, 0o600]
    assert mode(reports[1].parent) == 0o700


def test_a_hang_report_goes_through_no_link(temporary, tmp_path, monkeypatch):
    monkeypatch.setattr("time.strftime", lambda _: "20260101-000000")
    monkeypatch.setattr("time.monotonic_ns", lambda: 1)
    other = tmp_path / "other"
    other.write_text("kept")
    for folder in (tmp_path, private_folder()):
        (folder / "distman-hang-20260101-000000-000001.txt").symlink_to(other)
    write_report("rank 0 waits", 0, {0: Answer("in barrier", "stack", "a.py:1")}, ["rank 0"], tmp_path)
    assert other.read_text() == "kept"
    assert len([*temporary.rglob("*.txt")]) == 1


@pytest.mark.parametrize("forced", [[], ["--force"]])
def test_a_job_script_goes_through_no_link(forced, tmp_path, capsys):
    other, script = tmp_path / "other", tmp_path / "job.sh"
    other.write_text("kept")
    script.symlink_to(other)
    assert main(["launch", "--backend=slurm", f"--output={script}", *forced]) == 1
    assert other.read_text() == "kept"
    assert f"{script} must not " in capsys.readouterr().err


def test_a_job_script_is_its_owners_and_keeps_the_permissions_it_was_given(tmp_path):
    script = tmp_path / "job.sh"
    assert main(["launch", "--backend=slurm", f"--output={script}"]) == 0
    assert mode(script) == 0o700
    script.chmod(0o640)
    assert main(["launch", "--backend=slurm", f"--output={script}", "--force"]) == 0
    assert mode(script) == 0o740


def test_what_another_rank_is_to_see_is_read_from_a_plain_file(tmp_path, monkeypatch):
    monkeypatch.setattr(shared_folder, "_PATIENCE", 0.0)
    path = tmp_path / "word"
    write_new(path, "word")
    assert shared_folder._reads(path, "word")
    link, pipe, endless = tmp_path / "link", tmp_path / "pipe", Path("/dev/zero")
    link.symlink_to(path)
    os.mkfifo(pipe)
    assert not any(shared_folder._reads(one, "word") for one in (link, pipe, endless, tmp_path, tmp_path / "missing"))


def test_a_link_is_not_opened(tmp_path):
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "other")
    with contextlib.suppress(OSError):
        os.close(open_itself(link, os.O_WRONLY | os.O_CREAT))
        pytest.fail("it was opened")
    assert not (tmp_path / "other").exists()
