"""Training of a model on any number of ranks: the class that users work with."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypeVar

import torch
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import Dataset, TensorDataset

from distman._base.moved_names import missing_attribute
from distman._base.seeds import seed_generators, seed_of
from distman._job.device import resolve_device
from distman.checkpoint import CheckpointFolder, check_writable
from distman.data import generators_preserved
from distman.errors import DistmanError
from distman.handler._accumulators import RESERVED, MetricFunction, StatefulMetric
from distman.handler._archive import Archive, AutoSave, as_text, take_weights, whole
from distman.handler._callbacks import ModelCheckpoint
from distman.handler._evaluation import evaluate, predict
from distman.handler._events import Callback, Callbacks
from distman.handler._history import History
from distman.handler._objective import Forward, LossFunction, ScoreBased, default_forward, make_sde, supervised
from distman.handler._reporting import LoggerMode, Reporter, plot_history
from distman.handler._setup import (
    Setup,
    StepFunction,
    check_factory,
    check_numbers,
    make_evaluation_loader,
    make_loader,
    required,
)
from distman.handler._tracking import Tracker
from distman.handler._training import Limits, Training
from distman.manager import DistributedManager
from distman.score import SDE, Weighting
from distman.training import UNNAMED, Changes, NumSamples, Scheduling, StepOptions, TrainedModel, check_strategy

P = ParamSpec("P")
R = TypeVar("R")

_VALIDATION = 1  # tells the seeds of validations from those of the training


def joint(method: Callable[P, R]) -> Callable[P, R]:
    """Make an error of a method that all ranks call one of all of them, where not all raise one.

    The program may catch it, and the others would wait for this rank in the next collective.
    """

    @functools.wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        blocks = DistributedManager().resolve_group(None).joint_blocks
        with blocks.block(f"{method.__name__}()") if blocks is not None else nullcontext():
            return method(*args, **kwargs)

    return call


class NNHandler:
    """A model and everything that its training needs, on any number of ranks.

    Collective. Initializes the manager if the program has not; the model gets the weights of rank 0. Methods are
    collective unless they say otherwise: call them on all ranks. Rank 0 writes files, logs and shows progress bars.

    Args:
        model_class: The model's class, or a function that makes the model.
        device: Device of this rank; None leaves the choice to the manager.
        logger_mode: Where to log a line for each epoch: ``"console"``, ``"file"`` or ``"both"``. None leaves it to the
            program's configuration of :mod:`logging`, logger ``distman.training``.
        log_file: The file, to which lines are appended.
        use_distributed: True fails if no launcher is found; False runs as one process regardless; None follows the
            launcher, if there is one.
        seed: Seeds Python, NumPy and torch: with the same seed on all ranks while the model is made, then with one of
            its own on each rank.
        compile: Compile the model with ``torch.compile``; a mapping holds its options.
        strategy: ``"ddp"``: every rank has the whole model. ``"fsdp"``: every rank keeps its part of the parameters,
            the gradients and the optimizer's state, see :meth:`DistributedManager.wrap_fsdp`. The losses are the same.
        strategy_options: Options of :meth:`DistributedManager.wrap_ddp` or :meth:`DistributedManager.wrap_fsdp`.
        model_kwargs: Arguments of the model's class.

    Raises:
        TypeError: ``model_class`` is not a class or function that makes a module.
        ValueError: An option is not valid, or is not what the manager was initialized with.
        DistmanError: The ranks could not be brought together; see :meth:`distman.DistributedManager.initialize`.

    Example:
        >>> x = torch.rand(64, 2)
        >>> handler = NNHandler(torch.nn.Linear, in_features=2, out_features=1, seed=0)
        >>> handler.set_optimizer(torch.optim.SGD, lr=0.1)
        >>> handler.set_loss_fn(torch.nn.functional.mse_loss)
        >>> handler.set_train_loader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8)
        >>> history = handler.train(3)
        >>> history["loss"][-1] < history["loss"][0]
        True
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
        strategy: Literal["ddp", "fsdp"] = "ddp",
        strategy_options: Mapping[str, Any] | None = None,
        **model_kwargs: Any,
    ) -> None:
        check_factory("model_class", model_class, "the module", "Pass the class and its arguments, or lambda: model.")
        check_strategy(strategy, strategy_options or {})
        manager = _manager(device, use_distributed=use_distributed)
        if seed is not None:
            seed_generators(seed_of(seed))
        model = TrainedModel(
            model_class(**model_kwargs),
            compile_options=None if compile is False else {} if compile is True else compile,
            strategy=strategy,
            strategy_options=strategy_options,
        )
        if seed is not None:
            seed_generators(seed_of(seed, manager.rank))
        self._model, self._seed = model, seed or 0
        self._setup, self._callbacks = Setup(), Callbacks()
        self._reporter = Reporter(logger_mode, Path(log_file))
        self._archive = Archive(model, self._callbacks, self._reporter)
        self._dtype: torch.dtype | None = None  # of mixed precision, as in the latest training

    if not TYPE_CHECKING:  # else any name would pass

        def __getattr__(self, name: str) -> Any:
            raise missing_attribute(self, name)

    def __repr__(self) -> str:
        optimizers = ", ".join(type(one).__name__ for one in self._setup.optimizers.values()) or "no optimizer"
        return f"NNHandler({type(self.module).__name__}, {optimizers}, {self.history!r}, num_steps={self.num_steps})"

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
                "the average of a sharded model is not a module: it is in the model during validate(), predict() and "
                "sample(). Call these."
            )
        return None if self._model.average is None else self._model.evaluated

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer; of several, the one that was set first."""
        return next(iter(self.optimizers.values()))

    @property
    def optimizers(self) -> Mapping[str, torch.optim.Optimizer]:
        """The optimizers by name; one without a name is ``"optimizer"``."""
        return self._setup.required_optimizers()

    @property
    def validates(self) -> bool:
        """Whether data to validate with have been set."""
        return self._setup.val_data is not None

    @property
    def history(self) -> History:
        """The results of each epoch, the same on all ranks."""
        return self._archive.history

    @property
    def num_steps(self) -> int:
        """Number of steps that the optimizer has taken."""
        return self._archive.num_steps

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
            TypeError: ``optimizer_class`` is not a class or function that makes an optimizer; the name is not a string.

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
        if name is not None and (not isinstance(name, str) or not name):
            raise TypeError(f"name must be a string, got {name!r}. Pass one such as 'generator', or leave it out.")
        remedy = "Pass the class and its arguments, such as set_optimizer(torch.optim.SGD, lr=0.1)."
        check_factory("optimizer_class", optimizer_class, "the optimizer", remedy)
        check_numbers(kwargs)
        chosen = self.module.parameters() if parameters is None else parameters(self.module)
        self._setup.add_optimizer(name, optimizer_class(chosen, **kwargs))

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
        check_numbers(kwargs)
        optimizer = self.optimizers.get(name or UNNAMED)
        if optimizer is None:
            raise ValueError(
                f"name must be that of an optimizer, {' or '.join(map(repr, self.optimizers))}, got {name!r}. Call "
                "set_optimizer() for it first."
            )
        self._setup.schedulings[name or UNNAMED] = Scheduling(scheduler_class(optimizer, **kwargs), per, monitor)

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
                loader knows, or of a loader of your own the length of the first tensor in the batch.

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
        self._setup.forward, self._setup.num_samples = forward or default_forward, num_samples
        self._setup.objective = functools.partial(supervised, self._setup.forward, loss_fn)

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
        self._setup.step, self._setup.step_num_samples = function, None if function is None else num_samples

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
        self._setup.score_based = self._setup.objective = ScoreBased(
            make_sde(sde, **kwargs),
            conditional=conditional,
            null_condition=null_condition,
            drop_condition=drop_condition,
            weighting=weighting,
        )
        self._setup.num_samples = None

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
        self._setup.train_data = make_loader("set_train_loader", data, options, cached=cached)

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
        self._setup.val_data = make_loader("set_val_loader", data, loader_kwargs, cached=cached, evaluation=True)

    def add_metric(self, name: str, metric: MetricFunction | StatefulMetric) -> None:
        """Measure something besides the loss, in training and in validation.

        Local.

        Args:
            name: Its name in the history. In validation ``val_`` is put before it, so it must not begin with that.
            metric: Takes outputs and targets, and returns the mean over their samples; or a metric of torchmetrics.
                Those of a collection are named by this name, an underscore, and their own.

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
        if name in self._setup.metrics or name in (*RESERVED, "loss") or name.startswith("val_"):
            raise ValueError(f"name must be a new one, got {name!r}. Choose another, or call clear_metrics() first.")
        self._setup.metrics[name] = metric

    def clear_metrics(self) -> None:
        """Remove all metrics; only the loss is measured.

        Local.
        """
        self._setup.metrics.clear()

    def add_callback(self, callback: Callback) -> None:
        """Add a callback, to be called at the events of the training; those that save or track are called last.

        Local.

        Args:
            callback: The callback.

        Raises:
            TypeError: It is not a callback, or has a method that begins with ``on_`` and is not that of an event, or
                does not take its arguments.

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

    @joint
    def train(
        self,
        epochs: int | None = None,
        *,
        max_steps: int | None = None,
        limit_batches: int | None = None,
        accumulate: int = 1,
        amp: Literal["bf16", "fp16"] | None = None,
        clip_norm: float | None = None,
        ema_decay: float | None = None,
        use_buffers: bool | None = None,
        non_finite: Literal["raise", "skip", "ignore"] = "raise",
        check_every: int | None = None,
        validate_every: int = 1,
        validate_every_steps: int | None = None,
        progress: bool | None = None,
    ) -> History:
        """Train until so many epochs or steps are done, including those of the runs that it resumes.

        Collective. Blocking. When any rank receives SIGTERM, SIGUSR1 or SIGUSR2, or calls
        :meth:`DistributedManager.request_stop`, all ranks save after the same step, if :meth:`auto_save` was called,
        and end with exit code 75.

        Args:
            epochs: Total number of epochs; None leaves the end to ``max_steps``.
            max_steps: Total number of steps of the optimizer. The epoch that the last one is in ends there.
            limit_batches: Largest number of batches of a rank in an epoch. The next epoch goes on where it ended.
            accumulate: Number of batches whose gradients make a step; an epoch's last step may have fewer.
            amp: Automatic mixed precision; ``"fp16"`` scales the loss.
            clip_norm: Largest 2-norm of the gradient, of each optimizer by itself; None does not clip.
            ema_decay: Decay of a moving average of the weights, which validation, prediction and sampling then use.
            use_buffers: Average all floating buffers too, or none of them; None averages the running means and
                variances of norms. What is not averaged is copied.
            non_finite: When a loss or the gradient is NaN or infinite on any rank, ``"raise"`` on all ranks,
                ``"skip"`` the step on all, or ``"ignore"`` it.
            check_every: Number of steps after which to look for such a gradient, for which the host waits for a GPU;
                also before each validation and checkpoint. None is 1 on the CPU, and 32 elsewhere: then up to 32 steps
                may have spoilt the model before the error, after which it cannot be saved. ``"skip"`` and ``"fp16"``
                look in each step.
            validate_every: Number of epochs from one validation to the next.
            validate_every_steps: Number of steps from one validation to the next, in the place of those after epochs.
            progress: Show a progress bar; None shows it on a terminal and in a notebook.

        Returns:
            The history.

        Raises:
            DistmanError: Something has not been set, such as data to validate with for ``validate_every_steps``.
            NonFiniteLossError: On every rank: a loss or the gradient is NaN or infinite.
            Preempted: On every rank: the job was asked to stop. It ends the program unless it is caught.
            TypeError: Neither ``epochs`` nor ``max_steps`` is given, or a number is not whole.
            ValueError: An option is not valid.

        Example:
            >>> handler = NNHandler(torch.nn.Linear, in_features=1, out_features=1)
            >>> handler.set_optimizer(torch.optim.SGD, lr=0.5)
            >>> handler.set_loss_fn(torch.nn.functional.mse_loss)
            >>> handler.set_train_loader(TensorDataset(torch.ones(32, 1), torch.ones(32, 1)), batch_size=8)
            >>> history = handler.train(2, accumulate=2, clip_norm=1.0, ema_decay=0.99)
            >>> len(history), handler.num_steps
            (2, 4)
        """
        limits = Limits(epochs, max_steps, limit_batches, accumulate, validate_every, validate_every_steps)
        if validate_every_steps is not None:
            self._setup.required_val_data()
        options = StepOptions(amp, clip_norm, ema_decay, use_buffers, non_finite, check_every)
        self._dtype = options.dtype
        if self._archive.resume(limits):
            return self.history
        if self._archive.auto_save is not None:
            check_writable(self._archive.auto_save.folder)
        engine = self._setup.make_engine(self._model, options)
        training = Training(self, self._setup, self._archive, engine, limits)
        self._archive.follow(training)
        if not self.module.training:
            self.module.train()
        try:
            is_over = training.run(progress=progress)
            if self._archive.auto_save is not None:
                self._archive.auto_save.folder.wait()
            if not is_over:
                self._archive.end_program()
        except BaseException as error:
            self._callbacks.emit("on_exception", error)
            raise
        finally:
            self._archive.end_phase(training)
        return self.history

    def stop(self, reason: str = "stop()") -> None:
        """End the training on all ranks, after this epoch, or after the next validation within it.

        Local. For callbacks, on any rank. To end it at the next step, and the program with it, call
        :meth:`DistributedManager.request_stop`.

        Args:
            reason: Why, for the log.

        Raises:
            DistmanError: Nothing has been trained.

        Example:
            >>> class GoodEnough(Callback):
            ...     def on_epoch_end(self, handler, record):
            ...         if record["val_accuracy"] > 0.99:
            ...             handler.stop("the model is good enough")
        """
        required(self._archive.training, "training to stop", "train()").stop(reason)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the bare model.

        Local.
        """
        return self.module(*args, **kwargs)

    @joint
    def validate(self) -> dict[str, float]:
        """Return the loss and the metrics over the validation data, the same on all ranks.

        Collective. Blocking. A loss that draws random numbers, as that of a score-based model does, draws the same ones
        in each validation; the training's are left alone.

        Raises:
            DistmanError: No data to validate with, or no loss function, has been set.
        """
        return self._evaluate(self._setup.required_val_data())

    @joint
    def evaluate(self, data: Dataset[Any] | Iterable[Any], **loader_kwargs: Any) -> dict[str, float]:
        """Return the loss and the metrics over other data than those of :meth:`set_val_loader`, the same on all ranks.

        Collective. Blocking. Otherwise as :meth:`validate`; nothing of the training changes.

        Args:
            data: As for :meth:`set_val_loader`. Of an iterable, each rank's own batches count.
            loader_kwargs: Options of :func:`distman.data.distributed_loader` for a dataset; ``batch_size`` is 64 unless
                it is given.

        Raises:
            DistmanError: No loss function has been set.
            TypeError: The data or an option cannot be used.

        Example:
            >>> handler = NNHandler(torch.nn.Identity)
            >>> handler.set_loss_fn(torch.nn.functional.mse_loss)
            >>> handler.evaluate(TensorDataset(torch.zeros(10, 1), torch.ones(10, 1)))
            {'loss': 1.0}
        """
        return self._evaluate(make_evaluation_loader("evaluate", data, loader_kwargs))

    @joint
    def predict(
        self,
        data: Dataset[Any] | torch.Tensor | Iterable[Any],
        *,
        samples: Callable[[Any], Sequence[Any]] | None = None,
        pad: Callable[[list[torch.Tensor]], Any] | None = None,
        all_ranks: bool = False,
        **loader_kwargs: Any,
    ) -> Any:
        """Return the model's outputs for each sample, once and in order.

        Collective. Blocking. Outputs are tensors whose first dim is that of the samples, lists with one entry for each,
        or tuples, lists and mappings of such.

        Args:
            data: A dataset, the same on all ranks; a tensor of inputs, shape ``(n, *)``; or a loader, a stream, or
                another iterable of batches, each rank's own: then the outputs of rank 0 come first, and so on.
            samples: For outputs of another kind: takes those of a batch, in host memory, and returns one entry for each
                sample. The result is a list of these.
            pad: Takes a list of the tensors of all samples, and returns one of them all, where they differ in sizes,
                such as ``torch.nn.utils.rnn.pad_sequence``. None returns the list.
            all_ranks: Return the outputs on all ranks.
            loader_kwargs: Options of :func:`distman.data.distributed_loader` for a dataset or a tensor; ``batch_size``
                is 64 unless it is given.

        Returns:
            The outputs, in host memory, on rank 0; None elsewhere, and if there are no samples.

        Raises:
            TypeError: The data or an option cannot be used.
            ValueError: On a rank that found it: the outputs of two batches differ in structure, or some have not one
                entry for each sample.
            RankFailedError: On the other ranks.

        Example:
            >>> handler = NNHandler(torch.nn.Flatten)
            >>> handler.predict(torch.ones(100, 2, 2)).shape
            torch.Size([100, 4])
            >>> handler.predict(torch.ones(3, 2, 2), samples=lambda outputs: [one.sum().item() for one in outputs])
            [4.0, 4.0, 4.0]
        """
        dataset = TensorDataset(data) if isinstance(data, torch.Tensor) else data
        loader, forward = make_evaluation_loader("predict", dataset, loader_kwargs), self._setup.forward
        with self._model.evaluating() as model:
            return predict(model, forward, loader, samples=samples, pad=pad, all_ranks=all_ranks, dtype=self._dtype)

    @joint
    def sample(self, shape: Sequence[int], **kwargs: Any) -> torch.Tensor:
        """Draw samples from a score-based model; the ranks share the work.

        Collective. Blocking.

        Args:
            shape: Shape of all samples, ``(n, *)``.
            kwargs: ``condition=`` and other options of :func:`distman.score.sample`, and the ``guidance=`` of
                :func:`distman.score.score`; with ``rank_zero=True`` only rank 0 works.

        Returns:
            The samples, on all ranks unless ``dst`` says otherwise.

        Raises:
            DistmanError: :meth:`set_sde` has not been called.
            ValueError, PlanMismatchError, RankFailedError: See :func:`distman.score.sample`.

        Example:
            >>> class Network(torch.nn.Module):
            ...     def forward(self, t, x):
            ...         return -x
            >>> handler = NNHandler(Network)
            >>> handler.set_sde("vp")
            >>> handler.sample((4, 2), num_steps=10, seed=0).shape
            torch.Size([4, 2])
        """
        with self._model.evaluating() as model:
            return self._setup.required_score_based().sample(model, shape, **kwargs)

    @joint
    def log_likelihood(self, x: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """Return the log-density of samples under a score-based model, in nats; the ranks share the work.

        Collective. Blocking.

        Args:
            x: The samples, shape ``(n, *)``, the same on all ranks.
            kwargs: Options of :func:`distman.score.log_likelihood`.

        Raises:
            DistmanError: :meth:`set_sde` has not been called.
            ImportError, ValueError, PlanMismatchError, RankFailedError: See :func:`distman.score.log_likelihood`.

        Example:
            >>> class Network(torch.nn.Module):
            ...     def forward(self, t, x):
            ...         return -x
            >>> handler = NNHandler(Network)
            >>> handler.set_sde("vp")
            >>> handler.log_likelihood(torch.zeros(4, 2), seed=0).shape
            torch.Size([4])
        """
        with self._model.evaluating() as model:
            return self._setup.required_score_based().log_likelihood(model, x, **kwargs)

    def auto_save(
        self,
        folder: str | os.PathLike[str],
        *,
        every_epochs: int | None = 1,
        every_steps: int | None = None,
        keep: int = 2,
        resume: bool = True,
        requeue: bool | None = None,
        sharded: bool = False,
        on_change: Literal["file", "program", "error"] | None = None,
    ) -> None:
        """Save the training while it runs, and let :meth:`train` resume it when the program is started again.

        Local. Whenever the program is killed, the latest checkpoint is complete. :meth:`train` tries before the first
        step whether the folder can be written. A program that calls it several times resumes within the call that the
        checkpoint is of: those before it return at once, with the history that they had.

        Args:
            folder: The folder to save in; see :class:`distman.checkpoint.CheckpointFolder`.
            every_epochs: Save after every so many epochs; None saves after the last one only.
            every_steps: Save after every so many steps of the optimizer as well.
            keep: Number of checkpoints to keep.
            resume: Resume from the latest checkpoint in the folder, if there is one, whatever was loaded before.
            requeue: Requeue the Slurm job if it was asked to stop. None does so if ``DISTMAN_REQUEUE=1``, which the
                job scripts set.
            sharded: Let each rank write its part of a sharded model into checkpoints that are folders; else rank 0
                gathers it and writes files.
            on_change: What counts where the program has changed since the checkpoint was saved, in options of the
                optimizers, the length of a schedule, or what is frozen: ``"file"``, ``"program"``, or neither, which is
                an ``"error"``. None is the file, with a warning. An optimizer of another class, or with other
                parameters, is an error unless the program counts, whose own then begins anew.

        Raises:
            ValueError: A number is less than 1, or ``on_change`` is something else.

        Example:
            >>> handler = NNHandler(torch.nn.Linear, in_features=1, out_features=1)
            >>> handler.auto_save("run", every_steps=100)  # started again, train() goes on where it was
        """
        requeues = os.environ.get("DISTMAN_REQUEUE") == "1" if requeue is None else requeue
        saves_in = CheckpointFolder(folder, keep=keep, sharded=sharded)
        latest = self._archive.auto_save
        has_resumed = latest is not None and not latest.is_awaited and latest.folder.path == saves_in.path
        self._archive.auto_save = AutoSave(
            saves_in, every_epochs, every_steps, requeues, on_change, is_awaited=resume and not has_resumed
        )

    def state_dict(self) -> dict[str, Any]:
        """Return everything that a resumed training depends on, as plain values and tensors.

        Collective. The tensors are those of the model and the optimizer, not copies; ranks may differ in their buffers,
        and in their parts of what is sharded. See :meth:`whole_state_dict`.
        """
        return self._archive.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore such a state, saved by any number of ranks; the next :meth:`train` resumes from it.

        Local.

        Args:
            state: From :meth:`state_dict`, or on every rank what :meth:`whole_state_dict` returned on rank 0.

        Raises:
            RuntimeError: The weights do not fit the model.

        Example:
            >>> first, second = (NNHandler(torch.nn.Linear, in_features=2, out_features=1) for _ in range(2))
            >>> second.load_state_dict(first.state_dict())
            >>> torch.equal(first.module.weight, second.module.weight)
            True
        """
        self._archive.load_state_dict(state)

    def whole_state_dict(self) -> dict[str, Any]:
        """Return the state with whole tensors, on rank 0, as a file holds it; elsewhere it is not to be used.

        Collective. Blocking. Tensors that are sharded are gathered one by one, into the host's memory of rank 0.
        """
        return whole(self.state_dict())

    def save(self, path: str | os.PathLike[str], *, sharded: bool = False) -> None:
        """Write the present state of the training into a file or folder, completely or not at all.

        Collective. Blocking. See :func:`distman.checkpoint.save` and :func:`distman.checkpoint.save_sharded`. Once
        another rank has failed, local: each rank writes a file of its own, such as ``model.rank1.pt``.

        Args:
            path: The file or folder, or a URL.
            sharded: Write a folder, into which each rank writes its parts of a sharded model; else rank 0 writes a
                file, for which it gathers them.

        Raises:
            OSError: On a rank that could not write its file or its parts.
            RankFailedError: On the other ranks, then.
            ValueError, ImportError: See :func:`distman.checkpoint.save`.

        Example:
            >>> handler = NNHandler(torch.nn.Linear, in_features=2, out_features=1)
            >>> handler.save("run/model.pt")
            >>> sorted(load("run/model.pt"))
            ['callbacks', 'history', 'model', 'training']
        """
        self._archive.save(path, sharded=sharded)

    def export(self, path: str | os.PathLike[str]) -> None:
        """Write the whole weights and buffers alone into a file, for other programs: the averages, if they are kept.

        Collective. Blocking. What is sharded is gathered tensor by tensor into the host's memory of rank 0.

        Args:
            path: The file, or a URL. One that ends in ``.safetensors`` is written in that format; any other one is what
                ``torch.load`` reads. Both hold tensors under the names of the bare model.

        Raises:
            NonFiniteLossError: On every rank: a step has spoilt the model.
            ValueError: On rank 0: the file cannot hold the model's state.
            OSError: On rank 0: it could not be written.
            RankFailedError: On the other ranks, then.

        Example:
            >>> handler = NNHandler(torch.nn.Linear, in_features=2, out_features=1)
            >>> handler.export("run/weights.pt")
            >>> model = torch.nn.Linear(2, 1)
            >>> model.load_state_dict(torch.load("run/weights.pt"))
            <All keys matched successfully>
        """
        self._archive.export(path)

    def load(
        self,
        path: str | os.PathLike[str],
        *,
        only: Literal["model"] | None = None,
        strict: bool = True,
        on_change: Literal["file", "program", "error"] | None = None,
    ) -> dict[str, list[str]] | None:
        """Restore the training from what was saved by any number of ranks; the next :meth:`train` resumes from it.

        Collective. Blocking. Add callbacks first, so that they are restored too.

        With ``only="model"`` the training begins with the weights of the file, and nothing else of it. It may be of
        :meth:`save`, of ``torch.save``, of Lightning, or a ``.safetensors``; what its names have before those of the
        model, such as ``module.``, is left out.

        Args:
            path: The file or folder, or a URL, of a training with either strategy; of ``.safetensors`` a path.
            only: Load the weights only; None restores the whole training.
            strict: Take no weights unless file and model have the same; False takes those whose names and shapes fit.
            on_change: See :meth:`auto_save`.

        Returns:
            Names of parameters and buffers that were ``"taken"``, which rank 0 logs too; of those that are
            ``"missing"`` in the file or ``"misshapen"`` there, and are as they were; and of those that are
            ``"unexpected"``, by their names in the file. None for a whole training.

        Raises:
            CheckpointError: It holds something else, such as weights alone; or the weights do not fit.
            ImportError: It needs safetensors, which is not installed.
            ValueError: ``only`` is something else, or ``strict`` is False for a whole training.
            Exception: On the rank where reading failed: the reason.
            RankFailedError: On the other ranks.

        Example:
            >>> handler = NNHandler(torch.nn.Linear, in_features=2, out_features=1)
            >>> handler.save("model.pt")
            >>> handler.load("model.pt")
            >>> wider = NNHandler(torch.nn.Linear, in_features=3, out_features=1)
            >>> wider.load("model.pt", only="model", strict=False)
            {'taken': ['bias'], 'missing': [], 'misshapen': ['weight'], 'unexpected': []}
        """
        if only not in (None, "model") or (only is None and not strict):
            raise ValueError(
                f"only must be 'model' to load weights alone, got {only!r} with strict={strict}. A training is "
                "restored as a whole."
            )
        if only is None:
            self._archive.load(path, Changes(on_change))
            return None
        taken = take_weights(self.module, path, strict=strict)
        self._model.average = None  # of other weights
        self._reporter.log("weights of %s: %s", os.fspath(path), as_text(taken))
        return taken

    def plot_losses(self, path: str | os.PathLike[str], *, log: bool = False) -> None:
        """Plot the losses over the epochs into a file, on rank 0.

        Collective.

        Args:
            path: The file; its extension selects the format. Folders above it are made.
            log: Use a logarithmic axis.

        Raises:
            ImportError, ValueError, OSError: On rank 0: there is no matplotlib, nothing has been trained, or the file
                cannot be written.
            RankFailedError: On the other ranks, then.

        Example:
            >>> handler = NNHandler(torch.nn.Linear, in_features=2, out_features=1)
            >>> for epoch, loss in enumerate([1.0, 0.4, 0.2]):
            ...     handler.history.add({"epoch": epoch, "loss": loss})
            >>> handler.plot_losses("plots/loss.png", log=True)
        """
        names = [name for name in ("loss", "val_loss") if name in self.history.names]
        plot_history(self.history, names, path, title="Loss", log=log)

    def plot_metrics(self, path: str | os.PathLike[str], names: Sequence[str] | None = None) -> None:
        """Plot the metrics over the epochs into a file, on rank 0.

        Collective.

        Args:
            path: The file; its extension selects the format. Folders above it are made.
            names: Names in the history; None is all metrics, of training and validation.

        Raises:
            ImportError, ValueError, OSError: On rank 0: there is no matplotlib, the history lacks a name, or the file
                cannot be written.
            RankFailedError: On the other ranks, then.

        Example:
            >>> handler = NNHandler(torch.nn.Linear, in_features=2, out_features=1)
            >>> for epoch, accuracy in enumerate([0.5, 0.8, 0.9]):
            ...     handler.history.add({"epoch": epoch, "accuracy": accuracy})
            >>> handler.plot_metrics("plots/accuracy.png", ["accuracy"])
        """
        if names is None:
            names = [name for metric in self._setup.metrics for name in (metric, f"val_{metric}")]
            names = [name for name in names if name in self.history.names]
        plot_history(self.history, names, path, title="Metrics")

    def _evaluate(self, data: Any) -> dict[str, float]:
        setup, objective = self._setup, self._setup.required_objective()
        with generators_preserved(), self._model.evaluating() as model:
            seed_generators(seed_of(self._seed, DistributedManager().rank, _VALIDATION))
            return evaluate(model, objective, data, setup.metrics, dtype=self._dtype, num_samples=setup.num_samples)


def _manager(device: str | torch.device | None, *, use_distributed: bool | None) -> DistributedManager:
    """Return the manager, initialized, after a check that it is as the program asks for."""
    if not DistributedManager.is_initialized():
        wanted = None if device is None else resolve_device(device)  # a laptop has no GPU
        return DistributedManager.initialize(device=wanted, use_distributed=use_distributed)
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
