"""Takes names and ports at which a job will look for its store, before it does; run by `python -I -S squatter.py`.

In turn it poses as the store of a job without a secret, passes everything on to the real one, and says nothing; or it
poses as a store behind a credential of munge. It says where it listens, stays until its standard input ends, and tells
what the others have told it.
"""

import itertools
import json
import os
import resource
import selectors
import socket
import sys
import time
from pathlib import Path

SETTINGS = json.loads(sys.stdin.readline())
package = sys.modules["distman"] = type(sys)("distman")  # of which it needs nothing but the path
package.__path__ = [SETTINGS["package"]]

from distman._store.frames import MalformedError  # noqa: E402
from distman._store.handshake import OPENING_BYTES, ServerSide, door_key  # noqa: E402
from distman._store.transport import own_place  # noqa: E402

SQUATTED = "squat"
PAUSE = 0.1  # seconds between two looks for other names
WAYS = ("", "relay", "silent")
"""What it does; all else is the credential behind which it poses as the store."""


class Squatter:
    """Holds names and ports, and counts who comes."""

    def __init__(self):
        self.selector = selectors.DefaultSelector()
        self.num_guests = 0
        self.num_secrets = 0
        self.num_relayed = 0
        self.links = {}
        self.found = []
        self.looks_again_at = 0.0

    def hold(self, listener, way):
        listener.listen(64)
        listener.settimeout(0)
        self.selector.register(listener, selectors.EVENT_READ, ("door", way))

    def serve(self):
        self.selector.register(sys.stdin, selectors.EVENT_READ, ("end", ""))
        while True:
            for key, _ in self.selector.select():
                what, way = key.data
                if what == "end":
                    return
                try:
                    self.welcome(key.fileobj, way) if what == "door" else self.hear(key.fileobj, way)
                except (OSError, MalformedError):
                    self.drop(key.fileobj)

    def welcome(self, listener, way):
        guest, _ = listener.accept()
        guest.settimeout(0)
        self.num_guests += 1
        if way == "relay":
            real = self.real()
            if real is None:
                guest.close()
                return
            real.settimeout(0)
            self.num_relayed += 1
            self.links |= {guest: real, real: guest}
            self.selector.register(real, selectors.EVENT_READ, ("guest", "real"))
        self.selector.register(guest, selectors.EVENT_READ, ("guest", way))

    def hear(self, guest, way):
        heard = guest.recv(1 << 16)
        if not heard:
            self.drop(guest)
            return
        # After the opening, which is random, comes the proof of who knows the secret: nobody but the store may have it.
        self.num_secrets += way != "real" and len(heard) != OPENING_BYTES
        if way not in ("real", "relay", "silent"):
            side = ServerSide(door_key(None, SETTINGS["job"].encode()), own_place(guest), heard, way.encode())
            guest.send(side.challenge())
        elif guest in self.links:
            self.links[guest].send(heard)

    def drop(self, one):
        for end in (one, self.links.pop(one, None)):
            if end is not None and end.fileno() >= 0:
                if end in self.selector.get_map():
                    self.selector.unregister(end)
                self.links.pop(end, None)
                end.close()

    def real(self):
        """Return a connection to the job's own store, if it is there."""
        for address in [tuple(one) for one in SETTINGS["real"]] or self.other_names():
            try:
                if not isinstance(address, str):
                    return socket.create_connection(address, timeout=1)
                found = socket.socket(socket.AF_UNIX)
                found.connect(address)
            except OSError:
                continue
            return found
        return None

    def other_names(self):
        """Return the names of others; to look for each guest would cost more than all the rest."""
        if time.monotonic() > self.looks_again_at:
            self.found, self.looks_again_at = self.names_now(), time.monotonic() + PAUSE
        return self.found

    def names_now(self):
        rows = [
            row.split()[-1] for row in Path("/proc/net/unix").read_text(errors="replace").splitlines() if "@" in row
        ]
        theirs = [row.replace("@", "\0", 1) for row in rows if row.startswith("@distman/") and SQUATTED not in row]
        return [name for name in theirs if not name.endswith("turn")]


def say(text):
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def main():
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    squatter = Squatter()
    for number in range(SETTINGS["num_names"]):
        listener = socket.socket(socket.AF_UNIX)
        name = f"{SETTINGS['prefix']}{SQUATTED}{os.urandom(8).hex()}"
        if number % 50 == 0:
            name += "\x1b[2J\n@looks like a row"
        listener.bind(name)
        squatter.hold(listener, WAYS[number % len(WAYS)])
    ports = []
    for way, port in zip(SETTINGS["credentials"] or itertools.cycle(WAYS), SETTINGS["ports"], strict=False):
        listener = socket.create_server(("", port))
        ports.append(listener.getsockname()[1])
        squatter.hold(listener, way)
    if SETTINGS["prefix"]:
        turn = socket.socket(socket.AF_UNIX)
        turn.bind(f"{SETTINGS['prefix']}turn")
    say(json.dumps({"ports": ports}))
    squatter.serve()
    told = {"guests": squatter.num_guests, "secrets": squatter.num_secrets, "relayed": squatter.num_relayed}
    say(json.dumps(told))


if __name__ == "__main__":
    main()
