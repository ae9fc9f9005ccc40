"""Many tensors, one all_reduce."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, TypeVar, overload

import torch
import torch.distributed as dist

from distman._coordination.wait_scope import WaitScope, raise_if_failed, traceable_collective
from distman._job.groups.registry import Group, process_group_of
from distman._torch_internals import (
    EagerFunction,
    all_reduce_traced,
    are_simple,
    is_plain,
    outside_graphs,
    traced_by,
    untraced,
)
from distman.collectives import _debug
from distman.collectives._all_reduce import sum_in_rank_order
from distman.collectives._border import carried, refuse
from distman.collectives._exchange import begin_all_reduce, begin_sum, control_device
from distman.collectives._fused_layout import OPERATIONS, Layout, Rebuild, find_layout, flatten, kind_of, stack_alike
from distman.collectives._headers import HEADER_WORDS, MESSAGE_WORDS, check_signed, refuse_in_sum, signed_message
from distman.collectives._result_memory import new_empty
from distman.collectives._transport import carrier_of, reaches_all
from distman.collectives._validation import GroupLike, resolve_group
from distman.errors import DistmanError, JobFailed
from distman.manager import DistributedManager

T = TypeVar("T")


@overload
def fused_all_reduce(
    tensors: T,
    *,
    op: Any = dist.ReduceOp.SUM,
    group: GroupLike = None,
    buffer_dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    async_op: Literal[False] = False,
) -> T: ...


@overload
def fused_all_reduce(
    tensors: T,
    *,
    op: Any = dist.ReduceOp.SUM,
    group: GroupLike = None,
    buffer_dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    async_op: Literal[True],
) -> tuple[T, FusedWork]: ...


@traceable_collective
def fused_all_reduce(
    tensors: Any,
    *,
    op: Any = dist.ReduceOp.SUM,
    group: GroupLike = None,
    buffer_dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    async_op: bool = False,
) -> Any:
    """Reduce many tensors over all ranks with one collective, and return them in the structure they came in.

    Collective. Blocking unless ``async_op``. Differentiable for sums and averages: gradients are reduced
    alike.

    Ranks that differ in keys, shapes or dtypes are found, except under :func:`torch.compile`.

    Args:
        tensors: A tensor, or a list, tuple, mapping or TensorDict of tensors, nested too. Ranks may hold the keys of
            a mapping in different order.
        op: :class:`torch.distributed.ReduceOp` SUM, AVG, MAX, MIN or PRODUCT, or its name.
        group: A process group, the name of one, or None for the world.
        buffer_dtype: Dtype to which all are converted for the reduction; None takes the widest among them, and
            float32 at least for floats. Integers alone are reduced exactly.
        device: Device of the reduction; None takes that of the first tensor.
        async_op: Return when the data are under way, with results that carry no gradient, and this rank's values until
            they are reduced.

    Returns:
        New tensors in the same structure, each of its own dtype, on its own device; up to 512 elements in all may be
        parts of one storage. With ``async_op`` a pair of that and a :class:`FusedWork`, after whose ``wait()`` the
        results are there.

    Raises:
        TypeError: Something in the structure is no tensor, or one that messages do not carry; or another argument is of
            a wrong type.
        ValueError: The operation is unknown, integers are beside floats without ``buffer_dtype``, or the average of
            integers is asked for.
        PlanMismatchError: On every rank: the ranks differ in keys, shapes, dtypes or operation, or one of them was
            given what messages cannot carry.

    Example on two ranks:
        >>> sums = {"loss": torch.tensor(0.5 + rank), "samples": torch.tensor([8.0, 4.0])}
        >>> fused_all_reduce(sums)
        {'loss': tensor(2.), 'samples': tensor([16.,  8.])}
    """
    if torch.compiler.is_compiling():
        call = _prepare(tensors, op, group, buffer_dtype, device, is_async=async_op)
        buffer, process_group = call.layout.pack(call.values), process_group_of(call.group)
        if process_group is not None:
            operation = "sum" if call.layout.is_sum else call.layout.operation
            buffer = all_reduce_traced(buffer, operation, process_group)
        traced = call.rebuild(iter(call.layout.unpack(buffer, call.group.size)))
        return (traced, FusedWork(None)) if async_op else traced
    try:
        call = _prepare(tensors, op, group, buffer_dtype, device, is_async=async_op)
    except (TypeError, ValueError) as error:
        if not DistributedManager.is_initialized():
            raise
        refuse(error, "fused_all_reduce", resolve_group(group), refuse_in_sum)
    values, layout, rebuild, members = call.values, call.layout, call.rebuild, call.group
    _debug.compare_calls("fused_all_reduce", members, op=layout.operation, tensors=layout.text, grad=call.needs_grad)
    if async_op:
        results, work = _reduce_later([value.detach() for value in values], layout, members)
        return rebuild(iter(results)), work
    if call.needs_grad:
        return rebuild(iter(_FusedAllReduce.apply(layout, members, *values)))
    buffer = layout.pack(values) if call.stacked is None else layout.flat(call.stacked)
    return rebuild(iter(_launch(buffer, layout, members)()))


class _Prepared(NamedTuple):
    values: list[torch.Tensor]
    stacked: torch.Tensor | None  # the values along a new first dim, where that takes less time
    layout: Layout
    rebuild: Rebuild
    needs_grad: bool
    group: Group


def _prepare(
    tensors: Any,
    op: Any,
    group: GroupLike,
    buffer_dtype: torch.dtype | None,
    device: torch.device | str | None,
    *,
    is_async: bool,
) -> _Prepared:
    paths, values, rebuild = flatten(tensors)
    operation = _name_of(op)
    if buffer_dtype is not None and not isinstance(buffer_dtype, torch.dtype):
        raise TypeError(f"buffer_dtype must be a torch.dtype or None, got {buffer_dtype!r}. Pass torch.float64, say.")
    place = torch.device(device) if device is not None else values[0].device if values else None
    members = resolve_group(group)
    is_traced = torch.compiler.is_compiling()
    needs_grad = torch.is_grad_enabled() and True in [value.requires_grad for value in values]
    stacked = None
    if not is_traced:
        may_stack = not (is_async or needs_grad)
        values, stacked = _carried(values, paths, members if device is None else None, may_stack=may_stack)
        if place is not None and place.type in members.device_types:
            place = carrier_of(place, process_group_of(members))
    kinds = tuple([kind_of(value) for value in (values if stacked is None else values[:1])])
    place = place if place is not None else DistributedManager().device
    layout = find_layout(operation, buffer_dtype, place, paths, kinds)
    return _Prepared(values, stacked, layout, rebuild, needs_grad, members)


def _carried(
    values: list[torch.Tensor], paths: Sequence[str], group: Group | None, *, may_stack: bool
) -> tuple[list[torch.Tensor], torch.Tensor | None]:
    """Return tensors as such that messages can carry, and stacked where that takes less time."""
    if not traced_by() and are_simple(values):
        stacked = stack_alike(values) if may_stack else None
        if stacked is not None and is_plain(stacked):
            carried(values[0], group, f"tensors{paths[0]}")
            return values, stacked
        with contextlib.suppress(RuntimeError):  # a nested tensor has no shape
            places = {kind_of(value): place for place, value in enumerate(values)}
            for place in places.values():
                carried(values[place], group, f"tensors{paths[place]}")
            return values, None
    values = [carried(value, group, f"tensors{path}") for value, path in zip(values, paths, strict=True)]
    return values, stack_alike(values) if may_stack else None


class FusedWork:
    """A reduction under way, as :func:`fused_all_reduce` returns it with ``async_op=True``.

    Args:
        finish: Waits for it and fills the results; None if they are there.

    Example on two ranks:
        >>> total, work = fused_all_reduce(torch.tensor([1.0, rank]), async_op=True)
        >>> work.is_completed()
        False
        >>> work.wait()
        True
        >>> total
        tensor([2., 1.])
    """

    def __init__(self, finish: Callable[[], None] | None) -> None:
        self._finish = finish
        self._error: BaseException | None = None

    def wait(self) -> bool:
        """Wait until the results are there; again and again if you like.

        Collective where :func:`fused_all_reduce` was. Blocking.

        Returns:
            True, as of torch's work.

        Raises:
            PlanMismatchError: On every rank: the ranks differ in keys, shapes, dtypes or operation.
            DistmanError: An earlier wait was interrupted, by Ctrl-C say.
        """
        finish, self._finish = self._finish, None
        if finish is not None:
            self._error = DistmanError(
                "wait() must last until the results are there, got an interruption of an earlier one. They do not "
                "arrive any more, and the group's connections are closed: reduce again in a new group."
            )
            try:
                _wait_for(finish)
            except (Exception, JobFailed) as error:  # raised here, and again by every later wait
                self._error = error
                raise
            self._error = None
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        """Return whether the results are there: on one process, and after a :meth:`wait` that did not raise.

        Local.
        """
        return self._finish is None and self._error is None


@outside_graphs
def _wait_for(finish: Callable[[], None]) -> None:
    with WaitScope("wait() of fused_all_reduce"):
        raise_if_failed()
        finish()


@outside_graphs
def _reduce_later(values: Sequence[torch.Tensor], layout: Layout, group: Group) -> tuple[list[torch.Tensor], FusedWork]:
    """Return tensors that hold the values until the work is done, and the work."""
    finish = _launch(layout.pack(values), layout, group, is_async=True)
    if group.size == 1:
        return finish(), FusedWork(None)
    results = [value.clone(memory_format=torch.contiguous_format) for value in values]

    def fill() -> None:
        for result, value in zip(results, finish(), strict=True):
            result.copy_(value)

    return results, FusedWork(fill)


@outside_graphs
def _launch(
    buffer: torch.Tensor, layout: Layout, group: Group, *, is_async: bool = False
) -> Callable[[], list[torch.Tensor]]:
    """Send what can be sent at once, and return what waits for the results."""
    if group.size == 1:
        return lambda: layout.unpack(_own(buffer, layout), 1)
    place = control_device(group, layout.device)  # not a GPU's, which the host would have to wait for
    message = signed_message(layout.text, place).clone()
    end = HEADER_WORDS + layout.num_words
    room = message[HEADER_WORDS:end] if layout.is_sum and place == layout.device and end <= MESSAGE_WORDS else None
    if room is not None:
        room.copy_(layout.to_words(buffer))
    elif is_async or not (layout.is_sum and layout.device.type == "cpu" and reaches_all(group, layout.device)):
        message[HEADER_WORDS] = 1  # then no rank sums the data by exchanges within its host
    finish_message = begin_sum(message, group)

    def finish_room() -> list[torch.Tensor]:
        total = finish_message()
        check_signed(total, layout.text, group)
        return layout.unpack(layout.from_words(total[HEADER_WORDS:end]), group.size)

    if room is not None:
        return finish_room
    signed = finish_message()
    check_signed(signed, layout.text, group)
    if signed[HEADER_WORDS] == 0:
        total = sum_in_rank_order(buffer, group)
        return lambda: layout.unpack(total, group.size)
    buffer = _own(buffer, layout)
    finish_buffer = begin_all_reduce(buffer, layout.reduce_op, group)
    return lambda: layout.unpack(finish_buffer(), group.size)


def _own(buffer: torch.Tensor, layout: Layout) -> torch.Tensor:
    return new_empty(buffer, buffer.shape).copy_(buffer) if layout.is_sent_as_it_is else buffer


class _FusedAllReduce(EagerFunction):
    @staticmethod
    def forward(ctx: Any, layout: Layout, group: Group, *values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.layout, ctx.group = layout, group
        values = _still_carried(values, layout, group)
        results = _launch(layout.pack(values), layout, group)()
        ctx.mark_non_differentiable(*(one for one in results if not (one.is_floating_point() or one.is_complex())))
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        layout: Layout = ctx.layout
        if not layout.is_sum:
            raise ValueError(
                f"fused_all_reduce must sum or average to have a gradient, got {layout.operation}. Detach its inputs."
            )
        return None, None, *_FusedAllReduce.apply(layout, ctx.group, *grads)


def _still_carried(values: tuple[torch.Tensor, ...], layout: Layout, group: Group) -> tuple[torch.Tensor, ...]:
    try:
        return tuple(carried(value, None, f"gradient{row[0]}") for value, row in zip(values, layout.rows, strict=True))
    except (TypeError, ValueError) as error:
        with untraced():
            refuse_in_sum(error, "a backward pass of fused_all_reduce", group)
        raise


def taken_apart(tensors: Any, op: Any, buffer_dtype: torch.dtype | None) -> tuple[list[torch.Tensor], Rebuild]:
    """Return what :func:`fused_all_reduce` would reduce, and what makes the like of it; raise what it refuses."""
    paths, values, rebuild = flatten(tensors)
    kinds = tuple(kind_of(value) for value in values)
    find_layout(_name_of(op), buffer_dtype, torch.device("cpu"), paths, kinds)
    return values, rebuild


def _name_of(op: Any) -> str:
    if isinstance(op, str) and op.lower() in OPERATIONS:
        return op.lower()
    for name, known in OPERATIONS.items():
        if op is known:  # torch.compile follows it in every version
            return name
    is_torchs = isinstance(op, (dist.ReduceOp, dist.ReduceOp.RedOpType))  # whose numbers are equal to integers
    for name, known in OPERATIONS.items():
        if is_torchs and op == known:
            return name
    error = ValueError if isinstance(op, str) or is_torchs else TypeError
    raise error(f"op must be one of {', '.join(OPERATIONS)}, got {op!r}. Choose one.")
