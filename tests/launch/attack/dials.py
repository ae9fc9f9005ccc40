"""What a process of the job finds at ports that others took: `NUMBER PORT ...`, so many dials; none is the store."""

import itertools
import os
import sys

from distman._job.meeting.places import find_meeting
from distman._job.meeting.secret import find_protection
from distman._store.client import Client
from distman._store.dialing import ForeignServiceError
from distman._store.handshake import VISITOR
from distman.environments import detect

TRIES = int(sys.argv[1])
environment = detect(os.environ).environment
protection = find_protection(environment, os.environ)
point = find_meeting(environment, os.environ, protection)
(host,) = point.addresses
refused = 0
for _, port in zip(range(TRIES), itertools.cycle(map(int, sys.argv[2:]))):
    try:
        Client(point.door_at((host, port)), VISITOR).close()
    except (ForeignServiceError, OSError):
        refused += 1
Client(point.door_at((host, point.ports[len(sys.argv[2:])])), VISITOR).close()  # which is the store
sys.stdout.write(f"{refused} refused\n")
