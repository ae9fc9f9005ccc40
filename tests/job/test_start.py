"""Which device becomes the current one; how many GPUs there are is pretended."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from distman._job.job import Limits
from distman._job.start import _start_alone, adopt
from distman.environments import LaunchEnvironment
from distman.testing import ranks

LIMITS = Limits(30.0, 30.0)


def pretend_two_gpus(monkeypatch):
    """Return the list of devices that are made the current one."""
    chosen = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid=f"uuid-{index}"))
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    return chosen


@pytest.mark.parametrize("requested", [None, torch.device("cuda:1")])
def test_one_process_makes_its_gpu_the_current_one(monkeypatch, requested):
    chosen = pretend_two_gpus(monkeypatch)
    job = _start_alone(LaunchEnvironment.lone(), None, requested, LIMITS)
    assert chosen == [job.device] == [requested or torch.device("cuda:0")]


def test_one_process_on_the_cpu_leaves_the_gpus_alone(monkeypatch):
    chosen = pretend_two_gpus(monkeypatch)
    _start_alone(LaunchEnvironment.lone(), None, torch.device("cpu"), LIMITS)
    assert chosen == []


@ranks(2, manager=False)
def test_a_group_of_other_code_keeps_the_device_that_it_is_bound_to(monkeypatch, rank):
    chosen = pretend_two_gpus(monkeypatch)
    dist.group.WORLD.bound_device_id = torch.device("cuda", 1 - rank)
    job = adopt(LaunchEnvironment("env", rank, 2), None, LIMITS, None)
    assert chosen == [job.device] == [torch.device("cuda", 1 - rank)]
    dist.all_reduce(torch.ones(1))  # so that nobody leaves while the other one still joins
