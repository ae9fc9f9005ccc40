"""The events of a training, and the callbacks that are called for them."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from distman.handler._history import Record

if TYPE_CHECKING:
    from distman.handler._nn_handler import NNHandler


class Callback:
    """The events of a training, one method each, called on every rank with the handler; override those that you need.

    An exception in a callback ends the training on all ranks. A method that communicates must do so on all ranks. Write
    files or print on one rank only: see :func:`distman.on_rank`.

    Example:
        >>> class PrintLoss(Callback):
        ...     @on_rank(0)
        ...     def on_epoch_end(self, handler, record):
        ...         print(f"epoch {record['epoch']}: {record['loss']:.2f}")
        >>> PrintLoss().on_epoch_end(None, {"epoch": 3, "loss": 0.25})  # as the handler does
        epoch 3: 0.25
    """

    # This class is the only list of events: a new one is a method here, and a call of emit() where it happens.

    def on_train_begin(self, handler: NNHandler) -> None:
        """Called before the first epoch, and before the first one of a resumed run.

        Local.
        """

    def on_epoch_begin(self, handler: NNHandler, epoch: int) -> None:
        """Called before an epoch, and before the rest of one that is resumed.

        Local.

        Args:
            epoch: Index of the epoch, starting at 0.
        """

    def on_train_batch_start(self, handler: NNHandler, batch: Any) -> None:
        """Called before the model is trained with a batch.

        Local.

        Args:
            batch: This rank's batch, as the loader returned it; where the rank has none left, an earlier one, which
                does not count.
        """

    def on_before_backward(self, handler: NNHandler, loss: torch.Tensor) -> None:
        """Called before the backward pass of a batch.

        Local.

        Args:
            loss: This rank's mean loss over the batch, shape ``()``.
        """

    def on_after_backward(self, handler: NNHandler) -> None:
        """Called after the backward pass of a batch.

        Local. The gradients are those of the step's batches so far, of all ranks after the last one, multiplied by the
        scale of the loss with ``amp="fp16"``.
        """

    def on_train_batch_end(self, handler: NNHandler, batch: Any, loss: torch.Tensor) -> None:
        """Called after the model was trained with a batch; see :meth:`on_step_end` for the step of the optimizer.

        Local.

        Args:
            batch: See :meth:`on_train_batch_start`.
            loss: This rank's mean loss over the batch, detached. Reading it waits for the GPU.
        """

    def on_before_optimizer_step(self, handler: NNHandler) -> None:
        """Called when the gradient of a step is complete, before it is clipped; also if the step is then skipped.

        Local. The gradient is that of the mean loss over the samples of all ranks, and may be changed, on all ranks
        alike.

        Example:
            >>> class WithoutMean(Callback):
            ...     def on_before_optimizer_step(self, handler):
            ...         handler.module.weight.grad -= handler.module.weight.grad.mean()
        """

    def on_step_end(self, handler: NNHandler, step: int) -> None:
        """Called after a step of the optimizer.

        Local.

        Args:
            step: Number of the step, counted over all epochs, starting at 1.

        Example:
            >>> class Clamp(Callback):
            ...     def on_step_end(self, handler, step):
            ...         with torch.no_grad():
            ...             handler.module.weight.clamp_(-1, 1)
        """

    def on_step_records(self, handler: NNHandler, records: Sequence[Record]) -> None:
        """Called with the numbers of the steps since the last call, after at most 32 steps.

        Local. They are read from the GPU together, and only where a callback overrides this: the host waits once.

        Args:
            records: For each step, the same on all ranks: ``step``; ``epoch``; ``loss``, the mean over the samples of
                all ranks, or such a mean of each number that a step of your own returns; ``lr``, or ``lr_`` and the
                name of each optimizer; ``grad_norm``, before clipping, unless ``non_finite="ignore"`` without
                ``clip_norm``; ``samples_per_second`` of all ranks, and ``waiting``, the share of the time that the rank
                that waited longest waited for its batches. The last two are means over these steps.
        """

    def on_validation_start(self, handler: NNHandler) -> None:
        """Called before a validation of the training, after an epoch or within it.

        Local.
        """

    def on_validation_end(self, handler: NNHandler, record: Record) -> None:
        """Called after a validation of the training, after an epoch or within it.

        Local.

        Args:
            record: The results, the same on all ranks. Within an epoch, see ``validate_every_steps`` of
                :meth:`NNHandler.train`, it has a ``step``, and values added to it become part of
                ``history.validations``; after one it is the record of the epoch, which :meth:`on_epoch_end` gets too.
        """

    def on_epoch_end(self, handler: NNHandler, record: Record) -> None:
        """Called after an epoch and its validation.

        Local.

        Args:
            record: The results of the epoch, the same on all ranks; values added to it become part of the history.

        Example:
            >>> class Norm(Callback):
            ...     def on_epoch_end(self, handler, record):
            ...         record["norm"] = float(handler.module.weight.norm())
        """

    def on_train_end(self, handler: NNHandler) -> None:
        """Called after the last epoch.

        Local.
        """

    def on_exception(self, handler: NNHandler, error: BaseException) -> None:
        """Called when an error ends the training, in the place of :meth:`on_train_end`.

        Local. It must not communicate: other ranks may not get here.

        Args:
            error: What is being raised; :class:`Preempted` if the job was asked to stop.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run has to know, as plain values and tensors.

        Local.
        """
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore such a state.

        Local.

        Args:
            state: From :meth:`state_dict`.

        Example:
            >>> class Count(Callback):
            ...     num_steps = 0
            ...     def on_step_end(self, handler, step):
            ...         self.num_steps += 1
            ...     def state_dict(self):
            ...         return {"num_steps": self.num_steps}
            ...     def load_state_dict(self, state):
            ...         self.num_steps = state["num_steps"]
        """


EVENTS: dict[str, Callable[..., None]] = {name: one for name, one in vars(Callback).items() if name.startswith("on_")}


def _check_methods(callback: Callback) -> None:
    where = type(callback).__name__
    for name in [one for one in dir(callback) if one.startswith("on_") and one not in EVENTS]:
        close = difflib.get_close_matches(name, EVENTS, n=1, cutoff=0)[0]
        raise TypeError(
            f"a method of a callback must not begin with on_ unless it is that of an event, got {name}() of {where}. "
            f"Did you mean {close}{inspect.signature(EVENTS[close])}? The events are {', '.join(EVENTS)}."
        )
    for name, event in EVENTS.items():
        given = [*inspect.signature(event).parameters][1:]
        method = inspect.signature(getattr(callback, name))
        try:
            method.bind(*given)
        except TypeError:
            raise TypeError(
                f"{name}() must take {', '.join(given)}, got {method} in {where}. "
                f"Write def {name}(self, {', '.join(given)})."
            ) from None


class Callbacks:
    """The callbacks of a handler, in the order in which they are called for an event.

    A state that a callback saves says which had been called for the event by then: the run that is resumed from it
    calls the others, and none twice.
    """

    def __init__(self) -> None:
        # A weak reference, set as a training begins: a handler, with its loaders' workers, is freed with its last one.
        self.handler: Callable[[], Any]
        self._first: list[Callback] = []
        self._last: list[Callback] = []
        self._called: dict[str, list[int]] = {}  # indices, for what has happened since the latest step, or epoch

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "handler"}  # a copy is another handler's

    def __iter__(self) -> Iterator[Callback]:
        return iter([*self._first, *self._last])

    def add(self, callback: Callback, *, is_last: bool) -> None:
        _check_methods(callback)
        (self._last if is_last else self._first).append(callback)

    def has_listeners(self, event: str) -> bool:
        methods = [getattr(callback, event) for callback in self]
        return any(getattr(method, "__func__", None) is not EVENTS[event] for method in methods)

    def emit(self, event: str, *args: Any) -> None:
        self._called.pop(event, None)
        self.emit_rest(event, *args)

    def emit_rest(self, event: str, *args: Any) -> None:
        """Call the callbacks that have not been called for an event since :meth:`begin`."""
        called = self._called.setdefault(event, [])
        for index, callback in enumerate(self):
            if index not in called:
                called.append(index)
                getattr(callback, event)(self.handler(), *args)

    def begin(self) -> None:
        """Forget which have been called: a step or an epoch is over, and its events begin."""
        self._called.clear()

    def state_dict(self) -> list[list[Any]]:
        return [[type(callback).__qualname__, callback.state_dict()] for callback in self]

    def load_state_dict(self, state: Iterable[Sequence[Any]]) -> None:
        """Restore such states: each callback gets the first one of its class that none before it has got."""
        saved = list(state)
        for callback in self:
            own = next((one for one in saved if one[0] == type(callback).__qualname__), None)
            if own is not None:
                saved.remove(own)
                callback.load_state_dict(own[1])

    @property
    def _names(self) -> list[str]:
        classes = [type(callback).__qualname__ for callback in self]
        return [f"{name} {classes[:index].count(name)}" for index, name in enumerate(classes)]

    def called(self) -> dict[str, Any]:
        return {"names": self._names, "called": {event: [*indices] for event, indices in self._called.items()}}

    def set_called(self, state: Mapping[str, Any]) -> None:
        """Restore which have been called; one that is new has missed what it was not there for."""
        names = [*state["names"]]
        places = [names.index(name) if name in names else None for name in self._names]
        self._called = {
            event: [own for own, place in enumerate(places) if place is None or place in indices]
            for event, indices in state["called"].items()
        }
