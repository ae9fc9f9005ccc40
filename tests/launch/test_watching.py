"""What the other ranks learn when one raises, dies, leaves, is late or falls silent; and how all of them stop."""

import gzip
import os
import random
import re
import secrets
import shutil
import signal
import time
import zipfile
from contextlib import ExitStack
from pathlib import Path

import pytest

from . import preloaded
from .preloaded import PYTHON
from .processes import kill_all, marked, start

WATCHED = Path(__file__).parent / "scripts" / "watched.py"
LIMIT = 60


def bare(rank, world_size, port):
    values = {"RANK": rank, "WORLD_SIZE": world_size, "MASTER_ADDR": "localhost", "MASTER_PORT": port}
    return {name: str(value) for name, value in values.items()}


class Job:
    """Three ranks that no launcher looks after."""

    def __init__(self, port, *arguments, world_size=3, **variables):
        command = [PYTHON, WATCHED, *arguments]
        variables = {"DISTMAN_FAILURE_GRACE": "4", **variables}  # no rank stays long to end one that does not react
        with ExitStack() as stack:
            self.ranks = [
                stack.enter_context(start(command, env={**bare(rank, world_size, port), **variables}))
                for rank in range(world_size)
            ]
            self._stack = stack.pop_all()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self._stack.close()

    def wait(self, ranks=(0, 1, 2)):
        return [self.ranks[rank].wait(timeout=LIMIT) for rank in ranks]


def line_of(text):
    lines = WATCHED.read_text().splitlines()
    return next(number for number, line in enumerate(lines, start=1) if text in line)


def test_a_barrier_says_who_is_missing_and_where(free_port):
    with Job(free_port, "late_for_a_barrier") as job:
        finished = job.wait([0, 1])
        late = job.ranks[2]
        missing = f"rank 2 ({os.uname().nodename}, pid {late.pid})"
        for rank in finished:
            assert rank.returncode == 1
            assert f"barrier 0 'save' failed: within 1 s, 1 of 3 ranks did not come: {missing}" in rank.stderr
            assert f", at {WATCHED}:{line_of('time.sleep(0.01)')} in wait_in_python" in rank.stderr


def test_a_stopped_rank_was_last_seen_somewhere(free_port):
    with Job(free_port, "stopped_before_a_barrier") as job:
        finished = job.wait([0, 1])
    for rank in finished:
        assert rank.returncode == 1
        assert "which does not answer, last seen after fused_all_reduce at" in rank.stderr
        assert f"{WATCHED}:{line_of('fused_all_reduce(torch.ones(2))')}" in rank.stderr


def test_a_hang_is_reported_in_one_file(free_port, tmp_path):
    """The script lies in a folder whose name is no text, as old archives have it; the job has a secret."""
    secret = secrets.token_hex(32)
    folder = tmp_path / os.fsdecode(b"no\xfftext")
    folder.mkdir()
    script = shutil.copy(WATCHED, folder)
    command = [PYTHON, script, "hang"]
    variables = {"DISTMAN_HANG_TIMEOUT": "1", "DISTMAN_SECRET": secret}
    with ExitStack() as stack:
        ranks = [
            stack.enter_context(start(command, env={**bare(rank, 3, free_port), **variables}, cwd=tmp_path))
            for rank in range(3)
        ]
        finished = [rank.wait(timeout=LIMIT) for rank in ranks]
    assert [rank.returncode for rank in finished] == [0, 0, 0]
    (report,) = tmp_path.glob("distman-hang-*.txt")
    text = report.read_text()
    assert re.match(r"rank [02] \(.*\) waits in fused_all_reduce at .*watched.py:\d+ for \d+ s\n", text)
    assert r"no\udcfftext/watched.py" in text
    assert "in wait_in_python" in text
    assert all(f"rank {rank} (" in text for rank in range(3))
    (logged,) = (line for rank in finished for line in rank.stderr.splitlines())
    assert str(report) in logged
    assert "rank 1 (" in logged
    assert not any(secret in said for said in (text, *(rank.stdout for rank in finished), logged))


@pytest.mark.parametrize(
    ("scenario", "watch"),
    [
        ("in_a_data_loader", "1"),
        ("raise_while_others_compute", "1"),
        ("raise_while_others_wait", "1"),
        ("raise_while_others_wait", "0"),
    ],
)
def test_an_error_reaches_ranks_that_do_something_else(free_port, scenario, watch):
    with Job(free_port, scenario, DISTMAN_WATCH=watch) as job:
        finished = job.wait()
    assert [rank.returncode for rank in finished] == [76, 1, 76]
    for rank in (finished[0], finished[2]):
        assert "JobFailed: rank 1 (" in rank.stderr
        assert rank.stderr.rstrip().endswith("ValueError: boom")


def test_code_that_cannot_be_interrupted_ends_with_the_process(free_port):
    with Job(free_port, "in_uninterruptible_code", DISTMAN_FAILURE_GRACE="2") as job:
        finished = job.wait()
    assert [rank.returncode for rank in finished] == [1, 76, 76]
    for rank in finished[1:]:
        assert "distman: rank 0 (" in rank.stderr
        assert "ValueError: boom" in rank.stderr
        assert "This process could not be interrupted:\nthread MainThread" in rank.stderr
        assert f'{WATCHED}", line {line_of("never returns")}' in rank.stderr


@pytest.mark.parametrize("dead", [0, 1])
def test_a_child_of_a_dead_rank_does_not_hide_its_death(free_port, dead):
    with Job(free_port, "with_a_child", dead) as job:
        job.ranks[dead].wait_for_output("killed", timeout=LIMIT)
        finished = job.wait({0, 1, 2} - {dead})
        kill_all(lambda: marked(job.ranks[dead].marker))  # the child
    for rank in finished:
        assert rank.returncode == 76
        assert re.search(rf"JobFailed: rank {dead} \(\S+, pid {job.ranks[dead].pid}\).* died", rank.stderr)


@pytest.mark.parametrize("scenario", ["leave_early", "leave_early_in_a_collective"])
def test_a_rank_that_left_is_not_waited_for(free_port, scenario):
    with Job(free_port, scenario) as job:
        finished = job.wait()
    assert [rank.returncode for rank in finished] == [76, 0, 76]
    for rank in (finished[0], finished[2]):
        assert "JobFailed: rank 1 (" in rank.stderr
        assert "left the job" in rank.stderr


@pytest.mark.parametrize("adopted", [[], ["adopted"]])
def test_ranks_may_end_one_after_another(free_port, adopted):
    with Job(free_port, "last_to_call", *adopted) as job:
        finished = job.wait()
    assert [(rank.returncode, rank.stderr) for rank in finished] == [(0, "")] * 3


@pytest.mark.parametrize(
    ("how", "what"), [("raise", "raised ValueError: boom"), ("SIGKILL", "died"), ("SIGSTOP", "has been silent")]
)
def test_a_failure_is_known_after_the_end_of_the_rank_that_opened_the_store(free_port, how, what):
    with Job(free_port, "fail_after_the_end", how, DISTMAN_SILENCE_TIMEOUT="4" if how == "SIGSTOP" else "300") as job:
        finished = job.wait([0, 2])
        failed = rf"rank 1 \(\S+, pid {job.ranks[1].pid}\) {what}"
    assert [rank.returncode for rank in finished] == [0, 76]
    assert finished[0].stderr == ""
    assert re.search(f"JobFailed: {failed}", finished[1].stderr)


@pytest.mark.parametrize("failing", [0, 1])
def test_a_cleanup_on_the_way_of_an_error_does_not_hide_it(free_port, failing):
    with Job(free_port, "clean_up_in_any_case", failing) as job:
        finished = job.wait()
    assert [rank.returncode for rank in finished] == [1 if rank == failing else 76 for rank in range(3)]
    assert "JobFailed" not in finished[failing].stderr
    for rank in {0, 1, 2} - {failing}:
        assert f"JobFailed: rank {failing} (" in finished[rank].stderr
        assert finished[rank].stderr.rstrip().endswith("ValueError: boom")


def test_a_collective_that_nobody_completes_does_not_hold_the_end_up(free_port):
    limits = {"DISTMAN_SILENCE_TIMEOUT": "4", "DISTMAN_FAILURE_GRACE": "4"}
    with Job(free_port, "collective_with_a_stopped_rank", **limits) as job:
        finished = job.wait([0, 1])
    assert [rank.returncode for rank in finished] == [76, 76]
    assert all("JobFailed: rank 2 (" in rank.stderr for rank in finished)


@pytest.mark.parametrize("adopted", [[], ["adopted"]])
def test_a_cleanup_before_the_others_are_done_fails_nobody(free_port, adopted):
    with Job(free_port, "clean_up_before_the_others", *adopted) as job:
        finished = job.wait()
    assert [(rank.returncode, rank.stderr) for rank in finished] == [(0, "")] * 3


def test_an_error_after_a_job_that_was_left_fails_nobody(free_port):
    with Job(free_port, "end_with_another_error") as job:
        finished = job.wait()
    assert [rank.returncode for rank in finished] == [1, 0, 0]
    assert all(rank.stderr == "" for rank in finished[1:])


def test_a_cleanup_in_a_handler_fails_nobody(free_port):
    with Job(free_port, "clean_up_in_a_handler") as job:
        finished = job.wait()
    assert [(rank.returncode, rank.stderr) for rank in finished] == [(0, "")] * 3


def test_a_rank_that_keeps_the_interpreter_accuses_nobody_who_left_meanwhile(free_port):
    with Job(free_port, "busy_in_c_at_the_end") as job:
        finished = job.wait()
    assert [rank.returncode for rank in finished] == [0, 0, 0]
    assert all("distman" not in rank.stderr for rank in finished), "torch says that the store is gone; nobody is blamed"


@pytest.mark.parametrize("unwatched", [0, 1])
def test_ranks_that_do_not_watch_disturb_nobody(free_port, unwatched):
    """A launcher may not hand the variable on to all hosts."""
    command = [PYTHON, WATCHED, "last_to_end"]
    with ExitStack() as stack:
        ranks = [
            stack.enter_context(
                start(command, env={**bare(rank, 3, free_port), "DISTMAN_WATCH": str(int(rank != unwatched))})
            )
            for rank in range(3)
        ]
        finished = [rank.wait(timeout=LIMIT) for rank in ranks]
    assert [rank.returncode for rank in finished] == [0, 0, 0]
    assert all(rank.stderr == "" for number, rank in enumerate(finished) if number != unwatched)


def test_a_rank_may_end_though_who_serves_the_store_is_stopped(free_port):
    with Job(free_port, "end_while_the_store_is_stopped", DISTMAN_SILENCE_TIMEOUT="60") as job:
        finished = job.wait([1, 2])
    assert [rank.returncode for rank in finished] == [0, 0]


@pytest.mark.parametrize("adopted", [[], ["adopted"]])
def test_a_stopped_host_of_the_store_is_missed(free_port, adopted):
    with Job(free_port, "work_while_the_store_is_stopped", *adopted, DISTMAN_SILENCE_TIMEOUT="2") as job:
        finished = job.wait([1, 2])
    blamed = r"JobFailed: rank 0 \(.*\) has been silent for [23] s"
    for rank in finished:
        assert rank.returncode == 76
        assert re.search(blamed, rank.stderr)


def test_an_exception_hook_of_the_program_hides_nothing(free_port):
    with Job(free_port, "hook_of_its_own") as job:
        finished = job.wait()
    assert finished[1].stdout == "1: handled boom\n"
    for rank in (finished[0], finished[2]):
        assert re.search(r"JobFailed: rank 1 \(.*\) raised ValueError: boom", rank.stderr)


def test_a_huge_error_is_shortened(free_port):
    with Job(free_port, "huge_error") as job:
        finished = job.wait()
    for rank in (finished[0], finished[2]):
        assert re.search(r"JobFailed: rank 1 \(.*\) raised ValueError: x+\\n", rank.stderr)
        assert "characters left out" in rank.stderr


def test_children_of_ranks_are_not_ranks(free_port):
    with Job(free_port, "children_and_signals") as job:
        finished = job.wait()
    for number, rank in enumerate(finished):
        assert (rank.returncode, rank.stderr) == (0, "")
        assert rank.stdout == f"{number}: child ended with -15\n{number}: done\n"


def test_a_job_that_is_suspended_goes_on(free_port):
    """As Slurm suspends a job, or Ctrl-Z does: nobody was silent while nobody ran."""
    with Job(free_port, "suspended", DISTMAN_SILENCE_TIMEOUT="3") as job:
        for rank in job.ranks:
            rank.wait_for_output("ready", timeout=LIMIT)
        for rank in job.ranks:
            os.kill(rank.pid, signal.SIGSTOP)
        time.sleep(5)
        for rank in job.ranks:
            os.kill(rank.pid, signal.SIGCONT)
        finished = job.wait()
    assert [(rank.returncode, rank.stderr) for rank in finished] == [(0, "")] * 3


def test_a_rank_that_is_silent_for_long_fails_the_job(free_port):
    with Job(free_port, "suspended", DISTMAN_SILENCE_TIMEOUT="2") as job:
        for rank in job.ranks:
            rank.wait_for_output("ready", timeout=LIMIT)
        os.kill(job.ranks[2].pid, signal.SIGSTOP)
        finished = job.wait()
    assert [rank.returncode for rank in finished] == [76, 76, -signal.SIGKILL], "a stopped process is not left behind"
    for rank in finished[:2]:
        assert re.search(r"JobFailed: rank 2 \(.*\) has been silent for \d s", rank.stderr)


def test_a_rank_that_is_silent_from_the_start_fails_the_job(free_port):
    with Job(free_port, "suspended_at_once", DISTMAN_SILENCE_TIMEOUT="2") as job:
        finished = job.wait()
    assert [rank.returncode for rank in finished] == [76, 76, -signal.SIGKILL]
    for rank in finished[:2]:
        assert re.search(r"JobFailed: rank 2 \(.*\) has been silent for \d s", rank.stderr)


@pytest.mark.parametrize("fault", ["stopped", "keeps the GIL", "killed", "exits", "raises"])
def test_all_blame_the_rank_that_failed(free_port, fault):
    """Whoever hears of it first may end at once, and take the store with it."""
    rng = random.Random()  # noqa: S311 - it draws no secrets
    world_size = rng.choice([3, 4, 5])
    failing = rng.randrange(world_size)
    drawn = fault, str(failing), rng.choice(["code", "barrier"]), *rng.choice([[], ["adopted"]])
    limits = {"DISTMAN_SILENCE_TIMEOUT": "2", "DISTMAN_FAILURE_GRACE": "4"}
    with Job(free_port, "blamed", *drawn, world_size=world_size, **limits) as job:
        finished = job.wait(sorted({*range(world_size)} - {failing}))
    assert {rank.stdout.partition(": ")[2] for rank in finished} == {f"blames {failing}\n"}, drawn


@pytest.mark.parametrize(
    ("status", "code", "through"), [("3", 3, ""), ("3", 3, "cleanup"), ("text", 1, "cleanup"), ("list", 1, "")]
)
def test_an_exit_code_is_told_whatever_it_is_made_of(free_port, status, code, through):
    with Job(free_port, "exit_of_rank_1", status, through) as job:
        finished = job.wait()
    assert [rank.returncode for rank in finished] == [76, code, 76]
    for rank in (finished[0], finished[2]):
        assert re.search(rf"JobFailed: rank 1 \(.*\) ended with exit code {code}, by sys.exit", rank.stderr)


def test_files_are_whole_where_the_error_of_torch_itself_ends_the_program(free_port, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with Job(free_port, "broken_with_open_files") as job:
        finished = job.wait()
    assert [rank.returncode for rank in finished] == [76, -signal.SIGKILL, 76]
    for rank in (0, 2):
        assert "RuntimeError" in finished[rank].stderr
        assert finished[rank].stderr.rstrip().splitlines()[-1].count("rank 1 (") == 1
        assert gzip.decompress((tmp_path / f"log{rank}.gz").read_bytes()) == b"step\n"
        with zipfile.ZipFile(tmp_path / f"parts{rank}.zip") as archive:
            assert archive.read("step") == b"1"


@pytest.mark.parametrize("fault", ["stopped", "keeps the GIL"])
def test_a_rank_that_a_failure_does_not_reach_is_ended_by_another_one_of_its_host(free_port, fault):
    with Job(free_port, "stuck_while_another_raises", fault, DISTMAN_FAILURE_GRACE="2") as job:
        finished = job.wait()
    assert [rank.returncode for rank in finished] == [-signal.SIGKILL, 1, 76]
    told = [rank for rank in finished[1:] if "has not reacted to the failure of rank 1, and is ended" in rank.stderr]
    assert len(told) == 1


def test_a_death_is_known_to_who_waits_though_nobody_watches(free_port):
    with Job(free_port, "blamed", "killed", "0", "barrier", DISTMAN_WATCH="0") as job:
        finished = job.wait([1, 2])
    assert [rank.stdout for rank in finished] == ["1: blames 0\n", "2: blames 0\n"]


@pytest.fixture
def hosts_to_cut(namespace_hosts):
    """The virtual hosts; the link of n2 may be taken down."""
    yield namespace_hosts
    namespace_hosts.run(["ip", "link", "set", "eth0", "up"], host="n2")


def test_a_host_that_is_cut_off_is_known_long_before_a_silent_rank(hosts_to_cut, free_port):
    """A stopped process is not cut off: its host answers. Rank 0's host serves the store, rank 1's watches it."""
    silence, unreachable = 40, 6

    def run(rank):
        env = {**bare(rank, 2, free_port), "MASTER_ADDR": "n1", "DISTMAN_SILENCE_TIMEOUT": str(silence)}
        return start([*hosts_to_cut.enter(f"n{rank + 1}"), PYTHON, WATCHED, "cut_off"], env=env)

    with run(0) as first, run(1) as second:
        for rank in (first, second):
            rank.wait_for_output("ready", timeout=LIMIT)
        for rank in (first, second):
            os.kill(rank.pid, signal.SIGSTOP)
            time.sleep(unreachable + 2)
            os.kill(rank.pid, signal.SIGCONT)
        assert (first.stdout, second.stdout) == ("0: ready\n", "1: ready\n")
        hosts_to_cut.run(["ip", "link", "set", "eth0", "down"], host="n2")
        finished = [rank.wait(timeout=LIMIT) for rank in (first, second)]
    told = re.search(r"blames 1: is on a host that has not answered for (\d+) s", finished[0].stdout)
    assert int(told[1]) < silence
    assert "blames 0: , beside which the job's store runs at tcp://n1:" in finished[1].stdout
    assert f"is on a host that has not answered for {unreachable} s" in finished[1].stdout


def test_an_error_of_another_rank_can_be_handled(free_port):
    with Job(free_port, "caught") as job:
        finished = job.wait()
    assert [rank.returncode for rank in finished] == [0, 1, 0]
    for rank in (finished[0], finished[2]):
        assert re.search(r"saved because rank 1 \(.*\) raised ValueError: boom", rank.stdout)


def test_a_wait_after_a_survived_failure_says_where_the_program_ends(free_port):
    with Job(free_port, "waits_after_survival") as job:
        finished = job.wait()
    assert [rank.returncode for rank in finished] == [76, 1, 76]
    line = line_of('manager.barrier("epoch")')
    for rank in (finished[0], finished[2]):
        assert f"distman: {WATCHED}:{line} waits for other ranks" in rank.stderr


def test_an_error_of_another_rank_cannot_be_swallowed(free_port):
    with Job(free_port, "swallowed") as job:
        finished = job.wait()
    assert [rank.returncode for rank in finished] == [76, 1, 76]
    for rank in (finished[0], finished[2]):
        assert "caught JobFailed" in rank.stdout
        assert re.search(r"JobFailed: rank 1 \(.*\) raised ValueError: boom", rank.stderr)
        assert "To go on: `with distman.surviving_failure():`" in rank.stderr


@pytest.mark.parametrize(("how", "code", "what"), [("raise", 1, "raised ValueError: boom"), ("SIGKILL", -9, "died")])
def test_a_failure_that_was_known_when_the_rank_left_cannot_be_swallowed(free_port, how, code, what):
    with Job(free_port, "swallow_the_error_of_a_collective", how) as job:
        finished = job.wait()
    assert finished[0].returncode == code
    for rank in finished[1:]:
        assert rank.returncode == 76
        assert re.search(rf"JobFailed: rank 0 \(.*\).* {what}", rank.stderr)


def test_a_rank_that_cannot_say_anything_is_heard(free_port):
    with Job(free_port, "speechless") as job:
        finished = job.wait()
    for rank in (finished[0], finished[2]):
        assert rank.returncode == 76
        assert re.search(r"JobFailed: rank 1 \(.*\) raised SpeechlessError: \(its __str__ raised", rank.stderr)


def test_an_error_in_another_thread_ends_the_job_where_that_is_wanted(free_port):
    with Job(free_port, "in_another_thread") as job:
        finished = job.wait()
    assert [rank.returncode for rank in finished] == [76, 76, 76]
    for rank in finished:
        assert re.search(r"JobFailed: rank 1 \(.*\) raised ValueError: invalid literal", rank.stderr)


def test_a_rank_out_of_memory_has_last_words(free_port):
    with Job(free_port, "out_of_memory") as job:
        finished = job.wait()
    assert [rank.returncode for rank in finished] == [76, 1, 76]
    for rank in (finished[0], finished[2]):
        assert re.search(r"JobFailed: rank 1 \(.*\) raised MemoryError", rank.stderr)


def test_a_job_that_another_thread_started_ends_all_the_same(free_port):
    with Job(free_port, "in_a_thread", DISTMAN_FAILURE_GRACE="2") as job:
        finished = job.wait()
    assert [rank.returncode for rank in finished] == [76, 1, 76]
    for rank in (finished[0], finished[2]):
        assert re.search(r"distman: rank 1 \(.*\) raised ValueError: boom", rank.stderr)
        assert "This process could not be interrupted" in rank.stderr


def test_an_adopted_group_is_watched_too(free_port):
    with Job(free_port, "raise_while_others_compute", "adopted") as job:
        finished = job.wait()
    assert [rank.returncode for rank in finished] == [76, 1, 76]
    assert "JobFailed: rank 1 (" in finished[2].stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_to_one_rank_stops_all_at_the_same_step(free_port, number):
    with Job(free_port, "train_until_stopped") as job:
        for rank in job.ranks:
            rank.wait_for_output("ready", timeout=LIMIT)
        time.sleep(1)
        os.kill(job.ranks[1].pid, number)
        finished = job.wait()
    assert [(rank.returncode, rank.stderr) for rank in finished] == [(0, "")] * 3
    saved = [re.search(r"saved at step (\d+), (\d) signals seen", rank.stdout).groups() for rank in finished]
    assert len({step for step, _ in saved}) == 1
    assert [seen for _, seen in saved] == (["0", "1", "0"] if number == signal.SIGTERM else ["0", "0", "0"])


def test_a_call_on_one_rank_stops_all_at_the_same_step(free_port):
    with Job(free_port, "train_until_stopped", "request") as job:
        finished = job.wait()
    steps = {re.search(r"saved at step (\d+)", rank.stdout)[1] for rank in finished}
    assert len(steps) == 1
    assert 50 < int(steps.pop()) < 1_000


SPAWNED = """
import os, sys, time
import torch.multiprocessing as mp

def work(rank, port):
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="localhost", MASTER_PORT=port)
    from distman import DistributedManager
    manager = DistributedManager.initialize()
    if rank == 1:
        time.sleep(1)
        raise ValueError("boom")
    manager.barrier("end")

if __name__ == "__main__":
    mp.spawn(work, (sys.argv[1],), nprocs=2)
"""


def test_spawned_processes_end_with_the_error_of_the_one_that_raised(free_port, tmp_path):
    (tmp_path / "spawned.py").write_text(SPAWNED)
    with start([PYTHON, tmp_path / "spawned.py", str(free_port)]) as running:
        finished = running.wait(timeout=LIMIT)
    assert finished.returncode == 1
    assert "JobFailed: rank 1 (" in finished.stderr, "torch names the process that ends first"
    assert "ValueError: boom" in finished.stderr


def test_a_job_that_stops_is_queued_again(slurm_cluster):
    script = f"#!/bin/sh\nexport OMP_NUM_THREADS=1\nexec srun -N2 -n2 python {WATCHED} train_twice\n"
    options = ("-N2", "-n2", "--requeue", "--open-mode=append")
    finished = slurm_cluster.sbatch(script, *options, env=preloaded.variables(), timeout=LIMIT)
    assert finished.returncode == 0
    saved = re.findall(r"saved at step (\d+)", finished.stdout)
    assert len(saved) == 2
    assert len(set(saved)) == 1
    assert finished.stdout.count("done in the second run") == 2
