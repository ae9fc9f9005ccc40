"""Which signals ask for a stop, and who may listen to them."""

import logging
import multiprocessing
import os
import signal
import subprocess
import threading
import time

import pytest
import torch
from torch.utils.data import DataLoader

from distman import DistributedManager
from distman._base.process_state import reset
from distman._coordination.stop_signals import DEFAULT_SIGNALS, StopSignals, stop_signals


@pytest.fixture(autouse=True)
def _leave():
    yield
    reset()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("TERM", [signal.SIGTERM]),
        ("SIGHUP, usr1", [signal.SIGHUP, signal.SIGUSR1]),
        ("USR2,SIGUSR2,int", [signal.SIGUSR2, signal.SIGINT]),
    ],
)
def test_signals_have_names(text, expected):
    assert list(stop_signals({"DISTMAN_STOP_SIGNALS": text})) == expected


@pytest.mark.parametrize("name", ["KILL", "SIGSEGV", "TREM", "", "15", "TERM;HUP"])
def test_what_cannot_ask_for_a_stop_is_refused(name):
    with pytest.raises(ValueError, match="a stop signal must be one that a program can handle, got"):
        stop_signals({"DISTMAN_STOP_SIGNALS": f"TERM,{name}"})


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGALRM, signal.SIGINT, signal.SIGUSR2])
def test_the_variable_says_which_signals_ask(monkeypatch, number):
    monkeypatch.setenv("DISTMAN_STOP_SIGNALS", f"{number.name}")
    before = signal.getsignal(signal.SIGTERM)
    manager = DistributedManager.initialize()
    assert not manager.should_stop()
    assert signal.getsignal(signal.SIGTERM) == before
    os.kill(os.getpid(), number)
    assert manager.should_stop()


def test_a_name_that_is_none_stops_the_start(monkeypatch):
    monkeypatch.setenv("DISTMAN_STOP_SIGNALS", "TERM,SIGKILL")
    with pytest.raises(ValueError, match="got 'KILL' from DISTMAN_STOP_SIGNALS"):
        DistributedManager.initialize()


def test_another_thread_than_the_main_one_is_told_once_what_it_cannot_have(caplog):
    signals = StopSignals(DEFAULT_SIGNALS, lambda _: None)
    before = [signal.getsignal(number) for number in DEFAULT_SIGNALS]
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            thread = threading.Thread(target=signals.listen, name="training")
            thread.start()
            thread.join()
    (record,) = caplog.records
    assert "should_stop() cannot listen to signals in the thread 'training'" in record.getMessage()
    assert "SIGTERM, SIGUSR1, SIGUSR2 would end this process" in record.getMessage()
    assert [signal.getsignal(number) for number in DEFAULT_SIGNALS] == before
    signals.restore()


def test_the_handler_of_submitit_which_ends_rank_0_is_put_off_until_the_end_of_the_job():
    """Its methods checkpoint_and_try_requeue() and bypass() are told by their module."""
    called, asked = [], []

    def checkpoint_and_try_requeue(number, _frame):
        called.append(number)

    checkpoint_and_try_requeue.__module__ = "submitit.core.job_environment"
    before = signal.signal(signal.SIGUSR2, checkpoint_and_try_requeue)
    signals = StopSignals(DEFAULT_SIGNALS, asked.append)
    signals.listen()
    os.kill(os.getpid(), signal.SIGUSR2)
    assert (called, asked) == ([], [f"SIGUSR2 of process {os.getpid()}"])
    signals.restore()
    os.kill(os.getpid(), signal.SIGUSR2)
    assert (called, len(asked)) == ([signal.SIGUSR2], 1)
    signal.signal(signal.SIGUSR2, before)


def test_nothing_is_said_where_the_main_thread_listens_already(caplog):
    signals = StopSignals(DEFAULT_SIGNALS, lambda _: None)
    signals.listen()
    thread = threading.Thread(target=signals.listen)
    thread.start()
    thread.join()
    signals.restore()
    assert caplog.records == []


@pytest.mark.parametrize("number", DEFAULT_SIGNALS)
def test_a_loader_worker_obeys_its_rank_alone(number):
    DistributedManager.initialize()
    batches = iter(DataLoader(torch.arange(1000), num_workers=1))
    assert int(next(batches)) == 0
    (worker,) = multiprocessing.active_children()
    subprocess.run(["sh", "-c", f"kill -{number:d} {worker.pid}"], check=True)
    assert [int(next(batches)) for _ in range(100)] == [*range(1, 101)]
    worker.terminate()
    worker.join(5)
    assert worker.exitcode == os.EX_OK


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2])
def test_other_children_hear_signals_as_ever(number):
    DistributedManager.initialize().should_stop()
    runs = multiprocessing.get_context("fork").Event()
    child = multiprocessing.get_context("fork").Process(target=lambda: runs.set() or time.sleep(60))
    child.start()
    assert runs.wait(5)  # Python forgets the signals that come before
    os.kill(child.pid, number)
    child.join(5)
    assert child.exitcode == -number
