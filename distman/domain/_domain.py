"""What the layers of one decomposed model share: which dims are split over which groups, and how their inputs are."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from distman._coordination.wait_scope import collective
from distman.collectives import GroupLike, all_gather_v, check_call, resolve_group
from distman.domain._axes import Axis, Boundary, Layout, Windows, layout_of, set_layout
from distman.domain._guard import Guard
from distman.domain._halo import Fetch
from distman.errors import DistmanError


class Domain:
    """The state of a decomposed model, which its layers share and which is no part of its state dict."""

    def __init__(self, dims: Mapping[int, GroupLike]) -> None:
        self.dims = dict(dims)
        self.guard: Guard | None = None  # while the model runs

    def begin(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Find out how the inputs are split, and watch over the functions that compute on them."""
        if self.guard is not None:
            raise DistmanError(f"a decomposed {type(module).__name__} must not call itself. Decompose its parts.")
        tensors = [one for one in (*args, *kwargs.values()) if isinstance(one, torch.Tensor)]
        ndim = tensors[0].ndim if tensors else 0
        if ndim < max(-dim for dim in self.dims):
            raise ValueError(
                f"the first tensor given to a decomposed {type(module).__name__} must have the dims {list(self.dims)}, "
                f"got one of {ndim} dims. Pass the block of a field."
            )
        fields = [one for one in tensors if one.ndim == ndim]
        layouts: list[Layout] = [{} for _ in fields]
        for dim, group in self.dims.items():
            cuts: tuple[int, ...] = ()
            for layout, sizes in zip(layouts, _sizes(fields, dim, group), strict=True):
                cuts = cuts or tuple(itertools.accumulate(sizes))
                layout[dim] = Axis(group, sum(sizes), cuts, dim)
                if layout[dim].sizes != tuple(sizes):
                    raise ValueError(
                        f"fields of length {sum(sizes)} along dim {dim} must be split into {list(layout[dim].sizes)} "
                        f"where the first one is into shards that end at {list(cuts)}, got {sizes}. Split them alike."
                    )
        for field, layout in zip(fields, layouts, strict=True):
            set_layout(field, layout)
        self.guard = Guard()
        self.guard.__enter__()

    def end(self, *_: Any) -> None:
        guard, self.guard = self.guard, None
        if guard is not None:
            guard.__exit__(None, None, None)

    def __deepcopy__(self, memo: dict[int, Any]) -> Domain:
        copy = Domain(self.dims)  # groups are not copied
        memo[id(self)] = copy
        return copy


def _sizes(fields: list[torch.Tensor], dim: int, group: GroupLike) -> list[list[int]]:
    """Return the lengths of all ranks' shards, for each field."""
    members = resolve_group(group)
    if members.size == 1:
        return [[field.shape[dim]] for field in fields]
    mine = torch.tensor([[field.shape[dim] for field in fields]], device=fields[0].device)
    rows: list[list[int]] = all_gather_v(mine, [1] * members.size, group=group).T.tolist()
    return rows


class OnBlocks:
    """A layer of torch, with the same parameters, that computes on blocks what that one does on the full field."""

    _domain: Domain
    _seen: dict[tuple[int, ...], Layout | None]

    def compute(self, tensor: torch.Tensor, layout: Layout) -> tuple[torch.Tensor, Layout]:
        """Return the result, and how it is split."""
        raise NotImplementedError

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        layout, guard = self._layout(input), self._domain.guard
        if guard is not None:
            guard.is_paused = True
        try:
            if not layout:
                plain: torch.Tensor = super().forward(input)  # type: ignore[misc]  # that of torch's layer
                return plain
            output, out_layout = self.compute(input, layout)
        finally:
            if guard is not None:
                guard.is_paused = False
        set_layout(output, out_layout)
        return output

    def _layout(self, input: torch.Tensor) -> Layout:
        """Return how the input is split; where it is computed once more for its gradient, as it was before."""
        layout, shape = layout_of(input), tuple(input.shape)
        if self._domain.guard is not None:
            self._seen[shape] = layout if self._seen.get(shape, layout) == layout else None
            return layout
        found = layout or self._seen.get(shape)
        if found is None:
            raise DistmanError(
                f"a decomposed {type(self).__name__} must be called within its model, got a call for a tensor of shape "
                f"{shape} that was not there before. Call the module that was given to decompose."
            )
        return found

    def refuse(self, why: str) -> ValueError:
        return ValueError(f"{type(self).__bases__[-1].__name__} in a decomposed model {why}.")

    def spatial(self, layout: Layout, num_dims: int) -> None:
        """Refuse a tensor that is split along another than its last dims."""
        others = [dim for dim in layout if dim < -num_dims]
        if others:
            raise self.refuse(
                f"must get fields that are split along some of their last {num_dims} dims, got one split along dim "
                f"{others[0]}. Move its dims"
            )


@collective
def window(
    tensor: torch.Tensor,
    dim: int,
    axis: Axis,
    bounds: Sequence[tuple[int, int]],
    boundary: Boundary = "zeros",
    value: float = 0.0,
) -> torch.Tensor:
    """Return this rank's window of a field, each rank's being given by its bounds in the full field.

    Beyond the ends of the field the boundary "zeros" has the value.
    """
    if list(bounds) == axis.intervals:
        return tensor
    group = resolve_group(axis.group)
    windows = Windows(axis.sizes, tuple(bounds), boundary)
    tensor = check_call("a layer of a decomposed model", tensor, group, free_dim=dim, dim=dim, windows=windows.text)
    result: torch.Tensor = Fetch.apply(tensor, dim % tensor.ndim, windows, group, value)
    return result


def rank_in(axis: Axis) -> int:
    return resolve_group(axis.group).rank
