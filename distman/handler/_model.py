"""The model on this rank: bare for evaluation and saving, wrapped for training."""

from __future__ import annotations

import functools
import gc
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from distman._coordination.monitor.current_watcher import has_failed
from distman._coordination.wait_scope import WaitScope
from distman.checkpoint import load_model_state, model_state
from distman.checkpoint._model_state import without_compiled
from distman.collectives._objects import broadcast_data
from distman.errors import DistmanError
from distman.handler._average import Average
from distman.handler._changes import Changes
from distman.handler._sharding import (
    compile_parts,
    forget_step,
    gathered,
    place_parts,
    put_together_once,
    without_reduction,
)
from distman.handler._strategy import Strategy
from distman.manager import DistributedManager

_WITH_MEANS = (torch.nn.BatchNorm1d, torch.nn.BatchNorm2d, torch.nn.BatchNorm3d, torch.nn.SyncBatchNorm)
"""Modules whose buffers training writes on each rank, and evaluation reads: of those rank 0's are enough."""


_UNFINISHED = "Expected to have finished reduction in the prior iteration"


class TrainedModel:
    """A module that the ranks train, moved to this rank's device, with the weights of rank 0.

    The calls, the state and the parameters of ``module`` are local unless it is sharded, as it is wrapped itself then.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        *,
        compile_options: Mapping[str, Any] | None = None,
        strategy: Strategy | None = None,
        wraps: bool = True,
    ) -> None:
        self._strategy = strategy or Strategy()
        self.module = self._strategy.place(module)
        self.average: Average | None = None
        self._is_training = self._is_evaluated = False
        self.is_sharded = self._strategy.shard(self.module)
        self._trained: list[torch.nn.Parameter] = []
        if self.is_sharded:
            self._trained = self._trainable()
            self.module.register_forward_pre_hook(self._refuse, prepend=True)
        else:
            self._share([*module.parameters()])
        if compile_options is not None and self.is_sharded:
            compile_parts(self.module, compile_options)
        elif compile_options is not None:
            self.module.compile(**compile_options)
        self._gradient_order: list[list[int]] = []
        self._has_buckets = False
        self._is_used = False
        self._wrapped = self.module
        if wraps:
            self.wrap()

    @property
    def evaluated(self) -> torch.nn.Module:
        """The bare module, or its average; a sharded one has the average in :meth:`evaluating` alone."""
        copied = None if self.average is None else self.average.module
        return self.module if copied is None else copied

    def wrap(self) -> None:
        """Wrap the module, again if other parameters are trained than before. Collective."""
        trained = self._trainable()
        if [id(one) for one in trained] == [id(one) for one in self._trained]:
            return
        if self.is_sharded:
            put_together_once(self.module)
        self._trained = trained
        if self._has_buckets:  # else the order, if there is one, is that of a run to be resumed
            self._gradient_order, self._has_buckets = [], False
        self._wrapped = self.module
        if trained and not self.is_sharded:
            self._wrapped = self._strategy.wrap(self.module)
        if isinstance(self._wrapped, DistributedDataParallel):
            self._wrapped.register_forward_pre_hook(self._refuse)

    def forget_step(self) -> None:
        """Let a sharded module have its own parameters again after a step that raised."""
        if self.is_sharded:
            forget_step(self.module)

    def _trainable(self) -> list[torch.nn.Parameter]:
        return [parameter for parameter in self.module.parameters() if parameter.requires_grad]

    def unwrap(self) -> None:
        """Train the bare module from now on, whose gradients are not averaged."""
        self._trained, self._gradient_order, self._has_buckets = [], [], False
        self._wrapped = self.module
        if self._is_used:
            gc.collect()  # a backward pass that an error cut off would go on in the hooks of the wrapped one
            self._is_used = False

    @property
    def wrapped(self) -> torch.nn.Module:
        """The module as DistributedDataParallel; the bare module on one process, or where it is sharded."""
        return self._wrapped

    @contextmanager
    def training(self) -> Iterator[torch.nn.Module]:
        """Allow calls of the wrapped module within a ``with`` block, which all ranks must run."""
        self._is_training = self._is_used = True
        try:
            with WaitScope("a step of the sharded model") if self.is_sharded else nullcontext():
                yield self._wrapped
        finally:
            self._is_training = False

    @contextmanager
    def told_of_unused(self) -> Iterator[None]:
        """Say which parameters had no gradient on this rank where DistributedDataParallel has waited for them."""
        try:
            yield
        except RuntimeError as error:
            if _UNFINISHED not in str(error) or not isinstance(self._wrapped, DistributedDataParallel):
                raise
            found = re.search(rf"for rank {DistributedManager().rank}: ([\d ]+)", str(error))
            names = [name for name, one in self.module.named_parameters() if one.requires_grad]
            unused = [names[int(index)] for index in found[1].split()] if found else ["some"]
            raise DistmanError(
                "all parameters that are trained must have a part in the loss of each step, got none for "
                f"{', '.join(unused)} in the step before. Freeze what is not used, by requires_grad_(False), or set "
                "DDP_FIND_UNUSED_PARAMETERS=1."
            ) from error

    @contextmanager
    def backward_pass(self) -> Iterator[None]:
        """Note within a ``with`` block in which order the first gradients come that are summed over the ranks.

        DistributedDataParallel sorts its buckets by it, on which the last bits of the sums depend.
        """
        if not self._sorts_buckets or not getattr(self._wrapped, "require_backward_grad_sync", False):
            yield
            return
        order: list[list[int]] = []

        def note(index: int, parameter: torch.Tensor) -> None:
            order.append([index, int(parameter.grad is not None and parameter.grad.is_sparse)])

        handles = [
            parameter.register_post_accumulate_grad_hook(functools.partial(note, index))
            for index, parameter in enumerate(self._trained)
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
        self._gradient_order, self._has_buckets = order, True

    def sort_buckets(self) -> None:
        """Let DistributedDataParallel sort its buckets as it did after the first step of the run that is resumed.

        Collective. Gradients of zero come in the order of that run; nothing of the program's is called.
        """
        wrapped, order = self._wrapped, self._gradient_order
        if not self._sorts_buckets or len(order) != len(self._trained):
            return
        wrapped.module = _ZeroGradients([(self._trained[index], bool(is_sparse)) for index, is_sparse in order])
        try:
            with self.training() as model, WaitScope("the first step of a resumed training"):
                model().backward()
        finally:
            wrapped.module = self.module
        self.module.zero_grad()
        self._has_buckets = True

    @property
    def _sorts_buckets(self) -> bool:
        """Whether DistributedDataParallel has yet to sort its buckets; it never does if parameters may be unused."""
        wrapped = self._wrapped
        is_parallel = isinstance(wrapped, DistributedDataParallel) and not wrapped.find_unused_parameters
        return is_parallel and not self._has_buckets

    def without_synchronization(self) -> AbstractContextManager[None]:
        if isinstance(self._wrapped, DistributedDataParallel):
            context: AbstractContextManager[None] = self._wrapped.no_sync()
            return context
        return without_reduction(self.module) if self.is_sharded else nullcontext()

    def keep_average(self, decay: float | None, *, use_buffers: bool | None = None) -> None:
        """Keep a moving average of the weights from now on, or continue the present one; see :class:`Average`."""
        if decay is None:
            self.average = None
            return
        if self.average is None:
            self.average = self._new_average()
        self.average.set_options(decay, use_buffers=use_buffers)

    def after_step(self) -> None:
        if self.average is not None:
            self.average.update()

    @contextmanager
    def evaluating(self) -> Iterator[torch.nn.Module]:
        """Let :attr:`evaluated` have rank 0's buffers on all ranks within a ``with`` block, after which it has its own.

        Collective. Blocking. Running means of normalizations, say, differ between ranks in training.
        """
        was_evaluated, self._is_evaluated = self._is_evaluated, True
        with self._evaluated_parts() if self.is_sharded else nullcontext():
            buffers = list(self.evaluated.buffers()) if DistributedManager().world_size > 1 else []
            own = [buffer.clone() for buffer in buffers]
            self._share(buffers)
            try:
                yield self.evaluated
            finally:
                self._is_evaluated = was_evaluated
                with torch.no_grad():
                    for buffer, value in zip(buffers, own, strict=True):
                        buffer.copy_(value)

    @contextmanager
    def _evaluated_parts(self) -> Iterator[None]:
        """Let each rank have all weights of a sharded model, or their average, so that its calls wait for nobody."""
        average = self.average.put_in() if self.average is not None else nullcontext()
        with average, gathered(self.module, reshards=self._strategy.reshards):
            self._is_training = True
            try:
                yield
            finally:
                self._is_training = False

    def own_buffers(self) -> dict[str, torch.Tensor]:
        """Return the buffers in which this rank differs from rank 0, whose state is saved. Collective."""
        if DistributedManager().world_size == 1 or has_failed():  # then each rank saves its own state
            return {}
        buffers = self._saved_buffers()
        shared = broadcast_data(list(buffers.values()))
        return {
            name: own.cpu()
            for (name, own), other in zip(buffers.items(), shared, strict=True)
            if not torch.equal(own, other)
        }

    @torch.no_grad()
    def load_own_buffers(self, state: Mapping[str, torch.Tensor]) -> None:
        buffers = self._saved_buffers()
        for name in state.keys() & buffers.keys():
            buffers[name].copy_(state[name])

    def _saved_buffers(self) -> dict[str, torch.Tensor]:
        """Return the buffers that checkpoints hold and training may read."""
        found: dict[str, torch.Tensor] = {}
        average = self.average.module if self.average is not None else None
        for part, model in {"module": self.module, "average.module": average}.items():
            saved = model.state_dict(prefix=f"{part}.").keys() if model is not None else ()
            for path, module in model.named_modules(prefix=part) if model is not None else ():
                if not isinstance(module, _WITH_MEANS):
                    buffers = module.named_buffers(prefix=path, recurse=False)
                    found |= {name: buffer for name, buffer in buffers if name in saved}
        if self.is_sharded and self.average is not None:
            found |= {f"average.{name}": self.average.named[name] for name in [*found]}
        return found

    def state_dict(self) -> dict[str, Any]:
        if self._is_evaluated:
            raise DistmanError(
                "a state must be taken outside of validate(), predict() and sample(), got a call within one, for which "
                "the model may have other values. Save before it or after it."
            )
        average = None if self.average is None else self.average.state_dict()
        return {
            "module": model_state(self.module),
            "average": average,
            "gradient_order": self._gradient_order,
            "frozen": self._frozen(),
        }

    def evaluated_state(self) -> dict[str, Any]:
        """Return the average, if one is kept, else weights and buffers; under the names of the bare model."""
        if self.is_sharded and self.average is not None:
            averages = self.average.state_dict()
            return {name: averages.get(f"module.{name}", value) for name, value in model_state(self.module).items()}
        return model_state(self.evaluated)

    def load_state_dict(self, state: Mapping[str, Any], changes: Changes | None = None) -> None:
        """Restore such a state, and note what was frozen then and is not now."""
        if changes is not None and "frozen" in state:
            changes.note("frozen parameters", state["frozen"], self._frozen())
        if changes is None or not changes.are_of_program:
            self._freeze(state.get("frozen"))
        load_model_state(self.module, place_parts(self.module, state["module"]) if self.is_sharded else state["module"])
        if not self._has_buckets:
            self._gradient_order = state["gradient_order"]
        if state["average"] is not None:
            self.average = self.average or self._new_average()
            self.average.load_state_dict(state["average"])
        else:
            self.average = None

    def _frozen(self) -> list[str]:
        named = self.module.named_parameters()
        return [without_compiled(name) for name, one in named if not one.requires_grad]

    def _freeze(self, names: Sequence[str] | None) -> None:
        for name, parameter in self.module.named_parameters() if names is not None else ():
            parameter.requires_grad_(without_compiled(name) not in (names or ()))

    def _new_average(self) -> Average:
        return Average(self.module, is_sharded=self.is_sharded)

    @staticmethod
    def _share(tensors: list[torch.Tensor]) -> None:
        if not tensors or DistributedManager().world_size == 1:
            return
        with torch.no_grad():
            for own, shared in zip(tensors, broadcast_data(tensors), strict=True):
                own.copy_(shared)

    def _refuse(self, module: torch.nn.Module, args: tuple[Any, ...]) -> None:
        """Raise if the wrapped module is called outside of a step: its backward pass would wait for other ranks."""
        if not self._is_training:
            raise DistmanError(
                "the wrapped model must be called within a training step, on all ranks, got a call on rank "
                f"{DistributedManager().rank} outside of one. "
                + (
                    "Its weights are sharded: call handler.predict(), on all ranks."
                    if self.is_sharded
                    else "Call the bare module, handler.module, which waits for no rank."
                )
            )


class _ZeroGradients(torch.nn.Module):
    """A module whose loss gives parameters gradients of zero, one after another."""

    def __init__(self, parameters: Sequence[tuple[torch.nn.Parameter, bool]]) -> None:
        super().__init__()
        self._in_order = list(parameters)

    def forward(self) -> torch.Tensor:
        # What was computed last is differentiated first.
        parts = [_Zero.apply(parameter, is_sparse) for parameter, is_sparse in reversed(self._in_order)]
        return torch.stack(parts).sum()


class _Zero(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parameter: torch.Tensor, is_sparse: bool) -> torch.Tensor:  # noqa: FBT001 - of autograd
        ctx.save_for_backward(parameter)
        ctx.is_sparse = is_sparse
        return torch.zeros((), device=parameter.device)

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> tuple[torch.Tensor, None]:
        (parameter,) = ctx.saved_tensors
        if not ctx.is_sparse:
            return torch.zeros_like(parameter), None
        indices = torch.empty(1, 0, dtype=torch.int64, device=parameter.device)  # of rows, as embeddings have them
        values = parameter.new_empty(0, *parameter.shape[1:])
        return torch.sparse_coo_tensor(indices, values, parameter.shape, check_invariants=True), None
