"""The package's logger, whose messages say which rank speaks."""

from __future__ import annotations

import logging

from distman._base.process_state import puts_back


class _RankPrefix(logging.Filter):
    prefix = ""

    def filter(self, record: logging.LogRecord) -> bool:
        record.msg = f"{self.prefix}{record.msg}"
        return True


_rank_prefix = _RankPrefix()

logger = logging.getLogger("distman")
"""Logger of the package: silent below WARNING until the program configures :mod:`logging`."""
logger.addFilter(_rank_prefix)


@puts_back
def set_rank(rank: int | None = None, world_size: int = 1) -> None:
    """Make later messages begin with the rank, or with nothing where ``rank`` is None."""
    _rank_prefix.prefix = "" if rank is None else f"[rank {rank}/{world_size}] "
