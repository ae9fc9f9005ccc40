"""Files that concern their owner alone, where somebody has planted links, files and folders."""

import contextlib
import os
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from distman._base import timing
from distman._base.private_files import create_anew, open_itself, private_folder, write_new
from distman._cli import main
from distman._cli.check import shared_folder
from distman._coordination.monitor.hang import Answer, write_report


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


def write_anew(path, text):
    with os.fdopen(create_anew(path), "w") as file:
        file.write(text)


@pytest.mark.parametrize("plant", PLANTED.values(), ids=PLANTED)
def test_what_is_planted_in_the_place_of_a_file_gets_none_of_it(plant, tmp_path, umask):
    other, path = tmp_path / "other", tmp_path / "path"
    other.write_text("kept")
    plant(path, other)
    with contextlib.suppress(OSError):
        write_anew(path, "text")
        assert mode(path) == 0o600 & ~umask
    assert other.read_text() == "kept"
    assert not (tmp_path / "nowhere").exists()


def test_a_device_is_written_to():
    write_anew(Path(os.devnull), "text")
    assert Path(os.devnull).is_char_device()


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


COMMANDS = {
    "a report": ("path", ["run", "-n", "1", "--report={path}", os.devnull]),
    "a log": ("rank-0.log", ["run", "-n", "1", "--log-dir={path.parent}", os.devnull]),
    "a job script": ("path", ["launch", "--backend=slurm", "--output={path}", "--force"]),
}


def distman(arguments):
    """Run the command in a process of its own, whose other children ``distman run`` would end."""
    command = [sys.executable, "-m", "distman", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("plant", PLANTED.values(), ids=PLANTED)
@pytest.mark.parametrize(("name", "arguments"), COMMANDS.values(), ids=COMMANDS)
def test_what_a_command_writes_goes_to_nobody_else(name, arguments, plant, tmp_path):
    """Whoever has made a file there, or opened it before, does not read what the command writes."""
    other, path = tmp_path / "kept" / "other", tmp_path / name
    other.parent.mkdir()
    other.write_text("kept")
    plant(path, other)
    is_file = path.is_file() and not path.is_symlink()
    before = path.open() if is_file else contextlib.nullcontext()
    with before as opened:
        said = distman([word.format(path=path) for word in arguments]).stderr
        assert opened is None or opened.read() in ("", "kept")
    assert other.read_text() == "kept"
    assert [one.name for one in other.parent.iterdir()] == ["other"]
    if not is_file:
        assert str(path) in said, "it says what is in the way"


def test_logs_are_their_owners(tmp_path, umask):
    script = tmp_path / "fails.py"
    script.write_text("print('begins', flush=True)\nraise SystemExit(3)")
    arguments = ["-n", "1", f"--log-dir={tmp_path}", f"--report={tmp_path / 'report'}"]
    assert distman(["run", *arguments, str(script)]).returncode == 3
    logs, report = tmp_path / "rank-0.log", tmp_path / "report"
    assert mode(logs) == mode(report) == 0o600 & ~umask


@pytest.mark.parametrize("forced", [[], ["--force"]])
def test_a_job_script_goes_through_no_link(forced, tmp_path, capsys):
    other, script = tmp_path / "other", tmp_path / "job.sh"
    other.write_text("kept")
    script.symlink_to(other)
    assert main(["launch", "--backend=slurm", f"--output={script}", *forced]) == 1
    assert other.read_text() == "kept"
    assert f"{script} must not " in capsys.readouterr().err


def test_a_job_script_is_its_owners(tmp_path):
    script = tmp_path / "job.sh"
    assert main(["launch", "--backend=slurm", f"--output={script}"]) == 0
    assert mode(script) == 0o700
    script.chmod(0o777)
    assert main(["launch", "--backend=slurm", f"--output={script}", "--force"]) == 0
    assert mode(script) == 0o700


def test_what_another_rank_is_to_see_is_read_from_a_plain_file(tmp_path, monkeypatch):
    monkeypatch.setattr(timing, "CHECK_FOLDER", 0.0)
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
