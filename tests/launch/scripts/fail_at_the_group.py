"""A rank that fails when the ranks have met and make their process group: ``raise|kill RANK``."""

import os
import signal
import sys
import time

from distman import DistributedManager
from distman._coordination import protocol
from distman._job import start


def kill_this_process(job, job_store):
    while not all(job_store.store.check([protocol.beat(rank)]) for rank in range(job.world_size)):
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)


how, failing = sys.argv[1:]
if os.environ["RANK"] == failing and how == "raise":
    os.environ["GLOO_SOCKET_IFNAME"] = "missing0"
elif os.environ["RANK"] == failing:
    start._meet_in_process_group = kill_this_process
DistributedManager.initialize()
