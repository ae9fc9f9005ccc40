"""Children that end in every way while a checkpoint is being written; prints their exit codes and what they leave.

They are forked from this process, which has imported torch and has no other threads.
"""

import os
import signal
import sys

import torch

from distman._coordination.failure import hook
from distman.checkpoint import CheckpointFolder, load, save

LARGE = 4_000_000


def raise_error():
    raise ValueError("the program fails")


def kill():
    os.kill(os.getpid(), signal.SIGKILL)


WAYS = {
    "end": lambda: None,
    "sys.exit": lambda: sys.exit(3),
    "exception": raise_error,
    "exit_now": lambda: hook.exit_now(76),
    "kill": kill,
}


def begin(way, folder):
    path = folder / way / "state.pt"
    if way.startswith("failed"):
        (folder / way).touch()
        save({"tensor": torch.ones(LARGE)}, path, background=True)
    elif way.startswith("folder"):
        CheckpointFolder(path.parent).save({"tensor": torch.ones(LARGE)}, 7)
    else:
        save({"tensor": torch.zeros(1)}, path)
        save({"tensor": torch.ones(LARGE)}, path, background=True)


def main(folder):
    """Return whether this is still the process that forks, not a child that is to end now."""
    folder.mkdir()
    for way in ("end", "sys.exit", "exception", "exit_now", "kill", "folder end", "failed end", "failed exit_now"):
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            begin(way, folder)
            WAYS[way.split()[-1]]()
            return False
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        found = sorted((folder / way).glob("[a-z]*.pt"))
        left = (f"{path.name} {load(path)['tensor'].numel()}" for path in found)
        sys.stdout.write(" ".join([way, str(code), *left]) + "\n")
    return True
