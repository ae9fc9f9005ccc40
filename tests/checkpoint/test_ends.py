"""What is left when a process is killed while it saves, and what is finished when it ends."""

import re
import sys
import tempfile
from pathlib import Path

import pytest

from ..launch.processes import launch

SCRIPTS = Path(__file__).parent / "scripts"
KILLS = 80


@pytest.fixture
def in_memory():
    """A folder in memory: a kill loses nothing of it either, and few meet a process that waits for a disk."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield folder


def test_what_was_saved_survives_a_kill_at_any_moment(in_memory):
    finished = launch([sys.executable, SCRIPTS / "killed.py", in_memory, str(KILLS)], timeout=120)
    assert (finished.returncode, finished.stderr) == (0, "")
    assert re.findall(r"^\w+", finished.stdout, re.MULTILINE) == ["Whole", "Numbered", "Sharded"]


def test_a_process_that_ends_finishes_what_it_saves_in_the_background_or_says_why_not(in_memory):
    finished = launch([sys.executable, SCRIPTS / "ended.py", in_memory], timeout=60)
    whole = "4000000"
    assert finished.stdout.splitlines() == [
        f"end 0 state.pt {whole}",
        f"sys.exit 3 state.pt {whole}",
        f"exception 1 state.pt {whole}",
        f"exit_now 76 state.pt {whole}",
        "kill -9 state.pt 1",
        f"folder end 0 checkpoint-00000007.pt {whole} latest.pt {whole}",
        "failed end 0",
        "failed exit_now 76",
    ]
    assert finished.stderr.count("ValueError: the program fails") == 1
    assert len(re.findall(r"failed \S+/state\.pt was not written: \w+\(", finished.stderr)) == 2
