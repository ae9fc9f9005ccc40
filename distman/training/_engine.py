"""Steps of optimizers, each with the gradients of some batches of every rank."""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any, Literal

import torch
from torch.utils.hooks import RemovableHandle

from distman._base.arguments import check_choice, check_number
from distman._coordination import step_times
from distman._coordination.wait_scope import WaitScope
from distman._torch_internals import is_distributed_tensor, norms, tree_leaves, tree_map
from distman.collectives import all_gather_objects, fused_all_reduce
from distman.data import generators_preserved
from distman.errors import DistmanError, NonFiniteLossError
from distman.manager import DistributedManager
from distman.training._model import TrainedModel
from distman.training._optimizers import UNNAMED, Changes, Optimizers, needs_closure
from distman.training._sharding import copy_into, forget_step, norm_over_shards, own_part
from distman.training._sources import Step

Closure = Callable[[], torch.Tensor]
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_STEPS_BETWEEN_CHECKS = 32  # steps on an accelerator from one look at its gradients to the next, which waits for it
_NUM_PLACES = 8  # how many steps are distinguished: few, since each has a layout of the gradients, of which 64 are kept


class _NotFiniteError(Exception):
    """A closure has computed a loss or a gradient that is not finite."""


@dataclasses.dataclass(frozen=True)
class StepOptions:
    """How the optimizers step; what the options mean is said by :class:`Stepper`."""

    amp: Literal["bf16", "fp16"] | None = None
    clip_norm: float | None = None
    ema_decay: float | None = None
    use_buffers: bool | None = None
    non_finite: Literal["raise", "skip", "ignore"] = "raise"
    check_every: int | None = None

    def __post_init__(self) -> None:
        check_choice("amp", self.amp, (*_DTYPES, None))
        check_choice("non_finite", self.non_finite, ("raise", "skip", "ignore"))
        if self.check_every is not None:
            check_number("check_every", self.check_every)
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise ValueError(f"clip_norm must be greater than 0, got {self.clip_norm}. Pass None not to clip.")
        if self.ema_decay is not None and not 0 < self.ema_decay < 1:
            raise ValueError(f"ema_decay must be between 0 and 1, got {self.ema_decay}. Pass None for no average.")

    @property
    def dtype(self) -> torch.dtype | None:
        return _DTYPES[self.amp] if self.amp else None


class Engine:
    """Takes steps that are the same on all ranks, whatever happens on one of them.

    A step minimizes the mean loss over the samples of all its batches on all ranks. Within :meth:`window`, losses are
    given to :meth:`backward`, and :meth:`step` lets an optimizer step with their gradient. A model that is wrapped, for
    :meth:`learn`, averages its gradients over the ranks in the backward pass, by DistributedDataParallel or FSDP, and
    all optimizers step after the last batch. The parts of a bare one may be called in any order, any number of times,
    and its gradients are summed as an optimizer steps.
    """

    def __init__(
        self,
        model: TrainedModel,
        optimizers: Mapping[str, torch.optim.Optimizer],
        options: StepOptions,
        given: Mapping[str, Any] | None = None,
        *,
        wraps: bool,
    ) -> None:
        if model.is_sharded:
            forget_step(model.module)  # that raised
        self.model, self._options, self._wraps = model, options, wraps
        self._device, self._world_size = DistributedManager().device, DistributedManager().world_size
        self._optimizers = Optimizers(model.module, optimizers, given)
        self.optimizers, self._parameters = self._optimizers.by_name, self._optimizers.parameters
        self._with_closures = [name for name, one in optimizers.items() if needs_closure(one)]
        self._check_model()
        self.wrap()
        self._scaler = torch.amp.GradScaler(self._device.type, enabled=options.amp == "fp16")
        model.keep_average(options.ema_decay, use_buffers=options.use_buffers)
        model.module.zero_grad()  # left by a step that raised, or of parameters that another optimizer did not have
        self.num_steps = self.num_skipped = 0  # the latter because a loss or the gradient was not finite
        self.num_taken = dict.fromkeys(self.optimizers, 0)  # by each optimizer in the latest step
        self.norm: torch.Tensor | None = None  # of the latest step's gradient; None if no option needs it
        self.num_own = 0  # samples of the present batch that count on this rank
        self.emit: Callable[..., None] = lambda _event, *_: None  # to the callbacks of a handler
        self._share: float | None = None  # of a batch, in the samples of a step on all ranks; None outside of batches
        self._is_last, self._is_over = True, True  # the present batch; the step, to which nothing can be added then
        self._is_stepping = False
        self._batch = ExitStack()  # left when the batch is over
        self._buffers: list[torch.Tensor] = []  # from before a step that may be skipped
        self._losses: dict[str, list[torch.Tensor]] = {}  # of the gradients that wait for their optimizer's step
        self._closures: dict[str, list[tuple[Closure, float]]] = {}
        self._norms: list[torch.Tensor] = []  # of the optimizers' gradients in the present step
        self._scaled: set[str] = set()  # optimizers that have stepped since the scale of the loss was updated
        self.num_left_out = 0  # steps of optimizers, in the latest step
        self._num_windows = 0
        may_skip = options.non_finite == "skip" or options.amp == "fp16"
        usual = 1 if self._device.type == "cpu" else _STEPS_BETWEEN_CHECKS
        self._check_every = 1 if may_skip else options.check_every or usual
        # Of each gradient since the last look: number and name of its step, its norm, and this rank's losses.
        self._unchecked: list[tuple[int, str, torch.Tensor, Sequence[torch.Tensor]]] = []

    def wrap(self) -> None:
        """Average the gradients of what is trained now: a callback may have frozen a part. Collective."""
        if self._wraps:
            self.model.wrap()
            self.model.sort_buckets()
        else:
            self.model.unwrap()

    def _check_model(self) -> None:
        for name in self._with_closures if self._wraps else ():
            raise TypeError(
                f"the optimizer must step without a closure, got {type(self.optimizers[name]).__name__}, which "
                "computes the loss several times per step. Pass it the closure in a step of your own: set_step()."
            )
        if not self._wraps and any(map(is_distributed_tensor, self.model.module.parameters())):
            raise TypeError(
                "a step of your own must train a model of which each rank has all weights, got one with parameters "
                "that are divided among them. Train it with a loss function: set_loss_fn()."
            )

    def window(self, steps: Sequence[Step]) -> Generator[Any]:
        """Yield this rank's batches of a step, on its device; for each gradients may be computed. Collective."""
        self._buffers = self._copy_buffers() if self._options.non_finite == "skip" else []
        self.num_taken, self.num_left_out, self._norms = dict.fromkeys(self.optimizers, 0), 0, []
        self._num_windows += 1
        num_total = max(sum(step.num_total for step in steps), 1)
        hooked = [] if self._wraps else self.optimizers.values()
        hooks = [optimizer.register_step_pre_hook(self._refuse) for optimizer in hooked]
        is_ended = False
        try:
            for index, step in enumerate(steps, start=1):
                self._share, self._is_last = step.num_own / num_total, index == len(steps)
                self.num_own, self._is_over = step.num_own, False
                self.emit("on_train_batch_start", step.batch)
                with self._batch:
                    if not step.num_own:  # it takes part for the others, and leaves no trace
                        self._batch.enter_context(generators_preserved())
                        self._batch.callback(self._restore_buffers, self._copy_buffers())
                    step_times.current().enter(step_times.FORWARD)
                    yield to_device(step.batch, self._device)
            self.end_step()
            is_ended = True
            step_times.current().end_step()
        finally:
            self._share, self._is_over = None, True
            if not (self._wraps and is_ended):  # else the step has forgotten it
                self._forget([*self.optimizers])
            for parameter in self._optimizers.not_optimized if self._wraps else ():
                parameter.grad = None
            self._update_scale()
            for hook in hooks:
                hook.remove()

    def end_step(self) -> None:
        """End a step, after its last batch, or in it when its state is taken or the loop is left.

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
        if self._wraps:
            self._step([*self.optimizers])
        elif self._losses:
            raise DistmanError(
                f"the gradient of each backward() must be used by a step(), got one for {', '.join(self._losses)} that "
                "is not. Leave that backward() out; accumulate= gathers the gradients of several batches."
            )
        self.norm = _norm_of(self._norms)
        self._batch.close()
        if self.num_left_out and self._options.non_finite == "skip":
            self._restore_buffers(self._buffers)
        if any(self.num_taken.values()) and self.model.average is not None:
            self.model.average.update()
        self.num_steps += self.is_taken
        self.num_skipped += self.num_left_out
        self._is_over = True

    def leave(self) -> None:
        """End the step in which a loop is left: what has stepped counts, a gradient that waits is forgotten."""
        if any(self.num_taken.values()) or self.num_left_out:
            self._forget([*self.optimizers])
            self.end_step()

    def learn(self, objective: Callable[[torch.nn.Module, Any], Any], batch: Any) -> Any:
        """Compute the gradient of the ``loss`` of an objective of the wrapped model, for all optimizers."""
        averages = nullcontext() if self._is_last else self.model.without_synchronization()
        with averages, self.model.training() as model:
            with self.autocast(), self.model.explaining_unused():
                outcome = objective(model, batch)
            if not self._share and self.model.is_sharded:  # whose parameters get their gradients past their hooks
                _add_zeros_to(one for one in tree_leaves(outcome.outputs) if isinstance(one, torch.Tensor))
            self.backward(outcome.loss, [*self.optimizers])
        return outcome

    def backward(self, loss: torch.Tensor, names: Sequence[str], *, retain_graph: bool = False) -> None:
        """Add the gradient of a loss to that of some optimizers' parameters; of a bare model to no others."""
        share = self._share_of("backward()")
        chosen = [*dict.fromkeys(map(self._resolve, names))] or [self._resolve(None)]
        check_loss(loss)
        self.emit("on_before_backward", loss)
        waits = WaitScope("backward of the model", computes=True) if self._wraps else nullcontext()
        hooks = [] if share else _add_zeros_to(self.model.module.parameters())
        value, factor = loss.detach(), share * self._world_size if self._wraps else share
        # Where a loss that counts is not finite the pass begins with NaN, so that all ranks see it.
        root = (value - value) + factor if share else torch.zeros_like(value)
        step_times.current().enter(step_times.BACKWARD)
        try:
            with self._full_precision(), waits:
                inputs = self._inputs_of(chosen)
                self._scaler.scale(loss).backward(gradient=root, retain_graph=retain_graph, inputs=inputs)
        finally:
            for hook in hooks:
                hook.remove()
        for name in chosen:
            self._losses.setdefault(name, []).append(value if share else root)
        step_times.current().enter(step_times.COMPUTING)
        self.emit("on_after_backward")

    def _inputs_of(self, names: Sequence[str]) -> list[torch.nn.Parameter] | None:
        """Return the parameters that get a gradient; None for all, as a wrapped model needs it."""
        if self._wraps:
            return None
        is_all = len(names) == len(self.optimizers)
        if is_all and not any(one.requires_grad for one in self._optimizers.not_optimized):
            return None
        return [one for name in names for one in self._parameters[name] if one.requires_grad]

    def step(self, name: str | None, closure: Closure | None) -> bool:
        """Step with the gradients of all batches, in the last of them; return whether the optimizer has stepped."""
        share, name = self._share_of("step()"), self._resolve(name)
        if closure is None:
            self._check_gradient(name)
        else:
            self._check_closure(name, closure)
            self._closures.setdefault(name, []).append((closure, share))
        return self._is_last and self._step([name])

    def check(self, *, is_latest_taken: bool = True) -> bool:
        """Look at the gradients of all steps since the last look; return False if the latest is to be left out.

        Collective; each look waits for the device. A step that was taken with a gradient that is not finite has spoilt
        the model for good, so this raises for it again and again, and it cannot be saved.
        """
        if not self._unchecked:
            return True
        unchecked, norms = self._unchecked, torch.stack([norm for _, _, norm, _ in self._unchecked]).tolist()
        bad = next((index for index, norm in enumerate(norms) if not math.isfinite(norm)), None)
        taken = unchecked if is_latest_taken else unchecked[:-1]
        num_spoilt = 0 if bad is None else len(taken[bad:])
        self._unchecked = taken if num_spoilt else []
        if bad is not None:
            step, name, _, losses = unchecked[bad]
            self._check_skippable(step, name, losses, num_spoilt)
        return bad is None

    def _check_skippable(self, step: int, name: str, own: Sequence[torch.Tensor], num_spoilt: int) -> None:
        """Raise unless the step may be skipped: the scale of the loss was too large, or the options say so."""
        everyone = all_gather_objects([loss.item() for loss in own])
        losses = {rank: loss for rank, found in enumerate(everyone) for loss in found if not math.isfinite(loss)}
        is_overflow = not losses and self._scaler.is_enabled() and self._scaler.get_scale() >= 1
        if is_overflow or self._options.non_finite == "skip":
            return
        roll = DistributedManager().roll_call
        got = ", ".join(
            f"{loss} on rank {rank} ({roll[rank].host}, pid {roll[rank].pid})" for rank, loss in losses.items()
        )
        remedy = "Lower the learning rate, pass clip_norm, or skip such steps with non_finite='skip'."
        if num_spoilt:
            remedy += (
                f" {num_spoilt} steps were taken before this was seen, and have spoilt the model: go on from a "
                "checkpoint; check_every=1 looks before each step is taken."
            )
        raise NonFiniteLossError(
            f"the loss {f'of {name!r} ' if name else ''}must be finite in step {step}, got "
            f"{got or 'a gradient that is not, with finite losses on all ranks'}. {remedy}"
        )

    def state_dict(self) -> dict[str, Any]:
        counts = {"num_steps": self.num_steps, "num_skipped": self.num_skipped}
        return {**self._optimizers.state_dict(), "scaler": self._scaler.state_dict(), **counts}

    def compare(self, state: Mapping[str, Any], changes: Changes) -> None:
        self._optimizers.compare(state, changes)

    def load_state_dict(self, state: Mapping[str, Any], changes: Changes) -> None:
        """Restore such a state, after that of the model, which may have had no average, or one that is not wanted."""
        self.model.keep_average(self._options.ema_decay, use_buffers=self._options.use_buffers)
        self._optimizers.load_state_dict(state, changes)
        self._load_scale(state["scaler"])
        self.num_steps, self.num_skipped = state["num_steps"], state["num_skipped"]

    def go_on_from(self, latest: Engine) -> None:
        """Go on counting where the latest run in this program has ended; the optimizers are as they are now."""
        latest.check()
        self._load_scale(latest._scaler.state_dict())
        self.num_steps, self.num_skipped = latest.num_steps, latest.num_skipped

    def autocast(self) -> AbstractContextManager[Any]:
        return torch.autocast(self._device.type, self._options.dtype) if self._options.amp else nullcontext()

    def _full_precision(self) -> AbstractContextManager[Any]:
        """Return a context without mixed precision, in which a step of the user's own may be; it costs a little."""
        is_mixed = torch.is_autocast_enabled(self._device.type)
        return torch.autocast(self._device.type, enabled=False) if is_mixed else nullcontext()

    def _load_scale(self, state: Mapping[str, Any]) -> None:
        self._scaler.load_state_dict({**self._scaler.state_dict(), **state})  # empty of one that is off

    @property
    def is_taken(self) -> bool:
        return not self.num_left_out or any(self.num_taken.values())

    def _share_of(self, call: str) -> float:
        if self._share is not None and self._is_over:
            raise DistmanError(
                f"{call} must be called before the state of its step is taken, got a call after it, which that state "
                "would lack. Take the state after the last step() of a batch."
            )
        if self._share is None:
            raise DistmanError(
                f"{call} must be called for a batch, got a call outside of one. Call it in the function that "
                "set_step() was given, or in a loop over Stepper.batches()."
            )
        return self._share

    def _resolve(self, name: str | None) -> str:
        if name is None and len(self.optimizers) == 1:
            return next(iter(self.optimizers))
        if name is None or name not in self.optimizers:
            raise ValueError(
                f"name must be that of an optimizer, {' or '.join(map(repr, self.optimizers))}, got {name!r}. Pass it "
                "to backward() and step()."
            )
        return name

    def _refuse(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if not self._is_stepping:
            raise DistmanError(
                "an optimizer must step by step() of the stepper, which adds up the gradients of all ranks, got a call "
                f"of {type(optimizer).__name__}.step(). Call stepper.step() instead."
            )

    def _check_gradient(self, name: str) -> None:
        if name in self._with_closures:
            raise TypeError(
                f"closure must be a function, got None for {type(self.optimizers[name]).__name__}, which computes the "
                "loss several times per step. Pass one that calls backward() and returns the loss."
            )
        if name not in self._losses:
            raise DistmanError(
                f"step() must follow a stepper.backward() for the same optimizer, got none for {name!r}. Call that in "
                "place of loss.backward(), and pass the optimizer's name to both."
            )
        if self._scaler.is_enabled() and name in self._scaled:
            raise DistmanError(
                f"{name!r} must step once while gradients of {', '.join(self._losses.keys() - {name})} wait for their "
                "step, with amp='fp16', got a second step. Let them step before, or use amp='bf16'."
            )

    def _check_closure(self, name: str, closure: Closure) -> None:
        if not callable(closure):
            raise TypeError(f"closure must be a function, got {closure!r}. Pass one that computes the loss.")
        given = {"clip_norm": self._options.clip_norm, "amp": "fp16" if self._scaler.is_enabled() else None}
        for option, value in given.items():
            if value is not None:
                raise ValueError(
                    f"{option} must be left out where an optimizer calls a closure, got {value!r} for {name!r}, which "
                    "compares losses and gradients as they are. Train without it."
                )

    def _step(self, names: Sequence[str]) -> bool:
        self._is_stepping = True
        try:
            with self._full_precision():
                is_taken = self._take_with_closures(names[0]) if names[0] in self._closures else self._take(names)
        finally:
            self._is_stepping = False
            self._forget(names)
        torch.clear_autocast_cache()  # of weights in 16 bits, from before the step
        for name in names:
            self.num_taken[name] += is_taken
        self.num_left_out += not is_taken
        if not self._losses:  # else a gradient waits that was computed with the present scale
            self._update_scale()
        return is_taken

    def _take(self, names: Sequence[str]) -> bool:
        """Let optimizers step, unless the gradient, which is the same on all ranks then, says no."""
        for name in () if self._wraps else names:
            self._sum_gradients(name, torch.zeros((), device=self._device))
            if all(parameter.grad is None for parameter in self._parameters[name]):
                raise ValueError(
                    f"the loss must depend on the parameters of {name!r}, got one that does not. Pass the name of "
                    "another optimizer to backward() and step()."
                )
        # Those whose parameters are frozen, say, have no gradient, without which the scaler refuses them.
        scaled = [name for name in names if any(one.grad is not None for one in self._parameters[name])]
        self._scaled.update(scaled)
        for name in scaled:
            self._scaler.unscale_(self.optimizers[name])
        self.emit("on_before_optimizer_step")
        found = [norm for norm in map(self._clip, names) if norm is not None]
        self._norms += found
        self._look_later(names, _norm_of(found))
        if len(self._unchecked) >= self._check_every and not self.check(is_latest_taken=False):
            return False
        for name in names:
            if name in scaled:
                self._scaler.step(self.optimizers[name])
            else:
                self.optimizers[name].step()
        return True

    def _take_with_closures(self, name: str) -> bool:
        """Let an optimizer compute the loss of all batches as often as it wants to.

        It decides by losses and gradients that are the same on all ranks, so these compute equally often. Where one
        computes once more, because its processor rounds in another way, it meets the others' next step.
        """
        optimizer, parameters = self.optimizers[name], self._parameters[name]
        before = [parameter.detach().clone() for parameter in parameters]
        try:
            optimizer.step(lambda: self._evaluate(name))  # type: ignore[arg-type,return-value]  # torch says a float
        except _NotFiniteError:
            copy_into(parameters, before)
            optimizer.state.clear()  # of the way to where the loss is not finite
            return self.check(is_latest_taken=False)
        return True

    def _evaluate(self, name: str) -> torch.Tensor:
        """Return the loss of all batches of all ranks, after its gradient has been computed."""
        self._forget_gradient(name)
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        for closure, share in self._closures[name]:
            self._share = share
            with self.autocast():
                loss = closure()
            check_loss(loss)
            total += loss.detach().reshape(()) * share if share else 0
        if name not in self._losses:
            raise DistmanError(
                f"closure must call backward() for its optimizer, got none for {name!r}. Call it with the loss, and "
                "return the loss."
            )
        total = self._sum_gradients(name, total)
        if self._options.non_finite != "ignore":
            gradients = [parameter.grad for parameter in self._parameters[name] if parameter.grad is not None]
            norm = torch.stack([total.abs(), *[one.abs().sum() for one in gradients]]).sum()
            if not math.isfinite(norm.item()):
                self._look_later([name], norm)
                raise _NotFiniteError
        return total

    @torch.no_grad()
    def _sum_gradients(self, name: str, loss: torch.Tensor) -> torch.Tensor:
        """Add up the gradients of an optimizer's parameters over the ranks, and a loss; return the latter.

        A parameter that has a gradient on some ranks has one on all of them then.
        """
        trained = [parameter for parameter in self._parameters[name] if parameter.requires_grad]
        gradients = [parameter.grad for parameter in trained]
        if any(one is not None and one.layout != torch.strided for one in gradients):
            raise TypeError(
                "gradients must be dense in a step of your own, got a sparse one. Pass sparse=False to the embedding."
            )
        if self._world_size == 1:
            return loss
        parts = {
            f"{name} {index}": torch.zeros_like(one) if one.grad is None else one.grad
            for index, one in enumerate(trained)
        }
        is_there = torch.tensor([one is not None for one in gradients], dtype=torch.float32, device=self._device)
        place = f"step {self._num_windows % _NUM_PLACES} (mod {_NUM_PLACES})"  # so that ranks in other steps differ
        summed = fused_all_reduce({**parts, "loss": loss, place: is_there})
        is_missing = any(one is None for one in gradients)
        counts = summed[place].tolist() if is_missing else [1] * len(trained)
        for parameter, key, count in zip(trained, parts, counts, strict=True):
            parameter.grad = summed[key] if count else None
        return summed["loss"]

    def _clip(self, name: str) -> torch.Tensor | None:
        """Clip an optimizer's gradient, and return its 2-norm, the same on all ranks; None if no option needs it."""
        parameters = self._parameters[name]
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        if not gradients or (self._options.clip_norm is None and self._options.non_finite == "ignore"):
            return None
        parts = [own_part(one) for one in gradients]
        dense = [one.coalesce().values() if one.is_sparse else one for one in parts]
        norm = norm_over_shards(torch.linalg.vector_norm(torch.stack(norms(dense))), gradients[0])
        if self._options.clip_norm is not None and self.model.is_sharded:
            factor = (self._options.clip_norm / (norm + 1e-6)).clamp(max=1.0)  # as torch clips what is not sharded
            for part in parts:
                part.mul_(factor)
        elif self._options.clip_norm is not None:
            by_one_kernel = None if all(map(operator.is_, dense, gradients)) else False
            torch.nn.utils.clip_grads_with_norm_(parameters, self._options.clip_norm, norm, foreach=by_one_kernel)
        return norm

    def _forget(self, names: Sequence[str]) -> None:
        for name in names:
            self._forget_gradient(name)
            self._closures.pop(name, None)

    def _forget_gradient(self, name: str) -> None:
        if any(one.grad is not None for one in self._parameters[name]):  # a call that has nothing to do costs, too
            self.optimizers[name].zero_grad()
        self._losses.pop(name, None)

    def _update_scale(self) -> None:
        if self._scaled:
            self._scaler.update()
            self._scaled.clear()

    def _look_later(self, names: Sequence[str], norm: torch.Tensor | None) -> None:
        if norm is not None and self._options.non_finite != "ignore":
            label = "" if [*self.optimizers] == [UNNAMED] else ", ".join(names)
            self._unchecked.append((self.num_steps + self.num_skipped, label, norm, self._losses[names[0]]))

    def _copy_buffers(self) -> list[torch.Tensor]:
        return [buffer.clone() for buffer in self.model.module.buffers()]

    def _restore_buffers(self, saved: Sequence[torch.Tensor]) -> None:
        copy_into(self.model.module.buffers(), saved)  # some of which the step may have replaced


def _norm_of(norms: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Return the norm of gradients of which each has one of these; None if there are none."""
    if len(norms) < 2:
        return norms[0] if norms else None
    stacked = torch.stack([*norms]).double()  # whose squares do not overflow
    norm: torch.Tensor = torch.linalg.vector_norm(stacked)
    return norm


def _add_zeros_to(tensors: Iterable[torch.Tensor]) -> list[RemovableHandle]:
    """Let the gradient of a batch that counts 0 be 0: that of a mean over no samples is NaN."""
    return [one.register_hook(torch.zeros_like) for one in tensors if one.requires_grad]


def check_loss(loss: object) -> None:
    if not isinstance(loss, torch.Tensor):
        raise TypeError(
            f"the loss must be a tensor with one element, got a {type(loss).__name__}. Return the number to minimize; "
            "pass what else is to be measured to add_metric()."
        )
    if loss.numel() != 1:
        raise ValueError(f"the loss must be one number, got shape {tuple(loss.shape)}. Take its mean over the batch.")


def to_device(batch: Any, device: torch.device) -> Any:
    if device.type == "cpu":
        return batch
    return tree_map(lambda leaf: leaf.to(device, non_blocking=True) if isinstance(leaf, torch.Tensor) else leaf, batch)
