"""Start the job, and print what the manager knows as one line of JSON for each rank."""

import dataclasses
import json
import sys

from distman import DistributedManager

manager = DistributedManager.initialize(rendezvous_timeout=60)
found = {
    **dataclasses.asdict(manager.roll_call[manager.rank]),
    "world_size": manager.world_size,
    "distributed": manager.distributed,
}
sys.stdout.write(json.dumps(found) + "\n")
