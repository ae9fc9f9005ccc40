"""jsrun: the job step manager of IBM LSF. It does not say where rank 0 runs: by default that is LSF's first host.

Source:
    IBM Job Step Manager, jsrun, section Environment variables; IBM Spectrum LSF, Environment variables set for job
    execution, LSB_MCPU_HOSTS, which has the hosts of LSB_DJOB_RANKFILE, but need not be opened on each host.
"""

from __future__ import annotations

from collections.abc import Mapping

from distman.environments._base import read_text
from distman.environments._launcher import Family, Launcher, OnFailure, Place


def _job_id(environ: Mapping[str, str]) -> str | None:
    """Name the job step: the name space of PMIx tells two steps of one LSF job apart."""
    job, step = read_text(environ, "LSB_JOBID"), read_text(environ, "PMIX_NAMESPACE")
    return job if job is None or step is None else f"{job}.{step}"


def _first_host(environ: Mapping[str, str]) -> str | None:
    """Return the first host of the allocation that runs tasks: a launch node comes before, with one slot, not many."""
    words = (read_text(environ, "LSB_MCPU_HOSTS") or "").split()
    hosts, slots = words[::2], words[1::2]
    has_launch_node = slots[:1] == ["1"] and len(hosts) > 1 and slots[1:2] != ["1"]
    return next(iter(hosts[has_launch_node:]), None)


def _fake(place: Place) -> dict[str, str]:
    slots = " ".join(f"n{node + 1} {count}" for node, count in enumerate(place.counts))
    return {"LSB_MCPU_HOSTS": f"launch1 1 {slots}" if min(place.counts) > 1 else slots}


JSRUN = Launcher(
    name="jsrun",
    family=Family.STEP,
    fields={
        "rank": ("JSM_NAMESPACE_RANK",),
        "world_size": ("JSM_NAMESPACE_SIZE",),
        "local_rank": ("JSM_NAMESPACE_LOCAL_RANK",),
        "local_world_size": ("JSM_NAMESPACE_LOCAL_SIZE",),
        "main_address": ("LSB_MCPU_HOSTS",),
        "job_id": ("LSB_JOBID",),
    },
    variables=("JSM_*", "PMIX_*"),
    on_failure=OnFailure.WAITS,
    derived={"main_address": _first_host, "job_id": _job_id},
    fake=_fake,
)
