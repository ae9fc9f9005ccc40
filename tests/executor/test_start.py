"""How the workers are started, and where functions may come from."""

import os
import signal

import pytest

from distman import ParallelExecutor, WorkerError
from distman._workers import server_process

from ..notebooks import outputs_of_cells
from ..workers.preloaded import FORK_SERVERS

PROMPT = f'''{FORK_SERVERS}
import os
import torch
from dataclasses import dataclass
from distman import ParallelExecutor, parallelize_on_gpus

offset = 3

@dataclass
class Result:
    value: torch.Tensor

def helper(x):
    return x + offset

@parallelize_on_gpus()
def on_gpus(device, x):
    """Go there."""
    return os.getpid(), Result(helper(x).to(device))

with ParallelExecutor(devices=["cpu", "cpu"]) as executor:
    print(executor.run(lambda device, x: helper(x), 1))
    result = executor.run(lambda device: Result(torch.ones(100_000)))[1]
    assert isinstance(result, Result) and result.value.sum() == 100_000
    executor.run(lambda device: print("from", device))
    assert list(executor.map(lambda device, x: helper(x), [1, 2])) == [4, 5]
((first, result),) = on_gpus(torch.tensor([1]))
assert isinstance(result, Result) and result.value.tolist() == [4]
((second, _),) = on_gpus(x=torch.tensor([1]))
assert first == second != os.getpid()
assert on_gpus.__doc__ == "Go there."
on_gpus.shutdown()
assert on_gpus(torch.tensor([1]))[0][0] != first
'''
# The program has used every pool of threads that torch and numpy have, is in the middle of two modes, and has
# handlers of its own; the workers must be as if it had not.
USED = """
import os, signal, sys, warnings
import numpy as np, torch
from distman.executor import ParallelExecutor

warnings.filterwarnings("ignore", message="`torch.jit", category=FutureWarning)  # still the way to torch's other pool

def compute(device=None):
    if device is not None:
        torch.set_num_threads(2)  # in the program itself this would start threads that nothing can end
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(300, 300, generator=generator, dtype=torch.float64, requires_grad=True)
    image = torch.randn(8, 8, 64, 64, generator=generator, dtype=torch.float64)
    kernel = torch.randn(8, 8, 3, 3, generator=generator, dtype=torch.float64, requires_grad=True)
    loss = (weight @ weight).sum() + torch.nn.functional.conv2d(image, kernel).square().sum()
    loss = loss + torch.fft.rfft2(image).abs().sum()
    loss.backward()
    futures = [torch.jit.fork(torch.add, image, 1) for _ in range(3)] if device else []
    inter = sum(float(torch.jit.wait(future).sum()) for future in futures)
    array = np.ones((500, 500))
    large = torch.ones(10**7).sum().item()
    threads = len(os.listdir("/proc/self/task"))
    return [weight.grad.norm().item(), kernel.grad.norm().item(), (array @ array).sum(), large], threads, inter != 0

def is_as_new(device):
    signals = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)]
    files = [os.readlink(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd") if int(name) > 2
             and os.path.exists(f"/proc/self/fd/{name}")]
    return {
        "modes": (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), str(torch.empty(1).device)),
        "signals": signals == [signal.SIG_DFL, signal.SIG_DFL, signal.default_int_handler],
        "stdin": sys.stdin.read(),
        "files": [file for file in files if "distman" not in file and not file.startswith(("socket:", "/dev/null"))],
        "leaders": os.getpgid(0) == os.getpid(),
    }

print("not yet written", end="")
kept_file = open("/etc/hostname")
signal.signal(signal.SIGTERM, lambda *_: None)
signal.signal(signal.SIGUSR1, signal.SIG_IGN)
signal.signal(signal.SIGUSR1, lambda *_: None)
expected, threads, _ = compute()
assert threads > 1
executor = ParallelExecutor(devices=["cpu", "cpu"])
with torch.inference_mode():
    states = executor.run(is_as_new)
for state in states:
    assert state == {"modes": (True, False, "cpu"), "signals": True, "stdin": "", "files": [], "leaders": True}, state
for round in range(2):
    for result, threads, has_forked in executor.run(compute):
        assert np.allclose(result, expected, rtol=1e-12), (result, expected)
        assert threads > 1 and has_forked
assert np.allclose(compute()[0], expected, rtol=1e-12)
executor.shutdown()
"""
CELLS = [
    f"{FORK_SERVERS}import os\nfrom distman import ParallelExecutor, WorkerError\nfactor = 3",
    "executor = ParallelExecutor(devices=['cpu', 'cpu'])\nexecutor.run(lambda device, x: x * factor, 2)",
    "factor = 5\nexecutor.run(lambda device, x: x * factor, 2)",
    "try:\n    executor.run(lambda device: os._exit(3))\nexcept WorkerError as error:\n    code = error.exit_code",
    "code",
    "executor.shutdown()",
]


def test_functions_typed_at_a_prompt(type_in):
    lines = type_in(PROMPT).splitlines()
    assert sorted(lines) == ["[4, 4]", "from cpu", "from cpu"]


def test_functions_of_a_notebook(tmp_path):
    shown = outputs_of_cells(CELLS, tmp_path)
    assert [output.get("data", output).get("text/plain") for output in shown] == ["[6, 6]", "[10, 10]", "3"], shown


def test_nothing_of_the_program_is_in_the_workers(run_program):
    assert run_program("import torch; torch.set_num_threads(2)" + USED) == "not yet written"


def test_a_server_that_is_about_to_be_gone_is_replaced(monkeypatch):
    with ParallelExecutor(devices=["cpu"], pass_device=False) as executor:
        (server,) = executor.run(os.getppid)
        os.kill(server, signal.SIGKILL)
        monkeypatch.setattr(server_process.ServerProcess, "has_ended", False)
        assert executor._pool._workers[0].life.recv(1) == b""
        assert executor.run(abs, -2) == [2]


def test_a_server_that_cannot_start_is_an_error(monkeypatch, capfd):
    monkeypatch.setattr(server_process, "_PROGRAM", "raise SystemError('this python is broken')")
    executor = ParallelExecutor(devices=["cpu"])
    with pytest.raises(
        WorkerError, match=r"^worker 0 \(cpu\) did not start: The process that forks the workers ended\."
    ):
        executor.run(abs)
    executor.shutdown()
    assert "this python is broken" in capfd.readouterr().err
