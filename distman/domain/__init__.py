"""Fields that are split over ranks: halos, blocks, and models that compute on blocks as on the full field."""

from __future__ import annotations

from distman.domain._halo import halo_exchange, halo_reduce

__all__ = [
    "halo_exchange",
    "halo_reduce",
]
