"""The border that every tensor crosses before it travels: the one place that knows what messages can carry.

What they cannot carry is refused before the group is touched, and on every rank that waits for this one:

* A call that begins with a message of sizes, a signature or a length says in it that this rank refuses, and then why.
* A call whose messages are all of sizes that the ranks know has no room for that. There the rank that refuses asks over
  the store what the others exchange with it, and exchanges as much with them; see ``monitor/refusals.py``.

So nothing is sent more where nothing is refused, and the next call of the group finds it as it was.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import NoReturn

import torch

from distman._base.text import printable
from distman._coordination.monitor.refusals import Posted, Refusal, know
from distman._coordination.monitor.watcher import is_watching
from distman._coordination.tracking import call_site, current_wait, end_waits
from distman._coordination.wait_scope import collective
from distman._job.groups.registry import Group
from distman._torch_internals import (
    awaited,
    collects_batches,
    has_own_operations,
    is_distributed_tensor,
    is_plain,
    is_to_be_awaited,
    is_zero,
    kind_of_tensor,
    traced_by,
    untraced,
    without_subclass,
)
from distman.collectives import _debug
from distman.collectives._exchange import all_gather_numbers, all_gather_texts, exchange
from distman.errors import PlanMismatchError
from distman.manager import DistributedManager

DTYPES = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex128, torch.complex64),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
)
MAX_NDIM = 16  # dims that the header of a message has room for; more than any model uses
REFUSED = -2  # in the header of a call, in the place of a dtype
_REMEDIES = {
    "nested tensor": "Pass its values() and offsets(), or to_padded_tensor()",
    "batch of gradients": "Differentiate without is_grads_batched, or vectorize",
    "quantized tensor": "Pass its int_repr(), or dequantize()",
    "sparse tensor": "Pass its indices() and values(), or to_dense()",
    "tensor in MKL-DNN's layout": "Pass its to_dense()",
    "tensor on the meta device": "Give it memory with torch.empty_like(tensor, device=manager.device)",
    "FakeTensor": "Call this with tensors of the program, outside of FakeTensorMode and of traces",
    "FunctionalTensor": "Call this outside of traces",
    "functional tensor": "Call this outside of traces",
    "tensor within a transform of torch.func": "Call this outside of the transformed function",
}
_WITHOUT_MEMORY = (
    *("FakeTensor", "FunctionalTensor", "functional tensor"),
    *("tensor within a transform of torch.func", "batch of gradients"),
)


def carried(tensor: torch.Tensor, group: Group | None, name: str = "tensor") -> torch.Tensor:
    """Return a tensor as one that the messages of a group can carry, without a copy; differentiable.

    It waits where torch's functional collectives still compute the tensor. Without a group, what travels is on another
    device. A subclass with operations of its own is a TypeError; a dtype, number of dims or device that does not fit,
    and memory that was freed, a ValueError.
    """
    tensor = with_memory(tensor, name)
    if tensor.dtype not in DTYPES:
        raise ValueError(f"{name} must have a dtype that the backends carry, got {tensor.dtype}. Convert it.")
    if tensor.ndim > MAX_NDIM:
        raise ValueError(f"{name} must have at most {MAX_NDIM} dims, got {tensor.ndim}. Reshape it.")
    if group is not None and group.device_types and tensor.device.type not in group.device_types:
        raise ValueError(
            f"{name} must be on a device that group {group.name!r} can reach ({', '.join(group.device_types)}), got "
            f"{tensor.device}. Move it with .to(manager.device)."
        )
    return tensor


def with_memory(tensor: torch.Tensor, name: str = "tensor") -> torch.Tensor:
    """Return a tensor as one of torch with memory of its own, of any dtype and on any device."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}. Pass a tensor.")
    tracer = traced_by()
    if tracer:
        raise TypeError(
            f"{name} must be the program's own, got a {type(tensor).__name__} within {tracer}, which records or "
            "transforms operations. Call this outside of it."
        )
    if not is_plain(tensor):
        tensor = _made_plain(tensor, name)
    if not tensor.data_ptr() and tensor.numel():
        raise ValueError(
            f"{name} must have memory, got one of shape {tuple(tensor.shape)} whose memory was freed. Call this before "
            "its storage is resized, or where its module has gathered it."
        )
    return tensor


def _made_plain(tensor: torch.Tensor, name: str) -> torch.Tensor:
    if is_to_be_awaited(tensor):
        return with_memory(awaited(tensor), name)
    if is_distributed_tensor(tensor):
        raise TypeError(
            f"{name} must be one rank's own, got a {type(tensor).__name__}, of which each rank has a part. Pass what "
            "its to_local() or full_tensor() returns."
        )
    if torch.nn.parameter.is_lazy(tensor):
        raise TypeError(f"{name} must have a shape, got an {type(tensor).__name__}. Call its module once before.")
    if is_zero(tensor):
        return tensor.clone()
    is_torchs = type(tensor) is torch.Tensor
    if not is_torchs and not has_own_operations(tensor) and is_plain(plain := without_subclass(tensor)):
        return plain
    kind = kind_of_tensor(tensor)
    remedy = _REMEDIES.get(kind, "Pass the tensors of torch that it is made of")
    error = ValueError if is_torchs else TypeError
    raise error(f"{name} must be dense, with memory of its own, got a {kind}. {remedy}.")


def pickled(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor, of any class, as one that can be pickled with what it is made of."""
    if is_plain(tensor):
        return with_memory(tensor, "a tensor in the data")
    if is_to_be_awaited(tensor):
        return awaited(tensor).detach()
    kind = kind_of_tensor(tensor)
    if is_distributed_tensor(tensor) or kind in _WITHOUT_MEMORY:
        return _made_plain(tensor, "a tensor in the data")
    return tensor


def still_carried(tensor: torch.Tensor, group: Group, name: str = "gradient") -> torch.Tensor:
    """Return what :func:`carried` does where all ranks are in the call already, and hear of a refusal."""
    try:
        return carried(tensor, group, name)
    except (TypeError, ValueError) as error:
        with untraced():
            refuse_beside(error, "a backward pass", group)
        raise


def refuse(
    error: Exception, operation: str, group: Group, tell_others: Callable[[Exception, str, Group], None] | None
) -> NoReturn:
    """Raise an error of this rank, once the others that wait for it have heard of it; with None, nobody waits."""
    with untraced():
        if _debug.is_on() and group.consensus is not None:
            with contextlib.suppress(PlanMismatchError):
                _debug.compare_calls(operation, group, refused=error)
        elif tell_others is not None and group.size > 1:
            _debug.compare_calls(operation, group)
            tell_others(error, operation, group)
    raise error


def refuse_in_header(error: Exception, operation: str, group: Group) -> None:
    """Take part in the exchange of sizes with which a call begins, and let it say that this rank refuses."""
    all_gather_numbers([-1, REFUSED, *[0] * (2 + MAX_NDIM)], group)
    all_gather_texts(refusal_text(error, operation, group), group)


def raise_refusals(group: Group) -> NoReturn:
    """Raise what other ranks refuse, of which a header told."""
    raise PlanMismatchError("\n".join(filter(None, map(printable, all_gather_texts("", group)))))


def refusal_text(error: Exception, operation: str, group: Group) -> str:
    rank = group.ranks[group.rank]
    return (
        f"all ranks must be able to take part in {operation}, got a refusal from rank {rank} at {call_site()}. "
        f"Correct it there; the group stays usable. {type(error).__name__}: {error}"
    )


@collective
def refuse_beside(error: Exception, operation: str, group: Group) -> None:
    """Let the others of a call know that this rank refuses it, and exchange something with those that wait for it.

    Nobody can be told without a watcher, or where the backend works by itself as NCCL does.
    """
    consensus, process_group = group.consensus, group.process_group
    if consensus is None or process_group is None or group.size == 1 or not is_watching():
        return
    if collects_batches(process_group, DistributedManager().device):
        return
    number = next(group.exchanges)  # from here on this rank is in the call, for others that refuse it too
    know(group)
    rank, text = group.ranks[group.rank], refusal_text(error, operation, group)
    refusal = Refusal(rank, group.ranks, process_group.group_name, number, text)
    posted = refusal.ask(consensus.store_group, consensus.timeout)
    calls = {one.call for one in posted.values() if one.call}
    if any(one.is_closed for one in posted.values()) or len(calls) > 1:
        end_waits(group)
    elif calls:
        group.exchanges.last = number - 1
        _stand_in(calls.pop(), posted, group)


def _stand_in(call: str, posted: dict[int, Posted], group: Group) -> None:
    """Exchange as many bytes with the others as they wait for."""
    wait = current_wait()
    note, _, what = call.partition(" ")
    sizes = [posted.get(rank, Posted()) for rank in group.ranks]
    if wait is not None:
        wait.note = note
    with contextlib.suppress(PlanMismatchError):  # another one may refuse the call too
        exchange(_bytes(one.received for one in sizes), _bytes(one.sent for one in sizes), group, what)


def _bytes(sizes: Iterable[int]) -> list[torch.Tensor]:
    return [torch.zeros(size, dtype=torch.uint8, device="cpu") for size in sizes]
