"""Variables that begin like distman's own, but are misspelt."""

from __future__ import annotations

import difflib
from collections.abc import Mapping

from distman.environments._launcher import sets
from distman.environments._registry import LAUNCHERS

_PREFIX = "DISTMAN_"

VARIABLES = (
    "DISTMAN_ALLOW_SHARED_GPU",
    "DISTMAN_DEBUG",
    "DISTMAN_FAILURE_GRACE",
    "DISTMAN_FORBID_SKIP",
    "DISTMAN_END_TIME",
    "DISTMAN_HANG_TIMEOUT",
    "DISTMAN_INITIALIZATION_METHOD",
    "DISTMAN_JOB_ID",
    "DISTMAN_KEEP_FOLDER",
    "DISTMAN_RENDEZVOUS_TIMEOUT",
    "DISTMAN_REQUEUE",
    "DISTMAN_SECRET",
    "DISTMAN_SECRET_FILE",
    "DISTMAN_SHARED_MEMORY",
    "DISTMAN_SILENCE_TIMEOUT",
    "DISTMAN_STOP_MARGIN",
    "DISTMAN_STOP_SIGNALS",
    "DISTMAN_TIMEOUT",
    "DISTMAN_WATCH",
)
"""All variables that begin like this; any other is misspelt."""


def misspelt_variables(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return a sentence for each variable that begins like distman's, but is not one of them.

    Local.

    Args:
        environ: Environment variables, usually ``os.environ``; never modified.

    Example:
        >>> print(*misspelt_variables({"DISTMAN_TIMOUT": "60"}))
        DISTMAN_TIMOUT has no effect, because distman reads no such variable: did you mean DISTMAN_TIMEOUT?
    """
    sentences = []
    for name in sorted(name for name in environ if name.startswith(_PREFIX)):
        if name not in VARIABLES and not any(sets(launcher, name) for launcher in LAUNCHERS.values()):
            ends = [known.removeprefix(_PREFIX) for known in VARIABLES]
            close = difflib.get_close_matches(name.removeprefix(_PREFIX), ends, n=1)
            meant = f"did you mean {_PREFIX}{close[0]}?" if close else f"distman reads {', '.join(VARIABLES)}."
            sentences.append(f"{name} has no effect, because distman reads no such variable: {meant}")
    return tuple(sentences)
