"""One step of the optimizer, with some batches of every rank."""

from __future__ import annotations

import dataclasses
import inspect
import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Literal

import torch

from distman._coordination.wait_scope import WaitScope
from distman._torch_internals import norms
from distman.collectives._objects import all_gather_objects
from distman.data._randomness import generators_preserved
from distman.errors import NonFiniteLossError
from distman.handler._accumulators import Accumulators
from distman.handler._model import TrainedModel
from distman.handler._objective import Objective, Outcome, check_loss, to_device
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
        clip_norm: Largest 2-norm of the gradient; None does not clip.
        ema_decay: Decay of the moving average of the weights, between 0 and 1; None keeps no average.
        non_finite: What to do when a rank's loss, or the gradient, is NaN or infinite: ``"raise"`` on all ranks,
            ``"skip"`` the step on all, or ``"ignore"`` it.
        check_every: Number of steps from one look for such a gradient to the next, where it is to raise; None is 1 on
            the CPU and 32 elsewhere. Steps that may be skipped are looked at each: ``"skip"``, and ``"fp16"``.

    Raises:
        ValueError: An option is not valid.
    """

    accumulate: int = 1
    amp: Literal["bf16", "fp16"] | None = None
    clip_norm: float | None = None
    ema_decay: float | None = None
    non_finite: Literal["raise", "skip", "ignore"] = "raise"
    check_every: int | None = None

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


@dataclasses.dataclass(frozen=True)
class _Unchecked:
    """A step whose gradient has not been looked at: its index, the gradient's norm, and this rank's losses."""

    step: int
    norm: torch.Tensor
    losses: Sequence[torch.Tensor]


class Optimization:
    """Steps an optimizer such that all ranks do the same, whatever happens on one of them.

    A step minimizes the mean loss over the samples of all its batches on all ranks.

    Args:
        model: The model.
        optimizer: An optimizer of its parameters.
        options: How to step.

    Attributes:
        num_steps: Number of steps taken.
        num_skipped: Number of steps skipped because a loss or the gradient was not finite.
    """

    def __init__(self, model: TrainedModel, optimizer: torch.optim.Optimizer, options: StepOptions) -> None:
        self._model, self._optimizer, self._options = model, optimizer, options
        self._device, self._world_size = DistributedManager().device, DistributedManager().world_size
        self._parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        own = {id(one) for one in self._parameters}
        num_foreign = len(own - {id(one) for one in model.module.parameters()})
        self._not_optimized = [one for one in model.module.parameters() if id(one) not in own]
        if num_foreign and self._world_size > 1:
            raise ValueError(
                f"parameters of the optimizer must be the model's, got {num_foreign} others, whose gradients would "
                "not be averaged over the ranks. Make them part of the model."
            )
        closure = inspect.signature(optimizer.step).parameters.get("closure")
        if closure is not None and closure.default is inspect.Parameter.empty:
            raise TypeError(
                f"the optimizer must step without a closure, got {type(optimizer).__name__}, which computes the loss "
                "several times per step. Write the loop yourself, with manager.wrap_ddp()."
            )
        model.wrap()
        self._scaler = torch.amp.GradScaler(self._device.type, enabled=options.amp == "fp16")
        model.keep_average(options.ema_decay)
        model.module.zero_grad()  # left by a step that raised, or of parameters that another optimizer did not have
        self.num_steps = self.num_skipped = 0
        model.sort_buckets()
        self._unchecked: list[_Unchecked] = []
        may_skip = options.non_finite == "skip" or options.amp == "fp16"
        usual = 1 if self._device.type == "cpu" else _STEPS_BETWEEN_CHECKS
        self._check_every = 1 if may_skip else options.check_every or usual

    def run(self, objective: Objective, steps: Sequence[Step], accumulators: Accumulators) -> bool:
        """Step with the gradient of some batches; return False if the step was skipped.

        Collective.

        Args:
            objective: What is minimized.
            steps: This rank's batches.
            accumulators: What losses and metrics are added to, unless the step is skipped.

        Raises:
            NonFiniteLossError: On every rank: a loss or the gradient is NaN or infinite.
        """
        buffers = self._copy_buffers() if self._options.non_finite == "skip" else None
        losses, measured = self._accumulate(objective, steps, accumulators)
        norm = self._clip()
        if norm is not None and self._options.non_finite != "ignore":
            self._unchecked.append(_Unchecked(self._num_begun, norm, losses))
        is_taken = len(self._unchecked) < self._check_every or self.check()
        if not is_taken:
            self._restore_buffers(buffers)
        else:
            self._scaler.step(self._optimizer)
            self._model.after_step()
            for values, step in zip(measured, steps, strict=True):
                accumulators.add(values, step.num_own)
        self._scaler.update()
        self._optimizer.zero_grad()
        for parameter in self._not_optimized:
            parameter.grad = None
        self.num_steps += is_taken
        self.num_skipped += not is_taken
        return is_taken

    def check(self) -> bool:
        """Look at the gradients of all steps since the last look; return False if the latest is to be left out.

        Collective. This waits for the device. A step that was taken with a gradient that is not finite has spoilt the
        model for good, so this raises for it again and again: nobody can save it.

        Raises:
            NonFiniteLossError: On every rank: a loss or the gradient was NaN or infinite.
        """
        if not self._unchecked:
            return True
        norms = torch.stack([one.norm for one in self._unchecked]).tolist()
        bad = next((one for one, norm in zip(self._unchecked, norms, strict=True) if not math.isfinite(norm)), None)
        if bad is None or bad.step == self._num_begun:
            self._unchecked.clear()
        if bad is not None:
            self._check_skippable(bad)
        return bad is None

    def state_dict(self) -> dict[str, Any]:
        """Return everything that the next step depends on, except for the model."""
        return {
            "optimizer": self._optimizer.state_dict(),
            "scaler": self._scaler.state_dict(),
            "num_steps": self.num_steps,
            "num_skipped": self.num_skipped,
        }

    def own_buffers(self) -> dict[str, torch.Tensor]:
        """Return the model's buffers in which this rank differs from rank 0.

        Collective.
        """
        return self._model.own_buffers()

    def load_own_buffers(self, buffers: Mapping[str, torch.Tensor]) -> None:
        """Restore such buffers."""
        self._model.load_own_buffers(buffers)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore such a state."""
        self._optimizer.load_state_dict(state["optimizer"])
        self._load_scale(state["scaler"])
        self.num_steps, self.num_skipped = state["num_steps"], state["num_skipped"]

    def go_on_from(self, latest: Optimization) -> None:
        """Go on counting where the latest run in this program has ended; the optimizer is as it is now.

        Raises:
            NonFiniteLossError: On every rank: that run has spoilt the model, as :meth:`check` says.
        """
        latest.check()
        self._load_scale(latest._scaler.state_dict())
        self.num_steps, self.num_skipped = latest.num_steps, latest.num_skipped

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

    def _accumulate(
        self, objective: Objective, steps: Sequence[Step], accumulators: Accumulators
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Add up the gradients, with the last batch over the ranks too; return the batches' losses and measurements."""
        num_total = sum(step.num_total for step in steps)
        losses, measured = [], []
        for index, step in enumerate(steps, start=1):
            with nullcontext() if index == len(steps) else self._model.without_synchronization():
                outcome = self._backward(objective, step, step.num_own * self._world_size / max(num_total, 1))
            losses.append(outcome.loss.detach())
            measured.append(accumulators.measure(outcome, step.num_own))
        return losses, measured

    def _backward(self, objective: Objective, step: Step, factor: float) -> Outcome:
        batch = to_device(step.batch, self._device)
        with self._model.training() as model, nullcontext() if step.num_own else self._without_a_trace():
            with torch.autocast(self._device.type, self._options.dtype) if self._options.amp else nullcontext():
                outcome = objective(model, batch)
            check_loss(outcome.loss)
            loss = outcome.loss.detach()
            root = (loss - loss) + factor  # NaN if the loss is not finite, which makes the gradient NaN on all ranks
            with WaitScope("backward of the model"), self._model.backward_pass():
                self._scaler.scale(outcome.loss).backward(gradient=root)
        return outcome

    @contextmanager
    def _without_a_trace(self) -> Iterator[None]:
        """Leave buffers and generators as they were: a rank takes part, for the others, with a batch that counts 0."""
        buffers = self._copy_buffers()
        with generators_preserved():
            yield
        self._restore_buffers(buffers)

    def _clip(self) -> torch.Tensor | None:
        """Clip the gradient, and return its 2-norm, the same on all ranks; None if there is none, or nobody asks."""
        self._scaler.unscale_(self._optimizer)
        gradients = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        if not gradients or (self._options.clip_norm is None and self._options.non_finite == "ignore"):
            return None
        dense = [one.coalesce().values() if one.is_sparse else one for one in gradients]
        norm: torch.Tensor = torch.linalg.vector_norm(torch.stack(norms(dense)))
        if self._options.clip_norm is not None:
            by_one_kernel = None if all(map(operator.is_, dense, gradients)) else False
            torch.nn.utils.clip_grads_with_norm_(self._parameters, self._options.clip_norm, norm, foreach=by_one_kernel)
        return norm

    def _check_skippable(self, bad: _Unchecked) -> None:
        """Raise unless the step may be skipped: the scale of the loss was too large, or the options say so."""
        everyone = all_gather_objects([loss.item() for loss in bad.losses])
        losses = {rank: loss for rank, own in enumerate(everyone) for loss in own if not math.isfinite(loss)}
        is_overflow = not losses and self._scaler.is_enabled() and self._scaler.get_scale() >= 1
        if is_overflow or self._options.non_finite == "skip":
            return
        roll = DistributedManager().roll_call
        got = ", ".join(
            f"{loss} on rank {rank} ({roll[rank].host}, pid {roll[rank].pid})" for rank, loss in losses.items()
        )
        remedy = "Lower the learning rate, pass clip_norm, or skip such steps with non_finite='skip'."
        if num_spoilt := self._num_begun - bad.step:
            remedy += (
                f" {num_spoilt} steps were taken before this was seen, and have spoilt the model: go on from a "
                "checkpoint; check_every=1 looks before each step is taken."
            )
        raise NonFiniteLossError(
            f"the loss must be finite in step {bad.step}, got "
            f"{got or 'a gradient that is not, with finite losses on all ranks'}. {remedy}"
        )
