"""One step of the optimizers, with some batches of every rank."""

from __future__ import annotations

import abc
import dataclasses
import inspect
import operator
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext
from typing import Any, Literal

import torch

from distman._coordination.wait_scope import WaitScope
from distman._torch_internals import norms
from distman.checkpoint._model_state import without_compiled as bare_name
from distman.data._randomness import generators_preserved
from distman.errors import DistmanError
from distman.handler._accumulators import Accumulators, Metric
from distman.handler._changes import Changes, class_of, options_of, use_options
from distman.handler._events import Callback, Events
from distman.handler._finite import FiniteCheck
from distman.handler._model import TrainedModel
from distman.handler._objective import Outcome, check_loss, to_device
from distman.handler._scheduling import UNNAMED
from distman.handler._sharding import clip, norm_over_shards, own_part, place_optimizer_state
from distman.handler._sources import Step
from distman.manager import DistributedManager

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_STEPS_BETWEEN_CHECKS = 32
"""Steps on an accelerator from one look at its gradients to the next: each look waits for all its work."""


@dataclasses.dataclass(frozen=True)
class StepOptions:
    """How the optimizer steps.

    Attributes:
        accumulate: Number of batches whose gradients make a step; an epoch's last step may have fewer.
        amp: ``"bf16"`` or ``"fp16"`` for automatic mixed precision, the latter with a scaled loss; None without it.
        clip_norm: Largest 2-norm of each optimizer's gradient; None does not clip.
        ema_decay: Decay of the moving average of the weights, between 0 and 1; None keeps no average.
        use_buffers: Which buffers are averaged too, see :meth:`NNHandler.train`.
        non_finite: What to do when a rank's loss, or the gradient, is NaN or infinite: ``"raise"`` on all ranks,
            ``"skip"`` the step on all, or ``"ignore"`` it.
        check_every: Number of steps from one look for such a gradient to the next, where it is to raise; None is 1 on
            the CPU and 32 elsewhere. Steps that may be skipped are looked at each: ``"skip"``, and ``"fp16"``.
    """

    accumulate: int = 1
    amp: Literal["bf16", "fp16"] | None = None
    clip_norm: float | None = None
    ema_decay: float | None = None
    non_finite: Literal["raise", "skip", "ignore"] = "raise"
    check_every: int | None = None
    use_buffers: bool | None = None

    def __post_init__(self) -> None:
        if self.accumulate < 1:
            raise ValueError(f"accumulate must be at least 1, got {self.accumulate}. Pass a number of batches.")
        if self.amp not in (None, *_DTYPES):
            raise ValueError(f"amp must be 'bf16', 'fp16' or None, got {self.amp!r}. Choose one of them.")
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise ValueError(f"clip_norm must be greater than 0, got {self.clip_norm}. Pass None not to clip.")
        if self.ema_decay is not None and not 0 < self.ema_decay < 1:
            raise ValueError(f"ema_decay must lie between 0 and 1, got {self.ema_decay}. Pass None for no average.")
        if self.non_finite not in ("raise", "skip", "ignore"):
            raise ValueError(
                f"non_finite must be 'raise', 'skip' or 'ignore', got {self.non_finite!r}. Choose one of them."
            )
        if self.check_every is not None and self.check_every < 1:
            raise ValueError(f"check_every must be at least 1, got {self.check_every}. Pass a number of steps.")

    @property
    def dtype(self) -> torch.dtype | None:
        """Data type of automatic mixed precision; None without it."""
        return _DTYPES[self.amp] if self.amp else None


class Optimization(abc.ABC):
    """Steps optimizers such that all ranks do the same, whatever happens on one of them.

    A step minimizes the mean loss over the samples of all its batches on all ranks. What is learned from a batch, and
    how its gradients are averaged over the ranks, a derived class says.

    Attributes:
        optimizers: The optimizers.
        num_steps: Number of steps taken.
        num_skipped: Number of steps skipped because a loss or the gradient was not finite.
        num_taken: How often each optimizer stepped in the latest step.
        numbers: By name, this rank's means over the batches of the latest step, on the device, such as the loss.
        norm: The norm of its gradient, on the device; None if nobody asked.
        num_own: Number of samples of the present batch that count on this rank.
        may_lack: Whether NaN stands for a number that a batch lacks.
    """

    may_lack = False
    _num_told: int | None = 1
    """How many of a batch's numbers are told of a step; None is all."""

    def __init__(
        self,
        model: TrainedModel,
        optimizers: Mapping[str, torch.optim.Optimizer],
        options: StepOptions,
        given: Mapping[str, Any] | None = None,
    ) -> None:
        model.forget_step()
        self._model, self.optimizers, self._options = model, dict(optimizers), options
        self._device, self._world_size = DistributedManager().device, DistributedManager().world_size
        self._parameters = {
            name: [parameter for group in optimizer.param_groups for parameter in group["params"]]
            for name, optimizer in optimizers.items()
        }
        self._check_parameters()
        self._described = {name: self._describe(name, (given or {}).get(name)) for name in optimizers}
        self._prepare()
        self._scaler = torch.amp.GradScaler(self._device.type, enabled=options.amp == "fp16")
        model.keep_average(options.ema_decay, use_buffers=options.use_buffers)
        model.module.zero_grad()  # left by a step that raised, or of parameters that another optimizer did not have
        self.num_steps = self.num_skipped = 0
        self.num_taken = dict.fromkeys(self.optimizers, 0)
        self.numbers: dict[str, list[torch.Tensor]] = {}
        self.norm: torch.Tensor | None = None
        self._events: Events | None = None  # in a loop of one's own
        self._share: float | None = None  # of a batch, in the samples of a step on all ranks; None outside of batches
        self._is_last, self._is_over = True, True  # the present batch; the step, to which nothing can be added then
        self._batch = ExitStack()  # left when the batch is over
        self._buffers: list[torch.Tensor] | None = None  # from before the step
        self._scaled: set[str] = set()  # optimizers that have stepped since the scale of the loss was updated
        self._num_left_out = self.num_own = 0
        model.sort_buckets()
        may_skip = options.non_finite == "skip" or options.amp == "fp16"
        usual = 1 if self._device.type == "cpu" else _STEPS_BETWEEN_CHECKS
        self._finite = FiniteCheck(self._scaler, options.non_finite, 1 if may_skip else options.check_every or usual)

    @abc.abstractmethod
    def accumulators(self, metrics: Mapping[str, Metric]) -> Accumulators:
        """Return what adds up the results of an epoch's steps."""

    @abc.abstractmethod
    def _learn(self, objective: Callable[..., Any], batch: Any, accumulators: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute the gradient for a batch; return what was measured, and the loss."""

    @abc.abstractmethod
    def _complete(self) -> None:
        """Take the step, or see that it has been taken, after its last batch."""

    def run(
        self, objective: Callable[..., Any], steps: Sequence[Step], accumulators: Accumulators, events: Events
    ) -> bool:
        """Step with some batches; return False if all of it was left out.

        Collective. What was measured is added to the accumulators, unless something was left out.
        """
        self._events = events
        found = []
        with closing(self.window(steps)) as batches:
            for batch, step in zip(batches, steps, strict=True):
                values, loss = self._learn(objective, batch, accumulators)
                found.append(values)
                events.emit(Callback.on_train_batch_end, step.batch, loss)
        names = accumulators.names[: self._num_told]
        self.numbers = {name: [values[index] for values in found] for index, name in enumerate(names)}
        if not self._num_left_out:
            for values, step in zip(found, steps, strict=True):
                accumulators.add(values, step.num_own)
        return self._is_taken

    def window(self, steps: Sequence[Step]) -> Generator[Any]:
        """Yield this rank's batches of a step, on its device; for each gradients may be computed. Collective."""
        self._buffers = self._copy_buffers() if self._options.non_finite == "skip" else None
        self.num_taken, self._num_left_out = dict.fromkeys(self.optimizers, 0), 0
        num_total = max(sum(step.num_total for step in steps), 1)
        try:
            for index, step in enumerate(steps, start=1):
                self._share, self._is_last = step.num_own / num_total, index == len(steps)
                self.num_own, self._is_over = step.num_own, False
                self._emit(Callback.on_train_batch_start, step.batch)
                with self._batch:
                    if not step.num_own:
                        self._batch.enter_context(self._without_a_trace())
                    yield to_device(step.batch, self._device)
            self.conclude()
        finally:
            self._share, self._is_over = None, True
            self._forget([*self.optimizers])
            self._update_scale()

    def conclude(self) -> None:
        """End a step, after its last batch, or in it when its state is taken.

        This is the only place that says in which order the parts of a state change: the weights, then their average,
        then the counters; see :class:`Training` for what follows.
        """
        if self._is_over:
            return
        if not self._is_last:
            raise DistmanError(
                "a state must be taken in the last batch of a step, got a call in one before it, whose gradient waits "
                "for the others. Take it where step() returns True, or after the loop."
            )
        self._complete()
        self._batch.close()
        if self._num_left_out:
            self._restore_buffers(self._buffers)
        if any(self.num_taken.values()):
            self._model.after_step()
        self.num_steps += self._is_taken
        self.num_skipped += self._num_left_out
        self._is_over = True

    @property
    def _is_taken(self) -> bool:
        return not self._num_left_out or any(self.num_taken.values())

    def check(self) -> None:
        """Look at the gradients of all steps since the last look.

        Collective. This waits for the device.
        """
        self._finite.look()

    def state_dict(self) -> dict[str, Any]:
        """Return everything that the next step depends on, except for the model."""
        states = {name: optimizer.state_dict() for name, optimizer in self.optimizers.items()}
        return {
            **({"optimizer": states[UNNAMED]} if states.keys() == {UNNAMED} else {"optimizers": states}),
            "described": self._described,
            "scaler": self._scaler.state_dict(),
            "num_steps": self.num_steps,
            "num_skipped": self.num_skipped,
        }

    def own_buffers(self) -> dict[str, torch.Tensor]:
        """Return the model's buffers in which this rank differs from rank 0. Collective."""
        return self._model.own_buffers()

    def load_own_buffers(self, buffers: Mapping[str, torch.Tensor]) -> None:
        """Restore such buffers."""
        self._model.load_own_buffers(buffers)

    def compare(self, state: Mapping[str, Any], changes: Changes) -> list[str]:
        """Return the names of the optimizers that such a state can be loaded into, and note what differs."""
        states, described = _by_name(state), state.get("described", {})
        if not changes.fit("the names of the optimizers", sorted(states), sorted(self.optimizers)):
            states = {name: one for name, one in states.items() if name in self.optimizers}
        fitting = []
        for name in states:
            saved, own = described.get(name, self._described[name]), self._described[name]
            label = "the optimizer" if name == UNNAMED else f"the optimizer {name}"
            parts = {"class": f"the class of {label}", "parameters": f"the parameters of {label}"}
            if all([changes.fit(what, saved[part], own[part]) for part, what in parts.items()]):  # noqa: C419 - all of them
                changes.note(label, saved["options"], own["options"])
                fitting.append(name)
        return fitting

    def load_state_dict(self, state: Mapping[str, Any], changes: Changes | None = None) -> None:
        """Restore such a state, as far as it fits."""
        changes = changes or Changes()
        states, described = _by_name(state), state.get("described", {})
        for name in self.compare(state, changes):
            optimizer = self.optimizers[name]
            optimizer.load_state_dict(place_optimizer_state(optimizer, states[name]))
            if changes.are_of_program and name in described:
                use_options(optimizer, described[name]["options"], self._described[name]["options"])
        self._load_scale(state["scaler"])
        self.num_steps, self.num_skipped = state["num_steps"], state["num_skipped"]

    def go_on_from(self, latest: Optimization) -> None:
        """Go on counting where the latest run in this program has ended; the optimizers are as they are now."""
        latest.check()
        self._load_scale(latest._scaler.state_dict())
        self.num_steps, self.num_skipped = latest.num_steps, latest.num_skipped

    def _check_parameters(self) -> None:
        """Refuse parameters that are not the model's, or several optimizers'; note those of the model in none."""
        own = {id(parameter): name for name, parameters in self._parameters.items() for parameter in parameters}
        for name, parameters in self._parameters.items():
            shared = [own[id(one)] for one in parameters if own[id(one)] != name]
            if shared:
                raise ValueError(
                    f"a parameter must belong to one optimizer, got {len(shared)} that belong to {name!r} and "
                    f"{shared[0]!r}. Choose them with parameters=, as in set_optimizer(torch.optim.Adam, "
                    f"name={name!r}, parameters=lambda model: model.{name}.parameters())."
                )
        num_foreign = len(own.keys() - {id(one) for one in self._model.module.parameters()})
        if num_foreign and self._world_size > 1:
            raise ValueError(
                f"parameters of the optimizer must be the model's, got {num_foreign} others, whose gradients would "
                "not be averaged over the ranks. Make them part of the model."
            )
        self._not_optimized = [one for one in self._model.module.parameters() if id(one) not in own]

    def _describe(self, name: str, given: Any) -> dict[str, Any]:
        """Return what makes an optimizer another one: its class, the names of its parameters, and its options."""
        optimizer = self.optimizers[name]
        names = {id(one): bare_name(own) for own, one in self._model.module.named_parameters()}
        parameters = [[names.get(id(one), "foreign") for one in group["params"]] for group in optimizer.param_groups]
        return {"class": class_of(optimizer), "parameters": parameters, "options": given or options_of(optimizer)}

    @abc.abstractmethod
    def _prepare(self) -> None:
        """Let the model's gradients be averaged, and refuse optimizers that cannot step so."""

    @abc.abstractmethod
    def follow_freezing(self) -> None:
        """Let the gradients be averaged of what is trained now: a callback may have frozen or unfrozen a part.

        Collective.
        """

    def _load_scale(self, state: Mapping[str, Any]) -> None:
        if state and self._scaler.is_enabled():
            self._scaler.load_state_dict(dict(state))

    @property
    def _num_begun(self) -> int:
        return self.num_steps + self.num_skipped

    def _copy_buffers(self) -> list[torch.Tensor]:
        return [buffer.clone() for buffer in self._model.module.buffers()]

    @torch.no_grad()
    def _restore_buffers(self, buffers: Sequence[torch.Tensor] | None) -> None:
        for buffer, saved in zip(self._model.module.buffers(), buffers or (), strict=buffers is not None):
            buffer.copy_(saved)

    def autocast(self) -> AbstractContextManager[Any]:
        """Return a context of mixed precision, if there is to be any."""
        return torch.autocast(self._device.type, self._options.dtype) if self._options.amp else nullcontext()

    @contextmanager
    def _without_a_trace(self) -> Iterator[None]:
        """Leave buffers and generators as they were: a rank takes part, for the others, with a batch that counts 0."""
        buffers = self._copy_buffers()
        with generators_preserved():
            yield
        self._restore_buffers(buffers)

    def _take(self, names: Sequence[str], losses: Sequence[torch.Tensor]) -> bool:
        """Let optimizers step with their gradients, which are the same on all ranks; return False if they may not."""
        self._scaled.update(names)
        for name in names:
            self._scaler.unscale_(self.optimizers[name])
        self._emit(Callback.on_before_optimizer_step)
        found = [norm for norm in map(self._clip, names) if norm is not None]
        self.norm = norm_of(found)
        self._finite.add(self._num_begun, self._label(names), self.norm, losses)
        if not self._finite.may_be_taken():
            return False
        for name in names:
            self._scaler.step(self.optimizers[name])
        self._finite.note_taken()
        return True

    def _forget(self, names: Sequence[str]) -> None:
        """Forget the gradients of some optimizers, and those that are nobody's."""
        for name in names:
            self.optimizers[name].zero_grad()
        for parameter in self._not_optimized:
            parameter.grad = None

    def _update_scale(self) -> None:
        if self._scaled:
            self._scaler.update()
            self._scaled.clear()

    def _emit(self, event: Callable[..., None], *args: Any) -> None:
        if self._events is not None:
            self._events.emit(event, *args)

    def _label(self, names: Sequence[str]) -> str:
        """Return the names of optimizers for a message; empty where there is only one without a name."""
        return "" if [*self.optimizers] == [UNNAMED] else ", ".join(names)

    def _clip(self, name: str) -> torch.Tensor | None:
        """Clip an optimizer's gradient, and return its 2-norm, the same on all ranks; None if nobody asks for it."""
        parameters = self._parameters[name]
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        if not gradients or (self._options.clip_norm is None and self._options.non_finite == "ignore"):
            return None
        parts = [own_part(one) for one in gradients]
        dense = [one.coalesce().values() if one.is_sparse else one for one in parts]
        norm = norm_over_shards(torch.linalg.vector_norm(torch.stack(norms(dense))), gradients[0])
        if self._options.clip_norm is not None and self._model.is_sharded:
            clip(parts, self._options.clip_norm, norm)
        elif self._options.clip_norm is not None:
            by_one_kernel = None if all(map(operator.is_, dense, gradients)) else False
            torch.nn.utils.clip_grads_with_norm_(parameters, self._options.clip_norm, norm, foreach=by_one_kernel)
        return norm


class LossSteps(Optimization):
    """Steps with the gradient of one loss, which is averaged over the ranks in the backward pass of the last batch."""

    def accumulators(self, metrics: Mapping[str, Metric]) -> Accumulators:
        """Return what adds up the loss and the metrics."""
        return Accumulators(metrics)

    def _prepare(self) -> None:
        for optimizer in self.optimizers.values():
            if needs_closure(optimizer):
                raise TypeError(
                    f"the optimizer must step without a closure, got {type(optimizer).__name__}, which computes the "
                    "loss several times per step. Pass it the closure in a step of your own: set_step()."
                )
        self._losses: list[torch.Tensor] = []  # of the batches of the present step
        self._model.wrap()

    def follow_freezing(self) -> None:
        """Let the gradients be averaged of what is trained now. Collective."""
        self._model.wrap()

    def _learn(self, objective: Callable[..., Any], batch: Any, accumulators: Any) -> tuple[torch.Tensor, torch.Tensor]:
        averages = nullcontext() if self._is_last else self._model.without_synchronization()
        with averages, self._model.training() as model:
            with self.autocast(), self._model.told_of_unused():
                outcome: Outcome = objective(model, batch)
            check_loss(outcome.loss)
            self._emit(Callback.on_before_backward, outcome.loss)
            root = root_of(outcome.loss, (self._share or 0.0) * self._world_size)
            with WaitScope("backward of the model"), self._model.backward_pass():
                self._scaler.scale(outcome.loss).backward(gradient=root)
            self._emit(Callback.on_after_backward)
        self._losses.append(outcome.loss.detach())
        return accumulators.measure(outcome, self.num_own), self._losses[-1]

    def _complete(self) -> None:
        is_taken = self._take([*self.optimizers], self._losses)
        self.num_taken, self._num_left_out = dict.fromkeys(self.optimizers, int(is_taken)), int(not is_taken)

    def _forget(self, names: Sequence[str]) -> None:
        super()._forget(names)
        self._losses = []


def needs_closure(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer computes the loss several times per step, as LBFGS does."""
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def _by_name(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the optimizers' states in a state, by name."""
    states: Mapping[str, Any] = state["optimizers"] if "optimizers" in state else {UNNAMED: state["optimizer"]}
    return states


def norm_of(norms: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Return the norm of gradients of which each has one of these; None if there are none."""
    if len(norms) < 2:
        return norms[0] if norms else None
    stacked = torch.stack([*norms]).double()  # whose squares do not overflow
    norm: torch.Tensor = torch.linalg.vector_norm(stacked)
    return norm


def root_of(loss: torch.Tensor, factor: float) -> torch.Tensor:
    """Return where a backward pass begins: with NaN if the loss is not finite, so that it is seen on all ranks."""
    loss = loss.detach()
    return (loss - loss) + factor
