"""Links that another user has planted at every path that is written or that a secret is read from."""

import itertools
import logging
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from distman._base import timing
from distman._base.private_files import create_anew, open_itself, write_new
from distman._cli.check import shared_folder
from distman._cli.launch import command
from distman._coordination.monitor.hang import Answer, write_report
from distman._job.meeting.secret import find_protection
from distman.environments import LaunchEnvironment
from distman.errors import LaunchEnvironmentError

from ..conftest import require_namespaces
from .attacking import AS_ANOTHER_USER, LIMIT, TRIES

PLANT = """
import os, sys
target, folder, *names = sys.stdin.read().split("\\n")
for number, name in enumerate(names):
    os.symlink(target if number % 2 else "nowhere", os.path.join(folder, name))
"""


MAKE = """
import os, sys
folder, *names = sys.stdin.read().split("\\n")
os.umask(0)
made = [open(os.path.join(folder, name), "w+") for name in names]
print("made", flush=True)
os.read(int(sys.argv[1]), 1)
assert not any(file.read() for file in made)
"""


@pytest.fixture
def shared(scene):
    """A folder into which anybody may write, as /tmp, but where the system protects nobody from links."""
    return scene.theirs


@pytest.fixture
def kept(scene):
    """A file of this user's, to which the links lead."""
    file = scene.folder / "kept"
    file.write_text("kept " * 10)
    file.chmod(0o600)
    yield file
    assert file.read_text() == "kept " * 10
    assert not (scene.theirs / "nowhere").exists()


def plant(folder, kept, names):
    """Let another user link all the names to a file, or to nowhere."""
    require_namespaces()
    text = "\n".join([str(kept), str(folder), *names])
    program = [*AS_ANOTHER_USER, sys.executable, "-I", "-S", "-c", PLANT]
    subprocess.run(program, input=text, text=True, timeout=LIMIT, check=True)
    assert len([*folder.iterdir()]) == len(names)
    return [folder / name for name in names]


def test_hang_reports_go_elsewhere(shared, kept, monkeypatch, caplog):
    """The names are told beforehand here; that of the folder for temporary files always is."""
    monkeypatch.setattr(tempfile, "tempdir", str(shared))
    monkeypatch.setattr(time, "strftime", lambda _: "20260101-000000")
    numbers = itertools.count()
    monkeypatch.setattr(time, "monotonic_ns", lambda: next(numbers))
    names = [f"distman-hang-20260101-000000-{number:06d}.txt" for number in range(TRIES)]
    plant(shared, kept, [*names, f"distman-{0}"])
    with caplog.at_level(logging.ERROR, logger="distman"):
        for _ in names:
            write_report("rank 0 waits", 0, {0: Answer("in barrier", "stack", "a.py:1")}, ["rank 0"], shared)
    reports = [*shared.glob("*/*.txt")]
    assert len(reports) == TRIES
    assert not any(path.is_symlink() or path.stat().st_mode & 0o077 for path in reports)
    assert not any(path.parent.stat().st_mode & 0o077 for path in reports)


def write(descriptor):
    with os.fdopen(descriptor, "w") as file:
        file.write("text")


def write_script(path, number):
    command._write(path, "script", force=bool(number % 2))


def check_folder(path, _):
    assert not shared_folder._reads(path, "kept " * 10)
    shared_folder.write_new(path, "word")  # as rank 0 does


def read_secret(path, _):
    find_protection(LaunchEnvironment("env", 0, 2), {"DISTMAN_SECRET_FILE": str(path)})


WRITERS = {
    "any file": lambda path, _: write_new(path, "text"),
    "opened itself": lambda path, _: open_itself(path, 0),
    "a file in the place of another": lambda path, _: write(create_anew(path)),
    "job scripts": write_script,
    "the check of a shared folder": check_folder,
    "secrets": read_secret,
}


@pytest.mark.parametrize("what", WRITERS)
def test_nobody_goes_through_a_link(what, shared, kept, monkeypatch):
    monkeypatch.setattr(timing, "CHECK_FOLDER", 0.0)
    for number, path in enumerate(plant(shared, kept, [f"name {number}" for number in range(TRIES)])):
        with pytest.raises((OSError, LaunchEnvironmentError)):
            WRITERS[what](path, number)
        assert Path(path).is_symlink()


def test_who_has_made_a_file_there_and_holds_it_reads_nothing(shared):
    require_namespaces()
    names = [f"name {number}" for number in range(200)]
    end, other_end = os.pipe()
    program = [*AS_ANOTHER_USER, sys.executable, "-I", "-S", "-c", MAKE, str(end)]
    with subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, pass_fds=[end]) as other:
        other.stdin.write("\n".join([str(shared), *names]))
        other.stdin.close()
        try:
            assert other.stdout.readline() == "made\n"
            for name in names:
                write(create_anew(shared / name))
        finally:
            os.close(other_end)  # which lets the other process look into its files, and end
        assert other.wait(LIMIT) == 0
    os.close(end)
    assert {(path.stat().st_uid, path.stat().st_mode & 0o077) for path in shared.iterdir()} == {(os.geteuid(), 0)}
