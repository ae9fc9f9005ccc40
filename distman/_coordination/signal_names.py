"""Which signals ask a rank to stop. It needs no torch, for ``distman run``."""

from __future__ import annotations

import signal
from collections.abc import Mapping

_VARIABLE = "DISTMAN_STOP_SIGNALS"

DEFAULT_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
"""What Slurm, LSF, PBS and Kubernetes send, what ``mpirun`` hands on, and what submitit asks Slurm for."""

_NEVER = {"KILL", "STOP", "ABRT", "BUS", "FPE", "ILL", "QUIT", "SEGV", "SYS", "TRAP", "CHLD", "PIPE", "URG"}
"""Those that no program can handle, that mean a crash, or that Python, torch or the watcher needs."""


def stop_signals(environ: Mapping[str, str]) -> tuple[signal.Signals, ...]:
    """Return the signals that ask for a stop: those that a variable names, such as ``TERM,SIGHUP``, or the default."""
    text = environ.get(_VARIABLE)
    if not text:
        return DEFAULT_SIGNALS
    names = [name.strip().upper().removeprefix("SIG") for name in text.split(",")]
    known = {one.name.removeprefix("SIG"): one for one in signal.Signals}
    for name in names:
        if name not in known or name in _NEVER:
            raise ValueError(
                f"a stop signal must be one that a program can handle, got {name!r} from {_VARIABLE}. Name some "
                "of TERM, USR1, USR2, HUP, INT, separated by commas."
            )
    return tuple(dict.fromkeys(known[name] for name in names))
