"""A rank of a job in which something goes wrong: ``SCENARIO``; each function below is one."""

import os
import signal
import sys
import time

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from distman import DistributedManager, on_rank
from distman.collectives import fused_all_reduce


def say(text):
    sys.stdout.write(f"{DistributedManager().rank}: {text}\n")
    sys.stdout.flush()


def wait_in_python(seconds=60):
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
        time.sleep(1.5)  # a sign of life, with the place
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
        time.sleep(60)
        return index


def in_uninterruptible_code(manager):
    """Ranks 1 and 2 wait for each other in gloo, where no signal reaches Python."""
    dist.barrier()
    if manager.rank == 0:
        time.sleep(0.5)
        raise ValueError("boom")
    dist.recv(torch.zeros(1), src=3 - manager.rank)


def with_a_child(manager):
    """Rank 1 has a forked child that outlives it: its copies of connections must not hide the death."""
    if manager.rank == 1:
        if os.fork() == 0:
            time.sleep(6)
            os._exit(0)
        time.sleep(1)
        say("killed")
        os.kill(os.getpid(), signal.SIGKILL)
    wait_in_python()


def raise_while_others_compute(manager):
    if manager.rank == 1:
        time.sleep(1)
        raise ValueError("boom")
    wait_in_python(20)
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


def suspended(manager):
    """All ranks wait until the test has stopped and continued them."""
    say("ready")
    wait_in_python(9)
    manager.barrier("end")
    say("done")


def caught(manager):
    """A rank that handles the failure of another one may go on by itself."""
    try:
        if manager.rank == 1:
            raise ValueError("boom")
        wait_in_python()
    except RuntimeError as error:
        say(f"saved because {str(error).splitlines()[0]}")


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


if __name__ == "__main__":
    scenario = sys.argv[1]
    if scenario == "adopted":
        dist.init_process_group("gloo")
        scenario = "raise_while_others_compute"
    globals()[scenario](DistributedManager.initialize(rendezvous_timeout=60))
