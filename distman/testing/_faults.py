"""Faults that a test makes on purpose."""

from __future__ import annotations

import os
import signal as signals


def kill_rank(rank: int, *, signal: int = signals.SIGKILL) -> None:
    """Send this process a signal if it is ``rank``; do nothing on the other ranks.

    Local. Every rank may call it; the rank is read from the variable ``RANK``. A test that kills a rank says
    so, ``@ranks(3, dies=[1])``, or fails.

    Args:
        rank: The rank that gets the signal.
        signal: The signal, by default the one that nothing can catch.

    Example:
        >>> @ranks(3, dies=[1])
        ... def test_survivors_get_an_error():
        ...     kill_rank(1)
        ...     with pytest.raises(RuntimeError):
        ...         torch.distributed.barrier()
    """
    if os.environ.get("RANK") == str(rank):
        os.kill(os.getpid(), signal)
