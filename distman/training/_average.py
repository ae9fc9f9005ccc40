"""The moving average of a model's weights."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim.swa_utils import get_ema_multi_avg_fn

from distman.checkpoint import load_model_state, model_state
from distman.training._sharding import own_part, placed_as

_STATISTICS = ("running_mean", "running_var")


class Average:
    """The moving average of a module's weights, beside a copy of its other buffers.

    Averages are kept of the parameters and, unless a program says otherwise, of the running statistics of norms. The
    average of other buffers, such as tables, counters, or the vectors of a spectral norm, would not be valid.

    Attributes:
        module: A copy of the module, with the averages; None where it is sharded, as the averages are then.
    """

    def __init__(self, module: torch.nn.Module, *, is_sharded: bool) -> None:
        self._source = module
        self.module = None if is_sharded else copy.deepcopy(module)
        parts = {name: one.detach().clone() for name, one in _tensors(module).items()} if is_sharded else {}
        self._parts: dict[str, torch.Tensor] = parts
        self._num_updates = 0
        self.set_options(0.0, use_buffers=None)

    @property
    def named(self) -> dict[str, torch.Tensor]:
        """The averages and copies by the names of what they are of, after ``module.``."""
        return self._parts if self.module is None else _tensors(self.module)

    def set_options(self, decay: float, *, use_buffers: bool | None) -> None:
        """Set how the average moves on."""
        self._move = get_ema_multi_avg_fn(decay)
        buffers = dict(self._source.named_buffers()) if use_buffers else {}
        chosen = [*_statistics(self._source)] if use_buffers is None else [*buffers]
        names = [f"module.{name}" for name in [*dict(self._source.named_parameters()), *chosen]]
        is_number = {name: one.is_floating_point() or one.is_complex() for name, one in self.named.items()}
        self._averaged = {name for name in names if is_number.get(name)}

    @torch.no_grad()
    def update(self) -> None:
        """Add the present weights of the module to the average, and copy what is not averaged."""
        named, tensors = self.named, _tensors(self._source)
        groups: dict[Any, tuple[list[torch.Tensor], list[torch.Tensor]]] = defaultdict(lambda: ([], []))
        for name, one in named.items():  # the module may have got more since
            average, value = own_part(one.detach()), own_part(tensors[name].detach())
            if name not in self._averaged or not self._num_updates:
                average.copy_(value)
            elif average.numel():
                averages, values = groups[average.dtype, average.device]
                averages.append(average)
                values.append(value)
        for averages, values in groups.values():
            self._move(averages, values, self._num_updates)
        self._num_updates += 1

    def state_dict(self) -> dict[str, Any]:
        """Return the averages and copies of what a state of the module holds."""
        if self.module is not None:
            state = {f"module.{name}": value for name, value in model_state(self.module).items()}
        else:
            first = {id(one): name for name, one in _tensors(self._source).items()}
            state = {
                f"module.{name}": self.named[first[id(one)]]
                for name, one in self._source.state_dict(keep_vars=True).items()
                if first.get(id(one)) in self.named
            }
        return {"n_averaged": torch.tensor(self._num_updates), **state}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        values = {name.removeprefix("module."): value for name, value in state.items() if name != "n_averaged"}
        if self.module is not None:
            load_model_state(self.module, values)
        else:
            own = {name.removeprefix("module."): value for name, value in [*self.state_dict().items()][1:]}
            if own.keys() != values.keys():
                raise RuntimeError(
                    f"names of the average differ from the model's: {sorted(own.keys() ^ values.keys())}"
                )
            for name, value in own.items():
                value.copy_(placed_as(value, values[name]))
        self._num_updates = int(state["n_averaged"])

    @contextmanager
    def put_in(self) -> Iterator[None]:
        """Let a sharded module have the averages within a ``with`` block, and its own values after it."""
        tensors = [own_part(_tensors(self._source)[name].detach()) for name in self.named]
        own = [one.clone() for one in tensors]
        _copy([own_part(one) for one in self.named.values()], tensors)
        try:
            yield
        finally:
            _copy(own, tensors)


@torch.no_grad()
def _copy(values: list[torch.Tensor], tensors: list[torch.Tensor]) -> None:
    for value, tensor in zip(values, tensors, strict=True):
        tensor.copy_(value)


def _tensors(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {f"module.{name}": one for name, one in [*module.named_parameters(), *module.named_buffers()]}


def _statistics(module: torch.nn.Module) -> Iterator[str]:
    """Yield the names of running means and variances, which norms of all kinds have under these names."""
    for path, part in module.named_modules():
        if all(isinstance(getattr(part, name, None), torch.Tensor) for name in _STATISTICS):
            yield from (f"{path}.{name}" if path else name for name in _STATISTICS)
