"""What a handler is set to train with: model, optimizer, scheduler, loss, data, metrics and callbacks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Literal, TypeVar

import torch
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import Dataset

from distman.errors import DistmanError
from distman.handler._accumulators import Metric, MetricFunction, StatefulMetric
from distman.handler._callbacks import ModelCheckpoint
from distman.handler._events import Callback, Callbacks
from distman.handler._loading import make_loader, make_source
from distman.handler._model import TrainedModel
from distman.handler._objective import Forward, LossFunction, Objective, Supervised, default_forward
from distman.handler._scheduling import Scheduling
from distman.handler._score_based import ScoreBased, make_sde
from distman.handler._sources import NumSamples, Source
from distman.score import SDE
from distman.score._denoising import Weighting

T = TypeVar("T")

# Names that the history has besides those of metrics; see History.
_RESERVED_NAMES = ("epoch", "loss", "lr", "seconds", "skipped")


class Setup:
    """What a handler has been set to train with, and the methods that set it.

    Args:
        model: The model.
        seed: Seed of the order of the training data, unless a loader has its own.
    """

    def __init__(self, model: TrainedModel, seed: int) -> None:
        self._model = model
        self._seed = seed
        self._forward: Forward = default_forward
        self._num_samples: NumSamples | None = None
        self._objective: Objective | None = None
        self._score_based: ScoreBased | None = None
        self._optimizer: torch.optim.Optimizer | None = None
        self._scheduling: Scheduling | None = None
        self._train_data: Any = None
        self._val_data: Any = None
        self._metrics: dict[str, Metric] = {}
        self._callbacks = Callbacks()

    @property
    def model(self) -> torch.nn.Module:
        """The model as the ranks train it; outside of training steps call :attr:`module`, which waits for no rank."""
        return self._model.wrapped

    @property
    def module(self) -> torch.nn.Module:
        """The bare model."""
        return self._model.module

    @property
    def ema_module(self) -> torch.nn.Module | None:
        """The model with the moving average of the weights; None if no average is kept."""
        return None if self._model.average is None else self._model.evaluated

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer."""
        return required(self._optimizer, "optimizer", "set_optimizer()")

    @property
    def validates(self) -> bool:
        """Whether data to validate with have been set."""
        return self._val_data is not None

    def set_optimizer(
        self,
        optimizer_class: Callable[..., torch.optim.Optimizer],
        *,
        parameters: Callable[[torch.nn.Module], Iterable[Any]] | None = None,
        **kwargs: Any,
    ) -> None:
        """Set the optimizer. This removes the scheduler, which has to be set again.

        Local.

        Args:
            optimizer_class: The optimizer's class.
            parameters: Takes the bare model and returns the parameters, or parameter groups, to optimize; None is all.
            kwargs: Arguments of the class, such as ``lr``.

        Raises:
            TypeError: ``optimizer_class`` is not a class or function that makes an optimizer.

        Example:
            >>> handler = NNHandler(torch.nn.Linear, in_features=2, out_features=1)
            >>> handler.set_optimizer(torch.optim.AdamW, lr=1e-3, parameters=lambda module: [module.weight])
            >>> len(handler.optimizer.param_groups[0]["params"])
            1
        """
        check_factory(
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
        """Set the scheduler of the learning rate.

        Local. Set the optimizer first.

        Args:
            scheduler_class: The scheduler's class.
            per: Whether it steps after each epoch, or after each step of the optimizer.
            monitor: Name in the history of the value that ReduceLROnPlateau monitors; epochs without it do not count.
            kwargs: Arguments of the class.

        Raises:
            TypeError: ``scheduler_class`` is not a class or function that makes a scheduler.
            ValueError: ``per`` is neither, or is ``"step"`` for ReduceLROnPlateau.
            DistmanError: No optimizer has been set.

        Example:
            >>> handler = NNHandler(torch.nn.Linear, in_features=2, out_features=1)
            >>> handler.set_optimizer(torch.optim.SGD, lr=0.1)
            >>> warm_up = lambda step: min(1.0, (step + 1) / 100)
            >>> handler.set_scheduler(torch.optim.lr_scheduler.LambdaLR, lr_lambda=warm_up, per="step")
            >>> handler.optimizer.param_groups[0]["lr"]
            0.001
        """
        check_factory("scheduler_class", scheduler_class, "the scheduler", "Pass the class and its arguments.")
        self._scheduling = Scheduling(
            self.optimizer, scheduler_class(self.optimizer, **kwargs), per=per, monitor=monitor
        )

    def set_loss_fn(
        self, loss_fn: LossFunction, *, forward: Forward | None = None, num_samples: NumSamples | None = None
    ) -> None:
        """Set the loss function.

        Local.

        Args:
            loss_fn: Takes outputs and targets, and returns the mean loss over the samples, shape ``()``.
            forward: Takes the model and a batch, and returns outputs and targets. None calls the model with the first
                element of the batch, and takes the last element for the targets.
            num_samples: Takes a batch and returns over how many samples, or tokens, its loss is a mean: a whole number,
                by which the batches of all ranks are weighted, in metrics too. None counts samples: those that the
                loader knows, or of a loader of one's own the length of the first tensor in the batch.

        Raises:
            TypeError: One of them cannot be called.

        Example:
            >>> handler = NNHandler(torch.nn.Identity)
            >>> def forward(model, batch):
            ...     return model(batch["x"]), batch["y"]
            >>> handler.set_loss_fn(torch.nn.functional.mse_loss, forward=forward)
            >>> handler.set_val_loader([{"x": torch.zeros(1), "y": torch.ones(1)}], batch_size=1)
            >>> handler.validate()
            {'loss': 1.0}
        """
        given = {"loss_fn": loss_fn, "forward": forward or default_forward, "num_samples": num_samples or len}
        for name, function in given.items():
            if not callable(function):
                raise TypeError(f"{name} must be a function, got {function!r}. Pass torch.nn.MSELoss(), for example.")
        self._forward, self._num_samples = forward or default_forward, num_samples
        self._objective = Supervised(self._forward, loss_fn)

    def set_sde(
        self,
        sde: SDE | Literal["vp", "ve"],
        *,
        conditional: bool = False,
        drop_condition: float = 0.0,
        null_condition: float = 0.0,
        weighting: Weighting = "variance",
        **kwargs: Any,
    ) -> None:
        """Make the model a score-based one, which is trained by denoising score matching on batches of samples.

        Local. The model is called with times, shape ``(batch,)``, samples and, if it is conditional, conditions; see
        :func:`distman.score.score`.

        Args:
            sde: The equation, or ``"vp"`` for :class:`distman.score.VariancePreserving`, ``"ve"`` for
                :class:`distman.score.VarianceExploding`.
            conditional: Take the second element of each batch for the conditions of its samples.
            drop_condition: Probability with which a sample loses its condition, for guidance; see
                :func:`distman.score.denoising_loss`.
            null_condition: The number that stands for no condition.
            weighting: Weight of a sample by its time, as in :func:`distman.score.denoising_loss`.
            kwargs: Arguments of these equations.

        Raises:
            ValueError: There is no such equation, or its arguments are not valid.

        Example:
            >>> class Network(torch.nn.Module):
            ...     def forward(self, t, x):
            ...         return -x
            >>> handler = NNHandler(Network)
            >>> handler.set_sde("vp", beta_max=10.0)
            >>> handler.sample((4, 2), num_steps=10).shape
            torch.Size([4, 2])
        """
        self._score_based = self._objective = ScoreBased(
            make_sde(sde, **kwargs),
            conditional=conditional,
            null_condition=null_condition,
            drop_condition=drop_condition,
            weighting=weighting,
        )
        self._num_samples = None

    def set_train_loader(
        self, data: Dataset[Any] | Iterable[Any], *, cached: bool = False, **loader_kwargs: Any
    ) -> None:
        """Set the data to train with.

        Local. A step sees ``batch_size`` samples of each rank, so you may have to scale the learning rate with the
        number of ranks.

        Args:
            data: A dataset, the same on all ranks, which is distributed over them. Or, for data that each rank gets in
                its own way, a DataLoader or another iterable of batches, whose number may differ between ranks.
            cached: Keep each rank's shard in its memory: see :func:`distman.data.rank_cached_loader`.
            loader_kwargs: Options of :func:`distman.data.distributed_loader`, such as ``batch_size`` per rank.

        Raises:
            TypeError: The data or an option cannot be used.

        Example:
            >>> handler = NNHandler(torch.nn.Linear, in_features=2, out_features=1)
            >>> dataset = TensorDataset(torch.rand(64, 2), torch.rand(64, 1))
            >>> handler.set_train_loader(dataset, batch_size=16, drop_last=True)
            >>> handler.set_train_loader(dataset, batchsize=16)
            Traceback (most recent call last):
                ...
            TypeError: batchsize must be an option ... Did you mean batch_size?
        """
        options = loader_kwargs | {"seed": loader_kwargs.get("seed", self._seed)}
        self._train_data = make_loader("set_train_loader", data, options, cached=cached)

    def set_val_loader(self, data: Dataset[Any] | Iterable[Any], *, cached: bool = False, **loader_kwargs: Any) -> None:
        """Set the data to validate with. Each sample counts once.

        Local.

        Args:
            data: See :meth:`set_train_loader`; no loader for training.
            cached: Keep each rank's shard in its memory.
            loader_kwargs: Options of :func:`distman.data.distributed_loader`, such as ``batch_size`` per rank.

        Raises:
            TypeError: The data or an option cannot be used.

        Example:
            >>> handler = NNHandler(torch.nn.Identity)
            >>> handler.set_loss_fn(torch.nn.functional.mse_loss)
            >>> handler.set_val_loader(TensorDataset(torch.zeros(10, 1), torch.ones(10, 1)), batch_size=4)
            >>> handler.validate()
            {'loss': 1.0}
        """
        self._val_data = make_loader("set_val_loader", data, loader_kwargs, cached=cached, evaluation=True)

    def add_metric(self, name: str, metric: MetricFunction | StatefulMetric, *, needs_all: bool = False) -> None:
        """Measure something besides the loss, in training and in validation.

        Local.

        Args:
            name: Its name in the history. In validation ``val_`` is put before it, so it must not begin with that.
            metric: Takes outputs and targets, and returns the mean over their samples; or a metric of torchmetrics.
                Those of a collection are named by this name, an underscore, and their own.
            needs_all: Call it once, on rank 0, with all outputs and targets of a validation instead of batch by batch:
                for metrics that are not a mean over samples.

        Raises:
            ValueError: The name is taken.

        Example:
            >>> handler = NNHandler(torch.nn.Identity)
            >>> handler.set_loss_fn(torch.nn.functional.mse_loss)
            >>> handler.set_val_loader(TensorDataset(torch.zeros(10, 1), 2 * torch.ones(10, 1)), batch_size=4)
            >>> handler.add_metric("error", lambda outputs, targets: (outputs - targets).abs().mean())
            >>> handler.validate()
            {'loss': 4.0, 'error': 2.0}
        """
        if name in self._metrics or name in _RESERVED_NAMES or name.startswith("val_"):
            raise ValueError(f"name must be a new one, got {name!r}. Choose another, or call clear_metrics() first.")
        self._metrics[name] = Metric(metric, needs_all)

    def clear_metrics(self) -> None:
        """Remove all metrics; only the loss is measured.

        Local.
        """
        self._metrics.clear()

    def add_callback(self, callback: Callback) -> None:
        """Add a callback, to be called at the events of the training; callbacks that save are called last.

        Local.

        Args:
            callback: The callback.

        Example:
            >>> handler = NNHandler(torch.nn.Linear, in_features=2, out_features=1)
            >>> handler.add_callback(EarlyStopping("val_loss", patience=3))
            >>> handler.add_callback(ModelCheckpoint("best"))
        """
        if not isinstance(callback, Callback):
            raise TypeError(
                f"callback must be a Callback, got {callback!r}. Pass an object of a class derived from it."
            )
        self._callbacks.add(callback, is_last=isinstance(callback, ModelCheckpoint))

    def _required_objective(self) -> Objective:
        return required(self._objective, "loss function", "set_loss_fn() or set_sde()")

    def _required_val_data(self) -> Any:
        return required(self._val_data, "data to validate with", "set_val_loader()")

    def _required_score_based(self) -> ScoreBased:
        return required(self._score_based, "equation of a score-based model", "set_sde()")

    def _make_source(self) -> Source:
        return make_source(required(self._train_data, "data to train with", "set_train_loader()"), self._num_samples)

    def _required_scheduling(self) -> Scheduling:
        """Return the schedule of the learning rate, which is constant if none has been set."""
        scheduling = self._scheduling or Scheduling(self.optimizer)
        if (scheduling.monitored or "").startswith("val_") and not self.validates:
            raise DistmanError(
                f"ReduceLROnPlateau monitors {scheduling.monitored}, but there are no data to validate with. Call "
                "set_val_loader(), or set_scheduler(..., monitor='loss')."
            )
        return scheduling


def check_factory(name: str, factory: object, product: str, remedy: str) -> None:
    """Refuse what is a product already, and what cannot make one.

    Raises:
        TypeError: It is not a class or function.
    """
    if not callable(factory) or isinstance(factory, torch.nn.Module):
        got = repr(factory) if isinstance(factory, (str, int)) else f"a {type(factory).__name__}"
        raise TypeError(f"{name} must be a class or function that makes {product}, got {got}. {remedy}")


def required(value: T | None, what: str, remedy: str) -> T:
    """Return what has been set.

    Raises:
        DistmanError: It has not.
    """
    if value is None:
        raise DistmanError(f"the handler has no {what}. Call {remedy} first.")
    return value
