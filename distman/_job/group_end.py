"""The end of process groups: NCCL waits there for other ranks, which may come late, or never."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch
import torch.distributed as dist

from distman._base import timing
from distman._base.log import logger
from distman._coordination.timeouts import begin
from distman._job.device import wait_for
from distman._torch_internals import abort_backends, all_groups, end_group, waits_at_end


def end_groups(process_groups: Sequence[dist.ProcessGroup] | None, device: torch.device, *, aborts: bool) -> None:
    """Destroy process groups, and wait for nobody for long."""
    # NCCL first waits for what this rank has begun there, and then for the other ranks of the host, where it aborts,
    # too.
    is_late = threading.Event()

    def end(*, aborts: bool) -> None:
        for one in [None] if process_groups is None else process_groups:
            end_group(one, aborts=aborts)

    def abort() -> None:
        for one in waiting:
            abort_backends(one)

    def wait_and_end() -> None:
        try:
            wait_for(device)  # before NCCL takes the locks that an abort needs
        except BaseException:  # a kernel has failed, or Ctrl-C: the group ends all the same
            end(aborts=True)
            raise
        end(aborts=is_late.is_set())

    waiting = [one for one in (all_groups() if process_groups is None else process_groups) if waits_at_end(one)]
    if not waiting:
        end(aborts=aborts)
        return
    has_ended = begin((lambda: end(aborts=True)) if aborts else wait_and_end)
    if has_ended(timing.GROUPS_END):
        return
    is_late.set()
    logger.warning(
        "%d process groups have not ended for %.0f s and are aborted: a collective is outstanding there in which other "
        "ranks take no part, or they have not left yet. Let all ranks take the same way to the end",
        len(waiting),
        timing.GROUPS_END,
    )
    begin(abort)(timing.GROUPS_END)
    has_ended(timing.GROUPS_END)
