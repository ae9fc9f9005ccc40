"""The model on this rank: bare for evaluation and saving, wrapped for training."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from distman.checkpoint import load_model_state, model_state
from distman.collectives._objects import broadcast_data
from distman.errors import DistmanError
from distman.manager import DistributedManager


class TrainedModel:
    """A module that the ranks train.

    Collective. The module is moved to this rank's device and gets the weights of rank 0.

    Args:
        module: The model.
        compile_options: Options of ``torch.compile``; None does not compile.

    Attributes:
        module: The bare module: its calls, its state and its parameters are local.
        average: The moving average of the weights, see :meth:`keep_average`; None without one.
    """

    def __init__(self, module: torch.nn.Module, *, compile_options: Mapping[str, Any] | None = None) -> None:
        manager = DistributedManager()
        self.module = module.to(manager.device)
        if compile_options is not None:
            self.module.compile(**compile_options)
        self.average: AveragedModel | None = None
        self._is_training = False
        self._share([*module.parameters()])
        self._trained: list[torch.nn.Parameter] = []
        self._wrapped = self.module
        self.wrap()

    @property
    def evaluated(self) -> torch.nn.Module:
        """The bare module with the average of the weights, if one is kept, else with the weights."""
        return self.module if self.average is None else self.average.module

    def wrap(self) -> None:
        """Wrap the module, again if other parameters are trained than before.

        Collective.
        """
        trained = [parameter for parameter in self.module.parameters() if parameter.requires_grad]
        if [id(one) for one in trained] == [id(one) for one in self._trained]:
            return
        self._trained = trained
        self._wrapped = self.module
        if trained:
            self._wrapped = DistributedManager().wrap_ddp(self.module, gradient_as_bucket_view=True)
        if isinstance(self._wrapped, DistributedDataParallel):
            self._wrapped.register_forward_pre_hook(self._refuse)

    @property
    def wrapped(self) -> torch.nn.Module:
        """The module as DistributedDataParallel; the bare module on one process."""
        return self._wrapped

    @contextmanager
    def training(self) -> Iterator[torch.nn.Module]:
        """Allow calls of the wrapped module within a ``with`` block, which all ranks must run.

        Local; the block is collective.
        """
        self._is_training = True
        try:
            yield self._wrapped
        finally:
            self._is_training = False

    def without_synchronization(self) -> AbstractContextManager[None]:
        """Return a context in which gradients are not summed over the ranks."""
        if isinstance(self._wrapped, DistributedDataParallel):
            context: AbstractContextManager[None] = self._wrapped.no_sync()
            return context
        return nullcontext()

    def keep_average(self, decay: float | None) -> None:
        """Keep a moving average of weights and buffers from now on, or continue the present one.

        Args:
            decay: Weight of the previous average in each step, between 0 and 1; None keeps no average.
        """
        if decay is None:
            self.average = None
            return
        if self.average is None:
            self.average = AveragedModel(self.module, use_buffers=True)
        self.average.multi_avg_fn = get_ema_multi_avg_fn(decay)

    def after_step(self) -> None:
        """Add the present weights to the average."""
        if self.average is not None:
            self.average.update_parameters(self.module)

    def share_buffers(self) -> None:
        """Copy rank 0's buffers to all ranks: running means of normalizations, say, differ between ranks in training.

        Collective. Blocking.
        """
        models = [self.module] if self.average is None else [self.module, self.average.module]
        self._share([buffer for model in models for buffer in model.buffers()])

    def state_dict(self) -> dict[str, Any]:
        """Return weights, buffers and their average."""
        average = None if self.average is None else self.average.state_dict()
        return {"module": model_state(self.module), "average": average}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore such a state.

        Raises:
            RuntimeError: The weights do not fit the module.
        """
        load_model_state(self.module, state["module"])
        if state["average"] is not None:
            self.average = self.average or AveragedModel(self.module, use_buffers=True)
            self.average.load_state_dict(state["average"])
        else:
            self.average = None

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
                f"{DistributedManager().rank} outside of one. Call the bare module, handler.module, which waits for no "
                "rank."
            )
