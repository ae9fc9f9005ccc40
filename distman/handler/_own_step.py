"""Steps that a function of the program takes, with any number of optimizers."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

import torch

from distman._torch_internals import is_distributed_tensor
from distman.collectives._fused import fused_all_reduce
from distman.errors import DistmanError
from distman.handler._accumulators import Metric
from distman.handler._events import Callback
from distman.handler._model import TrainedModel
from distman.handler._numbers import Numbers
from distman.handler._objective import check_loss
from distman.handler._optimization import Optimization, StepOptions, needs_closure, norm_of, root_of
from distman.handler._sources import Step

Closure = Callable[[], torch.Tensor]
_NUM_PLACES = 8
"""How many steps are told apart: few, since each is a layout of its own for the gradients, of which 64 are kept."""


class _NotFiniteError(Exception):
    """A closure has come to a loss or a gradient that is not finite."""


class OwnSteps(Optimization):
    """Lets the program compute gradients and step, such that all ranks do the same.

    The model is not wrapped: its parts may be called in any order, any number of times. The gradients are summed over
    the ranks when an optimizer steps.
    """

    may_lack = True
    _num_told = None

    def __init__(
        self,
        model: TrainedModel,
        optimizers: Mapping[str, torch.optim.Optimizer],
        options: StepOptions,
        given: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(model, optimizers, options, given)
        self._is_stepping = False
        self._losses: dict[str, list[torch.Tensor]] = {}  # of the gradients that wait for their optimizer's step
        self._closures: dict[str, list[tuple[Closure, float]]] = {}
        self._num_windows = 0
        self._norms: list[torch.Tensor] = []  # of the gradients of the optimizers, in the latest step

    def accumulators(self, metrics: Mapping[str, Metric]) -> Numbers:
        """Return what adds up the numbers that the function returns."""
        return Numbers()

    def _learn(self, objective: Callable[..., Any], batch: Any, accumulators: Any) -> tuple[torch.Tensor, torch.Tensor]:
        with self.autocast():
            returned = objective(batch)
        found = accumulators.read(returned)
        return found, found[0] if len(found) else torch.tensor(math.nan, device=self._device)

    def window(self, steps: Sequence[Step]) -> Generator[Any]:
        """Yield this rank's batches of a step, for which only :meth:`step` may let an optimizer step. Collective."""
        self._num_windows += 1
        self._norms = []
        hooks = [optimizer.register_step_pre_hook(self._refuse) for optimizer in self.optimizers.values()]
        try:
            yield from super().window(steps)
        finally:
            for hook in hooks:
                hook.remove()

    def backward(self, loss: torch.Tensor, names: Sequence[str], *, retain_graph: bool) -> None:
        """Add the gradient of a loss to that of some optimizers' parameters, and to no others."""
        share = self._share_of("backward()")
        chosen = [*dict.fromkeys(map(self._resolve, names))] or [self._resolve(None)]
        check_loss(loss)
        self._emit(Callback.on_before_backward, loss)
        is_all = len(chosen) == len(self.optimizers) and not any(one.requires_grad for one in self._not_optimized)
        trained = [one for name in chosen for one in self._parameters[name] if one.requires_grad]
        with torch.autocast(self._device.type, enabled=False):
            self._scaler.scale(loss).backward(
                gradient=root_of(loss, share), retain_graph=retain_graph, inputs=None if is_all else trained
            )
        for name in chosen:
            self._losses.setdefault(name, []).append(loss.detach())
        self._emit(Callback.on_after_backward)

    def step(self, name: str | None, closure: Closure | None) -> bool:
        """Step with the gradients of all batches, in the last of them; return whether the optimizer has stepped."""
        share, name = self._share_of("step()"), self._resolve(name)
        if closure is None:
            self._check_gradient(name)
        else:
            self._check_closure(name, closure)
            self._closures.setdefault(name, []).append((closure, share))
        if not self._is_last:
            return False
        try:
            self._is_stepping = True
            with torch.autocast(self._device.type, enabled=False):
                is_taken = self._step_once(name) if closure is None else self._step_with_closures(name)
        finally:
            self._is_stepping = False
            self._forget([name])
        torch.clear_autocast_cache()  # of weights in 16 bits, from before the step
        self.num_taken[name] += is_taken
        self._num_left_out += not is_taken
        if not self._losses:  # else a gradient waits that was computed with the present scale
            self._update_scale()
        return is_taken

    def _refuse(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if not self._is_stepping:
            raise DistmanError(
                "an optimizer must step by step() of the stepper, which adds up the gradients of all ranks, got a call "
                f"of {type(optimizer).__name__}.step(). Call stepper.step() instead."
            )

    def follow_freezing(self) -> None:
        """Do nothing: gradients are summed of what is trained when an optimizer steps."""

    def _prepare(self) -> None:
        if any(map(is_distributed_tensor, self._model.module.parameters())):
            raise TypeError(
                "a step of your own must train a model of which each rank has all weights, got one with parameters "
                "that are divided among them. Train it with a loss function: set_loss_fn()."
            )
        self._model.unwrap()

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
        """Return the name of an optimizer; for None that of the only one."""
        if name is None and len(self.optimizers) == 1:
            return next(iter(self.optimizers))
        if name is None or name not in self.optimizers:
            raise ValueError(
                f"name must be that of an optimizer, {' or '.join(map(repr, self.optimizers))}, got {name!r}. Pass it "
                "to backward() and step()."
            )
        return name

    def _check_gradient(self, name: str) -> None:
        if needs_closure(self.optimizers[name]):
            raise TypeError(
                f"closure must be a function, got None for {type(self.optimizers[name]).__name__}, which computes the "
                "loss several times per step. Pass one that calls backward() and returns the loss."
            )
        if name not in self._losses:
            raise DistmanError(
                f"step() must follow a backward() for the same optimizer, got none for {name!r}. Pass its name to both."
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

    def _step_once(self, name: str) -> bool:
        self._sum_gradients(name)
        if all(parameter.grad is None for parameter in self._parameters[name]):
            raise ValueError(
                f"the loss must depend on the parameters of {name!r}, got one that does not. Pass the name of another "
                "optimizer to backward() and step()."
            )
        is_taken = self._take([name], self._losses[name])
        self._norms += [] if self.norm is None else [self.norm]
        return is_taken

    def _step_with_closures(self, name: str) -> bool:
        """Let an optimizer compute the loss of all batches as often as it wants to.

        It decides by losses and gradients that are the same on all ranks, so these compute equally often. Where one
        computes once more, because its processor rounds in another way, it meets the others' next step.
        """
        optimizer, parameters = self.optimizers[name], self._parameters[name]
        before = [parameter.detach().clone() for parameter in parameters]
        try:
            optimizer.step(lambda: self._evaluate(name))  # type: ignore[arg-type,return-value]  # torch says a float
        except _NotFiniteError:
            with torch.no_grad():
                for parameter, value in zip(parameters, before, strict=True):
                    parameter.copy_(value)
            optimizer.state.clear()  # of the way to where the loss is not finite
            return self._finite.look()
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
            total += loss.detach().reshape(()) * share
        if name not in self._losses:
            raise DistmanError(
                f"closure must call backward() for its optimizer, got none for {name!r}. Call it with the loss, and "
                "return the loss."
            )
        total = self._sum_gradients(name, total)
        if self._options.non_finite != "ignore":
            self._check_finite(name, total)
        return total

    def _check_finite(self, name: str, loss: torch.Tensor) -> None:
        gradients = [parameter.grad for parameter in self._parameters[name] if parameter.grad is not None]
        norm = torch.stack([loss.abs(), *[one.abs().sum() for one in gradients]]).sum()
        if not math.isfinite(norm.item()):
            self._finite.add(self._num_begun, self._label([name]), norm, self._losses[name])
            raise _NotFiniteError

    @torch.no_grad()
    def _sum_gradients(self, name: str, loss: torch.Tensor | None = None) -> torch.Tensor:
        """Add up the gradients of an optimizer's parameters over the ranks, and a loss; return the latter.

        A parameter that has a gradient on some ranks has one on all of them then.
        """
        loss = torch.zeros((), device=self._device) if loss is None else loss
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

    def _complete(self) -> None:
        if self._losses:
            raise DistmanError(
                f"the gradient of each backward() must be used by a step(), got one for {', '.join(self._losses)} that "
                "is not. Leave that backward() out; accumulate= gathers the gradients of several batches."
            )
        self.norm = norm_of(self._norms)

    def _forget(self, names: Sequence[str]) -> None:
        for name in names:
            self._forget_gradient(name)
            self._closures.pop(name, None)

    def _forget_gradient(self, name: str) -> None:
        self.optimizers[name].zero_grad()
        self._losses.pop(name, None)
