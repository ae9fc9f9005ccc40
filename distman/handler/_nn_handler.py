"""Training, evaluation and sampling of a model in a few lines, put together from the parts beside this file."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

import torch
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset, TensorDataset

from distman import checkpoint
from distman._device import resolve_device
from distman._seeds import seed_generators, seed_of
from distman.checkpoint._state import check_state
from distman.data import EvaluationLoader, TrainingLoader, distributed_loader, rank_cached_loader
from distman.errors import DistmanError, check_options
from distman.handler._accumulators import Metric, MetricFunction, StatefulMetric
from distman.handler._callbacks import Callback, ModelCheckpoint
from distman.handler._evaluation import evaluate, predict
from distman.handler._history import History
from distman.handler._model import TrainedModel
from distman.handler._objective import Forward, LossFunction, Objective, Supervised, default_forward
from distman.handler._optimization import Optimization, StepOptions
from distman.handler._plots import plot_history
from distman.handler._reporting import LoggerMode, Reporter
from distman.handler._resumption import EXIT_CODE, AutoSave, Preempted
from distman.handler._scheduling import Scheduling
from distman.handler._score_based import ScoreBased, make_sde
from distman.handler._sources import ForeignSource, LoaderSource, Source
from distman.handler._training import Hooks, Training
from distman.manager import DistributedManager
from distman.score import SDE
from distman.topology._partition import is_whole_number

T = TypeVar("T")

_NO_OPTIONS = {"dataset", "evaluation", "group", "loader_kwargs"}
_TAKEN = ("epoch", "loss", "lr", "seconds", "skipped")


class NNHandler:
    """A model, and all that belongs to its training, on any number of ranks.

    Collective. It initializes the manager if the program has not; the model gets the weights of rank 0. Methods are
    collective, unless they say otherwise: call them on all ranks. Files are written, lines and bars shown on rank 0.

    Args:
        model_class: The model's class, or a function that makes it.
        device: Device of this rank; None leaves it to the manager.
        logger_mode: Where to write a line for each epoch: ``"console"``, ``"file"`` or ``"both"``; None leaves it to
            the program's configuration of :mod:`logging`, logger ``distman.training``.
        log_file: The file, to which lines are appended.
        use_distributed: True fails where no launcher speaks; False is one process whatever they say; None believes
            them.
        seed: Seeds Python, NumPy and torch: the same while the model is made, then one stream for each rank.
        compile: Compile the model with ``torch.compile``; a mapping holds its options.
        model_kwargs: Arguments of the model's class.

    Attributes:
        history: What became of each epoch, the same on all ranks.
    """

    def __init__(
        self,
        model_class: Callable[..., torch.nn.Module],
        device: str | torch.device | None = None,
        logger_mode: LoggerMode | None = None,
        *,
        log_file: str | os.PathLike[str] = "training.log",
        use_distributed: bool | None = None,
        seed: int | None = None,
        compile: bool | Mapping[str, Any] = False,
        **model_kwargs: Any,
    ) -> None:
        _check_makes("model_class", model_class, "the module", "Pass the class and its arguments, or lambda: model.")
        manager = _manager(device, use_distributed=use_distributed)
        if seed is not None:
            seed_generators(seed_of(seed))
        options = None if compile is False else {} if compile is True else compile
        self._model = TrainedModel(model_class(**model_kwargs), compile_options=options)
        if seed is not None:
            seed_generators(seed_of(seed, manager.rank))
        self._model_kwargs = model_kwargs
        self._seed = seed or 0
        self.history = History()
        self._reporter = Reporter(logger_mode, Path(log_file))
        self._forward: Forward = default_forward
        self._objective: Objective | None = None
        self._score_based: ScoreBased | None = None
        self._optimizer: torch.optim.Optimizer | None = None
        self._scheduling: Scheduling | None = None
        self._train_data: Any = None
        self._val_data: Any = None
        self._metrics: dict[str, Metric] = {}
        self._callbacks: list[Callback] = []
        self._auto_save: AutoSave | None = None
        self._training: Training | None = None
        self._loaded: Mapping[str, Any] | None = None
        self._dtype: torch.dtype | None = None

    @classmethod
    def initialize_from_checkpoint(
        cls, path: str | os.PathLike[str], model_class: Callable[..., torch.nn.Module], **kwargs: Any
    ) -> NNHandler:
        """Return a handler whose model has the arguments and the weights of a checkpoint.

        Collective.

        Args:
            path: The file.
            model_class: The model's class, or a function that makes it.
            kwargs: Arguments of the handler, and of the model where they differ from the saved ones, or could not be
                saved: numbers, strings, lists and tensors can.

        Raises:
            Exception: On the rank where reading failed: why.
            RankFailedError: On the other ranks.
        """
        _manager(kwargs.get("device"), use_distributed=kwargs.get("use_distributed"))
        saved = checkpoint.load(path)
        handler = cls(model_class, **{**saved["model_kwargs"], **kwargs})
        handler._load(saved)
        return handler

    @property
    def model(self) -> torch.nn.Module:
        """The model as the ranks train it; call :attr:`module` instead, which waits for nobody."""
        return self._model.wrapped

    @property
    def module(self) -> torch.nn.Module:
        """The bare model."""
        return self._model.module

    @property
    def ema_module(self) -> torch.nn.Module | None:
        """The model with the moving average of the weights; None without one."""
        return None if self._model.average is None else self._model.evaluated

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer."""
        return _given(self._optimizer, "an optimizer", "set_optimizer")

    @property
    def num_steps(self) -> int:
        """Number of steps that the optimizer has taken."""
        if self._loaded is not None:
            return int(self._loaded["training"]["optimization"]["num_steps"])
        return self._training.optimization.num_steps if self._training is not None else 0

    @property
    def validates(self) -> bool:
        """Whether there are data to validate with."""
        return self._val_data is not None

    @property
    def train_losses(self) -> list[float]:
        """Mean training loss of each epoch."""
        return self.history["loss"]

    @property
    def val_losses(self) -> list[float]:
        """Mean validation loss of each epoch; NaN where there was no validation."""
        return self.history["val_loss"]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the bare model makes of these inputs.

        Local.
        """
        return self.module(*args, **kwargs)

    def set_optimizer(
        self,
        optimizer_class: Callable[..., torch.optim.Optimizer],
        *,
        parameters: Callable[[torch.nn.Module], Iterable[Any]] | None = None,
        **kwargs: Any,
    ) -> None:
        """Take an optimizer; a scheduler has to be set again.

        Local.

        Args:
            optimizer_class: Its class.
            parameters: Takes the bare model and returns the parameters, or groups of them; None takes all.
            kwargs: Arguments of the class, such as ``lr``.

        Raises:
            TypeError: It is not what makes an optimizer.
        """
        _check_makes(
            "optimizer_class",
            optimizer_class,
            "the optimizer",
            "Pass the class and its arguments, such as set_optimizer(torch.optim.SGD, lr=0.1).",
        )
        chosen = self.module.parameters() if parameters is None else parameters(self.module)
        self._optimizer = optimizer_class(chosen, **kwargs)
        self._scheduling = None

    def set_scheduler(
        self,
        scheduler_class: Callable[..., LRScheduler],
        *,
        per: Literal["epoch", "step"] = "epoch",
        monitor: str = "val_loss",
        **kwargs: Any,
    ) -> None:
        """Take a scheduler of the learning rate.

        Local. The optimizer must be set.

        Args:
            scheduler_class: Its class.
            per: Whether it steps with the epochs or with the optimizer.
            monitor: Which value of the history ReduceLROnPlateau watches; epochs without it do not count.
            kwargs: Arguments of the class.

        Raises:
            TypeError: It is not what makes a scheduler.
        """
        _check_makes("scheduler_class", scheduler_class, "the scheduler", "Pass the class and its arguments.")
        self._scheduling = Scheduling(
            self.optimizer, scheduler_class(self.optimizer, **kwargs), per=per, monitor=monitor
        )

    def set_loss_fn(self, loss_fn: LossFunction, *, forward: Forward | None = None) -> None:
        """Take a loss.

        Local.

        Args:
            loss_fn: Takes outputs and targets, and returns the mean loss over the samples, shape ``()``.
            forward: Takes the model and a batch, and returns outputs and targets; None calls the model with the first
                part of the batch, and takes the last part for the targets.
        """
        self._forward = forward or default_forward
        self._objective = Supervised(self._forward, loss_fn)

    def set_train_loader(
        self, data: Dataset[Any] | Iterable[Any], *, cached: bool = False, **loader_kwargs: Any
    ) -> None:
        """Take the data to train with.

        Local. The learning rate may have to follow the number of ranks: a step sees ``batch_size`` samples of each.

        Args:
            data: A dataset, the same on all ranks, which they share; or, for data that each rank finds in its own way,
                a DataLoader or another iterable of batches, of which the ranks may have different numbers.
            cached: Keep each rank's shard in its memory: see :func:`distman.data.rank_cached_loader`.
            loader_kwargs: Options of :func:`distman.data.distributed_loader`: ``batch_size`` for each rank, and others.

        Raises:
            TypeError: The data or an option is not such a one.
        """
        options = loader_kwargs | {"seed": loader_kwargs.get("seed", self._seed)}
        self._train_data = _loader("set_train_loader", data, options, cached=cached)

    def set_val_loader(self, data: Dataset[Any] | Iterable[Any], *, cached: bool = False, **loader_kwargs: Any) -> None:
        """Take the data to validate with.

        Local. See :meth:`set_train_loader`. Each sample counts once.
        """
        self._val_data = _loader("set_val_loader", data, loader_kwargs, cached=cached, evaluation=True)

    def add_metric(self, name: str, metric: MetricFunction | StatefulMetric, *, needs_all: bool = False) -> None:
        """Measure something besides the loss, in training and in validation.

        Local.

        Args:
            name: What it is called; in validation with ``val_`` before it, so no name begins so.
            metric: Takes outputs and targets, and returns the mean over their samples; or a metric of torchmetrics.
            needs_all: Call it once with all outputs and targets of a validation, on rank 0, instead of batch by batch:
                for what is no mean over samples.

        Raises:
            ValueError: The name is taken.
        """
        if name in self._metrics or name in _TAKEN or name.startswith("val_"):
            raise ValueError(f"name must be a new one, got {name!r}. Choose another, or call clear_metrics() first.")
        self._metrics[name] = Metric(metric, needs_all)

    def clear_metrics(self) -> None:
        """Measure the loss alone.

        Local.
        """
        self._metrics.clear()

    def add_callback(self, callback: Callback) -> None:
        """Call something at the turns of the training; callbacks that save come last.

        Local.
        """
        self._callbacks.append(callback)
        self._callbacks.sort(key=lambda one: isinstance(one, ModelCheckpoint))

    def auto_save(
        self,
        folder: str | os.PathLike[str],
        *,
        every_epochs: int | None = 1,
        every_steps: int | None = None,
        keep: int = 2,
        resume: bool = True,
        requeue: bool | None = None,
    ) -> None:
        """Save the training while it runs, and let :meth:`train` go on from there when the program is started again.

        Local. What it wrote last is complete whenever the program is killed.

        Args:
            folder: Where to; see :class:`distman.checkpoint.CheckpointFolder`.
            every_epochs: After how many epochs to save; None does so after the last only.
            every_steps: After how many steps of the optimizer to save, besides.
            keep: How many checkpoints to keep.
            resume: Go on from the latest one, if there is one, whatever was loaded before.
            requeue: Let Slurm queue the job again when it was asked to stop; None does so where ``DISTMAN_REQUEUE=1``,
                as the job scripts say.
        """
        requeues = os.environ.get("DISTMAN_REQUEUE") == "1" if requeue is None else requeue
        self._auto_save = AutoSave(
            checkpoint.CheckpointFolder(folder, keep=keep), every_epochs, every_steps, resumes=resume, requeues=requeues
        )

    def train(
        self,
        epochs: int,
        *,
        accumulate: int = 1,
        amp: Literal["bf16", "fp16"] | None = None,
        clip_norm: float | None = None,
        ema_decay: float | None = None,
        non_finite: Literal["raise", "skip"] = "raise",
        validate_every: int = 1,
        progress: bool | None = None,
    ) -> History:
        """Train until so many epochs are done, counting those of the runs that it goes on from.

        Collective. Blocking. When the job is asked to stop, by SIGTERM or SIGUSR1 to any rank, all ranks save after the
        same step, with :meth:`auto_save`, and end with the exit code 75.

        Args:
            epochs: Number of epochs in all.
            accumulate: Number of batches whose gradients make a step; an epoch's last step may have fewer.
            amp: Automatic mixed precision; ``"fp16"`` scales the loss.
            clip_norm: Greatest 2-norm of the gradient; None does not clip.
            ema_decay: Decay of a moving average of the weights, which validation, prediction and sampling then use.
            non_finite: When a loss or the gradient is NaN or infinite on any rank, ``"raise"`` on all ranks, or
                ``"skip"`` the step on all.
            validate_every: After how many epochs to validate.
            progress: Show a bar; None shows it on a terminal.

        Returns:
            The history.

        Raises:
            DistmanError: Something has not been set.
            NonFiniteLossError: On every rank: a loss or the gradient is NaN or infinite.
            Preempted: On every rank: the job was asked to stop. It ends the program, if nothing catches it.
            TypeError: ``epochs`` is not a whole number.
            ValueError: An option has no meaning.
        """
        if not is_whole_number(epochs):
            raise TypeError(f"epochs must be a whole number, got {epochs!r}. Pass the number of epochs in all.")
        options = StepOptions(accumulate, amp, clip_norm, ema_decay, non_finite)
        self._dtype = options.dtype
        state, is_own = self._state_to_go_on_from()
        training = Training(
            objective=self._checked_objective(),
            optimization=Optimization(self._model, self.optimizer, options),
            source=self._source(),
            scheduling=self._checked_scheduling(),
            metrics=self._metrics,
            history=self.history,
            reporter=self._reporter,
            hooks=_HandlerHooks(self, validate_every),
        )
        if state is not None:
            training.load_state_dict(state, keeps_optimizer=is_own)
        self._training, self._loaded = training, None
        if not self.module.training:
            self.module.train()
        for callback in self._callbacks:
            callback.on_train_begin(self)
        is_over = training.run(epochs, accumulate=accumulate, progress=progress)
        for callback in self._callbacks if is_over else ():
            callback.on_train_end(self)
        if self._auto_save is not None:
            self._auto_save.folder.wait()
        if not is_over:
            self._leave()
        return self.history

    def stop(self, reason: str = "stop()") -> None:
        """End the training after this epoch, on all ranks.

        Local. For callbacks; any rank may call it.
        """
        _given(self._training, "a training under way", "train").stop(reason)

    def validate(self) -> dict[str, float]:
        """Return the loss and the metrics over the data of the validation, the same on all ranks.

        Collective. Blocking.
        """
        data = _given(self._val_data, "data to validate with", "set_val_loader")
        self._model.share_buffers()
        return evaluate(self._model.evaluated, self._checked_objective(), data, self._metrics, dtype=self._dtype)

    def predict(
        self,
        data: Dataset[Any] | torch.Tensor | EvaluationLoader,
        *,
        batch_size: int = 64,
        all_ranks: bool = False,
        **loader_kwargs: Any,
    ) -> Any:
        """Return what the model makes of each sample, once and in order.

        Collective. Blocking.

        Args:
            data: A dataset, the same on all ranks; a tensor of inputs, shape ``(n, *)``; or a loader for evaluation.
            batch_size: Samples per rank and step.
            all_ranks: Return the outputs on all ranks.
            loader_kwargs: Options of :func:`distman.data.distributed_loader`.

        Returns:
            The outputs, in host memory, on rank 0; None elsewhere.
        """
        if isinstance(data, torch.Tensor):
            data = TensorDataset(data)
        if not isinstance(data, EvaluationLoader):
            data = cast(
                "EvaluationLoader", distributed_loader(data, evaluation=True, batch_size=batch_size, **loader_kwargs)
            )

        def forward(model: torch.nn.Module, batch: Any) -> Any:
            return self._forward(model, batch)[0]

        self._model.share_buffers()
        return predict(self._model.evaluated, forward, data, all_ranks=all_ranks, dtype=self._dtype)

    def state_dict(self) -> dict[str, Any]:
        """Return all that a resumed training depends on, of plain values and tensors.

        Collective. The tensors are those of the model and the optimizer, not copies.
        """
        self._model.share_buffers()
        training = self._training.state_dict() if self._training is not None else None
        if self._loaded is not None:
            training = self._loaded["training"]
        return {
            "model": self._model.state_dict(),
            "model_kwargs": {name: value for name, value in self._model_kwargs.items() if _is_plain(value)},
            "training": training,
            "history": self.history.state_dict(),
            "callbacks": [[type(one).__qualname__, one.state_dict()] for one in self._callbacks],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take such a state, of any number of ranks; the next :meth:`train` goes on from it.

        Local.

        Raises:
            RuntimeError: The weights do not fit the model.
        """
        self._model.load_state_dict(state["model"])
        self.history.load_state_dict(state["history"])
        saved = list(state["callbacks"])
        for callback in self._callbacks:
            own = next((one for one in saved if one[0] == type(callback).__qualname__), None)
            if own is not None:
                saved.remove(own)
                callback.load_state_dict(own[1])
        self._loaded = state if state["training"] is not None else None

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the training as it stands into a file, which is there as a whole or not at all.

        Collective. Blocking. See :func:`distman.checkpoint.save`.

        Raises:
            RankFailedError: On every rank: writing failed on rank 0, whose error is the cause there.
        """
        checkpoint.save(self.state_dict(), path)

    def load(self, path: str | os.PathLike[str]) -> None:
        """Take the training from a file, written by any number of ranks; the next :meth:`train` goes on from it.

        Collective. Blocking. Callbacks must have been added before.

        Raises:
            Exception: On the rank where reading failed: why.
            RankFailedError: On the other ranks.
        """
        self._load(checkpoint.load(path))

    def plot_losses(self, path: str | os.PathLike[str], *, log: bool = False) -> None:
        """Draw the losses over the epochs into a file, on rank 0.

        Collective.

        Args:
            path: The file; its ending says the format.
            log: Draw them on a logarithmic axis.
        """
        names = [name for name in ("loss", "val_loss") if name in self.history.names]
        plot_history(self.history, names, path, title="Loss", log=log)

    def plot_metrics(self, path: str | os.PathLike[str], names: Sequence[str] | None = None) -> None:
        """Draw the metrics over the epochs into a file, on rank 0.

        Collective.

        Args:
            path: The file; its ending says the format.
            names: Names in the history; None takes all metrics, of training and of validation.
        """
        if names is None:
            names = [name for metric in self._metrics for name in (metric, f"val_{metric}")]
            names = [name for name in names if name in self.history.names]
        plot_history(self.history, names, path, title="Metrics")

    def set_sde(self, sde: SDE | Literal["vp", "ve"], **kwargs: Any) -> None:
        """Make the model a score-based one, which is trained by denoising, with batches of samples.

        Local. The model is called with times, shape ``(batch,)``, and samples; see :func:`distman.score.score`.

        Args:
            sde: The equation, or ``"vp"`` for :class:`distman.score.VariancePreserving`, ``"ve"`` for
                :class:`distman.score.VarianceExploding`.
            kwargs: Arguments of these.

        Raises:
            ValueError: There is no such equation.
        """
        self._score_based = self._objective = ScoreBased(make_sde(sde, **kwargs))

    def score(self, t: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Return the estimated gradient of the log-density at times ``(batch,)`` and points ``(batch, *)``.

        Local.
        """
        return self._checked_score_based().score(self._model.evaluated, t, x)

    def sample(self, shape: Sequence[int], **kwargs: Any) -> torch.Tensor:
        """Draw samples from a score-based model; the ranks share the work.

        Collective. Blocking.

        Args:
            shape: Of all samples, ``(n, *)``.
            kwargs: Options of :func:`distman.score.sample`; ``rank_zero=True`` lets rank 0 work alone.
        """
        self._model.share_buffers()
        return self._checked_score_based().sample(self._model.evaluated, shape, **kwargs)

    def log_likelihood(self, x: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """Return the log-density of samples under a score-based model, in nats; the ranks share the work.

        Collective. Blocking.

        Args:
            x: The samples, shape ``(n, *)``, the same on all ranks.
            kwargs: Options of :func:`distman.score.log_likelihood`.
        """
        self._model.share_buffers()
        return self._checked_score_based().log_likelihood(self._model.evaluated, x, **kwargs)

    def _state_to_go_on_from(self) -> tuple[Mapping[str, Any] | None, bool]:
        """Return what was saved by the run before, or loaded, or trained already, and whether it is the latter."""
        if self._training is None and self._auto_save is not None and self._auto_save.resumes:
            saved = self._auto_save.load()
            if saved is not None:
                self._reporter.say("going on after %s", self._auto_save.folder.latest())
                self.load_state_dict(saved)
        if self._loaded is not None:
            return self._loaded["training"], False
        if self._training is not None:
            return {**self._training.state_dict(), "reason": ""}, True
        return None, False

    def _load(self, state: dict[str, Any]) -> None:
        if state["training"] is not None:
            state["training"]["reason"] = ""  # who loads it wants to go on
        self.load_state_dict(state)

    def _checked_scheduling(self) -> Scheduling:
        scheduling = self._scheduling or Scheduling(self.optimizer)
        if (scheduling.monitored or "").startswith("val_") and not self.validates:
            raise DistmanError(
                f"there must be data to validate with for ReduceLROnPlateau to watch {scheduling.monitored}, got none. "
                "Call set_val_loader(), or set_scheduler(..., monitor='loss')."
            )
        return scheduling

    def _checked_objective(self) -> Objective:
        return _given(self._objective, "a loss", "set_loss_fn() or set_sde")

    def _checked_score_based(self) -> ScoreBased:
        return _given(self._score_based, "a score-based model", "set_sde")

    def _source(self) -> Source:
        data = _given(self._train_data, "data to train with", "set_train_loader")
        return LoaderSource(data) if isinstance(data, TrainingLoader) else ForeignSource(data)

    def _leave(self) -> None:
        """End a program that was asked to stop."""
        if self._auto_save is None:
            self._reporter.say("asked to stop; nothing is saved: call auto_save() before train()")
        else:
            self._reporter.say("asked to stop; saved in %s", self._auto_save.folder.path)
        if self._auto_save is not None and self._auto_save.requeues:
            DistributedManager().requeue()
        raise Preempted(EXIT_CODE)


class _HandlerHooks(Hooks):
    """What a handler does at the turns of its training."""

    def __init__(self, handler: NNHandler, validate_every: int) -> None:
        if validate_every < 1:
            raise ValueError(f"validate_every must be at least 1, got {validate_every}. Pass a number of epochs.")
        self._handler, self._validate_every = handler, validate_every

    def on_epoch_begin(self, epoch: int) -> None:
        for callback in self._handler._callbacks:
            callback.on_epoch_begin(self._handler, epoch)

    def on_step_end(self, step: int) -> None:
        for callback in self._handler._callbacks:
            callback.on_step_end(self._handler, step)

    def validate(self, epoch: int) -> dict[str, float]:
        if self._handler._val_data is None or (epoch + 1) % self._validate_every:
            return {}
        return self._handler.validate()

    def on_epoch_end(self, record: dict[str, float]) -> None:
        for callback in self._handler._callbacks:
            callback.on_epoch_end(self._handler, record)

    def is_to_save(self, *, step: int | None = None, epoch: int | None = None) -> bool:
        auto_save = self._handler._auto_save
        return auto_save is not None and auto_save.is_due(step=step, epoch=epoch)

    def save(self) -> None:
        if self._handler._auto_save is not None:
            self._handler._auto_save.folder.save(self._handler.state_dict(), self._handler.num_steps)


def _manager(device: str | torch.device | None, *, use_distributed: bool | None) -> DistributedManager:
    """Return the manager, initialized; it must agree with what the handler was asked for."""
    if not DistributedManager.is_initialized():
        return DistributedManager.initialize(device=device, use_distributed=use_distributed)
    manager = DistributedManager()
    if use_distributed is not None and use_distributed != manager.distributed:
        raise ValueError(
            f"use_distributed must be {manager.distributed}, as the manager was initialized, got {use_distributed}. "
            "Pass it to DistributedManager.initialize()."
        )
    wanted = manager.device if device is None else resolve_device(device)
    if wanted.type != manager.device.type or wanted.index not in (None, manager.device.index):
        raise ValueError(f"device must be the manager's, {manager.device}, got {device}. Leave it out.")
    return manager


def _check_makes(name: str, function: object, what: str, advice: str) -> None:
    """Refuse what was made already, and what makes nothing."""
    if not callable(function) or isinstance(function, torch.nn.Module):
        got = repr(function) if isinstance(function, str) else f"a {type(function).__name__}"
        raise TypeError(f"{name} must be a class or function that makes {what}, got {got}. {advice}")


def _loader(method: str, data: Any, options: Mapping[str, Any], *, cached: bool, evaluation: bool = False) -> Any:
    """Return a loader that shares out a dataset, or the iterable as it is."""
    if "group" in options:
        raise TypeError("group must be left out: all ranks train one model. Use the loaders of distman.data by hand.")
    if isinstance(data, Iterator):
        raise TypeError(
            f"data must be there again in each epoch, got the iterator {data!r}. Pass a DataLoader, or an object whose "
            "__iter__ begins anew."
        )
    if evaluation and isinstance(data, TrainingLoader):
        raise TypeError(
            "data to validate with must be read in order, got a TrainingLoader. Pass evaluation=True to it."
        )
    if isinstance(data, DataLoader) or not hasattr(data, "__getitem__"):
        given = [name for name in options if name != "seed"]
        if cached or given:
            raise TypeError(
                f"options of a loader must come with a dataset, got {given or ['cached']} with a "
                f"{type(data).__name__}. Set them there."
            )
        return data
    make = rank_cached_loader if cached else distributed_loader
    check_options(options, _options_of(make), method)
    return make(data, evaluation=evaluation, **options)


def _options_of(make: Callable[..., Any]) -> set[str]:
    """Return what a program may pass on to one that makes loaders."""
    known = {"cached", *inspect.signature(make).parameters}
    if "loader_kwargs" in known:
        known |= {*inspect.signature(DataLoader).parameters}
    return known - _NO_OPTIONS


def _is_plain(value: object) -> bool:
    """Return whether a checkpoint can hold it."""
    try:
        check_state(value)
    except ValueError:
        return False
    return True


def _given(value: T | None, what: str, method: str) -> T:
    if value is None:
        raise DistmanError(f"the handler must have {what} for this, got none. Call {method}() first.")
    return value
