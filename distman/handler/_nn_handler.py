"""Training of a model on any number of ranks: the class that users work with."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import torch

from distman._device import resolve_device
from distman._seeds import seed_generators, seed_of
from distman.checkpoint._folder import check_writable
from distman.handler._accumulators import Accumulators
from distman.handler._changes import Changes
from distman.handler._engine import Engine
from distman.handler._events import Callback, Events
from distman.handler._history import History
from distman.handler._joint import joint
from distman.handler._model import TrainedModel
from distman.handler._numbers import Numbers
from distman.handler._options import Limits, StepOptions
from distman.handler._reporting import LoggerMode, Reporter
from distman.handler._resumption import end_program
from distman.handler._saved_arguments import saved_arguments
from distman.handler._saving import Saving, read_checkpoint
from distman.handler._setup import check_factory, required
from distman.handler._stepper import Stepper
from distman.handler._strategy import Strategy
from distman.handler._training import Training
from distman.manager import DistributedManager


class NNHandler(Saving):
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

    Attributes:
        history: The results of each epoch, the same on all ranks.

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
        shares = Strategy(strategy, strategy_options or {})
        manager = _manager(device, use_distributed=use_distributed)
        if seed is not None:
            seed_generators(seed_of(seed))
        options = None if compile is False else {} if compile is True else compile
        model = TrainedModel(model_class(**model_kwargs), compile_options=options, strategy=shares)
        if seed is not None:
            seed_generators(seed_of(seed, manager.rank))
        super().__init__(model, seed or 0, model_kwargs, Reporter(logger_mode, Path(log_file)))

    @classmethod
    def initialize_from_checkpoint(
        cls, path: str | os.PathLike[str], model_class: Callable[..., torch.nn.Module], **kwargs: Any
    ) -> NNHandler:
        """Return a handler whose model has the arguments and the weights of a checkpoint.

        Collective.

        Args:
            path: The file.
            model_class: The model's class, or a function that makes the model.
            kwargs: Arguments of the handler; and those of the model that differ from the saved ones, or that could not
                be saved: only numbers, strings, lists and tensors can.

        Raises:
            CheckpointError: It has arguments for the handler.
            Exception: On the rank where reading failed: the reason.
            RankFailedError: On the other ranks.

        Example:
            >>> handler = NNHandler(torch.nn.Linear, in_features=2, out_features=1)
            >>> handler.save("model.pt")
            >>> NNHandler.initialize_from_checkpoint("model.pt", torch.nn.Linear).module
            Linear(in_features=2, out_features=1, bias=True)
        """
        _manager(kwargs.get("device"), use_distributed=kwargs.get("use_distributed"))
        saved = read_checkpoint(path)
        handler = cls(model_class, **{**saved_arguments(saved["model_kwargs"], cls), **kwargs})
        handler._load(saved)
        return handler

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
        limits = Limits(epochs, max_steps, limit_batches, validate_every, validate_every_steps)
        if validate_every_steps is not None:
            self._required_val_data()
        options = StepOptions(accumulate, amp, clip_norm, ema_decay, non_finite, check_every, use_buffers)
        self._dtype = options.dtype
        if self._load_auto_save(limits):
            return self.history
        if self._auto_save is not None:
            check_writable(self._auto_save.folder)
        events = Events(self._callbacks, self)
        training = self._make_training(options, limits, events)
        if not self.module.training:
            self.module.train()
        try:
            is_over = training.run(accumulate=accumulate, progress=progress)
            if self._auto_save is not None:
                self._auto_save.folder.wait()
            if not is_over:
                end_program(self._auto_save, self._reporter)
        except BaseException as error:
            events.emit(Callback.on_exception, error)
            raise
        finally:
            self._progress.end_phase(self.history)
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
        required(self._progress.training, "training to stop", "train()").stop(reason)

    def _load_auto_save(self, limits: Limits) -> bool:
        """Load what an earlier run of the program has saved; return True if it did all of this call of train()."""
        auto_save = self._auto_save
        if auto_save is None or not auto_save.is_awaited:
            return False
        saved = auto_save.load(self.module)
        phases = saved["training"].get("phases", []) if saved is not None and saved["training"] is not None else []
        if self._progress.passes(limits, phases):
            self._show_phase(saved, phases[len(self._progress.phases) - 1])
            return True
        auto_save.finish()
        if saved is not None:
            self._restore(saved, Changes(auto_save.on_change))
            self._reporter.log("resuming from step %d, saved in %s", self.num_steps, auto_save.folder.path)
        return False

    def _show_phase(self, saved: Mapping[str, Any], end: Mapping[str, Any]) -> None:
        """Let the program see the latest weights, and the history that it had after a call of train()."""
        self._model.load_state_dict(saved["model"], Changes("program"))
        history = saved["history"]
        self.history.load_state_dict(
            {
                "records": history["records"][: end["records"]],
                "validations": history["validations"][: end["validations"]],
            }
        )
        self._reporter.log("train() number %d was done by an earlier run", len(self._progress.phases))

    def _make_training(self, options: StepOptions, limits: Limits, events: Events) -> Training:
        """Return a training that resumes from the state that was loaded, or from that of the latest run."""
        by_loss = self._step is None
        if by_loss or self.validates:
            self._required_objective()
        engine = Engine(self._model, self.optimizers, options, self._given, wraps=by_loss)
        training = Training(
            self,
            engine=engine,
            learn=self._learning(engine),
            new_accumulators=functools.partial(Accumulators, self._metrics) if by_loss else Numbers,
            source=self._make_source(),
            scheduling=self._required_schedules(),
            history=self.history,
            reporter=self._reporter,
            events=events,
            auto_save=self._auto_save,
            limits=limits,
        )
        self._progress.resume(training)
        return training

    def _learning(self, engine: Engine) -> Callable[[Any], Any]:
        """Return what is called with each batch of a step."""
        function = self._step
        if function is None:
            return functools.partial(engine.learn, self._required_objective())
        stepper = Stepper._over(engine)

        def learn(batch: Any) -> Any:
            with engine.autocast():
                return function(stepper, batch)

        return learn


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
