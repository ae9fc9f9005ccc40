"""What a test leaves behind in its workers is gone in the next; these tests come in pairs, in one process."""

import logging
import os
import random
import signal
import sys
import threading
import warnings

import numpy
import pytest
import torch
import torch.distributed as dist

from distman.testing import ranks

DRAWS = "draws"


def draws():
    return [random.random(), torch.rand(()).item(), numpy.random.random()]  # noqa: S311 - no secret


def ignore(*_):
    pass


@ranks(2)
def test_dirt(tmp_path):
    os.environ["TEST_DISTMAN_DIRT"] = "dirt"
    del os.environ["PATH"]
    os.chdir(tmp_path)
    sys.path.insert(0, "/dirt")
    sys.excepthook = threading.excepthook = sys.unraisablehook = ignore
    signal.signal(signal.SIGUSR1, ignore)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.alarm(60)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2})
    warnings.simplefilter("ignore")
    logging.getLogger("distman.dirt").setLevel(logging.DEBUG)
    logging.getLogger().addHandler(logging.NullHandler())
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta")
    torch.set_grad_enabled(False)
    torch.autograd.set_detect_anomaly(True)
    torch.backends.cudnn.benchmark = True
    torch.set_num_threads(2)
    dist.new_group([0])
    dist.new_group([1])
    sys.stdout = None


@ranks(2)
def test_dirt_is_gone():
    assert "TEST_DISTMAN_DIRT" not in os.environ
    assert "PATH" in os.environ
    assert "dirt" not in sys.path
    hooks = (sys.excepthook, threading.excepthook, sys.unraisablehook)
    assert "ignore" not in [getattr(hook, "__name__", "") for hook in hooks]
    assert signal.getsignal(signal.SIGUSR1) is signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert signal.getitimer(signal.ITIMER_REAL)[0] == 0
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, ())
    with pytest.raises(UserWarning, match="not ignored"):
        warnings.warn("not ignored", stacklevel=1)
    assert logging.getLogger("distman.dirt").level == logging.NOTSET
    assert not [one for one in logging.getLogger().handlers if isinstance(one, logging.NullHandler)]
    assert torch.get_default_dtype() == torch.float32
    assert torch.ones(()).device.type == "cpu"
    assert torch.is_grad_enabled()
    assert not torch.is_anomaly_enabled()
    assert not torch.backends.cudnn.benchmark
    assert torch.get_num_threads() == 1
    assert sys.stdout is sys.__stdout__


@ranks(2)
def test_directory_is_that_of_pytest(request_directory):
    assert os.getcwd() == request_directory  # noqa: PTH109


@pytest.fixture
def request_directory():
    return os.getcwd()  # noqa: PTH109


@ranks(2)
def test_no_group_at_the_end():
    dist.destroy_process_group()


@ranks(2)
def test_failed_init_is_forgotten(rank, tmp_path):
    dist.destroy_process_group()
    if rank == 0:
        store = dist.FileStore(str(tmp_path / "store"), 2)
        with pytest.raises(AssertionError, match="Unknown c10d backend"):
            dist.init_process_group("gloo:backend", store=store, rank=0, world_size=2)
        assert not dist.is_initialized()


@ranks(2)
def test_there_is_a_group_again():
    one = torch.ones(())
    dist.all_reduce(one)
    assert one == 2


@ranks(2)
def test_draws_of_a_test(rank, shared):
    (shared / f"{DRAWS}{rank}").write_text(str(draws()))


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    return tmp_path_factory.mktemp("shared")


@ranks(2)
def test_other_tests_draw_other_numbers(rank, shared):
    assert (shared / f"{DRAWS}{rank}").read_text() != str(draws())
