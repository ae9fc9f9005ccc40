"""``distman keep`` on real hosts: which ones it leaves out, and when it gives up."""

import os
import signal
import socket
import sys
import textwrap

import pytest

from . import preloaded
from .preloaded import PYTHON
from .processes import marked, poll, start

LIMIT = 90

PROGRAM = """
import os, signal, sys, time
from distman import DistributedManager
from distman.checkpoint import CheckpointFolder

manager = DistributedManager.initialize()
host = os.environ.get("SLURMD_NODENAME", "here")
attempt = int(os.environ.get("SLURM_STEP_ID", "0"))
folder = CheckpointFolder("run", background=False)
begin = (folder.load_latest() or {"step": 0})["step"]
if manager.is_main:
    print(f"from {begin} on {' '.join(peer.host for peer in manager.roll_call)}", flush=True)
"""


def keep(*options, python=sys.executable):
    return [str(python), "-m", "distman", "keep", *map(str, options), "--"]


@pytest.fixture
def submit(slurm_cluster, tmp_path):
    """Run a program under ``distman keep`` on three of four nodes, and return its account."""

    def run(text, *options, meanwhile=None):
        (tmp_path / "train.py").write_text(PROGRAM + textwrap.dedent(text))
        script = f"#!/bin/bash\n{' '.join(keep('--spare', 1, *options, python=PYTHON))} srun {PYTHON} train.py\n"
        job = ["--nodes=4", "--ntasks-per-node=1", "--no-kill"]
        env = {**preloaded.variables(), "DISTMAN_SILENCE_TIMEOUT": "3"}
        return slurm_cluster.sbatch(script, *job, env=env, timeout=LIMIT, cwd=tmp_path, meanwhile=meanwhile)

    return run


@pytest.mark.parametrize("number", ["SIGKILL", "SIGSTOP"])
def test_the_host_of_a_rank_that_is_killed_or_stopped_is_left_out(submit, number):
    done = submit(
        f"""
        folder.save({{"step": begin + 10}}, begin + 10)
        if host == "n2":
            os.kill(os.getpid(), signal.{number})
        manager.barrier()
        """
    )
    assert done.returncode == 0
    assert done.stdout.splitlines() == ["from 0 on n1 n2 n3", "from 10 on n1 n3 n4"]
    assert "Left out from now on: n2. Last saved: step 10." in done.stderr


def test_when_the_spare_nodes_are_used_up_it_stops_with_the_reason(submit):
    done = submit(
        """
        folder.save({"step": begin + 10}, begin + 10)
        if manager.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        manager.barrier()
        """
    )
    assert done.returncode not in (0, 75)
    assert done.stdout.splitlines() == ["from 0 on n1 n2 n3", "from 10 on n1 n3 n4"]
    assert "distman keep: gives up: 2 of 4 nodes are left, and the job needs 3." in done.stderr


def test_an_error_of_the_program_makes_no_host_bad_and_ends_after_the_restarts(submit):
    done = submit("raise ValueError('sample 17 has no label')", "--restarts", 1)
    assert done.returncode == 1
    assert done.stdout.splitlines() == ["from 0 on n1 n2 n3"] * 2
    assert "Left out" not in done.stderr
    assert "distman keep: gives up: 2 tries in a row have saved nothing new." in done.stderr


def test_a_step_that_is_cancelled_makes_no_host_bad(submit):
    def cancel(job):
        job.wait_for_output("ready", times=3, timeout=LIMIT)
        job.cluster.scancel("--signal=KILL", f"{job.id}.0")

    done = submit(
        """
        print("ready", flush=True)
        if attempt == 0:
            time.sleep(60)
        """,
        meanwhile=cancel,
    )
    assert done.returncode == 0
    assert "from 0 on n1 n2 n3" in done.stdout.splitlines()[-4:]
    assert "Left out" not in done.stderr


def test_a_job_that_ends_early_is_started_until_a_step_is_saved(tmp_path):
    (tmp_path / "train.py").write_text(PROGRAM + "folder.save({'step': begin + 10}, begin + 10)\n")
    with start([*keep("--until", 30), PYTHON, "train.py"], env={}, cwd=tmp_path) as running:
        done = running.wait(timeout=LIMIT)
    assert done.returncode == 0
    assert done.stdout.splitlines() == [f"from {step} on {socket.gethostname()}" for step in (0, 10, 20)]


@pytest.mark.parametrize("number", [15, 2, 10])
def test_signals_reach_the_command_and_end_the_tries(tmp_path, number):
    program = f"""
import signal, sys, time
signal.signal({number}, lambda number, frame: sys.exit(7))
print("ready", flush=True)
time.sleep(60)
"""
    (tmp_path / "train.py").write_text(program)
    with start([*keep("--restarts", 0), PYTHON, "train.py"], env={}, cwd=tmp_path) as running:
        running.wait_for_output("ready")
        os.kill(running.pid, number)
        done = running.wait(timeout=LIMIT)
    assert done.returncode == 7
    assert done.stdout == "ready\n"


@pytest.mark.parametrize("left", ["sleep 1000", "setsid sleep 1000", "(trap '' TERM; sleep 1000; sleep 1000)"])
def test_nothing_of_a_try_is_left_when_the_next_one_starts(left, tmp_path):
    (tmp_path / "job.sh").write_text(
        f"""
        if [ -e first ]; then [ -d /proc/$(cat first) ] && echo beside; exit 0; fi
        {left} &
        echo $! > first
        exit 3
        """
    )
    with start([*keep("--restarts", 1), "bash", "job.sh"], env={}, cwd=tmp_path) as running:
        done = running.wait(timeout=LIMIT)
    assert (done.returncode, done.stdout) == (0, "")


def test_what_a_script_has_started_may_save_when_the_tries_are_ended(tmp_path):
    program = """
import signal, sys, time
from pathlib import Path
def save(*_):
    time.sleep(1)
    Path("saved").touch()
    sys.exit()
signal.signal(signal.SIGTERM, save)
print("ready", flush=True)
time.sleep(60)
"""
    (tmp_path / "train.py").write_text(program)
    (tmp_path / "job.sh").write_text(f"{sys.executable} train.py\nexit $?\n")
    with start([*keep("--restarts", 0), "bash", "job.sh"], env={}, cwd=tmp_path) as running:
        running.wait_for_output("ready")
        os.kill(running.pid, signal.SIGTERM)
        done = running.wait(timeout=LIMIT)
    assert done.returncode == 128 + signal.SIGTERM
    assert (tmp_path / "saved").exists()


WRITES_MUCH = """
import os
for _ in range(1000):
    os.write(2, b"x" * 1000)
print("written", flush=True)
"""


def test_a_command_can_write_though_nobody_reads_its_errors(tmp_path):
    (tmp_path / "train.py").write_text(WRITES_MUCH)
    command = " ".join([*keep(), sys.executable, "train.py"])
    with start(["bash", "-c", f"{command} 2> >(exec true)"], env={}, cwd=tmp_path) as running:
        done = running.wait(timeout=LIMIT)
    assert done.stdout == "written\n"


def test_the_command_ends_when_this_one_is_killed(tmp_path):
    (tmp_path / "train.py").write_text("import time\nprint('ready', flush=True)\ntime.sleep(60)\n")
    with start([*keep(), PYTHON, "train.py"], env={}, cwd=tmp_path) as running:
        running.wait_for_output("ready")
        os.kill(running.pid, signal.SIGKILL)
        running.wait(timeout=LIMIT)
        assert poll(lambda: not marked(running.marker), 10.0)


def test_nothing_is_left_in_the_folder(tmp_path):
    (tmp_path / "train.py").write_text("raise SystemExit(3)\n")
    with start([*keep("--restarts", 0), PYTHON, "train.py"], env={}, cwd=tmp_path) as running:
        done = running.wait(timeout=LIMIT)
    assert done.returncode == 3
    assert done.stderr.splitlines()[0] == (
        "distman keep: it ended with exit code 3, and no rank wrote down why. Nothing was saved."
    )
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]


def test_a_command_that_is_not_there_is_told(tmp_path):
    with start([*keep(), "no-such-launcher"], env={}, cwd=tmp_path) as running:
        done = running.wait(timeout=LIMIT)
    assert done.returncode == 1
    assert "no-such-launcher" in done.stderr
    assert "Traceback" not in done.stderr
