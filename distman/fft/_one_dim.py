"""Fourier transforms of one dim of a sharded tensor."""

from __future__ import annotations

from typing import Unpack

from torch import Tensor

from distman.collectives import admitted, normalize_dim, resolve_group
from distman.fft._arguments import as_length, computable, is_same_dim
from distman.fft._blocks import Kind
from distman.fft._call import transform_shard
from distman.fft._signature import Layout, Length, Norm, transform


@transform
def fft(tensor: Tensor, n: Length = None, dim: int = -1, norm: Norm = None, **layout: Unpack[Layout]) -> Tensor:
    """Transform one dim of a sharded tensor, as :func:`torch.fft.fft` does a full one.

    Example on two ranks:
        >>> signal = torch.cos(2 * torch.pi * torch.arange(6) / 6)
        >>> spectrum = fft(signal.chunk(2)[rank])
        >>> all_gather_v(spectrum).abs().round()
        tensor([0., 3., 0., 0., 0., 3.])
    """
    return _transform("fft", "fft", tensor, n, dim, norm, **layout)


@transform
def ifft(tensor: Tensor, n: Length = None, dim: int = -1, norm: Norm = None, **layout: Unpack[Layout]) -> Tensor:
    """Undo :func:`fft`, as :func:`torch.fft.ifft` does.

    Example on two ranks:
        >>> part = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])[rank]
        >>> torch.allclose(ifft(fft(part)).real, part, atol=1e-6)
        True
    """
    return _transform("ifft", "ifft", tensor, n, dim, norm, **layout)


@transform
def rfft(tensor: Tensor, n: Length = None, dim: int = -1, norm: Norm = None, **layout: Unpack[Layout]) -> Tensor:
    """Transform real data along one dim to half of their spectrum, as :func:`torch.fft.rfft` does.

    Example on two ranks:
        >>> signal = torch.cos(2 * torch.pi * torch.arange(6) / 6)
        >>> all_gather_v(rfft(signal.chunk(2)[rank])).abs().round()
        tensor([0., 3., 0., 0.])
    """
    return _transform("rfft", "rfft", tensor, n, dim, norm, **layout)


@transform
def irfft(tensor: Tensor, n: Length = None, dim: int = -1, norm: Norm = None, **layout: Unpack[Layout]) -> Tensor:
    """Transform half of a spectrum along one dim to real data, as :func:`torch.fft.irfft` does: undoes :func:`rfft`.

    Example on two ranks:
        >>> part = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])[rank]
        >>> torch.allclose(irfft(rfft(part)), part, atol=1e-6)
        True
    """
    return _transform("irfft", "irfft", tensor, n, dim, norm, **layout)


@transform
def hfft(tensor: Tensor, n: Length = None, dim: int = -1, norm: Norm = None, **layout: Unpack[Layout]) -> Tensor:
    """Transform half of a Hermitian signal along one dim to its real spectrum, as :func:`torch.fft.hfft` does.

    Example on two ranks:
        >>> half = torch.tensor([[1.0, 1.0], [0.0, 0.0]])[rank]  # of the signal 1, 1, 0, 0, 0, 1
        >>> all_gather_v(hfft(half)).round()
        tensor([ 3.,  2.,  0., -1.,  0.,  2.])
    """
    return _transform("irfft", "hfft", tensor, n, dim, norm, **layout)


@transform
def ihfft(tensor: Tensor, n: Length = None, dim: int = -1, norm: Norm = None, **layout: Unpack[Layout]) -> Tensor:
    """Undo :func:`hfft`: transform a real spectrum along one dim to half of its signal, as :func:`torch.fft.ihfft`.

    Example on two ranks:
        >>> spectrum = torch.tensor([3.0, 2.0, 0.0, -1.0, 0.0, 2.0]).chunk(2)[rank]
        >>> all_gather_v(ihfft(spectrum)).real.round()
        tensor([1., 1., 0., 0.])
    """
    return _transform("rfft", "ihfft", tensor, n, dim, norm, **layout)


def _transform(
    kind: Kind, name: str, tensor: Tensor, n: Length, dim: int, norm: Norm, **layout: Unpack[Layout]
) -> Tensor:
    members = resolve_group(layout.get("group"))
    shard_dim, out_dim = layout.get("shard_dim"), layout.get("out_dim")
    sizes, out_sizes = layout.get("sizes"), layout.get("out_sizes")
    stays = shard_dim is not None and (out_dim is None or is_same_dim(tensor, shard_dim, out_dim))
    is_local = stays and out_sizes is None and not is_same_dim(tensor, shard_dim, dim)
    tensor = admitted(name, tensor, members, has_header=sizes is None, is_local=is_local)
    tensor = computable(name, kind, tensor)
    dim = normalize_dim(dim, tensor.ndim)
    shard = dim if shard_dim is None else normalize_dim(shard_dim, tensor.ndim, "shard_dim")
    out = shard if out_dim is None else normalize_dim(out_dim, tensor.ndim, "out_dim")
    wanted = as_length(n)
    given = {"dim": dim, "n": wanted}
    return transform_shard(kind, name, tensor, (dim,), (wanted,), norm, shard, out, sizes, out_sizes, members, given)
