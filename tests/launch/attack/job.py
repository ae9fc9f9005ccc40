"""A rank of a job that is attacked: it computes until the file `FOLDER/stop` is there, and checks every result."""

import json
import os
import socket
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from distman import DistributedManager, on_rank
from distman._store.frames import LENGTH
from distman._store.handshake import CHALLENGE_HEAD_BYTES, MAC_BYTES, NONCE_BYTES, VISITOR, ClientSide, Hello, door_key
from distman._store.transport import other_place
from distman.collectives import all_gather_objects, broadcast_data

FOLDER = Path(sys.argv[1])
TIMEOUT = 120.0
LISTENS = "0A"  # a state in /proc/net/tcp
EVERYWHERE, LOOPBACK = "0.0.0.0", "127.0.0.1"  # noqa: S104 - compared, not listened to
PAUSE = 0.01  # seconds between two looks whether others have done what comes before the job
LEARNING_RATE = 1e-4


@on_rank(0, broadcast=True)
def look(number):
    """What goes on, as rank 0 sees it."""
    return {
        "round": number,
        "stops": (FOLDER / "stop").exists(),
        "phase": "attacked" if (FOLDER / "attacked").exists() else "quiet",
    }


def check_round(manager, number, model):
    """Let all ranks exchange numbers and objects, and make a step."""
    rank, size = manager.rank, manager.world_size
    manager.barrier()
    numbers = torch.full((1000,), float(rank + number))
    dist.all_reduce(numbers)
    assert (numbers == sum(range(size)) + size * number).all()
    source = number % size
    shared = broadcast_data({"from": rank, "tensor": torch.arange(10) + rank, "round": number}, source)
    assert (shared["from"], shared["round"]) == (source, number)
    assert torch.equal(shared["tensor"], torch.arange(10) + source)
    assert all_gather_objects((rank, number)) == [(other, number) for other in range(size)]
    model.zero_grad()
    model(torch.full((1, 4), 1.0 + rank)).sum().backward()
    with torch.no_grad():
        for weight in model.parameters():
            weight -= LEARNING_RATE * weight.grad


def record(door):
    """Return what this rank would say to be let in, as somebody hears it who reads the wire."""
    family = socket.AF_UNIX if isinstance(door.address, str) else socket.AF_INET
    with socket.socket(family) as guest:
        guest.connect(door.address)
        side = ClientSide(door_key(door.secret, door.job.encode()), other_place(guest))
        opening = side.opening()
        guest.sendall(opening)
        challenge = guest.recv(CHALLENGE_HEAD_BYTES, socket.MSG_WAITALL)
        (length,) = LENGTH.unpack(challenge[NONCE_BYTES:])
        challenge += guest.recv(length + MAC_BYTES, socket.MSG_WAITALL)
        proof = side.proof(challenge, Hello(VISITOR, 0, os.getpid()))
        guest.sendall(proof)
        assert guest.recv(1)  # it was let in
    return {"opening": opening.hex(), "proof": proof.hex()}


def open_ports():
    """Return where this process listens to IPv4: anybody sees that of the host, who scans its ports."""
    mine = {str(file.readlink()) for file in Path("/proc/self/fd").iterdir() if file.is_symlink()}
    rows = [row.split() for row in Path("/proc/self/net/tcp").read_text().splitlines()[1:]]
    local = [row[1].split(":") for row in rows if row[3] == LISTENS and f"socket:[{row[9]}]" in mine]
    found = [(socket.inet_ntoa(bytes.fromhex(address)[::-1]), int(port, 16)) for address, port in local]
    return [(LOOPBACK if address == EVERYWHERE else address, port) for address, port in found]


def show_what_is_public(manager):
    """Write down what anybody can find out, or record, about the store."""
    job_store = manager._state.job.rendezvous
    door = job_store.store.client.door
    public = {"url": job_store.url, "job": door.job, "recorded": record(door), "ports": open_ports()}
    (FOLDER / "public.new").write_text(json.dumps(public))
    (FOLDER / "public.new").rename(FOLDER / "public")


def main():
    manager = DistributedManager.initialize(rendezvous_timeout=TIMEOUT)
    if manager.rank == 0:
        show_what_is_public(manager)
    sys.stdout.write(f"rank {manager.rank} is up\n")
    sys.stdout.flush()
    linear = torch.nn.Linear(4, 1, bias=False)
    with torch.no_grad():
        linear.weight.fill_(1.0)
    model = DistributedDataParallel(linear)
    seconds = {"quiet": [], "attacked": []}
    number = 0
    while not (told := look(number))["stops"]:
        assert told["round"] == number
        began = time.perf_counter()
        check_round(manager, number, model)
        seconds[told["phase"]].append(time.perf_counter() - began)
        number += 1
    mean_gradient = 1.0 + (manager.world_size - 1) / 2
    expected = torch.full((1, 4), 1.0 - LEARNING_RATE * mean_gradient * number)
    torch.testing.assert_close(linear.weight, expected, rtol=1e-3, atol=1e-3)
    medians = {phase: statistics.median(found) * 1000 for phase, found in seconds.items() if found}
    sys.stdout.write(json.dumps({"rank": manager.rank, "rounds": number, "ms": medians}) + "\n")


main()
