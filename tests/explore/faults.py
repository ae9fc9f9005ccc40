"""What the faults of the explorer do, each in the process of the rank that fails."""

import asyncio
import ctypes
import gc
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

BRIEFLY = 2.0  # seconds that a rank may stand still: half of the limit of silence
LONG = 100  # seconds, more than any case takes
NETWORK_OF_LAUNCH = "TEST_DISTMAN_CTL"  # the process id of the virtual host on which the cables end
SLOW = ("netem delay 20ms 10ms loss 1%", "tbf rate 4mbit burst 16kb latency 400ms")  # the first that the kernel has


class UnpicklableError(Exception):
    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.lock = threading.Lock()


class TwoArgumentsError(Exception):
    def __init__(self, what: str, number: int) -> None:
        super().__init__(f"{what} number {number}")


class TextlessError(Exception):
    def __str__(self) -> str:
        raise SystemExit


def throw(make: Callable[[], Exception] = lambda: ValueError("boom")) -> None:
    raise make()


def signal_myself(number: int) -> None:
    os.kill(os.getpid(), number)


def close_outputs() -> None:
    os.close(1)
    os.close(2)
    throw()


def lose_stderr() -> None:
    sys.stderr = None
    throw()


def fill_stderr() -> None:
    os.dup2(os.open("/dev/full", os.O_WRONLY), 2)
    throw()


def block_stderr() -> None:
    """Let standard error be a pipe that nobody reads, and that is full."""
    _, writing = os.pipe()
    os.set_blocking(writing, False)
    try:
        while True:
            os.write(writing, bytes(1 << 16))
    except BlockingIOError:
        os.set_blocking(writing, True)
    os.dup2(writing, 2)
    throw()


def exit_in_a_handler() -> None:
    """Do what frameworks do with an error of the program."""
    try:
        throw()
    except ValueError:
        sys.exit(1)


def throw_and_wait() -> None:
    """Wait for the others in any case: in a barrier to which they do not come, or of odd ranks for a message."""
    import torch

    from distman import DistributedManager

    manager = DistributedManager()
    try:
        throw()
    finally:
        if manager.world_size % 2:
            torch.distributed.recv(torch.ones(1), (manager.rank + 1) % manager.world_size)
        manager.barrier("teardown")


def wait_elsewhere() -> None:
    """Wait for the others in a barrier to which they do not come."""
    from distman import DistributedManager

    DistributedManager().barrier("elsewhere")


def in_a_worker(what: Callable[[], object]) -> None:
    import torch.utils.data

    class Failing(torch.utils.data.Dataset[int]):
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> int:
            what()
            return index

    for _ in torch.utils.data.DataLoader(Failing(), num_workers=1):
        pass


def exhaust_memory() -> None:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (32 << 20),) * 2)
    kept: list[bytearray] = []
    with suppress(MemoryError):
        hoard(1 << 20, kept)
    hoard(1 << 10, kept)


def hoard(size: int, kept: list[bytearray]) -> None:
    """Take memory until there is none; what was taken stays as long as the traceback."""
    while True:
        kept.append(bytearray(size))


def be_killed_by_the_kernel() -> None:
    """Use more memory than a control group of one's own allows, which the observer removes."""
    group, limit = memory_group(os.getpid())
    group.mkdir()
    (group / limit).write_text(str(64 << 20))
    (group / "cgroup.procs").write_text(str(os.getpid()))
    hoard(1 << 24, [])


def memory_group(pid: int) -> tuple[Path, str]:
    """Return the folder of a process's own memory control group, and the name of its limit."""
    first = Path("/sys/fs/cgroup/memory")
    name = f"distman-explore-{pid}"
    if first.exists():
        return first / name, "memory.limit_in_bytes"
    return Path("/sys/fs/cgroup") / name, "memory.max"


def fill_the_disk() -> None:
    """Save to a disk that is too small; the others take part in the save of the place."""
    import torch

    from distman.checkpoint import save

    folder = Path("small-disk").absolute()
    folder.mkdir()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(0x20000) != 0:  # CLONE_NEWNS: nobody else sees the disk
        raise OSError(ctypes.get_errno(), "unshare")
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", folder], check=True)
    save({"weights": torch.zeros(1 << 20)}, folder / "state.pt")


def stop_briefly() -> None:
    pid = os.getpid()
    waker = subprocess.Popen(["sh", "-c", f"sleep {BRIEFLY}; kill -CONT {pid}"])
    signal_myself(signal.SIGSTOP)
    waker.wait()


def hold_the_interpreter(seconds: float) -> None:
    ctypes.PyDLL(None).usleep(int(seconds * 1e6))


def cut_the_cable() -> None:
    """Take this host's cable out of the switch: both ends stay up, and every packet is lost."""
    name = socket.gethostname()
    enter = ["nsenter", "--target", os.environ[NETWORK_OF_LAUNCH], "--net"]
    subprocess.run([*enter, "ip", "link", "set", f"to-{name}", "nomaster"], check=True)


def take_the_link_down() -> None:
    subprocess.run(["ip", "link", "set", "eth0", "down"], check=True)


def slow_the_network_down() -> None:
    commands = [["tc", "qdisc", "add", "dev", "eth0", "root", *how.split()] for how in SLOW]
    if all(subprocess.run(command, capture_output=True, check=False).returncode for command in commands):
        raise OSError("tc can neither delay nor limit packets here")


def throw_in_a_thread() -> None:
    thread = threading.Thread(target=throw)
    thread.start()
    thread.join()


class Throwing:
    def __del__(self) -> None:
        throw()


def throw_in_del() -> None:
    Throwing()
    gc.collect()


def throw_in_a_callback() -> None:
    async def work() -> None:
        asyncio.get_running_loop().call_soon(throw)
        await asyncio.sleep(0.01)

    asyncio.run(work())


def go_on() -> None:
    """The network is lost, the rank is not: it goes on with what it does."""


ACTIONS: dict[str, Callable[[], object]] = {
    "raise": throw,
    "raise-unpicklable": partial(throw, lambda: UnpicklableError("boom")),
    "raise-two-arguments": partial(throw, lambda: TwoArgumentsError("boom", 2)),
    "raise-without-text": partial(throw, TextlessError),
    "raise-closed-outputs": close_outputs,
    "raise-no-stderr": lose_stderr,
    "raise-full-stderr": fill_stderr,
    "raise-blocked-stderr": block_stderr,
    "raise-in-worker": partial(in_a_worker, throw),
    "kill-worker": partial(in_a_worker, partial(signal_myself, signal.SIGKILL)),
    "exit-worker": partial(in_a_worker, partial(os._exit, 0)),
    "memory-limit": exhaust_memory,
    "full-disk": fill_the_disk,
    "sys.exit(0)": lambda: sys.exit(0),
    "sys.exit(3)": lambda: sys.exit(3),
    "sys.exit(1)-in-handler": exit_in_a_handler,
    "raise-and-wait": throw_and_wait,
    "wait-elsewhere": wait_elsewhere,
    "os._exit(0)": lambda: os._exit(0),
    "os._exit(3)": lambda: os._exit(3),
    "SIGKILL": partial(signal_myself, signal.SIGKILL),
    "SIGSEGV": partial(ctypes.string_at, 0),
    "oom-kill": be_killed_by_the_kernel,
    "SIGSTOP": partial(signal_myself, signal.SIGSTOP),
    "GIL": partial(hold_the_interpreter, LONG),
    "cut": cut_the_cable,
    "link-down": take_the_link_down,
    "SIGSTOP+SIGCONT": stop_briefly,
    "GIL-briefly": partial(hold_the_interpreter, BRIEFLY),
    "slow-network": slow_the_network_down,
    "raise-in-thread": throw_in_a_thread,
    "raise-in-del": throw_in_del,
    "raise-in-callback": throw_in_a_callback,
}
