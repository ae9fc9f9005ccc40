import os
import stat
import time

import pytest

from distman._coordination.preemption import StopAgreement
from distman._coordination.time_limit import TimeLimit, margin, saves

PBS = '{"Jobs": {"7.head": {"Resource_List": {"walltime": "01:00:00"}, "resources_used": {"walltime": "00:59:30"}}}}'


@pytest.fixture
def scheduler(tmp_path, monkeypatch):
    """Put a scheduler's command on the PATH: it counts its calls, and gives an answer."""
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    def put(name, answer, code=0):
        path = tmp_path / name
        path.write_text(f"#!/bin/sh\necho \"$@\" >> {tmp_path}/calls\ncat <<'END'\n{answer}\nEND\nexit {code}\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        return tmp_path / "calls"

    return put


@pytest.mark.parametrize("name", ["DISTMAN_END_TIME", "SLURM_JOB_END_TIME"])
def test_a_variable_says_when_the_time_is_up(name):
    limit = TimeLimit({name: str(time.time() + 100), "SLURM_JOB_ID": "7"})
    assert 99 < limit.left() <= 100


def test_the_variable_of_this_package_wins():
    limit = TimeLimit({"SLURM_JOB_END_TIME": str(time.time() + 900), "DISTMAN_END_TIME": str(time.time() + 100)})
    assert limit.left() <= 100


@pytest.mark.parametrize("text", ["soon", "nan", "-1", "inf"])
def test_a_variable_that_is_no_number_is_refused(text):
    with pytest.raises(ValueError, match="DISTMAN_END_TIME must be a number of seconds"):
        TimeLimit({"DISTMAN_END_TIME": text})
    with pytest.raises(ValueError, match="DISTMAN_STOP_MARGIN must be a number of seconds"):
        margin({"DISTMAN_STOP_MARGIN": text})


@pytest.mark.parametrize(
    ("variable", "command", "answer", "seconds"),
    [
        ("SLURM_JOB_ID", "squeue", "1-02:03:04", 93_784),
        ("SLURM_JOB_ID", "squeue", "2:03:04", 7_384),
        ("SLURM_JOB_ID", "squeue", "3:04", 184),
        ("SLURM_JOB_ID", "squeue", "UNLIMITED", None),
        ("SLURM_JOB_ID", "squeue", "INVALID", None),
        ("PBS_JOBID", "qstat", PBS, 30),
        ("PBS_JOBID", "qstat", '{"Jobs": {}}', None),
        ("LSB_JOBID", "bjobs", "12:05 L", 43_500),
        ("LSB_JOBID", "bjobs", "-", None),
        ("FLUX_JOB_ID", "flux", "75", 75),
        ("FLUX_JOB_ID", "flux", "inf", None),
    ],
)
def test_the_scheduler_is_asked_once_for_the_job(scheduler, variable, command, answer, seconds):
    calls = scheduler(command, answer)
    limit = TimeLimit({variable: "7.head"})
    assert limit.left() is None
    for _ in range(3):
        limit.ask()
    assert len(calls.read_text().splitlines()) == 1
    assert calls.read_text().split()[-1] == "7.head"
    assert limit.left() == (None if seconds is None else pytest.approx(seconds, abs=5))


def test_a_scheduler_that_fails_says_nothing(scheduler):
    scheduler("squeue", "slurm_load_jobs error: Unable to contact slurm controller", code=1)
    limit = TimeLimit({"SLURM_JOB_ID": "7"})
    assert limit.ask() is None


def test_without_a_scheduler_nothing_is_known():
    assert TimeLimit({}).ask() is None


def ends_in(seconds):
    return TimeLimit({"DISTMAN_END_TIME": str(time.time() + seconds)})


def test_one_process_stops_when_less_is_left_than_the_margin():
    assert StopAgreement(None, (), ends_in(50), 60.0).decide()
    assert not StopAgreement(None, (), ends_in(70), 60.0).decide()


def test_without_a_margin_at_least_ten_seconds_are_left():
    assert StopAgreement(None, (), ends_in(9), None).decide()
    assert not StopAgreement(None, (), ends_in(20), None).decide()


class Clock:
    """The time, on which a job takes steps and saves."""

    def __init__(self, monkeypatch):
        self.now = 1e6
        monkeypatch.setattr(time, "monotonic", lambda: self.now)
        monkeypatch.setattr(time, "time", lambda: self.now)

    def save(self, seconds, **options):
        with saves().timed(**options):
            self.now += seconds


@pytest.fixture
def clock(monkeypatch):
    yield Clock(monkeypatch)
    saves().longest = saves().total = 0.0


def seconds_left_at_stop(clock, end, work):
    """Let a job work until it is to stop, and return what it has left then."""
    agreement = StopAgreement(None, (), TimeLimit({"DISTMAN_END_TIME": str(clock.now + end)}), None)
    until, step = clock.now + end, 0
    while not agreement.decide(step):
        work(step)
        step += 1
    return until - clock.now


def test_the_margin_is_twice_the_longest_step_where_nobody_knows_how_long_a_save_takes(clock):
    def work(step):
        clock.now += 40.0 if step == 3 else 1.0  # with a save of the program's own

    assert seconds_left_at_stop(clock, 1000, work) == 79


def test_a_save_counts_by_itself_and_not_as_a_part_of_the_step(clock):
    def work(step):
        clock.now += 1.0
        if step % 100 == 50:
            clock.save(30.0)

    assert 60 < seconds_left_at_stop(clock, 1000, work) <= 62  # a save that begins now, and the one before the end


def test_a_save_in_the_background_counts_too(clock):
    def work(step):
        if step == 5:
            clock.save(30.0, in_background=True)
        clock.now += 2.0

    assert seconds_left_at_stop(clock, 1000, work) == 98  # 1.25 times the 32 s of that step, and twice the save


def test_a_job_that_seldom_asks_stops_at_the_last_call_but_one_that_is_in_time(clock):
    def work(_step):
        clock.now += 3500.0
        clock.save(100.0)

    assert seconds_left_at_stop(clock, 10.5 * 3600, work) == 0.5 * 3600


def test_a_step_that_is_longer_than_all_before_counts_while_it_lasts(clock):
    agreement = StopAgreement(None, (), TimeLimit({"DISTMAN_END_TIME": str(clock.now + 1000)}), None)
    assert not agreement.decide(0)
    clock.now += 700.0
    agreement._heed_time_limit()
    assert agreement._wish == "the job's time is up in 300 s"
