"""Linear maps of the ranks' tensors, whose derivatives of any order are the map itself and its adjoint."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from distman._torch_internals import EagerFunction

LinearMap = Callable[..., torch.Tensor]  # of a tensor, and of arguments that its adjoint takes too


def linear(tensor: torch.Tensor, run: LinearMap, adjoint: LinearMap, *arguments: object) -> torch.Tensor:
    """Return ``run(tensor, *arguments)``; its gradient is ``adjoint(gradient, *arguments)``, and so on."""
    result: torch.Tensor = _Linear.apply(tensor, run, adjoint, arguments)
    return result


class _Linear(EagerFunction):
    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, run: LinearMap, adjoint: LinearMap, arguments: tuple[object, ...]
    ) -> torch.Tensor:
        ctx.run, ctx.adjoint, ctx.arguments = run, adjoint, arguments
        return run(tensor, *arguments)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        if torch.is_grad_enabled():
            return linear(grad, ctx.adjoint, ctx.run, *ctx.arguments), None, None, None
        return ctx.adjoint(grad, *ctx.arguments), None, None, None
