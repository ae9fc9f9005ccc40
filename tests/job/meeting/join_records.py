"""Sign-ins of ranks that exist on paper only."""

from distman._job.meeting.peers import JoinRecord


def join_record(rank, world_size=2, **changes):
    fields = {
        "rank": rank,
        "world_size": world_size,
        "local_rank": None,
        "local_world_size": None,
        "node_rank": None,
        "num_nodes": None,
        "host": "n1",
        "boot_id": "5c9a",
        "pid": 100 + rank,
        "launcher": "env",
        "backend": "cpu",
        "device_type": "cpu",
        "device": None,
        "visible": (),
        "has_own_devices": False,
        "is_sharing_allowed": False,
        "torch": "2.13.0+cpu",
        "distman": "0.1.0",
        "started": 1000.0,
        "command": "train.py",
    }
    return JoinRecord(**{**fields, **changes})
