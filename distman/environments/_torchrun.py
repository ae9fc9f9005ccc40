"""torchrun and every other front end of torch.distributed.elastic.

Source:
    PyTorch documentation, torchrun, section Environment Variables.
"""

from __future__ import annotations

import re

from distman.environments._bare import BARE
from distman.environments._base import Environ
from distman.environments._launcher import Agent, Family, Launcher, OnFailure

_RUN_ID = "TORCHELASTIC_RUN_ID"  # the variable that only the elastic agent sets
_USES_STORE = "TORCHELASTIC_USE_AGENT_STORE"
_RESTART_COUNT = "TORCHELASTIC_RESTART_COUNT"

_UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
"""What torchrun draws with ``--standalone`` and, on one node, without a port or a rendezvous: both mean c10d."""


def _is_serving(environ: Environ) -> bool:
    return environ.get(_USES_STORE) == "True"


def _may_be_safe(environ: Environ, job_id: str) -> bool:
    return _is_serving(environ) and not _UUID.fullmatch(job_id)


TORCHRUN = Launcher(
    name="torchrun",
    family=Family.ENV,
    fields={
        **BARE.fields,
        "node_rank": ("GROUP_RANK",),
        "num_nodes": ("GROUP_WORLD_SIZE",),
        "job_id": (_RUN_ID,),
    },
    variables=("ROLE_NAME", "ROLE_RANK", "ROLE_WORLD_SIZE", "TORCHELASTIC_*"),
    on_failure=OnFailure.ENDS_JOB,
    marks=((_RUN_ID,),),
    agent=Agent(is_serving=_is_serving, may_be_safe=_may_be_safe, restart_count=_RESTART_COUNT),
    may_bind_gpus=False,
    fake=lambda _place: {_RUN_ID: "fake", _RESTART_COUNT: "0", _USES_STORE: "True"},
)
