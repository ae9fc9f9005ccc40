"""Fields that are split over ranks: halos, blocks, and models that compute on blocks as on the full field."""

from __future__ import annotations

from distman.domain._blocks import DomainDataset, gather_domain, neighbours, scatter_domain, weighted_sizes
from distman.domain._decompose import decompose
from distman.domain._global import SpectralConv
from distman.domain._halo import halo_exchange, halo_reduce
from distman.domain._local import Roll

__all__ = [
    "DomainDataset",
    "Roll",
    "SpectralConv",
    "decompose",
    "gather_domain",
    "halo_exchange",
    "halo_reduce",
    "neighbours",
    "scatter_domain",
    "weighted_sizes",
]
