"""What is left when a process is killed while it saves, and what is finished when it ends."""

import re
import tempfile
from pathlib import Path

import pytest
import torch

from distman.checkpoint import load_sharded

from ..launch.preloaded import PYTHON
from ..launch.processes import launch

SCRIPT = Path(__file__).parent / "scripts" / "forked.py"
KILLS = 40
KILLS_OF_RANKS = 12  # of each way of saving: one rank, the other, and both


@pytest.fixture(scope="module")
def finished():
    """What the script printed; it saves in memory: few kills should meet a process that waits for a disk."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield launch([PYTHON, SCRIPT, folder, str(KILLS)], timeout=120)


def test_what_was_saved_survives_a_kill_at_any_moment(finished):
    assert finished.returncode == 0
    ways = re.findall(r"^(\w+) saved \d+, (\d+) of (\d+) killed while writing$", finished.stdout, re.MULTILINE)
    assert [(way, int(count)) for way, _, count in ways] == [
        ("Whole", KILLS),
        ("Numbered", KILLS),
        ("Sharded", KILLS // 2),
    ]
    assert all(int(num_torn) > 0 for _, num_torn, _ in ways)


def test_a_process_that_ends_finishes_what_it_saves_in_the_background_or_says_why_not(finished):
    whole = "4000000"
    assert finished.stdout.splitlines()[:8] == [
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
    assert len(re.findall(r"the background save to .*/state\.pt failed: \w+\(", finished.stderr)) == 2


def test_what_two_ranks_saved_in_the_background_survives_a_kill_of_one_or_both():
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        script = SCRIPT.with_name("killed_ranks.py")
        finished = launch([PYTHON, script, f"{folder}/run", str(KILLS_OF_RANKS)], timeout=120)
    assert (finished.returncode, finished.stderr) == (0, "")
    ways = re.findall(r"^(\w+) saved [1-9]\d*, \d+ of (\d+) left traces$", finished.stdout, re.MULTILINE)
    num_each = str(KILLS_OF_RANKS // 4)
    assert ways == [(way, num_each) for way in ("Whole", "Numbered", "Sharded", "NumberedSharded")]


@pytest.mark.parametrize("guilty", [0, 1])
def test_ranks_that_fail_finish_the_parts_that_they_save_in_the_background(tmp_path, guilty):
    script, path = SCRIPT.with_name("fails_later.py"), tmp_path / "sharded"
    done = launch([PYTHON, "-m", "distman", "run", "-n", "2", script, path, str(guilty)], timeout=60)
    assert (done.returncode, done.stderr.count("ValueError: the program fails")) == (1, 1)
    state = {f"tensor of rank {rank}": torch.zeros(1_500_000) for rank in (0, 1)}
    load_sharded(state, path)
    for rank, tensor in enumerate(state.values()):
        assert torch.equal(tensor, torch.arange(1_500_000.0) + rank)
    assert [one.name for one in tmp_path.iterdir()] == ["sharded"]


def test_a_process_that_ends_finishes_what_it_saves_through_coroutines(tmp_path):
    finished = launch([PYTHON, SCRIPT.with_name("asynchronous.py"), tmp_path])
    assert (finished.returncode, finished.stderr) == (0, "")
    assert [path.name for path in tmp_path.iterdir()] == ["state.pt"]
