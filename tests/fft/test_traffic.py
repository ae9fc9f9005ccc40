"""What travels between the ranks is what the docstrings say."""

import pytest
import torch

from distman import fft, split_sizes
from distman.collectives import fused_all_reduce
from distman.fft import _hermitian, _resharding
from distman.testing import ranks

LENGTH = 96


def count_bytes(monkeypatch):
    """Return a list that will hold the bytes that leave this rank, message by message."""
    counted = []

    def count(sends, receives, group, segment=None):
        counted.extend(one.nbytes for rank, one in enumerate(sends) if rank != group.rank)
        exchange(sends, receives, group, segment=segment)

    exchange = _resharding.exchange
    for module in (_resharding, _hermitian):
        monkeypatch.setattr(module, "exchange", count)
    return counted


@pytest.mark.parametrize(
    ("kind", "shard_dim", "out_dim", "times", "halves"),
    [
        ("fft2", 0, 1, 1, 0),
        ("fft2", 0, 0, 2, 0),
        ("rfft2", 0, 1, 1, 0),
        ("rfft2", 0, 0, 2, 0),
        ("rfft2", 1, 0, 1, 1),
        ("rfft2", 1, 1, 2, 0),
        ("irfft2", 1, 0, 1, 0),
        ("irfft2", 0, 0, 2, 0),
        ("irfft2", 0, 1, 1, 1),
        ("irfft2", 1, 1, 2, 0),
    ],
)
@ranks(3, 4)
def test_forward_and_backward_send_what_is_promised(
    monkeypatch, rank, world_size, kind, shard_dim, out_dim, times, halves
):
    sent = count_bytes(monkeypatch)
    is_half, is_real = kind == "irfft2", kind == "rfft2"
    shape = [LENGTH, LENGTH // 2 + 1 if is_half else LENGTH]
    shape[shard_dim] = split_sizes(shape[shard_dim], world_size)[rank]
    tensor = torch.ones(shape, dtype=torch.float32 if is_real else torch.complex64, requires_grad=True)
    result = getattr(fft, kind)(tensor, shard_dim=shard_dim, out_dim=out_dim)
    forward = sum(sent)
    result.abs().sum().backward()
    backward = sum(sent) - forward
    spectrum = LENGTH * (LENGTH if kind == "fft2" else LENGTH // 2 + 1) * torch.complex64.itemsize
    promised = times * spectrum * (world_size - 1) / world_size + halves * spectrum / 2
    for bytes_sent in (forward, backward):
        total = fused_all_reduce(torch.tensor(bytes_sent)).item()
        hardly_anything = halves * spectrum / 2 / 3 if world_size % 2 else 0  # the middle rank owns its own images
        assert promised - 1.05 * hardly_anything <= 1.03 * total
        assert total <= 1.03 * promised


@pytest.mark.parametrize(
    ("shape", "dim", "shard_dim", "out_dim", "times"),
    [
        ((LENGTH, LENGTH), 1, 0, 0, 0),
        ((LENGTH, LENGTH), 1, 0, 1, 1),
        ((LENGTH, LENGTH), 0, 0, 1, 1),
        ((LENGTH, LENGTH), 0, 0, 0, 2),
        ((LENGTH * LENGTH,), 0, 0, 0, 2),  # to one rank, and back
    ],
)
@ranks(3)
def test_one_dim_sends_what_is_promised(monkeypatch, rank, world_size, shape, dim, shard_dim, out_dim, times):
    sent = count_bytes(monkeypatch)
    mine = torch.ones(shape, dtype=torch.complex64).chunk(world_size, shard_dim)[rank].clone().requires_grad_()
    fft.fft(mine, dim=dim, shard_dim=shard_dim, out_dim=out_dim).abs().sum().backward()
    total = fused_all_reduce(torch.tensor(sum(sent))).item()
    spectrum = LENGTH * LENGTH * torch.complex64.itemsize
    assert total == pytest.approx(2 * times * spectrum * (world_size - 1) / world_size, rel=0.03)
