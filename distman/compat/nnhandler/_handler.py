"""``nn_handler.NNHandler`` over distman's handler."""

from __future__ import annotations

import logging
import operator
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn, Self

import torch
from torch.utils.data import DataLoader, Dataset

from distman import checkpoint, score
from distman._version import VERSION
from distman.compat.nnhandler import _checkpoints, _kinds
from distman.compat.nnhandler._checkpoints import remember, with_suffix
from distman.compat.nnhandler._ddp import start
from distman.compat.nnhandler._events import Bridge, Callback, Logs, Validating
from distman.compat.nnhandler._kinds import DataLoaderType, ModelType, Sampler, initialize_logger
from distman.compat.nnhandler._names import REFUSED_METHODS, refuse
from distman.data import length_of
from distman.handler import evaluating
from distman.topology import split_sizes

Factory = Callable[..., Any]


def _part_of(path: str, doc: str | None = None) -> property:
    """Return a property of the handler that is an attribute of one of its parts."""
    return property(operator.attrgetter(path), doc=doc)


class NNHandler:
    """A model and everything that its training needs, with the calls of NNHandler; distman's handler does the work.

    Collective. Its methods are local where they do not say otherwise. What is not found here is looked for in the
    model. ``device`` is that of a process that is alone; a rank of a job has that of its place on its host. With
    ``use_distributed=False`` there is one process whatever the launcher says. ``save_model_code`` is refused, as are
    ``ddp_kwargs`` but for ``find_unused_parameters`` and ``broadcast_buffers``.

    Attributes:
        distman: The handler that does the work, for what is not here.
    """

    LoggingMode = _kinds.LoggingMode
    ModelType = _kinds.ModelType
    version = VERSION

    module = _part_of("distman.module", "The bare model.")
    ema = _part_of("distman.ema_module", "The model with the moving average of the weights; None without one.")
    optimizer = _part_of("_optimizer", "The optimizer.")
    scheduler = _part_of("_scheduler", "The scheduler of the learning rate.")
    _rank = _part_of("_manager.rank")
    _world_size = _part_of("_manager.world_size")
    _distributed = _part_of("_manager.distributed")

    def __init__(
        self,
        model_class: type[torch.nn.Module],
        device: torch.device | str = "cpu",
        logger_mode: _kinds.LoggingMode | None = None,
        logger_filename: str = "NNHandler.log",
        logger_filemode: str = "a",
        logger_level: int = logging.INFO,
        save_model_code: bool = False,
        model_type: _kinds.ModelType | str = _kinds.ModelType.CLASSIFICATION,
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
        for name, value in (ddp_kwargs or {}).items():
            if name not in ("find_unused_parameters", "broadcast_buffers"):
                refuse(ddp_kwargs={name: value})
            setattr(self._manager, name, value)
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
        self._bridge = self.distman.bridge = Bridge(self)
        self.distman.add_callback(self._bridge)
        self.distman._setup.forward = self._bridge.forward  # also of a handler that only predicts

    def __getattr__(self, name: str) -> Any:
        if name in REFUSED_METHODS:
            raise AttributeError(f"{name} is not here. {REFUSED_METHODS[name]}")
        if "distman" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.module, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the bare model."""
        return self.module(*args, **kwargs)

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
    def _local_rank(self) -> int:
        return self._manager.local_rank if self._distributed else -1

    @property
    def model(self) -> torch.nn.Module:
        """The model as the ranks train it, which waits for them; in evaluation mode the bare one."""
        bare = self.distman.module
        return self.distman.model if bare.training else bare

    _model = model

    def count_parameters(self, trainable_only: bool = True) -> int:
        """Return the number of parameters."""
        return sum(one.numel() for one in self.distman.module.parameters() if one.requires_grad or not trainable_only)

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
        """Log a line, on rank 0."""
        if self.logger is not None:
            self.logger.log(level, msg)

    def warn(self, msg: str, category: type[Warning] | None = None) -> None:
        """Log a warning, or issue one where there is no logger, on rank 0."""
        if self.logger is not None:
            self.logger.warning(msg)
        elif category is not None and self._rank == 0:
            warnings.warn(msg, category, stacklevel=2)

    def raise_error(
        self, error: Callable[[str], Exception], msg: str, reraised_exception: Exception | None = None
    ) -> NoReturn:
        """Log an error and raise it, on all ranks."""
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

    def set_optimizer(self, optimizer_class: Factory, **optimizer_kwargs: Any) -> None:
        """Set the optimizer; a scheduler is made again for it."""
        remember(optimizer_class)
        self.distman.set_optimizer(optimizer_class, **optimizer_kwargs)
        self._optimizer, self._optimizer_kwargs = self.distman.optimizer, optimizer_kwargs
        if self._scheduler is not None:
            self.set_scheduler(type(self._scheduler), **self._scheduler_kwargs)

    def set_scheduler(self, scheduler_class: Factory | None, **scheduler_kwargs: Any) -> None:
        """Set the scheduler, which steps after each epoch; None removes it."""
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

        Of several losses that it returns the first is minimized.
        """
        self.distman.set_loss_fn(self._bridge.loss if callable(loss_fn) else loss_fn, forward=self._bridge.forward)
        self._loss_fn, self.pass_epoch_to_loss, self.loss_fn_kwargs = loss_fn, pass_epoch_to_loss, kwargs

    def set_train_loader(
        self, dataset: Dataset[Any], dataloader_type: DataLoaderType = DataLoaderType.STANDARD, **loader_kwargs: Any
    ) -> None:
        """Set the data to train with; see :func:`distman.data.distributed_loader`."""
        self.distman.set_train_loader(dataset, **_loader_options(dataloader_type, loader_kwargs))
        self.train_loader, self.train_loader_kwargs = self.distman._setup.train_data, loader_kwargs

    def set_val_loader(
        self, dataset: Dataset[Any], dataloader_type: DataLoaderType = DataLoaderType.STANDARD, **loader_kwargs: Any
    ) -> None:
        """Set the data to validate with, of which each sample counts once."""
        self.distman.set_val_loader(dataset, **_loader_options(dataloader_type, loader_kwargs))
        self.val_loader, self.val_loader_kwargs = self.distman._setup.val_data, loader_kwargs

    def add_metric(self, name: str, metric_fn: Callable[..., Any]) -> None:
        """Measure something besides the loss; score-based models have no metrics."""
        if self._model_type is not ModelType.SCORE_BASED:
            self.distman.add_metric(name, metric_fn)
        self.metrics[name] = metric_fn

    def clear_metrics(self) -> None:
        """Remove all metrics."""
        self.distman.clear_metrics()
        self.metrics.clear()

    def add_callback(self, callback: Callback) -> None:
        """Add a callback."""
        if not isinstance(callback, Callback):
            raise TypeError(
                f"callback must be a Callback, got {callback!r}. Derive it from distman.compat.nnhandler.Callback; one "
                "of distman.handler goes to handler.distman.add_callback()."
            )
        callback.set_handler(self)
        self.callbacks.append(callback)
        self._bridge.restore(callback)

    def remove_callback(self, callback: Callback) -> None:
        """Remove a callback."""
        self.callbacks.remove(callback)

    def clear_callbacks(self) -> None:
        """Remove all callbacks."""
        self.callbacks.clear()

    def add_complimentary_kwargs(self, **kwargs: Any) -> None:
        """Keep something beside the training, which checkpoints hold too."""
        self.complimentary_kwargs.update(kwargs)

    def compile_model(self, **kwargs: Any) -> None:
        """Compile the model by ``torch.compile``."""
        self.module.compile(**kwargs)

    def freeze_module(self, module: torch.nn.Module) -> None:
        """Train the parameters of a module no longer."""
        module.requires_grad_(False)

    def keep_eval_on_module(self, module: torch.nn.Module, activate: bool = True) -> None:
        """Keep a module in evaluation mode while the model is trained, or no longer."""
        self.modules_always_eval = [one for one in self.modules_always_eval if one is not module]
        if activate:
            self.modules_always_eval.append(module)
        module.train(not activate)

    def eval(self, activate: bool = True, log: bool = True) -> None:
        """Put the model into evaluation mode, or into training mode."""
        self.module.train(not activate)
        for module in self.modules_always_eval:
            module.eval()

    def train(
        self,
        epochs: int,
        validate_every: int | None = 1,
        gradient_accumulation_steps: int = 1,
        use_amp: bool = False,
        gradient_clipping_norm: float | None = None,
        ema_decay: float = 0.0,
        seed: int | None = None,
        progress_bar: bool = True,
        debug_print_interval: int | None = None,
        save_on_last_epoch: bool = True,
        epoch_train_and_val_pbar: bool = False,
    ) -> None:
        """Train for so many epochs more. Steps whose loss or gradient is not finite are left out.

        Collective. Blocking. With ``use_amp`` mixed precision is float16, on a GPU; ``ema_decay`` is that of a moving
        average of the weights, which are the model's in the end. ``debug_print_interval`` is refused.
        """
        refuse(debug_print_interval=debug_print_interval)
        if seed is not None:
            self.seed = seed
        self._is_stopping, self._saves_last = False, save_on_last_epoch
        total = self._bridge.begin(epochs)
        try:
            self.distman.train(
                total,
                validate_every=validate_every or total + 1,
                accumulate=gradient_accumulation_steps,
                amp="fp16" if use_amp and self.device.type == "cuda" else None,
                clip_norm=gradient_clipping_norm,
                ema_decay=ema_decay or None,
                non_finite="skip",
                progress=None if progress_bar or epoch_train_and_val_pbar else False,
            )
        finally:
            self._bridge.phase = ""
        if self.ema is not None:
            self.module.load_state_dict(self.ema.state_dict())

    @property
    def _stop_training(self) -> bool:
        return self._is_stopping

    @_stop_training.setter
    def _stop_training(self, value: bool) -> None:
        self._is_stopping = bool(value)
        if value:
            self.distman.stop("a callback asked for it")

    def auto_save(
        self,
        interval: int | None,
        save_path: str = ".",
        name: str = "model_epoch{epoch:02d}",
        overwrite: bool = False,
    ) -> None:
        """Save the handler after every so many epochs; -1 is after the last one only, None or 0 never.

        In the name of the file, names of results in braces are filled in.
        """
        self.save_interval, self.save_path = interval, save_path
        self.save_model_name, self.overwrite_last_saved = name, overwrite

    def _save_after(self, logs: Logs, *, is_last: bool) -> None:
        interval = self.save_interval
        if not interval or self.save_path is None:
            return
        is_due = interval > 0 and logs["epoch"] % interval == 0
        if (interval < 0 or (self._saves_last and not is_due)) if is_last else is_due:
            path = Path(self.save_path) / with_suffix(self.save_model_name.format(**logs))
            self.save(path)
            if self.overwrite_last_saved and self._last_saved not in (None, path) and self._rank == 0:
                Path(self._last_saved or path).unlink(missing_ok=True)
            self._last_saved = path

    @property
    def train_losses(self) -> list[float]:
        """Mean training loss of each epoch."""
        return self.distman.history["loss"]

    @property
    def val_losses(self) -> list[float]:
        """Mean validation loss of each epoch; NaN for epochs without validation."""
        return self.distman.history["val_loss"]

    _train_losses, _val_losses = train_losses, val_losses

    @property
    def train_metrics_history(self) -> dict[str, list[float]]:
        """Each metric of the training, of each epoch."""
        return {name: self.distman.history[name] for name in self.metrics}

    @property
    def val_metrics_history(self) -> dict[str, list[float]]:
        """Each metric of the validation, of each epoch."""
        return {name: self.distman.history[f"val_{name}"] for name in self.metrics}

    def monitor_keys(self) -> list[str]:
        """Return the names of the results of an epoch."""
        return ["loss", "val_loss", "epoch_time", "lr", *self.metrics, *(f"val_{name}" for name in self.metrics)]

    def plot_losses(self, log_y_scale: bool = False, save_path: str | None = None) -> None:
        """Plot the losses into a file, on rank 0. Collective."""
        self.distman.plot_losses(_path_of_plot(save_path), log=log_y_scale)

    def plot_metrics(self, log_y_scale: bool = False, save_path_prefix: str | None = None) -> None:
        """Plot each metric into a file of its own, on rank 0. Collective."""
        refuse(log_y_scale=log_y_scale)
        prefix = _path_of_plot(save_path_prefix)
        for name in self.metrics:
            there = [one for one in (name, f"val_{name}") if one in self.distman.history.names]
            self.distman.plot_metrics(f"{prefix}_metric_{name}.png", there)

    def save(self, path: str | os.PathLike[str], single_file: bool = True) -> None:
        """Write the handler into a file, completely or not at all.

        Collective. Blocking: call it on all ranks. The loss function, metrics and callbacks themselves are left out.
        """
        refuse(single_file=not single_file)
        checkpoint.save({**self.distman.state_dict(), _checkpoints.KEY: _checkpoints.describe(self)}, path)

    load = _checkpoints.Load()

    @classmethod
    def initialize_from_checkpoint(
        cls,
        checkpoint_path: str,
        model_class: type[torch.nn.Module],
        model_type: _kinds.ModelType | str | None = None,
        device: torch.device | str | None = None,
        strict_load: bool = True,
        **model_kwargs: Any,
    ) -> Self:
        """Return a handler whose model has the weights in a file, and nothing else of it.

        Collective. Blocking. The arguments are those of :class:`NNHandler` and of its ``load``.
        """
        start(device)
        model_type = model_type or _kinds.ModelType.CLASSIFICATION
        handler = cls(model_class, device or "cpu", model_type=model_type, **model_kwargs)
        _checkpoints.load_model(handler, checkpoint_path, strict=strict_load)
        return handler

    def predict(self, data_loader: DataLoader[Any], apply_ema: bool = True) -> list[Any] | None:
        """Return the outputs of each batch, in the order of the dataset, on rank 0; None elsewhere.

        Collective. Blocking. The ranks share the batches, whatever sampler the loader has.

        Raises:
            TypeError: The model is a score-based one; or the dataset has no length.
        """
        if self._model_type is ModelType.SCORE_BASED:
            raise TypeError(
                "the model must return outputs for a batch alone, got a score-based one. Call score(t, x), sample() or "
                "log_likelihood()."
            )
        size = data_loader.batch_size or 1
        samples = range(length_of(data_loader.dataset))
        batches = [[*samples[first : first + size]] for first in samples[::size]]
        sizes = split_sizes(len(batches), self._world_size)
        first = sum(sizes[: self._rank])
        own = batches[first : first + sizes[self._rank]]
        options = {name: getattr(data_loader, name) for name in ("num_workers", "collate_fn", "pin_memory")}
        loader = DataLoader(data_loader.dataset, batch_sampler=own, **options)
        outputs = self.distman.predict(loader, samples=lambda one: [one])  # what a batch returns is one entry
        return None if self._rank else outputs or []

    @property
    def sde(self) -> Any:
        """The equation of a score-based model."""
        return self._sde

    @sde.setter
    def sde(self, sde_instance: Any) -> None:
        self._sde, self._model_type = sde_instance, _kinds.ModelType.SCORE_BASED

    def set_sde(self, sde_class: Callable[..., Any], **sde_kwargs: Any) -> None:
        """Make the model a score-based one."""
        self.sde = sde_class(**sde_kwargs)

    def score(self, t: torch.Tensor | float, x: torch.Tensor, *args: Any) -> torch.Tensor:
        """Return the estimated gradient of the log-density of noisy data of shape ``(batch, *)``.

        Differentiable. There is one time, or one for each sample; the model takes ``args`` besides.
        """
        return self._score(self.module, t, x, *args)

    def _score(self, module: torch.nn.Module, t: torch.Tensor | float, x: torch.Tensor, *args: Any) -> torch.Tensor:
        x = x.to(self.device)
        times = torch.as_tensor(t, device=self.device).expand(len(x))
        if isinstance(self.sde, score.SDE):
            return score.score(lambda t, x: module(t, x, *args), self.sde, times, x)
        value: torch.Tensor = module(times, x, *args) / self.sde.sigma(times).view(-1, *[1] * (x.ndim - 1))
        return value

    def sample(
        self,
        shape: Sequence[int],
        steps: int,
        corrector_steps: int = 0,
        condition: Sequence[Any] | None = None,
        likelihood_score_fn: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None,
        guidance_factor: float = 1.0,
        apply_ema: bool = True,
        bar: bool = True,
        stop_on_NaN: bool = True,  # noqa: N803 - its name there
        patch_size: int | None = None,
        stride: int | None = None,
        patch_chunk: int | None = None,
        corrector_snr: float = 0.1,
        on_step: Callable[..., object] | None = None,
    ) -> torch.Tensor:
        """Draw samples by the reverse equation: the same on all ranks, which share the work if there is no condition.

        Collective. Blocking. Samples that are not finite are an error, whatever ``stop_on_NaN`` is. ``condition`` is
        what the model takes besides times and samples; ``likelihood_score_fn`` is a function of these two, whose value
        is added to the score. ``corrector_steps``, patches and ``on_step`` are refused, ``bar`` makes no difference.

        Raises:
            TypeError: The equation is not one of :mod:`distman.score`.
        """
        refuse(corrector_steps=corrector_steps, patch_size=patch_size, stride=stride, on_step=on_step)
        refuse(patch_chunk=patch_chunk)
        module = self._evaluated("sample", apply_ema)

        def score_fn(t: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
            value = self._score(module, t, x, *(condition or ()))
            return value if likelihood_score_fn is None else value + guidance_factor * likelihood_score_fn(t, x)

        with evaluating(module):
            return score.sample(score_fn, self.sde, shape, num_steps=steps, rank_zero=bool(condition))

    def log_likelihood(
        self,
        x: torch.Tensor,
        *args: Any,
        ode_steps: int | None = None,
        n_cotangent_vectors: int = 1,
        noise_type: Literal["rademacher", "gaussian"] = "rademacher",
        method: str = "",
        t0: float | None = None,
        t1: float | None = None,
        apply_ema: bool = True,
        pbar: bool = False,
    ) -> torch.Tensor:
        """Return the log-density of samples, in nats, on all ranks, which share the work.

        Collective. Blocking. The samples are the same on all ranks, of shape ``(n, *)``; the model takes ``args``
        besides. ``t0`` and ``t1`` are refused; ``ode_steps``, ``method`` and ``pbar`` make no difference: the steps of
        the solver are as many as its precision needs.

        Raises:
            TypeError: The equation is not one of :mod:`distman.score`.
        """
        refuse(t0=t0, t1=t1)
        module = self._evaluated("log_likelihood", apply_ema)
        with evaluating(module):
            return score.log_likelihood(
                lambda t, x: self._score(module, t, x, *args),
                self.sde,
                x,
                num_probes=n_cotangent_vectors,
                probes=noise_type,
            )

    def set_sampler(self, sampler_class: Callable[..., _kinds.Sampler], **sampler_kwargs: Any) -> None:
        """Set a way to draw samples."""
        self.sampler = sampler_class(**sampler_kwargs)

    def get_samples(self, N: int, device: torch.device | str | None = None) -> Any:  # noqa: N803 - its name there
        """Return so many samples of the sampler, on rank 0; None elsewhere."""
        if self.sampler is None:
            raise RuntimeError("the handler has no sampler. Call set_sampler() first.")
        if self._rank:
            return None
        return self.sampler.sample(N, device=self.device if device is None else torch.device(device))

    def _evaluated(self, method: str, apply_ema: bool) -> torch.nn.Module:
        if not isinstance(self.sde, score.SDE):
            raise TypeError(
                f"sde must be an equation of distman.score for {method}(), got {self.sde!r}. Call "
                "set_sde(distman.score.VarianceExploding, sigma_max=...) or the like, or draw samples with your own "
                "loop over handler.score(t, x)."
            )
        module: torch.nn.Module = self.ema if apply_ema and self.ema is not None else self.module
        return module


def _loader_options(dataloader_type: DataLoaderType, loader_kwargs: dict[str, Any]) -> dict[str, Any]:
    if dataloader_type is DataLoaderType.STANDARD:
        return loader_kwargs
    of_memory = ("batch_size", "shuffle", "drop_last", "seed")  # the options that a loader of what is there has
    return {"cached": True, **{name: value for name, value in loader_kwargs.items() if name in of_memory}}


def _path_of_plot(path: str | None) -> str:
    if path is None:
        raise TypeError("the path of the plot must be given, got None. Pass a file: nothing is shown on a screen.")
    return path
