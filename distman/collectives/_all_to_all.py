"""Every rank sends a slice to every other rank."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from distman._coordination.wait_scope import collective
from distman._job.groups.registry import Group
from distman.collectives import _debug
from distman.collectives._border import refuse, refuse_beside, still_carried, with_memory
from distman.collectives._debug import tell_apart
from distman.collectives._exchange import exchange, layout_of
from distman.collectives._linear import linear
from distman.collectives._result_memory import new_empty
from distman.collectives._sums import HALVES
from distman.collectives._validation import (
    GroupLike,
    check_call,
    check_matrix,
    normalize_dim,
    resolve_group,
    shard_sizes,
)
from distman.topology import split_sizes

_MAX_SHOWN = 16  # ranks; the sizes of more would take longer to write down than to send
_INDEX_DTYPES = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


@collective
def all_to_all_v(
    tensor: torch.Tensor, sizes: Sequence[Sequence[int]], dim: int = 0, group: GroupLike = None
) -> torch.Tensor:
    """Send consecutive slices of a tensor to the ranks, and concatenate what they send here, in rank order.

    Collective. Blocking. Differentiable: the gradients of the slices travel back.

    Args:
        tensor: What this rank r sends: slices of lengths ``sizes[r]`` along ``dim``, one behind the other.
        sizes: ``sizes[i][j]`` is the length of the slice from rank i to rank j, the same on all ranks.
        dim: Dim along which the slices follow each other.
        group: A process group, the name of one, or None for the world.

    Returns:
        The slices received, of length ``sum(sizes[i][r] for i)`` along ``dim``, a new tensor.

    Raises:
        TypeError: The tensor is a DTensor, or of another class that messages do not carry.
        ValueError: Sizes, dim, group or device do not fit.
        PlanMismatchError: On every rank that waits, in debug mode on all: the ranks call differently, or another one
            was given what messages cannot carry.

    Example on two ranks:
        >>> mine = torch.arange(3) + 10 * rank
        >>> theirs = all_to_all_v(mine, sizes=[[1, 2], [2, 1]])  # rank 0 keeps one and sends two
        >>> all_gather_objects(theirs.tolist())
        [[0, 10, 11], [1, 2, 12]]
    """
    members = resolve_group(group)
    tensor = check_call("all_to_all_v", tensor, members, free_dim=dim, dim=dim, sizes=sizes)
    dim = normalize_dim(dim, tensor.ndim)
    return _send_slices(tensor, check_matrix(sizes, members), dim, members)


@collective
def indexed_all_to_all_v(
    tensor: torch.Tensor,
    indices: Sequence[torch.Tensor],
    sizes: Sequence[Sequence[int]],
    use_fp32: bool = True,
    dim: int = 0,
    group: GroupLike = None,
) -> torch.Tensor:
    """Send chosen slices of a tensor to the ranks, and concatenate what they send here, in rank order.

    Collective. Blocking. Differentiable: the gradients travel back and are added up where a slice was sent more than
    once.

    Args:
        tensor: This rank's shard.
        indices: For each rank of the group, the indices along ``dim`` of the slices to send there; one-dimensional
            integer tensors, which may repeat an index and may be empty.
        sizes: ``sizes[i][j]`` is the number of slices from rank i to rank j, the same on all ranks.
        use_fp32: Add gradients of 16-bit floats up in float32.
        dim: Dim along which slices are taken.
        group: A process group, the name of one, or None for the world.

    Returns:
        The slices received, of length ``sum(sizes[i][r] for i)`` along ``dim`` on rank r, a new tensor.

    Raises:
        TypeError: The tensor is a DTensor, or of another class that messages do not carry.
        ValueError: Indices, sizes, dim, group or device do not fit. Indices into a tensor on a GPU are looked at in
            debug mode only, since the host would wait for them; else CUDA itself ends the rank.
        PlanMismatchError: On every rank that waits, in debug mode on all: the ranks call differently, or another one
            was given what messages cannot carry.

    Example on two ranks:
        >>> rows = torch.tensor([10, 20, 30]) + rank
        >>> indices = [torch.tensor([0]), torch.tensor([2, 0])]  # the first to rank 0; the last and the first to rank 1
        >>> all_gather_objects(indexed_all_to_all_v(rows, indices, sizes=[[1, 2], [1, 2]]).tolist())
        [[10, 11], [30, 10, 31, 11]]
    """
    members = resolve_group(group)
    try:
        indices = [with_memory(index, f"indices[{rank}]") for rank, index in enumerate(indices)]
    except (TypeError, ValueError) as error:
        refuse(error, "indexed_all_to_all_v", members, refuse_beside)
    tensor = check_call("indexed_all_to_all_v", tensor, members, free_dim=dim, dim=dim, sizes=sizes, use_fp32=use_fp32)
    dim = normalize_dim(dim, tensor.ndim)
    matrix = check_matrix(sizes, members)
    if any(index.ndim != 1 or index.dtype not in _INDEX_DTYPES for index in indices):
        raise ValueError(
            "indices must be one-dimensional tensors of integers, got "
            f"{', '.join(f'{index.dtype} of {index.ndim} dims' for index in indices)}. Convert them with .long()."
        )
    lengths = [index.numel() for index in indices]
    if lengths != matrix[members.rank]:
        raise ValueError(
            f"indices must hold as many entries for each rank as sizes[{members.rank}] = {matrix[members.rank]}, got "
            f"{lengths}. Make them agree."
        )
    index = torch.cat([one.to(tensor.device) for one in indices])
    if index.numel() and (index.is_cpu or _debug.is_on()):
        low, high = (int(bound) for bound in torch.aminmax(index))
        if not 0 <= low <= high < tensor.shape[dim]:
            raise ValueError(
                f"indices must be between 0 and {tensor.shape[dim] - 1} along dim {dim}, got {low} to {high}. Index "
                "into this rank's own tensor."
            )
    adds_in_fp32 = use_fp32 and tensor.requires_grad and tensor.dtype in HALVES
    source = tensor.to(torch.float32) if adds_in_fp32 else tensor
    chosen = source.index_select(dim, index.long()).to(tensor.dtype)
    return _send_slices(chosen, matrix, dim, members)


@collective
def distributed_transpose(
    tensor: torch.Tensor, dim0: int, dim1: int, group: GroupLike = None, *, sizes: Sequence[int] | None = None
) -> torch.Tensor:
    """Turn a tensor that is sharded along ``dim1`` into one that is sharded along ``dim0``.

    Collective. Blocking. Differentiable: the gradient is transposed back.

    Args:
        tensor: This rank's shard: whole along ``dim0``, a shard along ``dim1``.
        dim0: Dim to be split over the ranks, by :func:`distman.split_sizes`.
        dim1: Dim along which the shards are put together.
        group: A process group, the name of one, or None for the world.
        sizes: Lengths of all shards along ``dim1``, the same list on all ranks; None lets the ranks exchange them.

    Returns:
        The shard along ``dim0``, whole along ``dim1``, a new tensor.

    Raises:
        TypeError: The tensor is a DTensor, or of another class that messages do not carry.
        ValueError: Dims, sizes, group or device do not fit; without ``sizes`` on every rank: the shards differ in
            dtype or in another dim.
        PlanMismatchError: On every rank that waits, in debug mode on all: the ranks call differently, or another one
            was given what messages cannot carry.

    Example on two ranks:
        >>> columns = torch.zeros(5, 2)  # of a matrix of five rows and four columns
        >>> rows = distributed_transpose(columns, dim0=0, dim1=1)
        >>> all_gather_objects(tuple(rows.shape))
        [(3, 4), (2, 4)]
    """
    members = resolve_group(group)
    tensor = check_call(
        "distributed_transpose",
        tensor,
        members,
        free_dim=dim1,
        unites_grad=sizes is None,
        dim0=dim0,
        dim1=dim1,
        sizes=sizes,
    )
    dim0 = normalize_dim(dim0, tensor.ndim, "dim0")
    if dim0 == dim1 % tensor.ndim:
        raise ValueError(f"dim0 and dim1 must be two dims, got {dim0} twice. Choose two different dims.")
    tensor, lengths, dim1 = shard_sizes("distributed_transpose", tensor, sizes, dim1, members)
    parts = split_sizes(tensor.shape[dim0], members.size)
    tell_apart(f"sizes {lengths} and {tensor.shape[dim0]} along dim {dim0}")
    return reshard(tensor, (dim0, parts), (dim1, lengths), members)


def _send_slices(tensor: torch.Tensor, sizes: list[list[int]], dim: int, group: Group) -> torch.Tensor:
    outgoing = sizes[group.rank]
    if tensor.shape[dim] != sum(outgoing):
        raise ValueError(
            f"sizes[{group.rank}] must add up to the tensor's length {tensor.shape[dim]} along dim {dim}, got "
            f"{outgoing}. Make them agree."
        )
    incoming = [row[group.rank] for row in sizes]
    tell_apart(f"sizes {sizes}" if group.size <= _MAX_SHOWN else f"hash of sizes {hash(tuple(map(tuple, sizes)))}")
    return reshard(tensor, (dim, outgoing), (dim, incoming), group)


Parts = tuple[int, list[int]]  # a dim, and a length along it for each rank


def reshard(
    tensor: torch.Tensor, outgoing: Parts, incoming: Parts, group: Group, what: str = "all_to_all"
) -> torch.Tensor:
    """Split a tensor along one dim over the ranks, and join what comes along another; differentiable."""
    return linear(tensor, _there, _back, outgoing, incoming, group, what)


def _there(tensor: torch.Tensor, outgoing: Parts, incoming: Parts, group: Group, what: str) -> torch.Tensor:
    tensor = still_carried(tensor, group)
    (split_dim, sent), (join_dim, received) = outgoing, incoming
    shape = list(tensor.shape)
    shape[split_dim] = sent[group.rank]
    shape[join_dim] = sum(received)
    joined = new_empty(tensor, shape)
    what = f"{what} {layout_of(tensor, split_dim, join_dim)} from dim {split_dim} to dim {join_dim}"
    exchange(tensor.split(sent, split_dim), joined.split(received, join_dim), group, what)
    return joined


def _back(tensor: torch.Tensor, outgoing: Parts, incoming: Parts, group: Group, what: str) -> torch.Tensor:
    return _there(tensor, incoming, outgoing, group, what)
