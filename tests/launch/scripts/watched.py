"""A rank of a job in which something goes wrong: ``SCENARIO``; each function below is one."""

import contextlib
import ctypes
import gzip
import multiprocessing
import os
import resource
import signal
import sys
import threading
import time
import zipfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from distman import DistributedManager, JobFailed, on_rank, surviving_failure
from distman._coordination.failure import job_abort
from distman._coordination.protocol import left
from distman.collectives import fused_all_reduce


def say(text):
    sys.stdout.write(f"{DistributedManager().rank}: {text}\n")
    sys.stdout.flush()


LONG = 100  # seconds, more than any test waits


def wait_in_python(seconds=LONG):
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        time.sleep(0.01)


def late_for_a_barrier(manager):
    """Rank 2 is at a known place while the others wait in a barrier, for a second."""
    if manager.rank == 2:
        wait_in_python(8)
    else:
        manager.barrier("save", timeout=1)


def stopped_before_a_barrier(manager):
    if manager.rank == 2:
        fused_all_reduce(torch.ones(2))
        time.sleep(1.5)  # a heartbeat, with the place
        say("stopping")
        os.kill(os.getpid(), signal.SIGSTOP)
    else:
        fused_all_reduce(torch.ones(2))
        manager.barrier("save", timeout=4)


def hang(manager):
    """Rank 1 does not come to a collective until the report is written."""
    if manager.rank == 1:
        wait_in_python(5)
    fused_all_reduce({"loss": torch.ones(2)})
    say("done")


def in_a_data_loader(manager):
    if manager.rank == 1:
        time.sleep(2)
        raise ValueError("boom")
    loader = DataLoader(SlowDataset(), batch_size=1, num_workers=1)
    for _ in loader:
        pass


class SlowDataset(torch.utils.data.Dataset):
    def __len__(self):
        return 100

    def __getitem__(self, index):
        time.sleep(LONG)
        return index


def in_uninterruptible_code(manager):
    """Ranks 1 and 2 wait for a lock of C that they hold themselves, where no signal reaches Python."""
    dist.barrier()
    if manager.rank == 0:
        time.sleep(0.5)
        raise ValueError("boom")
    take = ctypes.CDLL(None).pthread_mutex_lock
    lock = ctypes.create_string_buffer(64)
    take(lock)
    take(lock)  # never returns


def keep_the_interpreter(seconds):
    ctypes.PyDLL(None).sleep(seconds)


FAULTS = {
    "stopped": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "keeps the GIL": lambda: keep_the_interpreter(8),
    "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "exits": lambda: os._exit(3),
    "raises": lambda: {}["boom"],
}


def exit_of_rank_1(manager):
    """Rank 1 ends with what it is told, through a cleanup() perhaps; the others wait for it."""
    with contextlib.ExitStack() as stack:
        if "cleanup" in sys.argv:
            stack.callback(DistributedManager.cleanup)
        if manager.rank == 1:
            sys.exit({"3": 3, "text": "no data", "list": [1]}[sys.argv[2]])
        manager.barrier("end")


def broken_with_open_files(manager):
    """Rank 1 dies while the others wait in what torch's logger does not see, each with files that are open."""
    packed = gzip.open(f"log{manager.rank}.gz", "wt")  # noqa: SIM115 - what is tested
    packed.write("step\n")
    archive = zipfile.ZipFile(f"parts{manager.rank}.zip", "w")
    archive.writestr("step", "1")
    if manager.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(1), async_op=True).wait()


def stuck_while_another_raises(manager):
    """Rank 0 is stopped, or keeps the interpreter, when rank 1 raises."""
    manager.barrier()
    if manager.rank == 1:
        time.sleep(0.5)
        raise ValueError("boom")
    if manager.rank == 0:
        {**FAULTS, "keeps the GIL": lambda: keep_the_interpreter(LONG)}[sys.argv[2]]()
    wait_in_python()


def blamed(manager):
    """A rank fails, in Python code or in a barrier of the others; who hears of it ends at once, without a word."""
    fault, failing, place = sys.argv[2:5]
    try:
        manager.barrier()
        if manager.rank == int(failing):
            time.sleep(0.5)  # the others leave the barrier
            FAULTS[fault]()
        if place == "barrier":
            manager.barrier("never opens")
        wait_in_python()
    except JobFailed as error:
        say(f"blames {error.rank}")
        os._exit(1)


def cut_off(_manager):
    """Each host has one rank; the test cuts one of them off."""
    say("ready")
    try:
        wait_in_python()
    except JobFailed as error:
        say(f"blames {error.rank}: {error.error_text}")
        os._exit(1)


def with_a_child(manager):
    """A rank has a forked child that outlives it: its copies of connections must not hide the death."""
    if manager.rank == int(sys.argv[2]):
        if os.fork() == 0:
            signal.pause()
        time.sleep(1)
        say("killed")
        os.kill(os.getpid(), signal.SIGKILL)
    wait_in_python()


def raise_while_others_compute(manager):
    if manager.rank == 1:
        time.sleep(1)
        raise ValueError("boom")
    wait_in_python()
    manager.barrier("end")


def raise_while_others_wait(manager):
    if manager.rank == 1:
        time.sleep(1)
        raise ValueError("boom")
    on_rank(1)(len)([])


def leave_early(manager):
    if manager.rank == 1:
        sys.exit(0)
    manager.barrier("save")


def leave_early_in_a_collective(manager):
    if manager.rank == 1:
        sys.exit(0)
    fused_all_reduce(torch.ones(2))


def last_to_end(manager):
    """Rank 1 goes on for a while when the rank that serves the store has ended."""
    if manager.rank == 1:
        wait_in_python(2)
    say("done")


def last_to_call(manager):
    """Rank 1 comes to the last call, which waits over the store, long after the rank that serves the store has."""
    if manager.rank == 1:
        wait_in_python(2)
    on_rank(0)(say)("done")
    say("done")


def fail_after_the_end(manager):
    """Rank 1 fails when the rank that serves the store has left the job."""
    if manager.rank == 0:
        return
    if manager.rank == 1:
        while not manager._state.job.store_group().store.check([left(0)]):
            time.sleep(0.01)
        if sys.argv[2] == "raise":
            raise ValueError("boom")
        os.kill(os.getpid(), getattr(signal, sys.argv[2]))
    wait_in_python()


def clean_up_in_any_case(manager):
    try:
        if manager.rank == int(sys.argv[2]):
            raise ValueError("boom")
        if manager.rank == 2:
            wait_in_python()
        manager.barrier()
    finally:
        DistributedManager.cleanup()


def swallow_the_error_of_a_collective(manager):
    """Rank 0 raises or dies, and its connections close at once; the others end before a watcher can have looked."""
    dist.all_reduce(torch.ones(4))  # all have left the barrier
    if manager.rank == 0 and sys.argv[2] == "raise":
        raise ValueError("boom")
    if manager.rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    with contextlib.suppress(RuntimeError, JobFailed):
        dist.all_reduce(torch.ones(4))


def collective_with_a_stopped_rank(manager):
    """Rank 2 is stopped, by something that no other process can see, while a collective waits for it."""
    if manager.rank == 2:
        say("stopping")
        os.kill(os.getpid(), signal.SIGSTOP)
    job_abort._end_if_stopped = lambda _: None
    work = dist.all_reduce(torch.ones(1000), async_op=True)
    wait_in_python()
    work.wait()


def end_with_another_error(manager):
    """Rank 0 handles an error, leaves the job, and then fails by itself while the others work on."""
    if manager.rank != 0:
        wait_in_python(2)
        return
    try:
        raise KeyError("handled")
    except KeyError:
        DistributedManager.cleanup()
    raise ValueError("after the job")


def clean_up_before_the_others(manager):
    """Rank 0 cleans up and ends, while rank 1 works on."""
    if manager.rank == 1:
        wait_in_python(2)
    DistributedManager.cleanup()
    if "adopted" in sys.argv:
        dist.destroy_process_group()


def clean_up_in_a_handler(manager):
    """Rank 0 fails, handles it, leaves the job, and comes to its end before rank 1 does."""
    try:
        if manager.rank == 0:
            raise ValueError("boom")
        if manager.rank == 1:
            wait_in_python(2)
    except ValueError:
        DistributedManager.cleanup()


def busy_in_c_at_the_end(manager):
    """Rank 1 keeps the interpreter to itself while the rank that serves the store ends."""
    if manager.rank == 1:
        sum(range(2 * 10**8))
    say("done")


def end_while_the_store_is_stopped(manager):
    manager.barrier()
    if manager.rank == 0:
        time.sleep(0.5)  # the others leave the barrier
        say("stopping")
        os.kill(os.getpid(), signal.SIGSTOP)
    wait_in_python(1)
    say("done")


def work_while_the_store_is_stopped(manager):
    manager.barrier()
    if manager.rank == 0:
        time.sleep(0.5)  # the others leave the barrier
        say("stopping")
        os.kill(os.getpid(), signal.SIGSTOP)
    wait_in_python()


def hook_of_its_own(manager):
    sys.excepthook = lambda _kind, error, _trace: say(f"handled {error}")
    raise_while_others_compute(manager)


def huge_error(manager):
    if manager.rank == 1:
        raise ValueError("x" * 20_000_000)
    wait_in_python()


def children_and_signals(manager):
    """What a child of a rank does: nothing with other ranks, and it dies of SIGTERM."""
    manager.should_stop(0)
    fork = multiprocessing.get_context("fork")
    is_up = fork.Event()
    child = fork.Process(target=lambda: (is_up.set(), wait_in_python()))
    child.start()
    is_up.wait()  # a signal that comes during the fork is lost to any handler in Python
    child.terminate()
    child.join(5)
    say(f"child ended with {child.exitcode}")
    loaded = list(DataLoader(LoggingDataset(), batch_size=1, num_workers=1))
    on_rank(0, broadcast=True)(len)(loaded)
    manager.barrier("end")
    say("done")


class LoggingDataset(torch.utils.data.Dataset):
    """Of another length on each rank; a function for rank 0 is called in the worker, and a barrier fails there."""

    def __len__(self):
        return 70 + DistributedManager().rank

    def __getitem__(self, index):
        on_rank(0)(len)([])
        try:
            DistributedManager().barrier()
        except RuntimeError as error:
            return str(error)
        return ""


def suspended(manager):
    """All ranks wait until the test has stopped and continued them."""
    say("ready")
    wait_in_python(9)
    manager.barrier("end")
    say("done")


def suspended_at_once(manager):
    if manager.rank == 2:
        os.kill(os.getpid(), signal.SIGSTOP)
    wait_in_python()


def caught(manager):
    """A rank that handles the failure of another one may go on by itself."""
    with surviving_failure() as failure:
        if manager.rank == 1:
            raise ValueError("boom")
        wait_in_python()
    if failure:
        say(f"saved because {str(failure.error).splitlines()[0]}")


def waits_after_survival(manager):
    """A rank that goes on alone comes to a barrier all the same."""
    with surviving_failure():
        if manager.rank == 1:
            raise ValueError("boom")
        wait_in_python()
    manager.barrier("epoch")


def out_of_memory(manager):
    """Rank 1 has no memory left for its last words, nor for another thread."""
    if manager.rank == 1:
        in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (in_use + 4_000_000, -1))
        kept = []
        while True:
            kept.append(bytearray(100_000))
    wait_in_python()


class SpeechlessError(Exception):
    def __str__(self):
        sys.exit(0)


def speechless(manager):
    """Rank 1 can say nothing here, and its error nothing of itself."""
    if manager.rank == 1:
        sys.stdout.close()
        sys.stderr = None
        raise SpeechlessError
    wait_in_python()


def in_another_thread(manager):
    if manager.rank == 1:
        threading.Thread(target=int, args=["boom"]).start()
    wait_in_python()


def swallowed(manager):
    """A rank that catches whatever comes, once, and ends as if nothing had happened."""
    if manager.rank == 1:
        raise ValueError("boom")
    try:
        wait_in_python()
    except BaseException as error:  # noqa: BLE001
        say(f"caught {type(error).__name__}")


def in_a_thread(manager):
    """The initialization in another thread cannot interrupt the main thread."""
    if manager.rank == 1:
        time.sleep(0.5)
        raise ValueError("boom")
    wait_in_python()


def train_until_stopped(manager):
    """Steps of different length on each rank; the test asks one of them to stop."""
    previous = []
    signal.signal(signal.SIGTERM, lambda number, _frame: previous.append(number))
    say("ready")
    for step in range(100_000):
        dist.all_reduce(torch.ones(2))
        time.sleep(0.002 * (1 + manager.rank))
        if step == 50 and manager.rank == 1 and "request" in sys.argv:
            manager.request_stop()
        if manager.should_stop(step):
            break
    say(f"saved at step {step}, {len(previous)} signals seen")


def train_twice(manager):
    """The first run is stopped, and asks Slurm for the second."""
    is_first = "SLURM_RESTART_COUNT" not in os.environ
    for step in range(20):
        if step == 5 and is_first and manager.rank == 1:
            os.kill(os.getpid(), signal.SIGUSR1)
        time.sleep(0.2)
        if manager.should_stop(step):
            say(f"saved at step {step}")
            manager.requeue()
            return
    say("done in the second run")


def wait_twice(manager):
    """The first run waits for whoever preempts or cancels it, and asks for the second."""
    if "SLURM_RESTART_COUNT" in os.environ:
        say("done in the second run")
        return
    manager.should_stop(0)
    say("ready")
    for step in range(1, 600):
        time.sleep(0.1)
        if manager.should_stop(step):
            say("saved")
            manager.requeue()
            return


if __name__ == "__main__":
    scenario = sys.argv[1]
    if "adopted" in sys.argv:
        dist.init_process_group("gloo")
    if scenario == "in_a_thread":
        thread = threading.Thread(target=DistributedManager.initialize)
        thread.start()
        thread.join()
    else:
        DistributedManager.initialize(rendezvous_timeout=60, fail_with_threads=True)
    DistributedManager().barrier("all are within the scenario")
    globals()[scenario](DistributedManager())
