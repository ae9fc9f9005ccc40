"""What all transforms have in common: their last arguments, and what their docstrings say besides a first sentence."""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import Callable, Sequence
from typing import ParamSpec, TypedDict, TypeVar

from distman._coordination.wait_scope import collective
from distman.collectives import GroupLike

P = ParamSpec("P")
R = TypeVar("R")
Length = int | None
Lengths = Sequence[int | None] | None
Dims = Sequence[int] | None
Norm = str | None


class Layout(TypedDict, total=False):
    """The arguments by keyword that all transforms have, with the default None; users see them one by one."""

    shard_dim: int | None
    out_dim: int | None
    sizes: Sequence[int] | None
    out_sizes: Sequence[int] | None
    group: GroupLike


_LAYOUT = typing.get_type_hints(Layout)
_TAKES_AND_RETURNS = {
    "fft": ("real or complex", "the spectrum, complex"),
    "ifft": ("real or complex", "the signal, complex"),
    "rfft": ("real", "half of the spectrum, complex, with n // 2 + 1 frequencies along the last dim"),
    "irfft": ("half of a spectrum", "the signal, real"),
    "hfft": ("half of a Hermitian signal", "the spectrum, real"),
    "ihfft": ("a real spectrum", "half of the signal, complex, with n // 2 + 1 points"),
}
_ONE_DIM = {
    "length": "n: Length",
    "dim": "The transformed dim",
    "which": "The dim",
    "shard_dim": "the transformed one",
    "out_dim": "``shard_dim``",
    "out_sizes": "those of the input where that is sharded\n"
    "        along the same dim and another one is transformed, else :func:`distman.split_sizes`",
}
_SEVERAL_DIMS = {
    "length": "s: Lengths along ``dim``",
    "dim": "The transformed dims, two or more; None: the last ``len(s)`` ones, or all",
    "which": "The transformed dim",
    "out_sizes": ":func:`distman.split_sizes`",
}
_FORWARD = {"shard_dim": "the first one", "out_dim": "the last one that is not ``shard_dim``"}
_INVERSE = {"shard_dim": "the last one", "out_dim": "the first one that is not ``shard_dim``"}
_TO_REAL = ", and makes\n        ``2 * (m - 1)`` of m points in all along the last dim: pass an odd length"
_TEXT = """

Collective. Blocking. Differentiable, twice too; a backward pass does as much work.

Args:
    tensor: This rank's shard, {takes}, shape ``(*, m, *)`` with m at ``shard_dim``;
        m may differ between ranks and be 0.
    {length} of the full signal, cut or filled up with zeros at the end; None keeps what is there{to_real}.
    dim: {dim}.
    norm: ``"backward"`` (None) scales the inverse by one over the number of points, ``"forward"`` the other one,
        ``"ortho"`` both by the root.
    shard_dim: {which} along which the input is sharded; None: {shard_dim}.
    out_dim: {which} along which the result shall be sharded; None: {out_dim}.
    sizes: Lengths of all input shards along ``shard_dim``, the same list on all ranks; None lets the ranks exchange
        them.
    out_sizes: Lengths of the result's shards along ``out_dim``; None: {out_sizes}.
    group: A process group, the name of one, or None for the world.

Returns:
    This rank's shard of {returns}. It has the input's
    precision, or that of float32 for input of 16 bits, which needs autocast. It need not be contiguous.

Raises:
    TypeError: The tensor is a DTensor, or of another class that messages do not carry.
    ValueError: Dims, lengths, norm, sizes, dtype or group do not fit; without ``sizes`` on every rank: the shards
        differ in dtype or in another dim.
    PlanMismatchError: On every rank that waits: another one was given what messages cannot carry. In debug mode on
        all: the ranks call differently.

Example on two ranks:
"""


def transform(func: Callable[P, R]) -> Callable[P, R]:
    """Make a function a collective, and complete its signature and docstring by what its name says."""
    name = func.__name__
    kind = name.rstrip("2n")
    texts = _ONE_DIM if kind == name else _SEVERAL_DIMS | (_INVERSE if kind.startswith("i") else _FORWARD)
    takes, returns = _TAKES_AND_RETURNS[kind]
    to_real = _TO_REAL if kind in ("irfft", "hfft") else ""
    text = _TEXT.format(takes=takes, returns=returns, to_real=to_real, **texts)
    func.__doc__ = inspect.cleandoc(func.__doc__ or "").replace("\n\nExample on two ranks:\n", text)

    hints = typing.get_type_hints(func)
    del hints["layout"]
    signature = inspect.signature(func)
    parameters = [one.replace(annotation=hints[one.name]) for one in list(signature.parameters.values())[:-1]]
    parameters += [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
        for name, annotation in _LAYOUT.items()
    ]
    func.__annotations__ = hints | _LAYOUT
    func.__signature__ = signature.replace(parameters=parameters, return_annotation=hints["return"])  # type: ignore[attr-defined]  # inspect's
    known = {one.name for one in parameters}

    @functools.wraps(func)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        for name in kwargs.keys() - known:
            raise TypeError(f"{func.__name__}() got an unexpected keyword argument {name!r}")
        return func(*args, **kwargs)

    return collective(call)
