"""torchrun and every other front end of torch.distributed.elastic.

Source:
    PyTorch documentation, torchrun, section Environment Variables.
"""

from __future__ import annotations

import re

from distman.environments._bare import BARE, fake_bare
from distman.environments._launcher import Agent, Family, Launcher, OnFailure, Place

_RUN_ID = "TORCHELASTIC_RUN_ID"
"""The variable that only the elastic agent sets."""

_UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
"""What torchrun draws with ``--standalone`` and, on one node, without a port or a rendezvous: both mean c10d."""

_AGENT = Agent(
    serves=("TORCHELASTIC_USE_AGENT_STORE", "True"),
    restart_count="TORCHELASTIC_RESTART_COUNT",
    drawn_job_id=_UUID,
)


def _fake(place: Place) -> dict[str, str]:
    name, value = _AGENT.serves
    return fake_bare(place) | {
        "GROUP_RANK": str(place.node_rank),
        "GROUP_WORLD_SIZE": str(place.num_nodes),
        "MASTER_PORT": str(place.main_port),
        _RUN_ID: "fake",
        _AGENT.restart_count: "0",
        name: value,
    }


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
    agent=_AGENT,
    may_bind_gpus=False,
    fake=_fake,
)
