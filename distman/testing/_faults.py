"""Faults that a test makes on purpose."""

from __future__ import annotations

import os
import signal as signals
import time


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
    if _is_rank(rank):
        os.kill(os.getpid(), signal)


def delay_rank(rank: int, seconds: float) -> None:
    """Let this process sleep if it is ``rank``; do nothing on the other ranks.

    Local. Blocks on that rank. Every rank may call it; the rank is read from the variable ``RANK``.

    Args:
        rank: The rank that sleeps.
        seconds: How long.

    Example:
        >>> @ranks(2)
        ... def test_a_barrier_says_who_is_late(rank):
        ...     delay_rank(1, seconds=2)
        ...     with pytest.raises(BarrierTimeoutError if rank == 0 else RankFailedError):
        ...         DistributedManager().barrier(timeout=0.5)
    """
    if _is_rank(rank):
        time.sleep(seconds)


def _is_rank(rank: int) -> bool:
    return os.environ.get("RANK") == str(rank)
