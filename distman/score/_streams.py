"""Random streams that differ between ranks."""

from __future__ import annotations

import hashlib

import torch


def random_stream(purpose: str, seed: int, index: int, device: torch.device | str = "cpu") -> torch.Generator:
    """Return a generator for one of many streams of random numbers.

    Local. Streams of the same purpose and seed differ for all indices below 2^32: the index is added to a digest of
    the other two, of which a generator on the CPU uses 32 bits.

    Args:
        purpose: What the numbers are used for; equal seeds give different numbers for different purposes.
        seed: Any integer.
        index: The rank, or the number of a batch.
        device: Device of the generator.

    Returns:
        A new generator; torch's default generators are not used.

    Example:
        >>> draws = [torch.rand((), generator=random_stream("noise", 7, index)) for index in (0, 0, 1)]
        >>> draws[0] == draws[1], draws[1] == draws[2]
        (tensor(True), tensor(False))
    """
    digest = hashlib.blake2b(f"{purpose} {seed}".encode(), digest_size=8).digest()
    return torch.Generator(device).manual_seed((int.from_bytes(digest, "big") + index) % 2**64)
