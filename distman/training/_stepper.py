"""What a loop, or a step, of your own is made of: gradients and steps that are the same on all ranks."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch.nn.parallel import DistributedDataParallel

from distman._base.arguments import check_number
from distman._base.moved_names import missing_attribute
from distman.data import EvaluationLoader, TrainingLoader
from distman.manager import DistributedManager
from distman.training._engine import Closure, Engine, StepOptions, to_device
from distman.training._model import TrainedModel
from distman.training._optimizers import UNNAMED, Changes
from distman.training._sources import ForeignSource, Step, check_ranks

training_logger = logging.getLogger("distman.training")
"""Logs the numbers of a training, at level INFO, on rank 0."""


class Stepper:
    """A module and its optimizers, for a loop or a step of your own on any number of ranks.

    Collective. The module is moved to the manager's device and gets the weights and buffers of rank 0; it is called as
    it is. Each optimizer steps with the gradient of the mean loss over the samples of all ranks, however unevenly these
    are divided. It is summed over the ranks when the optimizer steps, so all ranks must call :meth:`step` for the same
    optimizers in the same order; if they do not, all get an error. A function that :meth:`NNHandler.set_step` was given
    gets a stepper; a loop without a handler makes its own.

    Args:
        module: The module, with all parts that are trained.
        optimizers: Its optimizer, or several by name. A parameter belongs to one of them.
        amp: Automatic mixed precision, see :meth:`autocast`; ``"fp16"`` scales the loss.
        clip_norm: Largest 2-norm of each optimizer's gradient; None does not clip.
        ema_decay: Decay of a moving average of the weights, which takes them after the last batch of a step.
        use_buffers: Which buffers are averaged too, see :meth:`NNHandler.train`.
        non_finite: When a loss or a gradient is NaN or infinite on any rank, ``"raise"`` on all ranks, ``"skip"`` the
            step of that optimizer on all, or ``"ignore"`` it.
        check_every: See :meth:`NNHandler.train`; it counts the steps of all optimizers.

    Raises:
        TypeError: ``module`` is not a bare module.
        ValueError: An option is not valid, or a parameter belongs to two optimizers, or not to the module.
        NotInitializedError: The manager has not been initialized.

    Example:
        >>> manager = DistributedManager.initialize()
        >>> network = torch.nn.Linear(2, 1)
        >>> stepper = Stepper(network, torch.optim.SGD(network.parameters(), lr=0.1), clip_norm=1.0)
        >>> loader = distributed_loader(TensorDataset(torch.rand(64, 2), torch.rand(64, 1)), batch_size=8)
        >>> for inputs, targets in stepper.batches(loader):
        ...     stepper.backward(torch.nn.functional.mse_loss(network(inputs), targets))
        ...     is_taken = stepper.step()
        >>> stepper.num_steps
        8
    """

    _num_passes = 0  # through loaders that do not count themselves

    def __init__(
        self,
        module: torch.nn.Module,
        optimizers: torch.optim.Optimizer | Mapping[str, torch.optim.Optimizer],
        *,
        amp: Literal["bf16", "fp16"] | None = None,
        clip_norm: float | None = None,
        ema_decay: float | None = None,
        use_buffers: bool | None = None,
        non_finite: Literal["raise", "skip", "ignore"] = "raise",
        check_every: int | None = None,
    ) -> None:
        if not isinstance(module, torch.nn.Module) or isinstance(module, DistributedDataParallel):
            raise TypeError(
                f"module must be a bare module, got a {type(module).__name__}. Pass it before it is wrapped: its "
                "gradients are summed over the ranks when an optimizer steps."
            )
        named = {UNNAMED: optimizers} if isinstance(optimizers, torch.optim.Optimizer) else optimizers
        options = StepOptions(amp, clip_norm, ema_decay, use_buffers, non_finite, check_every)
        self._engine = Engine(TrainedModel(module, wraps=False), named, options, wraps=False)

    @classmethod
    def _over(cls, engine: Engine) -> Stepper:
        stepper = cls.__new__(cls)
        stepper._engine = engine
        return stepper

    if not TYPE_CHECKING:  # else any name would pass

        def __getattr__(self, name: str) -> Any:
            raise missing_attribute(self, name)

    def __repr__(self) -> str:
        optimizers = ", ".join(f"{name}={type(one).__name__}" for name, one in self.optimizers.items())
        return f"Stepper({type(self.module).__name__}, {optimizers}, num_steps={self.num_steps})"

    @property
    def module(self) -> torch.nn.Module:
        """The module."""
        return self._engine.model.module

    @property
    def ema_module(self) -> torch.nn.Module | None:
        """The module with the moving average of the weights; None if no average is kept."""
        model = self._engine.model
        return None if model.average is None else model.evaluated

    @property
    def optimizers(self) -> Mapping[str, torch.optim.Optimizer]:
        """The optimizers by name; one without a name is ``"optimizer"``."""
        return self._engine.optimizers

    @property
    def num_steps(self) -> int:
        """Number of steps taken: of batches, or of as many as are accumulated, however often an optimizer stepped."""
        return self._engine.num_steps

    @property
    def num_own(self) -> int:
        """Number of samples of the present batch that count on this rank; 0 if it takes part with weight 0."""
        return self._engine.num_own

    def batches(self, loader: Iterable[Any], *, accumulate: int = 1) -> Generator[Any]:
        """Yield this rank's batches of the next epoch, on its device; within the loop gradients are computed.

        Collective. The ranks make the same number of steps: one that has no batch left takes part with weight 0, for
        which its buffers and generators are left alone.

        Of a loader with ``evaluation=True`` the ranks read each sample once, in possibly different numbers of batches,
        so nothing within the loop may wait for others; the module, or its moving average, has rank 0's buffers there.

        Args:
            loader: Of :func:`distman.data.distributed_loader`, or another iterable of this rank's batches, which starts
                over each time; the number of samples of such a batch is the length of its first tensor.
            accumulate: Number of batches whose gradients make a step; an epoch's last step may have fewer. Optimizers
                step in the last of them. What a batch computes from weights that have stepped before in the same
                batch is computed from the older weights in the others.

        Returns:
            An iterator over the batches, with their tensors on this rank's device.

        Raises:
            ValueError: ``accumulate`` is less than 1, or the loader distributes its data over some of the ranks only.
            DistmanError: A gradient was computed, but not used.
            PlanMismatchError: On every rank: the ranks do not take the same steps.

        Example:
            >>> manager, network = DistributedManager.initialize(), torch.nn.Linear(2, 1)
            >>> stepper = Stepper(network, torch.optim.SGD(network.parameters(), lr=0.1))
            >>> loader = distributed_loader(torch.rand(10, 2), batch_size=4)
            >>> for inputs in stepper.batches(loader, accumulate=2):
            ...     stepper.backward(network(inputs).square().mean())
            ...     print(stepper.num_own, stepper.step())
            4 False
            4 True
            2 True
        """
        check_number("accumulate", accumulate)
        if isinstance(loader, EvaluationLoader):
            with self._engine.model.evaluating():
                for batch in loader:
                    yield to_device(batch, DistributedManager().device)
            return
        steps = self._read(loader)
        while window := list(itertools.islice(steps, accumulate)):
            for batch in self._engine.window(window):
                try:
                    yield batch
                except GeneratorExit:  # by break, say
                    self._engine.leave()
                    raise

    def backward(self, loss: torch.Tensor, *names: str, retain_graph: bool = False) -> None:
        """Compute the gradient of a loss, for the parameters of some optimizers and no others, and add it to theirs.

        Local. The loss is weighted by this rank's share of the samples of the step: pass it as it is, without the
        ``loss_scale`` of the loader, and without dividing it by the number of batches that are accumulated.

        Args:
            loss: Mean over the samples of this rank's batch, shape ``()``.
            names: Names of the optimizers; none for the only one.
            retain_graph: Keep the graph, for another loss that shares a part of it.

        Raises:
            TypeError: The loss is not a tensor.
            ValueError: The loss is not one number, or there is no such optimizer.
            DistmanError: Called outside of a batch.

        Example:
            >>> def step(stepper, batch):
            ...     states, returns = batch
            ...     values = stepper.module.critic(states)
            ...     stepper.backward((values - returns).square().mean(), "critic", retain_graph=True)
            ...     stepper.backward(-values.mean(), "encoder")  # which the critic begins with
            ...     stepper.step("critic")
            ...     stepper.step("encoder")
        """
        self._engine.backward(loss, names, retain_graph=retain_graph)

    def step(self, name: str | None = None, closure: Closure | None = None) -> bool:
        """Step with the gradient over all ranks, after which it is forgotten.

        Collective.

        Args:
            name: Name of the optimizer; None for the only one.
            closure: For LBFGS and its like, which compute the loss several times per step, as often on all ranks: calls
                :meth:`backward` and returns the loss.

        Returns:
            Whether the optimizer has stepped, the same on all ranks. It does not where a loss or the gradient is not
            finite and such steps are skipped, nor in batches that are accumulated, but in the last of them.

        Raises:
            NonFiniteLossError: On every rank: a loss or the gradient is NaN or infinite.
            PlanMismatchError: On every rank: the ranks do not take the same steps.
            TypeError: The optimizer needs a closure, or a gradient is sparse.
            ValueError: There is no such optimizer, the loss does not depend on its parameters, or ``clip_norm`` or
                ``amp="fp16"`` go with a closure.
            DistmanError: There is no gradient; or with ``amp="fp16"`` that of another optimizer waits for its step.

        Example:
            >>> def step(stepper, batch):
            ...     def closure():
            ...         loss = (stepper.module(batch[0]) - batch[1]).square().mean()
            ...         stepper.backward(loss)
            ...         return loss
            ...     stepper.step(closure=closure)
            >>> handler = NNHandler(torch.nn.Linear, in_features=1, out_features=1)
            >>> handler.set_optimizer(torch.optim.LBFGS)
            >>> handler.set_step(step)
        """
        return self._engine.step(name, closure)

    def autocast(self) -> AbstractContextManager[Any]:
        """Return a context of mixed precision for what leads to a loss; it does nothing without ``amp``.

        Local. A function that :meth:`NNHandler.set_step` was given is called in it.

        Example:
            >>> manager, network = DistributedManager.initialize(), torch.nn.Linear(2, 1)
            >>> stepper = Stepper(network, torch.optim.SGD(network.parameters(), lr=0.1), amp="bf16")
            >>> with stepper.autocast():
            ...     print(network(torch.rand(4, 2)).dtype)
            torch.bfloat16
        """
        return self._engine.autocast()

    def print(self, *values: object, **options: Any) -> None:
        """Print on rank 0, and nothing elsewhere.

        Local.

        Args:
            values: What to print.
            options: As of Python's ``print``, such as ``sep``.

        Example:
            >>> manager, network = DistributedManager.initialize(), torch.nn.Linear(2, 1)
            >>> stepper = Stepper(network, torch.optim.SGD(network.parameters(), lr=0.1))
            >>> stepper.print("epoch", 1)
            epoch 1
        """
        if DistributedManager().is_main:
            print(*values, **options)  # noqa: T201 - what it is for

    def log(self, values: Mapping[str, float | torch.Tensor], *, step: int | None = None) -> None:
        """Log numbers of rank 0, by the logger ``distman.training`` at level INFO; nothing elsewhere.

        Local. For means over all ranks pass what :func:`distman.metrics.aggregate_metrics` returns.

        Args:
            values: Numbers by name.
            step: Number of the step; None is :attr:`num_steps`.

        Example:
            >>> manager, network = DistributedManager.initialize(), torch.nn.Linear(2, 1)
            >>> stepper = Stepper(network, torch.optim.SGD(network.parameters(), lr=0.1))
            >>> stepper.log({"loss": 0.25, "lr": 0.1})  # step 0: loss 0.25, lr 0.1
        """
        if DistributedManager().is_main:
            number = self.num_steps if step is None else step
            training_logger.info("step %d: %s", number, as_text(values))

    def state_dict(self) -> dict[str, Any]:
        """Return the weights, their average, the states of the optimizers, and the numbers of steps and epochs.

        Collective. The tensors are no copies. The states of loaders and generators are not in it. Within the loop,
        call it after the last :meth:`step` of a batch: this ends the step, with its average and its count.

        Raises:
            DistmanError: The step has batches left, or a gradient has been computed, but not used.
            NonFiniteLossError: On every rank: a step has spoilt the weights, see ``check_every``.
        """
        self._engine.end_step()
        self._engine.check()
        states = {"model": self._engine.model.state_dict(), "optimization": self._engine.state_dict()}
        return {**states, "num_passes": self._num_passes}

    def load_state_dict(
        self, state: Mapping[str, Any], *, on_change: Literal["file", "program", "error"] | None = None
    ) -> None:
        """Restore such a state, saved by any number of ranks.

        Local.

        Args:
            state: From :meth:`state_dict`.
            on_change: What counts where the optimizers, or what is frozen, have changed since, see
                :meth:`NNHandler.auto_save`. An average is kept as ``ema_decay`` says.

        Raises:
            RuntimeError: The weights do not fit the module.
            CheckpointError: It is of other optimizers; or something has changed, with ``on_change="error"``.

        Example:
            >>> manager, network = DistributedManager.initialize(), torch.nn.Linear(2, 1)
            >>> stepper = Stepper(network, torch.optim.Adam(network.parameters()))
            >>> stepper.load_state_dict(stepper.state_dict())
        """
        changes = Changes(on_change)
        self._engine.model.load_state_dict(state["model"], changes)
        self._engine.load_state_dict(state["optimization"], changes)
        self._num_passes = state["num_passes"]
        changes.report()

    def _read(self, loader: Iterable[Any]) -> Iterator[Step]:
        if isinstance(loader, TrainingLoader):
            check_ranks(loader, "train by NNHandler with num_samples where ranks share samples")
            for batch in loader:
                yield Step(batch, loader.num_own, loader.num_total)
            return
        source, epoch = ForeignSource(loader), self._num_passes
        source.begin(epoch)
        try:
            yield from source.steps(epoch)
        finally:
            self._num_passes = epoch + 1


def as_text(values: Mapping[str, float | torch.Tensor]) -> str:
    return ", ".join(f"{name} {float(value):.4g}" for name, value in values.items())
