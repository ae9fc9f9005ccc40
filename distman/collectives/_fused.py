"""Many tensors, one all_reduce."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from distman._coordination.wait_scope import collective
from distman._groups.registry import Group
from distman._torch_internals import all_reduce_traced
from distman.collectives import _debug
from distman.collectives._headers import HEADER_WORDS, MESSAGE_WORDS, is_signed_by_all, signed_message
from distman.collectives._objects import all_gather_objects
from distman.collectives._structure import leaves, rebuild
from distman.collectives._validation import GroupLike, check_tensor, resolve_group
from distman.errors import PlanMismatchError
from distman.manager import DistributedManager

_OPERATIONS = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.AVG,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "product": dist.ReduceOp.PRODUCT,
}


@collective
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

    Collective. Blocking unless ``async_op``. Differentiable for sums and averages: the gradient is reduced alike.

    Up to 4 kB of data travel in one message together with a signature of keys, shapes and dtypes, by which ranks that
    differ are found; more data follow that message. Under ``torch.compile`` the ranks are not compared.

    Args:
        tensors: A tensor, or a list, tuple, mapping or TensorDict of tensors, nested too. Ranks may hold the keys of
            a mapping in different order.
        op: ``torch.distributed.ReduceOp`` SUM, AVG, MAX, MIN or PRODUCT, or its name.
        group: A process group, the name of one, or None for the world.
        buffer_dtype: Dtype to which all are converted for the reduction; None takes the widest among them, and
            float32 at least for floats. Integers alone are reduced exactly.
        device: Device of the reduction; None takes that of the first tensor.
        async_op: Return at once, with results that are filled later and carry no gradient.

    Returns:
        New tensors in the same structure, each of its own dtype, on its own device; with ``async_op`` a pair of that
        and a :class:`FusedWork`, after whose ``wait()`` the results are there.

    Raises:
        TypeError: Something in the structure is no tensor.
        ValueError: The operation is unknown, integers are beside floats without ``buffer_dtype``, or the average of
            integers is asked for.
        PlanMismatchError: On every rank: the ranks differ in keys, shapes, dtypes or operation.
    """
    members = resolve_group(group)
    paths, values = [], []
    for path, tensor in leaves(tensors):
        paths.append(path)
        values.append(tensor)
    operation = _name_of(op)
    if device is None:
        for value in {(value.dtype, value.device): value for value in values}.values():
            check_tensor(value, members)
    layout = _find_layout(values, operation, buffer_dtype, device, paths)
    if torch.compiler.is_compiling():
        traced = rebuild(tensors, iter(_reduce_traced(values, layout, members)))
        return (traced, FusedWork(_do_nothing)) if async_op else traced
    needs_grad = torch.is_grad_enabled() and any(value.requires_grad for value in values)
    _debug.compare("fused_all_reduce", members, op=operation, tensors=layout.text, grad=needs_grad)
    if async_op:
        results = [torch.empty_like(value, memory_format=torch.contiguous_format).detach() for value in values]
        finish = _launch([value.detach() for value in values], layout, members)
        return rebuild(tensors, iter(results)), FusedWork(lambda: _fill(results, finish()))
    if needs_grad:
        return rebuild(tensors, iter(_FusedAllReduce.apply(layout, members, *values)))
    return rebuild(tensors, iter(_launch(values, layout, members)()))


class FusedWork:
    """A reduction under way.

    Args:
        finish: Waits for it and fills the results.
    """

    def __init__(self, finish: Callable[[], None]) -> None:
        self._finish: Callable[[], None] | None = finish
        self._error: Exception | None = None

    def wait(self) -> bool:
        """Wait until the results are there; again and again if you like.

        Collective where :func:`fused_all_reduce` was. Blocking.

        Raises:
            PlanMismatchError: On every rank: the ranks differ in keys, shapes, dtypes or operation.
        """
        finish, self._finish = self._finish, None
        try:
            if finish is not None:
                finish()
        except Exception as error:  # raised here, and again by every later wait
            self._error = error
            raise
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        """Return whether :meth:`wait` was called.

        Local.
        """
        return self._finish is None


@dataclass(frozen=True)
class _Layout:
    """How tensors become one buffer.

    Attributes:
        operation: Name of the reduction.
        dtype: Dtype of the buffer; complex numbers are pairs of it.
        device: Device of the buffer.
        rows: Path, shape, dtype and device of each tensor.
        lengths: Number of elements of the buffer that each takes.
        is_uniform: Whether all are of one shape and one real dtype, and on one device.
    """

    operation: str
    dtype: torch.dtype
    device: torch.device
    rows: tuple[tuple[str, torch.Size, torch.dtype, torch.device], ...]
    lengths: list[int]
    is_uniform: bool

    @functools.cached_property
    def text(self) -> str:
        """What must be equal on all ranks, as JSON."""
        rows = [[path, shape, str(dtype)] for path, shape, dtype, _ in self.rows]
        return json.dumps([self.operation, str(self.dtype), rows])

    @functools.cached_property
    def empty_message(self) -> torch.Tensor:
        """The first message, without data."""
        return signed_message(self.text, torch.float64 if self.dtype.is_floating_point else torch.int64, self.device)

    @property
    def is_sum(self) -> bool:
        return self.operation in ("sum", "avg")

    def pack(self, values: Sequence[torch.Tensor]) -> torch.Tensor:
        if self.is_uniform:
            return torch.stack(list(values)).to(self.device, self.dtype).contiguous().view(-1)
        flat = [_as_real(value).reshape(-1).to(self.device, self.dtype) for value in values]
        return torch.cat(flat) if flat else torch.empty(0, dtype=self.dtype, device=self.device)

    def unpack(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        """Return new tensors with the contents of the buffer."""
        if self.is_uniform:
            _, shape, dtype, device = self.rows[0]
            stacked = buffer.to(device, dtype).view(len(self.rows), *shape)
            parts: Any = torch.unbind_copy(stacked)  # type: ignore[func-returns-value]  # typed as None
            return list(parts)
        pieces = zip(buffer.split(self.lengths), self.rows, strict=True)
        return [_restore(part, shape, dtype, device) for part, (_, shape, dtype, device) in pieces]


def _restore(part: torch.Tensor, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if dtype.is_complex:
        return torch.view_as_complex(part.to(device, dtype.to_real(), copy=True).view(*shape, 2))
    return part.to(device, dtype, copy=True).view(shape)


def _find_layout(
    values: Sequence[torch.Tensor],
    operation: str,
    buffer_dtype: torch.dtype | None,
    device: torch.device | str | None,
    paths: Sequence[str],
) -> _Layout:
    place = device if device is not None else values[0].device if values else DistributedManager().device
    rows = tuple([(path, value.shape, value.dtype, value.device) for path, value in zip(paths, values, strict=True)])
    make = _make_layout.__wrapped__ if torch.compiler.is_compiling() else _make_layout
    return make(operation, buffer_dtype, torch.device(place), rows)


@functools.lru_cache(maxsize=64)
def _make_layout(
    operation: str,
    buffer_dtype: torch.dtype | None,
    device: torch.device,
    rows: tuple[tuple[str, torch.Size, torch.dtype, torch.device], ...],
) -> _Layout:
    """Return the layout for these tensors; a program asks for a few, again and again."""
    dtype = _buffer_dtype([dtype for _, _, dtype, _ in rows], operation, buffer_dtype)
    lengths = [shape.numel() * (2 if kind.is_complex else 1) for _, shape, kind, _ in rows]
    kinds = {row[1:] for row in rows}
    return _Layout(operation, dtype, device, rows, lengths, len(kinds) == 1 and not rows[0][2].is_complex)


def _launch(values: Sequence[torch.Tensor], layout: _Layout, group: Group) -> Callable[[], list[torch.Tensor]]:
    """Send what can be sent at once, and return what waits for the results."""
    buffer = layout.pack(values)
    if group.size == 1:
        return lambda: layout.unpack(buffer)
    message = layout.empty_message.clone()
    fits = layout.is_sum and buffer.numel() <= MESSAGE_WORDS - HEADER_WORDS
    room = message[HEADER_WORDS : HEADER_WORDS + buffer.numel()].copy_(buffer) if fits else None
    work = dist.all_reduce(message, group=group.process_group, async_op=True)
    if room is None:
        work.wait()
        _check(message, layout, group)
        work = dist.all_reduce(buffer, _reduce_op(layout), group=group.process_group, async_op=True)

    def finish() -> list[torch.Tensor]:
        work.wait()
        if room is not None:
            _check(message, layout, group)
        total = buffer if room is None else room.to(layout.dtype)
        return layout.unpack(_averaged(total, layout, group))

    return finish


def _check(message: torch.Tensor, layout: _Layout, group: Group) -> None:
    """Raise on all ranks if their signatures differ."""
    if is_signed_by_all(message[:HEADER_WORDS].tolist(), group.size):
        return
    texts = all_gather_objects(layout.text, group.process_group)
    rows = [f"  rank {rank}: {_describe(text, texts)}" for rank, text in zip(group.ranks, texts, strict=True)]
    raise PlanMismatchError(
        "all ranks must bring the same keys, shapes, dtypes and operation to fused_all_reduce. They bring:\n"
        + "\n".join(rows)
    )


def _describe(text: str, texts: Sequence[str]) -> str:
    """Return what one rank brings that not all ranks bring."""
    operation, dtype, rows = json.loads(text)
    common = set.intersection(*({json.dumps(row) for row in json.loads(other)[2]} for other in texts))
    own = [
        f"{path or 'the tensor'} {shape} {kind}"
        for path, shape, kind in rows
        if json.dumps([path, shape, kind]) not in common
    ]
    return f"{operation} in {dtype} of {len(rows)} tensors" + (f", among them {', '.join(own[:8])}" if own else "")


def _averaged(total: torch.Tensor, layout: _Layout, group: Group) -> torch.Tensor:
    return total / group.size if layout.operation == "avg" else total


def _fill(results: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
    for result, value in zip(results, values, strict=True):
        result.copy_(value)


def _reduce_op(layout: _Layout) -> Any:
    return dist.ReduceOp.SUM if layout.is_sum else _OPERATIONS[layout.operation]


class _FusedAllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, layout: _Layout, group: Group, *values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.layout, ctx.group = layout, group
        results = _launch(values, layout, group)()
        ctx.mark_non_differentiable(*(result for result in results if not _carries_gradient(result)))
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        if not ctx.layout.is_sum:
            raise ValueError(
                f"fused_all_reduce must sum or average to have a gradient, got {ctx.layout.operation}. "
                "Detach its inputs."
            )
        return None, None, *_FusedAllReduce.apply(ctx.layout, ctx.group, *grads)


def _reduce_traced(values: Sequence[torch.Tensor], layout: _Layout, group: Group) -> list[torch.Tensor]:
    """Reduce in a way that ``torch.compile`` can follow, gradients included."""
    buffer = layout.pack(values)
    if group.process_group is not None:
        buffer = all_reduce_traced(buffer, "sum" if layout.is_sum else layout.operation, group.process_group)
    return layout.unpack(_averaged(buffer, layout, group))


def _do_nothing() -> None:
    """Finish a reduction that the compiled program waits for by itself."""


def _carries_gradient(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _as_real(tensor: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def _buffer_dtype(dtypes: Sequence[torch.dtype], operation: str, wish: torch.dtype | None) -> torch.dtype:
    floats = [dtype for dtype in dtypes if dtype.is_floating_point or dtype.is_complex]
    if any(dtype.is_complex for dtype in dtypes) and operation not in ("sum", "avg"):
        raise ValueError(
            f"complex tensors must be summed or averaged, got op {operation}. Reduce their real and imaginary parts."
        )
    if wish is not None:
        if wish.is_complex or wish == torch.bool:
            raise ValueError(
                f"buffer_dtype must be a float or integer dtype, got {wish}. Choose one such as torch.float64."
            )
        return wish
    if floats and len(floats) < len(dtypes):
        raise ValueError(
            "tensors must be all integers or all floats unless buffer_dtype says what to convert them to, got "
            f"{', '.join(sorted({str(dtype) for dtype in dtypes}))}. Reduce the integers separately, or set "
            "buffer_dtype."
        )
    if not floats and operation == "avg":
        raise ValueError("integers must not be averaged, got op avg. Sum them, or set buffer_dtype to a float.")
    if not floats:
        return torch.int64
    return functools.reduce(torch.promote_types, (_real_dtype(dtype) for dtype in floats), torch.float32)


def _real_dtype(dtype: torch.dtype) -> torch.dtype:
    return dtype.to_real() if dtype.is_complex else dtype


def _name_of(op: Any) -> str:
    if isinstance(op, str) and op.lower() in _OPERATIONS:
        return op.lower()
    for name, known in _OPERATIONS.items():
        if op == known:
            return name
    raise ValueError(f"op must be one of {', '.join(_OPERATIONS)}, got {op}. Choose one.")
