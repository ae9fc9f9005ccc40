"""Torch's private names: no other module touches one, so that a new release of torch is met in one place.

What has a public name in torch is used under that name where it is needed; what is here has none. The functions for
nested data (``tree_map`` and its like) are torch's own, handed on.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import inspect
import itertools
import logging
import os
import pickle
import re
import sys
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import IO, Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d, utils as distributed_utils
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import (  # noqa: F401 - for other modules
    TreeSpec,
    tree_flatten,
    tree_leaves,
    tree_map,
    tree_structure,
    tree_unflatten,
)
from torch.utils.data._utils import worker

P = ParamSpec("P")
R = TypeVar("R")

# Process groups

_AT_ONCE = timedelta(milliseconds=1)
_TAG = 0x646D  # nobody sends such a message


def make_group(
    ranks: Sequence[int], rank: int, *, name: str, description: str, store: dist.Store | None, timeout: timedelta
) -> dist.ProcessGroup:
    """Make a process group among its members alone, over a store of their own, with the backends of the world."""
    # ``new_group`` is collective over the world, uses the store of the world, and counts its groups: a rank that fails
    # to make one leaves all others waiting, and the next group has another name here than there. ``name`` is part of
    # the keys in the store, the same on all members and new; ``rank`` counts among ``ranks``.
    process_group: dist.ProcessGroup
    make: Any = distributed_c10d._new_process_group_helper  # some versions have a type of their own for the name
    place, backend = (len(ranks), rank, list(ranks)), dist.get_backend()
    with _world_without_device(), meeting_in_few_calls():
        process_group, _ = make(*place, backend, store, name, timeout=timeout, group_desc=description)
    distributed_c10d._world.pg_group_ranks[process_group] = dict(zip(ranks, itertools.count(), strict=False))
    return process_group


_IN_FEW_CALLS = {"GLOO_ENABLE_STORE_V2_API": "1", "GLOO_ENABLE_RANK_AS_SEQUENCE_NUMBER": "1"}
_meetings: list[dict[str, str | None]] = []  # what the variables were, one entry for each group that is being made
_MEETING = threading.Lock()


@contextlib.contextmanager
def meeting_in_few_calls() -> Iterator[None]:
    """Let the members of a gloo group that is made meanwhile read where the others are in one call, of O(N) bytes.

    By itself gloo makes a call for each of the N others, and each answer has a number for each member. It reads these
    variables of the environment as a group is made. They must be the same on all members, so they do not stay: a group
    made by other code may have members where distman has made none.
    """
    with _MEETING:
        _meetings.append({name: os.environ.get(name) for name in _IN_FEW_CALLS})
        os.environ.update(_IN_FEW_CALLS)
    try:
        yield
    finally:
        with _MEETING:
            before = _meetings.pop()
            if not _meetings:
                for name, value in before.items():
                    if value is None:
                        os.environ.pop(name, None)
                    else:
                        os.environ[name] = value


@contextlib.contextmanager
def _world_without_device() -> Iterator[None]:
    """Keep NCCL from splitting the world's communicator, in which ranks outside the group would have to take part."""
    world = dist.group.WORLD
    device = world.bound_device_id if world is not None else None
    if world is None or device is None:
        yield
        return
    world.bound_device_id = None
    try:
        yield
    finally:
        world.bound_device_id = device


# Operations between two ranks that this package has begun: a group counts them with its collectives.
_uncounted: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()


def batch_isend_irecv(operations: list[dist.P2POp]) -> list[dist.Work]:
    """Do what torch's function of this name does, but let its group go on after an exception."""
    # NCCL collects the operations of a batch. torch leaves that state open when one is refused or the main thread is
    # interrupted, and later reductions of the group would be collected and never done.
    works: list[dist.Work]
    group = operations[0].group
    before = _num_begun(group)
    try:
        works = dist.batch_isend_irecv(operations)
    except BaseException:
        world = distributed_c10d._world
        if group is not None and world.pg_coalesce_state.pop(group, None) is not None:
            with contextlib.suppress(RuntimeError):  # the first error counts
                group._end_coalescing(operations[0].tensor.device)
        raise
    finally:
        if group is not None:
            _uncounted[group] = _uncounted.get(group, 0) + _num_begun(group) - before
    return works


def _num_begun(process_group: dist.ProcessGroup | None) -> int:
    """Return how many operations a group has begun; 0 where its backend does not count them."""
    try:
        # torch's stub lacks the method
        number: int = process_group._get_sequence_number_for_group()  # type: ignore[union-attr]
        return number
    except (AttributeError, RuntimeError):
        return 0


def operations_begun() -> dict[str, int]:
    """Return how many of torch's collectives this rank has begun, by the name of their group."""
    groups = {one: _num_begun(one) for one in all_groups()}
    return {one.group_name: number - _uncounted.get(one, 0) for one, number in groups.items()}


# Collectives that no rank leaves before all ranks of the group have begun them; the first is of DDP's constructor.
_FOR_ALL = frozenset(
    {
        "_verify_param_shape_across_processes",
        "all_gather",
        "all_gather_coalesced",
        "all_gather_into_tensor",
        "all_gather_single",
        "all_reduce",
        "all_reduce_coalesced",
        "all_to_all",
        "all_to_all_single",
        "barrier",
        "reduce_scatter",
        "reduce_scatter_single",
        "reduce_scatter_tensor",
    }
)
# Those in which the others wait for one rank, and in which one rank waits for the others.
_FROM_ONE, _TO_ONE = frozenset({"broadcast", "scatter"}), frozenset({"gather", "reduce"})
_STORE = f"{__package__}._store."
_MESSAGES = {"recv": "group_src", "send": "group_dst"}  # and the variable that holds the other rank
_COLLECTIVES = _FOR_ALL | _FROM_ONE | _TO_ONE
_MOST_MEMBERS = 8  # that a message names
_FILES_OF_COLLECTIVES = {distributed_c10d.__file__, distributed_utils.__file__}


@dataclasses.dataclass(frozen=True)
class TorchWait:
    """A call of torch's own, in which a thread of the program waits for other ranks."""

    text: str  # its name, in words; the same on both sides of a message
    line: str  # where the program called it
    place: tuple[str, int]  # its group, and its number there, which tells one call from the next; ``("", 0)`` of none
    members: tuple[int, ...]  # of the group, in the world
    ranks: tuple[int, ...]  # those of them that it is sure to wait for
    is_message: bool = False  # from one rank to another, which may be under way while the other does something else
    is_for_all: bool = True  # no rank leaves it before all have begun it

    @property
    def label(self) -> str:
        """The group, for messages."""
        return str(self.members)

    @property
    def title(self) -> str:
        """What it is, in which group, and its number there, for messages: a rank that is behind has another number."""
        name, number = self.place
        if not name:
            return self.text
        ranks = str(self.members) if len(self.members) <= _MOST_MEMBERS else f"{len(self.members)} ranks"
        return f"{self.text}, call {number} in group {name} of {ranks}"


def torch_wait_in(frame: FrameType | None, line_of: Callable[[FrameType], str]) -> TorchWait | None:
    """Return the collective, message or new group that the innermost function of a stack is in.

    None where the backend does not count its collectives, so that nothing tells one call from the next. The frame
    would, but keeping a frame keeps the program's files open.
    """
    while frame is not None and str(frame.f_globals.get("__name__")).startswith(_STORE):
        frame = frame.f_back  # a backend asks the job's store
    code = frame.f_code if frame is not None else None
    if frame is None or code is None or code.co_filename not in _FILES_OF_COLLECTIVES:
        return None
    if code.co_name in _MESSAGES:
        return _message_in(frame, line_of)
    if code.co_name not in _COLLECTIVES:
        return _new_group_in(frame, line_of)
    group = frame.f_locals.get("group") or frame.f_locals.get("process_group") or dist.group.WORLD
    if not isinstance(group, dist.ProcessGroup):
        return None
    number = operations_begun().get(group.group_name, 0)
    if number == 0:
        return None
    members = tuple(dist.get_process_group_ranks(group))
    name = "DistributedDataParallel" if code.co_name.startswith("_") else code.co_name
    awaited = _awaited_in(code.co_name, frame.f_locals, members, group.rank())
    is_for_all, place = code.co_name in _FOR_ALL, (group.group_name, number)
    return TorchWait(f"torch's {name}", line_of(frame), place, members, awaited, is_for_all=is_for_all)


def _message_in(frame: FrameType, line_of: Callable[[FrameType], str]) -> TorchWait | None:
    group = frame.f_locals.get("group") or dist.group.WORLD
    is_sent, other = frame.f_code.co_name == "send", frame.f_locals.get(_MESSAGES[frame.f_code.co_name])
    if other is None:  # as torch is given it, in the world
        other_in_world = frame.f_locals.get("dst" if is_sent else "src")
    else:
        other_in_world = dist.get_process_group_ranks(group)[other] if isinstance(group, dist.ProcessGroup) else None
    if not isinstance(other_in_world, int):
        return None  # from any rank
    pair = (dist.get_rank(), other_in_world) if is_sent else (other_in_world, dist.get_rank())
    text = f"torch's message from rank {pair[0]} to rank {pair[1]}"
    return TorchWait(text, line_of(frame), ("", 0), pair, (other_in_world,), is_message=True)


def _new_group_in(frame: FrameType, line_of: Callable[[FrameType], str]) -> TorchWait | None:
    """Return the new group that a function of torch's is making, for which it waits for all its members."""
    inner: FrameType | None = frame
    while inner is not None and inner.f_code.co_filename in _FILES_OF_COLLECTIVES:
        if inner.f_code.co_name == "_new_group_with_tag":
            ranks = tuple(inner.f_locals.get("ranks") or ())
            shown = str(ranks) if len(ranks) <= _MOST_MEMBERS else f"{len(ranks)} ranks"
            return TorchWait(f"torch's new_group of {shown}", line_of(frame), ("", 0), ranks, ranks)
        inner = inner.f_back
    return None


_FILES_OF_WAITS = {*_FILES_OF_COLLECTIVES, torch._ops.__file__}


def blocking_call(frame: FrameType | None) -> str:
    """Return in words what the innermost function of a stack may wait in for other ranks; empty if it does not wait."""
    if frame is None:
        return ""
    code = frame.f_code
    if code.co_name == "_engine_run_backward":  # for the reductions of DDP
        return "torch's backward pass"
    if code.co_filename in _FILES_OF_WAITS:
        return f"torch's {code.co_name.strip('_')}"
    works = [one for one in frame.f_locals.values() if isinstance(one, dist.Work)]
    return "wait() of a collective of torch's" if any(not work.is_completed() for work in works) else ""


def _awaited_in(name: str, variables: Mapping[str, Any], members: tuple[int, ...], me: int) -> tuple[int, ...]:
    """Return the ranks without which a collective cannot end on this rank, as far as that is sure."""
    if name in _FOR_ALL:
        return members
    one = variables.get("group_src" if name in _FROM_ONE else "group_dst")
    if not isinstance(one, int):
        return ()
    return (members[one],) * (me != one) if name in _FROM_ONE else members * (me == one)


def is_in_backward() -> bool:
    """Return whether this is called by a backward pass, which computes once more what was not kept, say."""
    return torch._C._current_graph_task_id() != -1


def queue_callback(call: Callable[[], None]) -> None:
    """Let the backward pass that this is called in call a function at its end, in the order of these calls."""
    torch.autograd.Variable._execution_engine.queue_callback(call)


if hasattr(dist, "all_gather_single"):
    all_gather_single, reduce_scatter_single = dist.all_gather_single, dist.reduce_scatter_single
else:  # up to 2.11
    all_gather_single, reduce_scatter_single = dist.all_gather_into_tensor, dist.reduce_scatter_tensor


def collects_batches(process_group: dist.ProcessGroup | None, device: torch.device) -> bool:
    """Return whether what carries a group's tensors of a device has the rules of NCCL, as those for GPUs have."""
    return type(process_group) is dist.ProcessGroup and bool(process_group._get_backend(device).supports_coalescing)


def gloo_timeout(process_group: dist.ProcessGroup) -> float | None:
    """Return the seconds that a wait for a tensor of the CPU may take in a group; None where gloo does not carry it."""
    if type(process_group) is not dist.ProcessGroup:  # one that is written in Python, or gloo itself, without backends
        return None
    backend = process_group._get_backend(torch.device("cpu"))
    is_gloo = isinstance(backend, getattr(distributed_c10d, "ProcessGroupGloo", ()))  # torch may be built without it
    return backend.options._timeout.total_seconds() if is_gloo else None


def shortest_timeout(process_group: dist.ProcessGroup) -> float | None:
    """Return the seconds that a collective may take in a group, the fewest of its backends'; None if none tells."""
    found = []
    if type(process_group) is dist.ProcessGroup:
        for device in process_group._device_types:
            with contextlib.suppress(AttributeError, RuntimeError):  # not every backend has options
                options: Any = process_group._get_backend(device).options
                found.append(options._timeout.total_seconds())
    return min(found, default=None)


def abort_backends(process_group: dist.ProcessGroup) -> None:
    """End what a group waits for by aborting the backends that have NCCL's rules; it is good for nothing afterwards."""
    for device in process_group._device_types:
        if collects_batches(process_group, device):
            process_group._get_backend(device).abort()


def all_groups() -> list[dist.ProcessGroup]:
    return list(distributed_c10d._world.pg_map)


def waits_at_end(process_group: dist.ProcessGroup) -> bool:
    """Return whether to end a group may wait for other ranks, as NCCL does."""
    return any(collects_batches(process_group, device) for device in process_group._device_types)


# What closes the connections that a group has beside those of its backends.
_beside: weakref.WeakKeyDictionary[dist.ProcessGroup, weakref.WeakMethod[Callable[[], None]]] = (
    weakref.WeakKeyDictionary()
)


def close_with(process_group: dist.ProcessGroup, close: Callable[[], None]) -> None:
    """Let a method be called, in any thread, where a group's connections are closed, and when the group is gone."""
    _beside[process_group] = reference = weakref.WeakMethod(close)
    weakref.finalize(process_group, _call, reference)


def close_beside(process_group: dist.ProcessGroup) -> None:
    """Close the connections that a group has beside those of its backends, at once."""
    if process_group in _beside:
        _call(_beside[process_group])


def _call(reference: weakref.WeakMethod[Callable[[], None]]) -> None:
    method = reference()
    if method is not None:
        method()


def close_connections(process_group: dist.ProcessGroup) -> None:
    """End what waits over gloo in a group, on all its ranks; it is good for nothing afterwards."""
    close_beside(process_group)
    if dist.Backend.GLOO not in dist.get_backend(process_group):  # cpu:gloo, say
        return
    for step in range(1, process_group.size()):
        # gloo closes a connection when a wait for it is too long; or it is closed already, which leaves others open.
        with contextlib.suppress(RuntimeError, ValueError):
            other = (process_group.rank() + step) % process_group.size()
            process_group.recv([torch.empty(1, device="cpu")], other, _TAG).wait(_AT_ONCE)


def close_all_connections() -> None:
    for process_group in all_groups():
        with contextlib.suppress(ValueError, RuntimeError):  # the main thread destroys it at this moment
            abort_backends(process_group)
            close_connections(process_group)


def end_group(process_group: dist.ProcessGroup | None = None, *, aborts: bool) -> None:
    """Destroy a process group, or all of them."""
    if aborts:  # and does not wait for what is outstanding there, as NCCL does: after a failure nobody completes it
        distributed_c10d._abort_process_group(process_group)
    else:
        dist.destroy_process_group(process_group)


@contextlib.contextmanager
def counting_no_failed_group() -> Iterator[None]:
    """Let a group that could not be made not count: the number is part of the store's keys, which all ranks share."""
    count = distributed_c10d._world.group_count
    try:
        yield
    except BaseException:
        distributed_c10d._world.group_count = count
        raise


def count_groups_from_zero() -> None:
    """Count the groups anew, as ``destroy_process_group`` does where there is one to destroy."""
    distributed_c10d._world.group_count = 0


def is_registered(process_group: dist.ProcessGroup) -> bool:
    """Return whether torch still has a group: one that was destroyed is good for nothing, though objects hold it."""
    return process_group in distributed_c10d._world.pg_map


def default_store() -> dist.Store:
    """Return the store of the default process group; a group that is written in Python may not hold it itself."""
    store: dist.Store = distributed_c10d._get_default_store()
    return store


def make_gloo_default(process_group: dist.ProcessGroup) -> None:
    # torch leaves it open where some library has registered a backend, as ``torch.compile`` does, and then warns at
    # every call.
    process_group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)


def device_types(process_group: dist.ProcessGroup) -> set[str]:
    """Return the types of devices whose tensors a group carries; the text of its backends need not name them."""
    return {device.type for device in process_group._device_types}


def mesh_without_groups(device_type: str, ranks: torch.Tensor, names: tuple[str, ...]) -> DeviceMesh:
    """Return a mesh on one process without a process group, where the public constructor would make one."""
    if "_rank" in inspect.signature(DeviceMesh.__init__).parameters:
        return DeviceMesh(device_type, ranks, mesh_dim_names=names, _init_backend=False, _rank=0)
    # Up to 2.9 it asks the process group for this rank, unless the device is one of these.
    mesh = DeviceMesh("xla", ranks, mesh_dim_names=names, _init_backend=False)
    vars(mesh).update(device_type=device_type, _coordinate_on_dim=[0] * ranks.ndim)
    return mesh


# What torchrun's agents leave in the store that they share with their ranks


def is_static_rendezvous(place: tuple[str, int], run_id: str, node_rank: int, timeout: float) -> bool:
    """Return whether torchrun's agents are seen to have met in this store, as they do by a static rendezvous only."""
    # By any other one they meet in a store of its own, and leave nothing in the one that they show their ranks.
    try:
        store = dist.TCPStore(*place, is_master=False, timeout=timedelta(seconds=timeout), wait_for_workers=False)
        return dist.PrefixStore(run_id, store).check([f"torchelastic/role_info/{node_rank}"])
    except dist.DistError:
        return False


# Words of gloo, NCCL and torch, which raise bare RuntimeErrors and warn without a category of their own

GLOO_THREADS = "pt_gloo"  # how the names of gloo's threads begin

NO_JOB_WARNING = "torch.distributed is disabled"
"""How ``torch.distributed.checkpoint`` begins its warning that there is one process only."""

_LOST_CONNECTION = re.compile(
    r"gloo/transport|pair closure|nccl(Remote|System)Error|"
    r"Connection (closed: this rank|closed by peer: rank|timed out after [\d.]+ s: )"
)
"""Said by gloo, NCCL, and this package: errors of a program may quote connections to servers of its own."""

_UNREACHABLE = re.compile(r"Connection timed out|No route to host|(Network|Host) is unreachable")


def collective_errors() -> logging.Logger:
    """Return the logger to which torch's collectives report each error before they raise it."""
    from torch.distributed import c10d_logger

    return c10d_logger._c10d_logger


def is_lost_connection(error: BaseException) -> bool:
    """Return whether an error says that another rank did not answer, or that its connection broke.

    Every error of a store does. Those of NCCL have a type derived from theirs, and may be about memory.
    """
    is_of_store = isinstance(error, dist.DistError) and not isinstance(error, dist.DistBackendError)
    return is_of_store or (isinstance(error, RuntimeError) and _LOST_CONNECTION.search(str(error)) is not None)


def is_unreachable(error: BaseException) -> bool:
    """Return whether an error of a store says that its host does not answer, not even by breaking the connection."""
    return _UNREACHABLE.search(str(error)) is not None


# Compiled programs

COMPILED = "_orig_mod"  # attribute under which a compiled module holds the module: part of the names in its state


def is_compiled(module: torch.nn.Module | None) -> bool:
    compiler = sys.modules.get("torch._dynamo.eval_frame")  # its import takes a second, and compiling does it anyway
    return compiler is not None and isinstance(module, compiler.OptimizedModule)


def outside_graphs(func: Callable[P, R]) -> Callable[P, R]:
    """Keep a function, and all that it calls, out of the graphs of ``torch.compile``, at no cost to its calls.

    It does what :func:`torch.compiler.disable` does, which would import the compiler, for a second: the first mark ends
    a graph in front of a call, the second lets neither the function nor what it calls be compiled by itself.
    """
    frames: Any = torch._C._dynamo.eval_frame
    skip = frames._FrameAction.SKIP
    marked: Any = func
    marked._torchdynamo_disable = True
    marked._torchdynamo_disable_msg = "it exchanges messages with other ranks"
    frames.set_code_exec_strategy(marked.__code__, frames._FrameExecStrategy(skip, skip))
    return func


class EagerFunction(torch.autograd.Function):
    """A differentiable function that is in no graph of ``torch.compile``, nor are its derivatives."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        for name in {"forward", "backward"} & vars(cls).keys():
            outside_graphs(vars(cls)[name].__func__)


def all_reduce_traced(tensor: torch.Tensor, operation: str, process_group: dist.ProcessGroup) -> torch.Tensor:
    """Return the reduction of a tensor in a way that ``torch.compile`` can follow, with the gradient of a sum."""
    from torch.distributed import _functional_collectives

    all_reduce: Callable[..., torch.Tensor] = _functional_collectives.all_reduce
    if hasattr(_functional_collectives, "all_reduce_backward"):
        return all_reduce(tensor, operation, process_group)
    reduced: torch.Tensor = _TracedAllReduce.apply(tensor, operation, process_group, all_reduce)  # type: ignore[no-untyped-call]
    return reduced


class _TracedAllReduce(torch.autograd.Function):
    """For torch up to 2.10, whose own operation drops the gradient without a word."""

    @staticmethod
    def forward(
        ctx: Any,
        tensor: torch.Tensor,
        operation: str,
        process_group: dist.ProcessGroup,
        all_reduce: Callable[..., torch.Tensor],
    ) -> torch.Tensor:
        ctx.operation, ctx.process_group, ctx.all_reduce = operation, process_group, all_reduce
        return all_reduce(tensor, operation, process_group)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        if ctx.operation != "sum":
            raise ValueError(f"an all_reduce must sum to have a gradient, got {ctx.operation}. Detach its input.")
        return ctx.all_reduce(grads[0].contiguous(), "sum", ctx.process_group), None, None, None


# Tensors, their memory, and the states of modules


def is_plain(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is nothing but shape, strides and memory, though that may have been freed."""
    keys: int = torch._C._dispatch_keys(tensor).raw_repr()
    return type(tensor) in _PLAIN_TYPES and not keys & _NOT_PLAIN


def are_simple(tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether tensors are of torch's own types and have memory, sooner than to look at each one's dispatch."""
    try:
        return _PLAIN_TYPES.issuperset(map(type, tensors)) and 0 not in map(torch.Tensor.data_ptr, tensors)
    except RuntimeError:  # such as a sparse tensor's, which has no memory that is its own
        return False


def has_own_operations(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is of a class that computes its operations itself."""
    return bool(torch._C._dispatch_keys(tensor).has(torch._C.DispatchKey.Python))


def without_subclass(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of a subclass without operations of its own as one of torch, differentiably, without a copy."""
    with torch._C.DisableTorchFunctionSubclass():
        plain: torch.Tensor = tensor.as_subclass(torch.Tensor)
    return plain


def is_zero(tensor: torch.Tensor) -> bool:
    """Return whether a tensor stands for zeros without memory, as derivatives do."""
    return tensor._is_zerotensor()


def is_to_be_awaited(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is one that torch's functional collectives, or its tensor parallelism, still compute."""
    functional = sys.modules.get("torch.distributed._functional_collectives")
    return functional is not None and isinstance(tensor, functional.AsyncCollectiveTensor)


def awaited(tensor: torch.Tensor) -> torch.Tensor:
    """Return what a tensor is that torch's functional collectives still compute, without a copy; differentiable."""
    result: torch.Tensor = _Awaited.apply(tensor)  # type: ignore[no-untyped-call]
    return result


class _Awaited(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, tensor: Any) -> torch.Tensor:
        result: torch.Tensor = tensor.trigger_wait().detach()
        return result

    @staticmethod
    def backward(_: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


def kind_of_tensor(tensor: torch.Tensor) -> str:
    """Return what a tensor is that is not plain, as torch calls it; the name of its class if nothing else is known."""
    keys = str(torch._C._dispatch_keys(tensor))  # such as DispatchKeySet(CPU, Functionalize, AutogradCPU)
    return next((kind for key, kind in _KINDS.items() if key in keys), type(tensor).__name__)


def traced_by() -> str:
    """Return what records or transforms the operations of this thread, instead of computing them; or nothing."""
    if torch._C._are_functorch_transforms_active():
        return "a transform of torch.func"
    if torch.autograd.forward_ad._current_level >= 0:
        return "forward-mode differentiation"
    if torch._C._len_torch_dispatch_stack() == 0:
        return ""
    kinds: Any = torch._C._TorchDispatchModeKey
    names = {
        kinds.PROXY: "make_fx or torch.export",
        kinds.FAKE: "FakeTensorMode",
        kinds.FUNCTIONAL: "functionalization",
    }
    return next((name for kind, name in names.items() if torch._C._get_dispatch_mode(kind) is not None), "")


@contextlib.contextmanager
def untraced() -> Iterator[None]:
    """Let the operations of a ``with`` block be computed, though others of this thread are recorded or transformed."""
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
    from torch.utils._python_dispatch import _disable_current_modes

    with temporarily_clear_interpreter_stack(), _disable_current_modes():
        yield


def despite_traces(func: Callable[P, R]) -> Callable[P, R]:
    """Let a function compute, though operations of this thread are recorded or transformed."""

    @functools.wraps(func)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        with untraced() if traced_by() else contextlib.nullcontext():
            return func(*args, **kwargs)

    return call


def _union_of_keys(*names: str) -> int:
    known = [name for name in names if hasattr(torch._C.DispatchKey, name)]
    union = 0
    for name in known:
        union |= torch._C.DispatchKeySet(torch._C._dispatch_key_parse(name)).raw_repr()
    return union


_PLAIN_TYPES = frozenset({torch.Tensor, torch.nn.Parameter})
_NOT_PLAIN = ~_union_of_keys(
    *("CPU", "CUDA", "HIP", "XPU", "MPS", "HPU", "MTIA", "PrivateUse1", "PrivateUse2", "PrivateUse3"),
    *("AutogradCPU", "AutogradOther", "ADInplaceOrView", "Conjugate", "Negative"),
    *(name for name in dir(torch._C.DispatchKey) if name.startswith("Autocast")),
)
"""All keys of the dispatcher but those of ordinary memory, gradients, autocast, and signs that are put in later."""
_KINDS = {
    "NestedTensor": "nested tensor",
    "FuncTorch": "tensor within a transform of torch.func",
    "Batched": "batch of gradients",
    "Functionalize": "functional tensor",
    "Quantized": "quantized tensor",
    "Sparse": "sparse tensor",
    "Mkldnn": "tensor in MKL-DNN's layout",
    "Meta": "tensor on the meta device",
}


def unbind_apart(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the slices of a tensor along its first dim, which share memory; autograd takes each for itself alone."""
    with torch._C._AutoDispatchBelowADInplaceOrView():
        return list(tensor.unbind())


def norms(tensors: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Return the 2-norm of each tensor, in any order, by one kernel; in float32 at least, since 16 bits overflow."""
    short = [one for one in tensors if one.dtype in (torch.float16, torch.bfloat16)]
    long = [one for one in tensors if one.dtype not in (torch.float16, torch.bfloat16)]
    found = torch._foreach_norm(short, dtype=torch.float32) if short else ()
    return (*found, *(torch._foreach_norm(long) if long else ()))


def without_type(storage: torch.TypedStorage) -> torch.UntypedStorage:
    """Return the memory of a typed storage, without the warning that its public methods give."""
    return storage._untyped_storage


def with_type(storage: torch.UntypedStorage, dtype: torch.dtype) -> torch.TypedStorage:
    """Return memory as a typed storage, without the warning that its public constructor gives."""
    return torch.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)  # type: ignore[no-untyped-call]


def reduce_tensor(tensor: torch.Tensor) -> Any:
    """Return how a tensor is made again, as ``__reduce_ex__`` does, in a way that works for all dtypes."""
    # For the newer ones, such as float8, torch names a function that takes what ``torch.load`` hands it alone.
    reduced: Any = tensor.__reduce_ex__(pickle.HIGHEST_PROTOCOL)  # type: ignore[no-untyped-call]
    if not isinstance(reduced, tuple):
        return reduced
    make, args, *rest = reduced
    if make is torch._tensor._rebuild_from_type_v2:
        args = (_takes_untyped(args[0]), *args[1:])
    return (_takes_untyped(make), args, *rest)


def _takes_untyped(make: Callable[..., Any]) -> Callable[..., Any]:
    return _rebuild_tensor if make is torch._utils._rebuild_tensor_v3 else make


def _rebuild_tensor(storage: torch.UntypedStorage, *args: Any) -> torch.Tensor:
    rebuild: Any = torch._utils._rebuild_tensor_v3
    with torch.no_grad():  # it writes to what may require a gradient
        tensor: torch.Tensor = rebuild(with_type(storage, torch.uint8), *args)
    return tensor


def own_parameters(module: torch.nn.Module) -> dict[str, torch.nn.Parameter | None]:
    """Return a module's own parameters by their names, those of its submodules left out."""
    return module._parameters


def forward_pre_hooks(module: torch.nn.Module) -> dict[int, Callable[..., Any]]:
    """Return what a module calls before its forward pass; to delete one takes it away."""
    return module._forward_pre_hooks


def versions_in(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return which versions of themselves the modules saved a state by, by the modules' names."""
    return getattr(state, "_metadata", None) or {}


def set_versions(state: OrderedDict[str, Any], versions: OrderedDict[str, Any]) -> None:
    """Tell ``load_state_dict`` which versions of themselves the modules saved a state by."""
    vars(state)["_metadata"] = versions


# Checkpoints of several ranks: the import takes a second, so it is done where it is needed


def is_distributed_tensor(value: object) -> bool:
    """Return whether a tensor holds a part of what several ranks have; imports nothing."""
    if type(value) in (torch.Tensor, torch.nn.Parameter):  # as nearly all, and this is asked for each in each step
        return False
    kinds = (("torch.distributed.tensor", "DTensor"), ("torch.distributed._shard.sharded_tensor", "ShardedTensor"))
    known = (getattr(sys.modules.get(module), name, None) for module, name in kinds)
    return any(kind is not None and isinstance(value, kind) for kind in known)


def forget_layouts() -> None:
    """Let torch forget what it knows of DTensors: parts of a process that was another rank then."""
    if "torch.distributed.tensor" in sys.modules:
        from torch.distributed.tensor import DTensor, _redistribute, debug

        if hasattr(debug, "_clear_sharding_prop_cache"):
            debug._clear_sharding_prop_cache()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        else:  # up to 2.9
            propagator: Any = DTensor._op_dispatcher.sharding_propagator
            propagator.propagate_op_sharding.cache.cache_clear()
        _redistribute._gen_transform_infos.cache_clear()


def has_been_called(module: Any) -> bool:
    """Return whether a module that ``fully_shard`` sharded has been called: before, it has no state of a step."""
    return module._get_fsdp_state()._is_root is not None


def reset_step(root: Any) -> None:
    """Let the outermost part of a sharded module forget a step that an error has ended."""
    if hasattr(root, "reset_iter_state"):
        root.reset_iter_state()
        return
    shared = root._get_fsdp_state()._state_ctx
    if shared.iter_forward_root is not None or shared.post_backward_final_callback_queued:
        raise RuntimeError(
            "a sharded module must be whole again after an error in a step, got one that cannot forget the step with "
            f"torch {torch.__version__}. Install torch 2.10 or later, or make the module anew."
        )


def check_finds_unused(*, finds_unused: bool) -> None:
    """Refuse to look for unused parameters of a sharded module where torch cannot."""
    from torch.distributed.fsdp import FSDPModule

    if finds_unused and not hasattr(FSDPModule, "set_reduce_scatter_unused_params"):
        raise ValueError(
            f"find_unused_parameters must be False for wrap_fsdp with torch {torch.__version__}, got True. Install "
            "torch 2.12 or later, or let every step use all parameters."
        )


def storage_info() -> Any:
    """Return the class that says where in a sharded checkpoint an entry lies."""
    from torch.distributed.checkpoint import filesystem

    return filesystem._StorageInfo


def pickle_in(file: IO[bytes]) -> bytes:
    record: bytes = torch._C.PyTorchFileReader(file).get_record("data.pkl")
    return record


# Workers of a DataLoader


def is_loader_worker(process: BaseProcess) -> bool:
    """Return whether a process of ``multiprocessing`` is a worker of a DataLoader."""
    return getattr(process, "_target", None) is worker._worker_loop


@contextlib.contextmanager
def as_only_worker() -> Iterator[None]:
    """Let ``get_worker_info`` answer in a worker as if it were the only one; elsewhere it answers None as ever."""
    info: Any = worker._worker_info
    if info is not None:
        alone = copy.copy(info)
        for name, value in {"id": 0, "num_workers": 1}.items():
            object.__setattr__(alone, name, value)  # it refuses to be set
        worker._worker_info = alone
    try:
        yield
    finally:
        worker._worker_info = info
