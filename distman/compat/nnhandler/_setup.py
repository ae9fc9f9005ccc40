"""What an NNHandler is set to train with."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.utils.data import Dataset

from distman.compat.nnhandler._base import Base
from distman.compat.nnhandler._callbacks import Callback
from distman.compat.nnhandler._kinds import DataLoaderType, ModelType
from distman.compat.nnhandler._known_classes import remember
from distman.compat.nnhandler._numbers import of_cache

if TYPE_CHECKING:
    from distman.compat.nnhandler._handler import NNHandler

Factory = Callable[..., Any]


class Setup(Base):
    """An NNHandler, and the methods that set what it trains with."""

    @property
    def seed(self) -> int | None:
        """The seed that was set last; setting one seeds torch."""
        return self._seed

    @seed.setter
    def seed(self, seed_value: int | None) -> None:
        if seed_value is not None:
            torch.manual_seed(seed_value)
        self._seed = seed_value

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """The optimizer."""
        return self._optimizer

    def set_optimizer(self, optimizer_class: Factory, **optimizer_kwargs: Any) -> None:
        """Set the optimizer; a scheduler is made again for it.

        Local.
        """
        remember(optimizer_class)
        self.distman.set_optimizer(optimizer_class, **optimizer_kwargs)
        self._optimizer, self._optimizer_kwargs = self.distman.optimizer, optimizer_kwargs
        if self._scheduler is not None:
            self.set_scheduler(type(self._scheduler), **self._scheduler_kwargs)

    @property
    def scheduler(self) -> Any:
        """The scheduler of the learning rate."""
        return self._scheduler

    def set_scheduler(self, scheduler_class: Factory | None, **scheduler_kwargs: Any) -> None:
        """Set the scheduler, which steps after each epoch; None removes it.

        Local.
        """
        optimizer = self.distman.optimizer
        self._scheduler, self._scheduler_kwargs = None, scheduler_kwargs
        self.distman.set_optimizer(lambda _: optimizer)  # without a scheduler
        if scheduler_class is not None:
            remember(scheduler_class)
            self._scheduler = scheduler_class(optimizer, **scheduler_kwargs)
            self.distman.set_scheduler(lambda _: self._scheduler)

    @property
    def loss_fn(self) -> Any:
        """The loss function."""
        return self._loss_fn

    @loss_fn.setter
    def loss_fn(self, loss_function: Callable[..., Any]) -> None:
        self.set_loss_fn(loss_function)

    def set_loss_fn(self, loss_fn: Callable[..., Any], pass_epoch_to_loss: bool = False, **kwargs: Any) -> None:
        """Set the loss function: of outputs, targets and ``kwargs``, or of samples, equation, model and device.

        Local.

        Args:
            loss_fn: The function; of several losses that it returns the first is minimized.
            pass_epoch_to_loss: Pass the index of the epoch too, as ``epoch``.
            kwargs: What it is always called with.
        """
        self.distman.set_loss_fn(self._bridge.loss if callable(loss_fn) else loss_fn, forward=self._bridge.forward)
        self._loss_fn, self.pass_epoch_to_loss, self.loss_fn_kwargs = loss_fn, pass_epoch_to_loss, kwargs

    def set_train_loader(
        self, dataset: Dataset[Any], dataloader_type: DataLoaderType = DataLoaderType.STANDARD, **loader_kwargs: Any
    ) -> None:
        """Set the data to train with; see :func:`distman.data.distributed_loader`.

        Local.
        """
        is_cached = dataloader_type is DataLoaderType.RANK_CACHED
        options = of_cache(loader_kwargs) if is_cached else loader_kwargs
        self.distman.set_train_loader(dataset, cached=is_cached, **options)
        self.train_loader, self.train_loader_kwargs = self.distman._train_data, loader_kwargs

    def set_val_loader(
        self, dataset: Dataset[Any], dataloader_type: DataLoaderType = DataLoaderType.STANDARD, **loader_kwargs: Any
    ) -> None:
        """Set the data to validate with, of which each sample counts once.

        Local.
        """
        is_cached = dataloader_type is DataLoaderType.RANK_CACHED
        options = of_cache(loader_kwargs) if is_cached else loader_kwargs
        self.distman.set_val_loader(dataset, cached=is_cached, **options)
        self.val_loader, self.val_loader_kwargs = self.distman._val_data, loader_kwargs

    def add_metric(self, name: str, metric_fn: Callable[..., Any]) -> None:
        """Measure something besides the loss; score-based models have no metrics.

        Local.
        """
        if self._model_type is not ModelType.SCORE_BASED:
            self.distman.add_metric(name, metric_fn)
        self.metrics[name] = metric_fn

    def clear_metrics(self) -> None:
        """Remove all metrics.

        Local.
        """
        self.distman.clear_metrics()
        self.metrics.clear()

    def add_callback(self, callback: Callback) -> None:
        """Add a callback.

        Local.
        """
        if not isinstance(callback, Callback):
            raise TypeError(
                f"callback must be a Callback, got {callback!r}. Derive it from distman.compat.nnhandler.Callback; one "
                "of distman.handler goes to handler.distman.add_callback()."
            )
        callback.set_handler(cast("NNHandler", self))
        self.callbacks.append(callback)
        self._bridge.restore(callback)

    def remove_callback(self, callback: Callback) -> None:
        """Remove a callback.

        Local.
        """
        self.callbacks.remove(callback)

    def clear_callbacks(self) -> None:
        """Remove all callbacks.

        Local.
        """
        self.callbacks.clear()

    def add_complimentary_kwargs(self, **kwargs: Any) -> None:
        """Keep something beside the training, which checkpoints hold too.

        Local.
        """
        self.complimentary_kwargs.update(kwargs)

    def compile_model(self, **kwargs: Any) -> None:
        """Compile the model by ``torch.compile``.

        Local.
        """
        self.module.compile(**kwargs)

    def freeze_module(self, module: torch.nn.Module) -> None:
        """Train the parameters of a module no longer.

        Local.
        """
        module.requires_grad_(False)

    def keep_eval_on_module(self, module: torch.nn.Module, activate: bool = True) -> None:
        """Keep a module in evaluation mode while the model is trained, or no longer.

        Local.
        """
        self.modules_always_eval = [one for one in self.modules_always_eval if one is not module]
        if activate:
            self.modules_always_eval.append(module)
        module.train(not activate)

    def eval(self, activate: bool = True, log: bool = True) -> None:
        """Put the model into evaluation mode, or into training mode.

        Local.
        """
        self.module.train(not activate)
        for module in self.modules_always_eval:
            module.eval()
