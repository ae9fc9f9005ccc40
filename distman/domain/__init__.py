"""Fields that are split over ranks: halos, blocks, and models that compute on blocks as on the full field."""

from __future__ import annotations

from distman.domain._axes import neighbours, weighted_sizes
from distman.domain._blocks import gather_domain, scatter_domain
from distman.domain._decompose import decompose
from distman.domain._halo import halo_exchange, halo_reduce
from distman.domain._local import Roll
from distman.domain._reading import DomainDataset
from distman.domain._spectral import SpectralConv

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
