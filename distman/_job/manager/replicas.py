"""Whether ranks that ought to hold the same numbers do."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from distman._coordination.wait_scope import WaitScope
from distman._job.job import Job
from distman._torch_internals import is_distributed_tensor
from distman.errors import DivergenceError, PlanMismatchError

_COLUMNS = 128  # words in a row
_ROWS = 1024  # that are added up at once: a MiB, which caches have room for
_GOLDEN = -0x61C8864680B583EB  # 2**64 over the golden ratio, odd: its multiples lie evenly
_SHOWN = 5  # names in a message

_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)

Entries = dict[dist.ProcessGroup | None, dict[str, torch.Tensor]]


def check_replicas(
    module: nn.Module, optimizers: Sequence[torch.optim.Optimizer], step: int | None, job: Job, *, buffers: bool
) -> None:
    """Compare sums over the bits of all tensors, and raise on all ranks if some differ."""
    for group, tensors in _entries(module, optimizers, buffers=buffers).items():
        size = dist.get_world_size(group)
        if size > 1:
            with WaitScope("check_replicas()"):
                _compare(tensors, group, step, job)


def _compare(tensors: dict[str, torch.Tensor], group: dist.ProcessGroup | None, step: int | None, job: Job) -> None:
    device = job.device
    no_sums = torch.zeros(0, dtype=torch.int64, device=device)
    sums = torch.stack([_sum_of_bits(one).to(device) for one in tensors.values()]) if tensors else no_sums
    names = torch.tensor(zlib.crc32("\n".join(tensors).encode()), device=device)
    mine = torch.stack([names, _sum_of_bits(sums)])
    ends = torch.cat([mine, ~mine])  # whose largest is that of the smallest, and unlike -mine always a number
    dist.all_reduce(ends, dist.ReduceOp.MAX, group)
    same_names, same_sums = (ends[:2] == ~ends[2:]).tolist()
    if not same_names:
        raise PlanMismatchError(
            f"all ranks must check modules with the same parameters and buffers, got {len(tensors)} on rank "
            f"{job.peer.rank}, and others elsewhere. Pass the same module, and the same optimizers, on all ranks."
        )
    if not same_sums:
        everyone = [torch.empty_like(sums) for _ in range(dist.get_world_size(group))]
        dist.all_gather(everyone, sums, group)
        raise _error([one.tolist() for one in everyone], list(tensors), group, step, job)


def _error(
    sums: Sequence[list[int]], names: list[str], group: dist.ProcessGroup | None, step: int | None, job: Job
) -> DivergenceError:
    ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
    differing = [at for at in range(len(names)) if len({one[at] for one in sums}) > 1]
    ((usual, number),) = Counter(one[differing[0]] for one in sums).most_common(1)
    is_majority = 2 * number > len(sums)
    odd = [rank for rank, one in zip(ranks, sums, strict=True) if not is_majority or one[differing[0]] != usual]
    return DivergenceError(
        tensors=[names[at] for at in differing],
        ranks=odd,
        places=[str(job.roll_call[rank]) for rank in odd[:_SHOWN]],
        step=step,
        is_majority=is_majority,
    )


def _entries(module: nn.Module, optimizers: Sequence[torch.optim.Optimizer], *, buffers: bool) -> Entries:
    """Return all tensors by name, grouped by the process group whose ranks ought to hold the same numbers."""
    default = getattr(module, "process_group", None)
    found: Entries = {default: {}}
    shared = _shared_buffers(module) if buffers else []
    for name, tensor in [*module.named_parameters(), *shared, *_states(module, optimizers)]:
        if not is_distributed_tensor(tensor):
            found.setdefault(default, {})[name] = tensor.detach()
            continue
        whole: Any = tensor
        for dim, placement in enumerate(whole.placements):
            if placement.is_replicate():
                found.setdefault(whole.device_mesh.get_group(dim), {})[name] = whole.to_local().detach()
    return found


def _shared_buffers(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the buffers but for statistics that each rank keeps of its own batches."""
    own = {
        id(buffer) for part in module.modules() if isinstance(part, _NORMS) for buffer in part.buffers(recurse=False)
    }
    return ((name, buffer) for name, buffer in module.named_buffers() if id(buffer) not in own)


def _states(module: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of the optimizers' states; parameters outside of the module are named by number."""
    names: dict[torch.Tensor, str] = {parameter: name for name, parameter in module.named_parameters()}
    for number, optimizer in enumerate(optimizers):
        of = f" in optimizer {number}" if len(optimizers) > 1 else ""
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        for at, parameter in enumerate(parameters):
            for key, value in sorted(optimizer.state.get(parameter, {}).items()):
                several = isinstance(value, list | tuple)  # as LBFGS has them
                for place, one in enumerate(value if several else [value]):
                    if isinstance(one, torch.Tensor):
                        which = f"{key}[{place}]" if several else key
                        yield f"{which} of {names.get(parameter, f'parameter {at}')}{of}", one


def _sum_of_bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return a number that a changed bit, or another order, changes, on the tensor's device."""
    flat = tensor.contiguous().reshape(-1)
    flat = (flat.clone() if flat.storage_offset() else flat).view(torch.uint8)
    num_rows = flat.numel() // (8 * _COLUMNS)
    end = torch.zeros(8 * _COLUMNS, dtype=torch.uint8, device=flat.device)
    end[: flat.numel() - num_rows * len(end)] = flat[num_rows * len(end) :]
    rows = flat[: num_rows * len(end)].view(torch.int64).view(num_rows, _COLUMNS)
    weights = 2 * (torch.arange(_ROWS + _COLUMNS, device=flat.device) * _GOLDEN) + 1  # all of them odd
    total = torch.zeros(_COLUMNS, dtype=torch.int64, device=flat.device)
    room = torch.empty(min(max(num_rows, 1), _ROWS), _COLUMNS, dtype=torch.int64, device=flat.device)
    for number, part in enumerate((*torch.split(rows, _ROWS), end.view(torch.int64)[None])):
        # The upper half is added to the lower one, too: a sum has no room for the multiples of its highest bits.
        mixed = torch.bitwise_right_shift(part, 32, out=room[: len(part)])
        torch.add(part, mixed, alpha=_GOLDEN, out=mixed).mul_(weights[: len(part), None])
        total += mixed.sum(0) * _as_signed((2 * number + 1) * _GOLDEN)
    return (total * weights[_ROWS:]).sum()


def _as_signed(number: int) -> int:
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)
