"""What a handler is set to train with: model, optimizer, scheduler, loss, data, metrics and callbacks."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, TypeVar

import torch
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import Dataset

from distman.errors import DistmanError
from distman.handler._accumulators import Metric, MetricFunction, StatefulMetric
from distman.handler._callbacks import ModelCheckpoint
from distman.handler._changes import options_of
from distman.handler._events import Callback, Callbacks
from distman.handler._loading import make_loader, make_source
from distman.handler._model import TrainedModel
from distman.handler._objective import Forward, LossFunction, Objective, Supervised, default_forward
from distman.handler._scheduling import UNNAMED, Schedules, Scheduling
from distman.handler._score_based import ScoreBased, make_sde
from distman.handler._sources import NumSamples, Source
from distman.handler._stepper import StepFunction
from distman.handler._tracking import Tracker
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
        self._step: StepFunction | None = None
        self._step_num_samples: NumSamples | None = None
        self._optimizers: dict[str, torch.optim.Optimizer] = {}
        self._given: dict[str, list[dict[str, Any]]] = {}  # options, before a schedule changes them
        self._schedulings: dict[str, Scheduling] = {}
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
        """The model with the moving average of the weights; None if no average is kept.

        Raises:
            DistmanError: The model is sharded, and no rank has such a copy of it.
        """
        if self._model.is_sharded and self._model.average is not None:
            raise DistmanError(
                "the average of a sharded model is no module: it is in the model for the time of validate(), predict() "
                "and sample(). Call these."
            )
        return None if self._model.average is None else self._model.evaluated

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer; of several, the one that was set first."""
        return next(iter(self.optimizers.values()))

    @property
    def optimizers(self) -> Mapping[str, torch.optim.Optimizer]:
        """The optimizers by name; one without a name is ``"optimizer"``."""
        return required(self._optimizers or None, "optimizer", "set_optimizer()")

    @property
    def validates(self) -> bool:
        """Whether data to validate with have been set."""
        return self._val_data is not None

    def set_optimizer(
        self,
        optimizer_class: Callable[..., torch.optim.Optimizer],
        *,
        name: str | None = None,
        parameters: Callable[[torch.nn.Module], Iterable[Any]] | None = None,
        **kwargs: Any,
    ) -> None:
        """Set the optimizer, or one of several. This removes its scheduler, which has to be set again.

        Local.

        Args:
            optimizer_class: The optimizer's class.
            name: Its name, where there are several: each has parameters of its own, all step with the loss, or as a
                function says, see :meth:`set_step`. Without a name it is the only one.
            parameters: Takes the bare model and returns the parameters, or parameter groups, to optimize; None is all.
            kwargs: Arguments of the class, such as ``lr``.

        Raises:
            TypeError: ``optimizer_class`` is not a class or function that makes an optimizer, or the name is no string.

        Example:
            >>> handler = NNHandler(torch.nn.Linear, in_features=2, out_features=1)
            >>> handler.set_optimizer(torch.optim.AdamW, lr=1e-3, parameters=lambda module: [module.weight])
            >>> len(handler.optimizer.param_groups[0]["params"])
            1
            >>> handler.set_optimizer(torch.optim.SGD, name="slope", lr=0.1, parameters=lambda module: [module.weight])
            >>> handler.set_optimizer(torch.optim.Adam, name="offset", parameters=lambda module: [module.bias])
            >>> list(handler.optimizers)
            ['slope', 'offset']
        """
        check_name(name)
        check_factory(
            "optimizer_class",
            optimizer_class,
            "the optimizer",
            "Pass the class and its arguments, such as set_optimizer(torch.optim.SGD, lr=0.1).",
        )
        _check_numbers(kwargs)
        chosen = self.module.parameters() if parameters is None else parameters(self.module)
        optimizer = optimizer_class(chosen, **kwargs)
        kept = {} if name is None else {one: own for one, own in self._optimizers.items() if one != UNNAMED}
        self._optimizers = kept | {name or UNNAMED: optimizer}
        self._given[name or UNNAMED] = options_of(optimizer)
        self._schedulings = {one: own for one, own in self._schedulings.items() if one in kept and one != name}

    def set_scheduler(
        self,
        scheduler_class: Callable[..., LRScheduler],
        *,
        name: str | None = None,
        per: Literal["epoch", "step"] = "epoch",
        monitor: str = "val_loss",
        **kwargs: Any,
    ) -> None:
        """Set the scheduler of the learning rate.

        Local. Set the optimizer first.

        Args:
            scheduler_class: The scheduler's class.
            name: Name of its optimizer, where there are several.
            per: Whether it steps after each epoch, or after each step of the optimizer.
            monitor: Name in the history of the value that ReduceLROnPlateau monitors; epochs without it do not count.
            kwargs: Arguments of the class.

        Raises:
            TypeError: ``scheduler_class`` is not a class or function that makes a scheduler.
            ValueError: ``per`` is neither, or is ``"step"`` for ReduceLROnPlateau; or no optimizer has this name.
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
        _check_numbers(kwargs)
        optimizer = self.optimizers.get(name or UNNAMED)
        if optimizer is None:
            raise ValueError(
                f"name must be that of an optimizer, {' or '.join(map(repr, self.optimizers))}, got {name!r}. Call "
                "set_optimizer() for it first."
            )
        scheduler = scheduler_class(optimizer, **kwargs)
        self._schedulings[name or UNNAMED] = Scheduling(optimizer, scheduler, per=per, monitor=monitor)

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
        if isinstance(loss_fn, type):
            raise TypeError(f"loss_fn must be a function, got the class {loss_fn.__name__}. Pass {loss_fn.__name__}().")
        self._forward, self._num_samples = forward or default_forward, num_samples
        self._objective = Supervised(self._forward, loss_fn)

    def set_step(self, function: StepFunction | None, *, num_samples: NumSamples | None = None) -> None:
        """Let a function compute the losses of a batch and step the optimizers, as for a GAN, or LBFGS.

        Local. A loss function, if one is set too, is what a validation measures.

        Args:
            function: Takes a :class:`Stepper` and a batch, on this rank's device, and calls ``backward(loss)`` and
                ``step()`` of the former. It returns what the history is to have, each a mean over the samples of the
                batch: numbers by name, one number, the ``loss``, or None. None goes back to the loss function.
            num_samples: Takes a batch and returns over how many samples the losses are means; see :meth:`set_loss_fn`,
                whose function counts if this is None.

        Raises:
            TypeError: One of them cannot be called.

        Example:
            >>> def step(stepper, batch):
            ...     inputs, targets = batch
            ...     loss = torch.nn.functional.mse_loss(stepper.module(inputs), targets)
            ...     stepper.backward(loss)
            ...     stepper.step()
            ...     return {"loss": loss, "largest": inputs.max()}
            >>> handler = NNHandler(torch.nn.Linear, in_features=1, out_features=1)
            >>> handler.set_optimizer(torch.optim.SGD, lr=0.1)
            >>> handler.set_step(step)
            >>> handler.set_train_loader(TensorDataset(torch.ones(8, 1), torch.ones(8, 1)), batch_size=4)
            >>> handler.train(2)["largest"]
            [1.0, 1.0]
        """
        for name, given in {"function": function, "num_samples": num_samples}.items():
            if given is not None and not callable(given):
                raise TypeError(f"{name} must be a function, got {given!r}. Pass one that takes a stepper and a batch.")
        self._step, self._step_num_samples = function, num_samples

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
        """Add a callback, to be called at the events of the training; those that save or track are called last.

        Local.

        Args:
            callback: The callback.

        Raises:
            TypeError: It is no callback, or has a method that begins with ``on_`` and is not that of an event, or does
                not take its arguments.

        Example:
            >>> handler = NNHandler(torch.nn.Linear, in_features=2, out_features=1)
            >>> handler.add_callback(EarlyStopping("val_loss", patience=3))
            >>> handler.add_callback(ModelCheckpoint("best"))
        """
        if not isinstance(callback, Callback):
            raise TypeError(
                f"callback must be a Callback, got {callback!r}. Pass an object of a class derived from it."
            )
        self._callbacks.add(callback, is_last=isinstance(callback, ModelCheckpoint | Tracker))

    def _required_objective(self) -> Objective:
        return required(self._objective, "loss function", "set_loss_fn() or set_sde()")

    def _required_val_data(self) -> Any:
        return required(self._val_data, "data to validate with", "set_val_loader()")

    def _required_score_based(self) -> ScoreBased:
        return required(self._score_based, "equation of a score-based model", "set_sde()")

    def _make_source(self) -> Source:
        data = required(self._train_data, "data to train with", "set_train_loader()")
        num_samples = None if self._step is None else self._step_num_samples
        return make_source(data, num_samples or self._num_samples)

    def _required_schedules(self) -> Schedules:
        """Return the schedules of the learning rates, which are constant where none has been set."""
        given = {name: self._schedulings.get(name) or Scheduling(one) for name, one in self.optimizers.items()}
        for scheduling in given.values():
            if (scheduling.monitored or "").startswith("val_") and not self.validates:
                raise DistmanError(
                    f"ReduceLROnPlateau monitors {scheduling.monitored}, but there are no data to validate with. Call "
                    "set_val_loader(), or set_scheduler(..., monitor='loss')."
                )
        return Schedules(given)


def check_factory(name: str, factory: object, product: str, remedy: str) -> None:
    """Refuse what is a product already, and what cannot make one."""
    if not callable(factory) or isinstance(factory, torch.nn.Module):
        got = repr(factory) if isinstance(factory, (str, int)) else f"a {type(factory).__name__}"
        raise TypeError(f"{name} must be a class or function that makes {product}, got {got}. {remedy}")


def _check_numbers(options: Mapping[str, object]) -> None:
    """Refuse numbers that stand in strings, as some configuration files give them: torch compares them with numbers."""
    for name, value in options.items():
        if isinstance(value, str) and re.fullmatch(r"\s*[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?\s*", value, re.IGNORECASE):
            raise TypeError(f"{name} must be a number, got the string {value!r}. Pass float({value!r}).")


def check_name(name: object) -> None:
    if name is not None and (not isinstance(name, str) or not name):
        raise TypeError(f"name must be a string, got {name!r}. Pass one such as 'generator', or leave it out.")


def required(value: T | None, what: str, remedy: str) -> T:
    if value is None:
        raise DistmanError(f"the handler has no {what}. Call {remedy} first.")
    return value
