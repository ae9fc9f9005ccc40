"""What all transforms have in common: their last arguments, what is said of these, and what a call may raise."""

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


class Layout(TypedDict, total=False):
    """The arguments by keyword that all transforms have, with the default None; users see them one by one."""

    shard_dim: int | None
    out_dim: int | None
    sizes: Sequence[int] | None
    out_sizes: Sequence[int] | None
    group: GroupLike


_LAYOUT = typing.get_type_hints(Layout)

_ARGS = """
    shard_dim: {which} along which the input is sharded; None: {shard_dim}.
    out_dim: {which} along which the result shall be sharded; None: {out_dim}.
    sizes: Lengths of all input shards along ``shard_dim``, the same list on all ranks; None lets the ranks exchange
        them.
    out_sizes: Lengths of the result's shards along ``out_dim``; None: {out_sizes}.
    group: A process group, the name of one, or None for the world.

Returns:
"""
_RAISES = """

Raises:
    TypeError: The tensor is a DTensor, or of another class that messages do not carry.
    ValueError: Dims, lengths, norm, sizes, dtype or group do not fit; without ``sizes`` on every rank: the shards
        differ in dtype or in another dim.
    PlanMismatchError: On every rank that waits: another one was given what messages cannot carry. In debug mode on
        all: the ranks call differently.

Example on two ranks:
"""


def transform(
    which: str, *, shard_dim: str, out_dim: str, out_sizes: str = ":func:`distman.split_sizes`"
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a decorator for transforms that completes signature and docstring; the texts say what None stands for."""
    args = _ARGS.format(which=which, shard_dim=shard_dim, out_dim=out_dim, out_sizes=out_sizes)

    def complete(func: Callable[P, R]) -> Callable[P, R]:
        signature = inspect.signature(func)
        own = list(signature.parameters.values())[:-1]
        layout = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
            for name, annotation in _LAYOUT.items()
        ]
        func.__signature__ = signature.replace(parameters=[*own, *layout])  # type: ignore[attr-defined]  # inspect's
        del func.__annotations__["layout"]
        func.__annotations__ |= _LAYOUT
        text = inspect.cleandoc(func.__doc__ or "")
        func.__doc__ = text.replace("\n\nReturns:\n", args).replace("\n\nExample on two ranks:\n", _RAISES)
        known = {*func.__signature__.parameters}  # type: ignore[attr-defined]  # as above

        @functools.wraps(func)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            for name in kwargs.keys() - known:
                raise TypeError(f"{func.__name__}() got an unexpected keyword argument {name!r}")
            return func(*args, **kwargs)

        return collective(call)

    return complete
