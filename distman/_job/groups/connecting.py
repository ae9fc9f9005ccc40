"""How the members of a new group connect to each other."""

from __future__ import annotations

import contextlib
from datetime import timedelta

import torch.distributed as dist

from distman._coordination.abortable_store import AbortableStore
from distman._job.device import is_pure_gloo
from distman._job.job import Job
from distman._job.strangers import meets_on_this_host, noticed
from distman._torch_internals import default_store, make_gloo_default, make_group


def members_store(job: Job, failure_key: str) -> dist.Store | None:
    """Return the store over which members of a new group find each other; None on one process.

    Over gloo alone they wait there no longer than the rendezvous may take, or until the key is set. Other backends use
    the store from threads of their own, which must not call into Python.
    """
    if job.backend is None:
        return None
    if job.rendezvous is None:
        return default_store()
    store = job.rendezvous.store
    return AbortableStore(store, failure_key, job.limits.rendezvous) if is_pure_gloo(job.backend) else store


def connect(
    job: Job, name: str, ranks: tuple[int, ...], key: str, store: dist.Store | None
) -> dist.ProcessGroup | None:
    """Return a new process group of some ranks, this one among them; None on one process without process groups.

    Collective over these ranks. Blocking.

    Args:
        job: The job.
        name: Its name in torch's messages.
        ranks: The members' ranks in the world, ascending.
        key: Part of the keys in the store, the same on all members and new.
        store: See :func:`members_store`.
    """
    if job.backend is None:
        return None
    with noticed(f"group {name!r}", len(ranks) - 1) if meets_on_this_host(job) else contextlib.nullcontext():
        process_group = make_group(
            ranks,
            ranks.index(job.peer.rank),
            name=f"distman/{key}",
            description=name,
            store=store,
            timeout=timedelta(seconds=job.limits.collective),
        )
    if is_pure_gloo(dist.get_backend()):
        make_gloo_default(process_group)
    return process_group
