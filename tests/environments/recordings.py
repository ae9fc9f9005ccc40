"""Environments that real launchers made, one mapping for each rank."""

import json
from pathlib import Path

RECORDINGS = json.loads(Path(__file__).with_name("recorded.json").read_text(encoding="utf-8"))


def recorded(name):
    """Return the environment of each rank of a recording, in rank order; the caller may change them."""
    return [dict(environ) for environ in RECORDINGS[name].values()]
