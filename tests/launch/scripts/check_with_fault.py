"""Run ``distman check`` or ``bench`` with a fault on rank 1: ``check_with_fault.py FAULT COMMAND OPTIONS``."""

import os
import signal
import sys

import torch.distributed as dist

from distman import _cli, collectives
from distman._cli import timing


def add_one(call):
    return lambda *args, **options: call(*args, **options) + 1


def raise_error(_call):
    def boom(*_args, **_options):
        raise ValueError("boom")

    return boom


def stop(call):
    def stand_still(*args, **options):
        os.kill(os.getpid(), signal.SIGSTOP)
        return call(*args, **options)

    return stand_still


def late(fault, num_calls):
    """Let some calls go well before."""

    def replace(call):
        calls, faulty = iter(range(num_calls)), fault(call)
        return lambda *args, **options: (call if next(calls, None) is not None else faulty)(*args, **options)

    return replace


FAULTS = {
    "wrong": (collectives, "all_gather_v", add_one),
    "raise": (collectives, "all_gather_v", raise_error),
    "stop": (timing, "pass_on", late(stop, 4)),
    "raise late": (dist, "all_to_all_single", raise_error),
}

if os.environ["RANK"] == "1":
    module, name, fault = FAULTS[sys.argv[1]]
    setattr(module, name, fault(getattr(module, name)))
sys.exit(_cli.main(sys.argv[2:]))
