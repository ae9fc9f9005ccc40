"""What a process needs before it meets the others."""

import resource
import socket
from pathlib import Path

import pytest

from distman._job import start
from distman._job.job import Limits
from distman._job.meeting import join
from distman._job.meeting.join import allow_open_files, check_room, join_record_of
from distman.environments import LaunchEnvironment
from distman.errors import DistmanError


@pytest.fixture
def limits():
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield before
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_the_limit_of_open_files_grows_as_far_as_it_may(limits):
    _, hard = limits
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    allow_open_files(700)
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (700, hard)
    allow_open_files(300)
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (700, hard)
    allow_open_files(10**12)
    assert hard == resource.RLIM_INFINITY or resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)


def test_a_store_that_has_no_room_for_all_ranks_is_not_started():
    check_room(2016, 4096)
    with pytest.raises(DistmanError, match="open 4098 files for 2017 ranks, got 4096, the hard limit on this host"):
        check_room(2017, 4096)
    check_room(10**6, resource.RLIM_INFINITY)
    check_room(4, 16)
    with pytest.raises(DistmanError, match="open 20 files for 5 ranks, got 16"):
        check_room(5, 16)


def test_what_may_fail_is_done_before_the_store_is_opened(monkeypatch):
    """Who has reached the store waits for a verdict; who has not is told by the rank that failed."""

    def fail(_):
        raise RuntimeError("the driver does not answer")

    monkeypatch.setattr(join, "visible_devices", fail)
    monkeypatch.setattr(start, "join", pytest.fail)
    monkeypatch.setattr(start, "keep_garbage_from_children", lambda: None)
    with pytest.raises(RuntimeError, match="the driver does not answer"):
        start.start(LaunchEnvironment("env", 0, 2), None, None, Limits(10.0, 10.0), None)


def test_a_rank_says_which_machine_it_runs_on():
    machine = join_record_of(LaunchEnvironment("env", 0, 2), {}, None, None).machine
    assert machine == (socket.gethostname(), Path("/proc/sys/kernel/random/boot_id").read_text().strip())
