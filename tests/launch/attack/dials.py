"""What a process of the job finds at ports that others took: `NUMBER PORT ...`, so many dials; none is the store."""

import dataclasses
import itertools
import os
import sys

from distman._job.meeting.address import find_endpoint
from distman._job.meeting.door import door_at
from distman._job.meeting.secret import find_protection
from distman._store.client import Client
from distman._store.dialing import ForeignServiceError
from distman._store.handshake import VISITOR
from distman.environments import detect

TRIES = int(sys.argv[1])
environment = detect(os.environ).environment
protection = find_protection(environment, os.environ)
point = find_endpoint(environment, os.environ, protection.key)
point = dataclasses.replace(point, protection=protection)
(host,) = point.addresses
refused = 0
for _, port in zip(range(TRIES), itertools.cycle(map(int, sys.argv[2:]))):
    try:
        Client(door_at((host, port), point), VISITOR).close()
    except (ForeignServiceError, OSError):
        refused += 1
Client(door_at((host, point.ports[len(sys.argv[2:])]), point), VISITOR).close()  # which is the store
sys.stdout.write(f"{refused} refused\n")
