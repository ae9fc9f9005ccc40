"""A rank that fails when the ranks have met and make their process group: ``raise|kill RANK``."""

import os
import signal
import sys

from distman import DistributedManager
from distman._job import start


def kill_this_process(*_):
    os.kill(os.getpid(), signal.SIGKILL)


how, failing = sys.argv[1:]
if os.environ["RANK"] == failing and how == "raise":
    os.environ["GLOO_SOCKET_IFNAME"] = "missing0"
elif os.environ["RANK"] == failing:
    start._make_process_group = kill_this_process
DistributedManager.initialize()
