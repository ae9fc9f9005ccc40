"""Which device a rank computes on; how many GPUs it sees is what a test pretends, all else is real."""

import logging
import re
from types import SimpleNamespace

import pytest
import torch

from distman import DistributedManager
from distman._job.device import (
    backend_for,
    pick_device,
    pick_index,
    requested_device,
    resolve_device,
    visible_devices,
)
from distman.environments import detect
from distman.testing import fake_environment

from ..environments.recordings import recorded

ALLOW_SHARED = "DISTMAN_ALLOW_SHARED_GPU"


@pytest.fixture(autouse=True)
def see(monkeypatch):
    """A function that makes this process see so many GPUs; none at first."""

    def see_gpus(count, of="cuda"):
        for name, module in (("cuda", torch.cuda), ("xpu", torch.xpu)):
            visible = count if name == of else 0
            monkeypatch.setattr(module, "is_available", lambda visible=visible: visible > 0)
            monkeypatch.setattr(module, "device_count", lambda visible=visible: visible)
            monkeypatch.setattr(
                module, "get_device_properties", lambda index, of=of: SimpleNamespace(uuid=f"{of}-uuid-{index}")
            )

    monkeypatch.delenv(ALLOW_SHARED, raising=False)
    see_gpus(0)
    return see_gpus


@pytest.mark.parametrize(
    ("visible", "local_rank", "local_world_size", "index"),
    [(1, 0, 1, 0), (1, 3, 4, 0), (1, 3, None, 0), (4, 0, 4, 0), (4, 3, 4, 3), (4, 3, None, 3), (8, 1, 2, 1)],
)
def test_a_rank_takes_the_gpu_of_its_local_rank_unless_it_sees_one_only(visible, local_rank, local_world_size, index):
    assert pick_index(visible, local_rank, local_world_size) == index


@pytest.mark.parametrize(("visible", "local_rank", "local_world_size", "ranks"), [(2, 0, 3, 3), (2, 2, None, 3)])
def test_fewer_gpus_than_ranks_is_an_error_with_both_counts(visible, local_rank, local_world_size, ranks):
    with pytest.raises(ValueError) as caught:
        pick_index(visible, local_rank, local_world_size)
    assert f"got {ranks} ranks on this host and {visible} GPUs." in str(caught.value)
    assert f"{ALLOW_SHARED}=1" in str(caught.value)


def test_shared_gpus_are_taken_in_turn():
    assert [pick_index(2, local_rank, 4, shared=True) for local_rank in range(4)] == [0, 1, 0, 1]


def test_a_task_of_slurm_with_gpus_of_its_own_takes_the_first(see, monkeypatch):
    see(2)
    for name, value in (fake_environment("slurm", tasks=3)[2] | {"SLURMD_TRES_BIND": "gpu:per_task:2"}).items():
        monkeypatch.setenv(name, value)
    assert pick_device(2, 3) == torch.device("cuda:0")
    monkeypatch.setenv("SLURMD_TRES_BIND", "gpu:closest")
    with pytest.raises(ValueError, match="3 ranks on this host and 2 GPUs"):
        pick_device(2, 3)


def test_without_a_gpu_a_rank_computes_on_the_cpu():
    assert pick_device(3, 4) == torch.device("cpu")


@pytest.mark.parametrize("device_type", ["cuda", "xpu"])
def test_the_rank_of_a_host_with_gpus_takes_its_own(see, device_type):
    see(4, of=device_type)
    assert pick_device(3, 4) == torch.device(device_type, 3)
    assert pick_device() == torch.device(device_type, 0)


def test_every_task_of_gpus_per_task_takes_the_one_gpu_it_sees(see):
    for environ in recorded("slurm-srun-gpus-per-task"):
        see(len(environ["CUDA_VISIBLE_DEVICES"].split(",")))
        environment = detect(environ).environment
        assert pick_device(environment.local_rank, environment.local_world_size) == torch.device("cuda", 0)


def test_every_task_that_sees_all_gpus_takes_its_own(see):
    see(2)
    environments = [detect(environ).environment for environ in fake_environment("slurm", nodes=2, tasks=4)]
    devices = [pick_device(environment.local_rank, environment.local_world_size) for environment in environments]
    assert [device.index for device in devices] == [0, 1, 0, 1]


@pytest.mark.parametrize(
    ("variables", "visible", "of", "devices"),
    [
        ({}, 2, "cuda", ["cuda:0", "cuda:1"]),
        ({"CUDA_VISIBLE_DEVICES": "2,3"}, 2, "cuda", ["cuda:0", "cuda:1"]),
        ({"CUDA_VISIBLE_DEVICES": "MIG-6ad3,MIG-9f1c"}, 2, "cuda", ["cuda:0", "cuda:1"]),
        ({"CUDA_VISIBLE_DEVICES": "MIG-6ad3"}, 1, "cuda", ["cuda:0", "cuda:0"]),  # CUDA shows one slice to a process
        ({"CUDA_VISIBLE_DEVICES": ""}, 0, "cuda", ["cpu", "cpu"]),
        ({"HIP_VISIBLE_DEVICES": "1,0"}, 2, "cuda", ["cuda:0", "cuda:1"]),
        ({"ZE_AFFINITY_MASK": "0.0,0.1"}, 2, "xpu", ["xpu:0", "xpu:1"]),
        ({"CUDA_MPS_PIPE_DIRECTORY": "mps", ALLOW_SHARED: "1"}, 1, "cuda", ["cuda:0", "cuda:0"]),
        ({"CUDA_VISIBLE_DEVICES": "0,1,2", ALLOW_SHARED: "1"}, 3, "cuda", ["cuda:0", "cuda:1"]),
    ],
    ids=str,
)
@pytest.mark.parametrize("recording", ["torchrun-standalone", "slurm-srun-n2-pmix"])
def test_ranks_take_the_devices_that_the_variables_leave_them(
    see, monkeypatch, recording, variables, visible, of, devices
):
    found = []
    for environ in recorded(recording)[:2]:
        with monkeypatch.context() as patched:
            see(visible, of=of)
            for name, value in (environ | variables).items():
                patched.setenv(name, value)
            environment = detect(environ).environment
            found.append(str(pick_device(environment.local_rank, environment.local_world_size)))
    assert found == devices


@pytest.mark.parametrize("no", [None, "", "0"])
def test_ranks_share_no_gpu_unless_the_user_says_so(see, monkeypatch, no):
    see(2)
    if no is not None:
        monkeypatch.setenv(ALLOW_SHARED, no)
    with pytest.raises(ValueError, match="got 3 ranks on this host and 2 GPUs"):
        pick_device(2, 3)
    monkeypatch.setenv(ALLOW_SHARED, "1")
    assert pick_device(2, 3) == torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("text", "device"),
    [
        ("cpu", "cpu"),
        ("CPU", "cpu"),
        ("cuda", "cuda"),
        ("gpu", "cuda"),
        (" Cuda:1 ", "cuda:1"),
        ("GPU:1", "cuda:1"),
        ("meta", "meta"),
        (torch.device("cuda", 1), "cuda:1"),
        (torch.device("cpu"), "cpu"),
    ],
    ids=str,
)
def test_a_specification_names_a_device(see, caplog, text, device):
    see(2)
    assert resolve_device(text) == torch.device(device)
    assert caplog.records == []


@pytest.mark.parametrize("wanted", ["cuda", "gpu", "cuda:0", "cuda:7", torch.device("cuda")], ids=str)
def test_without_cuda_it_falls_back_to_the_cpu_and_says_so(caplog, wanted):
    with caplog.at_level(logging.WARNING, "distman"):
        assert resolve_device(wanted) == torch.device("cpu")
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "(no GPU is visible): using the CPU instead" in record.getMessage()


@pytest.mark.parametrize("wanted", ["cuda", "gpu", "gpu:1", "cuda:0", "xpu", torch.device("cuda", 1)], ids=str)
def test_a_job_that_asks_for_a_gpu_where_none_is_does_not_start_on_the_cpu(wanted):
    with pytest.raises(ValueError, match=r"device must be one that this process sees, got .* where no GPU is visible"):
        DistributedManager.initialize(device=wanted)
    assert not DistributedManager.is_initialized()
    with pytest.raises(ValueError, match="got 'cpus'"):
        DistributedManager.initialize(device="cpus")


@pytest.mark.parametrize(("wanted", "device"), [(None, None), ("cpu", "cpu"), ("gpu", None), ("gpu:1", "cuda:1")])
def test_what_a_program_asks_for(see, wanted, device):
    see(2)
    assert requested_device(wanted) == (None if device is None else torch.device(device))


def test_a_gpu_is_whatever_accelerator_is_there(see, caplog):
    see(2, of="xpu")
    assert [str(resolve_device(text)) for text in ("gpu", "gpu:1", "xpu")] == ["xpu", "xpu:1", "xpu"]
    with pytest.raises(ValueError, match=r"device must be one of xpu:0, xpu:1, got xpu:2\."):
        resolve_device("gpu:2")
    assert caplog.records == []
    assert resolve_device("cuda") == torch.device("cpu")
    see(2)
    assert resolve_device("xpu:1") == torch.device("cpu")


@pytest.mark.parametrize("wanted", ["cuda:2", "gpu:2", torch.device("cuda", 2)], ids=str)
def test_a_gpu_beyond_the_visible_ones_is_an_error_that_names_those(see, wanted):
    see(2)
    with pytest.raises(ValueError, match=r"device must be one of cuda:0, cuda:1, got cuda:2\."):
        resolve_device(wanted)


@pytest.mark.parametrize("wrong", [None, 0, 1.0, ["cuda"], b"cpu"], ids=repr)
def test_what_is_neither_text_nor_device_is_a_type_error(wrong):
    with pytest.raises(TypeError, match=f"device must be a str or a torch.device, got {type(wrong).__name__}"):
        resolve_device(wrong)


@pytest.mark.parametrize("wrong", ["", "cud", "cuda:", "cuda:x", "cuda:-1", "gpu:x", "gpux", "cpu cuda"])
def test_a_text_that_names_no_device_is_shown(see, wrong):
    see(2)
    with pytest.raises(ValueError) as caught:
        resolve_device(wrong)
    assert f"device must be a string such as 'cuda', 'cuda:1' or 'cpu', got {wrong!r}" in str(caught.value)


@pytest.mark.parametrize(
    ("device", "backend"),
    [
        ("cpu", "cpu:gloo"),
        ("cuda", "cpu:gloo,cuda:nccl"),
        ("cuda:3", "cpu:gloo,cuda:nccl"),
        ("xpu", "cpu:gloo,xpu:xccl"),
    ],
)
def test_the_backend_follows_the_device_and_always_carries_cpu_tensors(device, backend):
    assert backend_for(torch.device(device)) == backend


@pytest.mark.parametrize("wanted", ["mps", "meta", "hpu", "xla:0", torch.device("mps", 0)], ids=str)
def test_a_kind_of_device_that_no_job_computes_on_is_an_error_and_not_the_cpu(wanted):
    with pytest.raises(ValueError, match=rf"device must be one of cpu, cuda, xpu, got {re.escape(repr(wanted))}\. Lea"):
        requested_device(wanted)


@pytest.mark.parametrize(
    ("count", "of", "asked", "expected"),
    [
        (0, "cuda", None, ("cpu", ())),
        (0, "cuda", "cpu", ("cpu", ())),
        (2, "cuda", None, ("cuda", ("cuda-uuid-0", "cuda-uuid-1"))),
        (2, "cuda", "cuda", ("cuda", ("cuda-uuid-0", "cuda-uuid-1"))),
        (2, "cuda", "cpu", ("cpu", ())),
        (1, "xpu", None, ("xpu", ("xpu-uuid-0",))),
    ],
)
def test_visible_devices_are_told_by_their_uuids(see, count, of, asked, expected):
    see(count, of=of)
    assert visible_devices(asked) == expected
