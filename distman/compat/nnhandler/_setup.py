"""What an NNHandler is made of, what it is set to train with, and what it says of itself."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, cast

import torch
from torch.utils.data import Dataset

from distman._version import VERSION
from distman.compat.nnhandler._callbacks import Callback
from distman.compat.nnhandler._events import Bridge, Validating
from distman.compat.nnhandler._kinds import DataLoaderType, LoggingMode, ModelType, Sampler, initialize_logger
from distman.compat.nnhandler._known_classes import remember
from distman.compat.nnhandler._names import REFUSED_ARGUMENTS, REFUSED_METHODS
from distman.compat.nnhandler._numbers import of_cache
from distman.compat.nnhandler._start import start

if TYPE_CHECKING:
    from distman.compat.nnhandler._handler import NNHandler


Factory = Callable[..., Any]


class Setup:
    """An NNHandler that can be set up, and nothing else; the arguments are those of :class:`NNHandler`."""

    def __init__(
        self,
        model_class: type[torch.nn.Module],
        device: torch.device | str = "cpu",
        logger_mode: LoggingMode | None = None,
        logger_filename: str = "NNHandler.log",
        logger_filemode: str = "a",
        logger_level: int = logging.INFO,
        save_model_code: bool = False,
        model_type: ModelType | str = ModelType.CLASSIFICATION,
        use_distributed: bool | None = None,
        ddp_kwargs: Mapping[str, Any] | None = None,
        **model_kwargs: Any,
    ) -> None:
        refuse(save_model_code=save_model_code)
        if not (isinstance(model_class, type) and issubclass(model_class, torch.nn.Module)):
            raise TypeError(
                f"model_class must be a class of torch.nn.Module, got {model_class!r}. Pass its arguments too."
            )
        remember(model_class)
        self._manager = start(device, use_distributed=use_distributed)
        _set_ddp_options(self._manager, ddp_kwargs or {})
        self.logger: logging.Logger | None = None
        if logger_mode is not None:
            self.logger = initialize_logger("NNHandler", logger_mode, logger_filename, logger_filemode, logger_level)
        self._model_class, self._model_type, self.model_kwargs = model_class, ModelType.parse(model_type), model_kwargs
        self._seed: int | None = None
        self._optimizer: torch.optim.Optimizer | None = None
        self._scheduler: Any = None
        self._optimizer_kwargs: dict[str, Any] = {}
        self._scheduler_kwargs: dict[str, Any] = {}
        self._loss_fn: Callable[..., Any] | None = None
        self.loss_fn_kwargs: dict[str, Any] = {}
        self.pass_epoch_to_loss = False
        self.train_loader: Any = None
        self.val_loader: Any = None
        self.train_loader_kwargs: dict[str, Any] = {}
        self.val_loader_kwargs: dict[str, Any] = {}
        self.metrics: dict[str, Callable[..., Any]] = {}
        self.callbacks: list[Callback] = []
        self.modules_always_eval: list[torch.nn.Module] = []
        self.complimentary_kwargs: dict[str, Any] = {}
        self.sampler: Sampler | None = None
        self._sde: Any = None
        self.save_interval: int | None = None
        self.save_path, self.save_model_name, self.overwrite_last_saved = ".", "model_state_epoch", False
        self._last_saved: Path | None = None
        self._is_stopping = False
        self.distman = Validating(
            lambda: model_class(**model_kwargs), use_distributed=False if use_distributed is False else None
        )
        self._bridge = self.distman.bridge = Bridge(cast("NNHandler", self))
        self.distman.add_callback(self._bridge)

    def __getattr__(self, name: str) -> Any:
        if name in REFUSED_METHODS:
            raise AttributeError(f"{name} is not here. {REFUSED_METHODS[name]}")
        if "distman" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.module, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the bare model.

        Local.
        """
        return self.module(*args, **kwargs)

    @property
    def version(self) -> str:
        """The version of distman."""
        return VERSION

    @property
    def device(self) -> torch.device:
        """The device of this rank."""
        return self._manager.device

    @device.setter
    def device(self, value: torch.device | str) -> None:
        if torch.device(value).type != self.device.type:
            raise RuntimeError(
                f"device must stay {self.device}, got {value}. Pass it to NNHandler, which is made first."
            )

    _device = device

    @property
    def _rank(self) -> int:
        return self._manager.rank

    @property
    def _local_rank(self) -> int:
        return self._manager.local_rank if self._distributed else -1

    @property
    def _world_size(self) -> int:
        return self._manager.world_size

    @property
    def _distributed(self) -> bool:
        return self._manager.distributed

    @property
    def module(self) -> torch.nn.Module:
        """The bare model."""
        return self.distman.module

    @property
    def model(self) -> torch.nn.Module:
        """The model as the ranks train it, which waits for them; in evaluation mode the bare one."""
        return self.distman.model if self.module.training else self.module

    _model = model

    @property
    def ema(self) -> torch.nn.Module | None:
        """The model with the moving average of the weights; None without one."""
        return self.distman.ema_module

    def count_parameters(self, trainable_only: bool = True) -> int:
        """Return the number of parameters."""
        return sum(one.numel() for one in self.module.parameters() if one.requires_grad or not trainable_only)

    def __str__(self) -> str:
        return self.print()

    def print(self, show_model_structure: bool = False) -> str:
        """Return a text on what has been set."""
        set_up = {
            "model": f"{self._model_class.__name__} ({self._model_type.value}), {self.count_parameters():,} parameters",
            "rank": f"{self._rank} of {self._world_size}, {self.device}",
            "epochs": len(self.train_losses),
            "optimizer": type(self._optimizer).__name__,
            "scheduler": type(self._scheduler).__name__,
            "loss": getattr(self._loss_fn, "__name__", self._loss_fn),
            "metrics": ", ".join(self.metrics),
            "callbacks": ", ".join(type(callback).__name__ for callback in self.callbacks),
        }
        lines = [f"{name}: {value}" for name, value in set_up.items()]
        return "\n".join([*lines, str(self.module)] if show_model_structure else lines)

    def log(self, msg: str, level: int = logging.INFO) -> None:
        """Log a line, on rank 0.

        Local.
        """
        if self.logger is not None:
            self.logger.log(level, msg)

    def warn(self, msg: str, category: type[Warning] | None = None) -> None:
        """Log a warning, or issue one where there is no logger, on rank 0.

        Local.
        """
        if self.logger is not None:
            self.logger.warning(msg)
        elif category is not None and self._rank == 0:
            warnings.warn(msg, category, stacklevel=2)

    def raise_error(
        self, error: Callable[[str], Exception], msg: str, reraised_exception: Exception | None = None
    ) -> NoReturn:
        """Log an error and raise it; the other ranks hear of it."""
        self.log(msg, logging.ERROR)
        raise error(msg) from reraised_exception

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
        self.train_loader, self.train_loader_kwargs = self.distman._setup.train_data, loader_kwargs

    def set_val_loader(
        self, dataset: Dataset[Any], dataloader_type: DataLoaderType = DataLoaderType.STANDARD, **loader_kwargs: Any
    ) -> None:
        """Set the data to validate with, of which each sample counts once.

        Local.
        """
        is_cached = dataloader_type is DataLoaderType.RANK_CACHED
        options = of_cache(loader_kwargs) if is_cached else loader_kwargs
        self.distman.set_val_loader(dataset, cached=is_cached, **options)
        self.val_loader, self.val_loader_kwargs = self.distman._setup.val_data, loader_kwargs

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


def refuse(**arguments: object) -> None:
    """Raise for an argument that is given and cannot be kept, and say what to write instead."""
    for name, value in arguments.items():
        if value:
            raise TypeError(f"{name} must be left out, got {value!r}. {REFUSED_ARGUMENTS[name]}")


def _set_ddp_options(manager: Any, options: Mapping[str, Any]) -> None:
    """Set what DistributedDataParallel is made with."""
    for name, value in options.items():
        if name not in ("find_unused_parameters", "broadcast_buffers"):
            raise TypeError(f"{name} must be left out of ddp_kwargs, got {value!r}. {REFUSED_ARGUMENTS['ddp_kwargs']}")
        setattr(manager, name, value)
