"""Start the job, and print what the manager knows as one line of JSON for each rank; and whether its secret shows."""

import contextlib
import dataclasses
import hashlib
import json
import os
import sys
from pathlib import Path

from distman import DistributedManager


def is_shown(secret):
    """Return whether the secret is on any command line of this machine."""
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            if secret.encode() in file.read_bytes():
                return True
    return False


secret = os.environ.get("DISTMAN_SECRET")
manager = DistributedManager.initialize(rendezvous_timeout=60)
found = {
    **dataclasses.asdict(manager.roll_call[manager.rank]),
    "world_size": manager.world_size,
    "distributed": manager.distributed,
    "secret": secret and hashlib.sha256(secret.encode()).hexdigest(),
    "is_shown": bool(secret) and is_shown(secret),
}
sys.stdout.write(json.dumps(found) + "\n")
