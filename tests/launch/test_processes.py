import sys
from pathlib import Path

import pytest

from .processes import assert_nothing_left, launch, marked, poll, start

HANG = "import time\ndef stuck_here(): time.sleep(60)\nprint('started', flush=True)\nstuck_here()"
LEAVE_A_CHILD = "import subprocess; subprocess.Popen(['sleep', '60'], start_new_session=True)"
TREE = "sh -c 'sleep 60 & sleep 60' & echo started; wait"


def test_account_of_a_launch():
    finished = launch(["sh", "-c", "echo said; echo complained >&2; exit 3"])
    assert finished.returncode == 3
    assert (finished.stdout, finished.stderr) == ("said\n", "complained\n")
    account = str(finished)
    for part in ("$ sh -c", "exit code 3, after ", "said", "complained"):
        assert part in account


def test_signal_is_named():
    assert "exit code -9 (SIGKILL)" in str(launch(["sh", "-c", "kill -9 $$"]))


def test_time_limit_ends_everything_and_shows_the_stacks():
    with pytest.raises(pytest.fail.Exception) as failure:
        launch([sys.executable, "-c", HANG], timeout=3.0)
    assert not marked()
    account = str(failure.value)
    for part in ("waited 3 s to end", "started", "in stuck_here"):
        assert part in account


def test_launchers_variables_do_not_reach_a_launch(monkeypatch):
    monkeypatch.setenv("SLURM_PROCID", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    finished = launch(
        ["sh", "-c", "echo ${SLURM_PROCID-no} ${WORLD_SIZE-no} $RANK ${HOME-no}"],
        env={"RANK": "1", "HOME": None},
    )
    assert finished.stdout == "no no 1 no\n"


def test_leaving_the_block_ends_the_whole_tree():
    with start(["sh", "-c", TREE]) as running:
        running.wait_for_output("started")
        assert poll(lambda: len(marked(running.marker)) == 4, 5.0)
    assert not marked()


def test_waiting_for_output_ends_with_the_launch():
    with start(["sh", "-c", "echo other"]) as running, pytest.raises(pytest.fail.Exception, match="other"):
        running.wait_for_output("started")


def test_child_left_behind_is_found_and_killed():
    launch([sys.executable, "-c", LEAVE_A_CHILD])
    assert len(marked()) == 1
    with pytest.raises(pytest.fail.Exception, match="sleep 60"):
        assert_nothing_left(within=0.2)
    assert not marked()


def test_temporary_folder_lasts_as_long_as_the_launch():
    finished = launch(["sh", "-c", "touch $TMPDIR/litter; echo $TMPDIR"])
    assert finished.returncode == 0
    assert not Path(finished.stdout.strip()).exists()
