"""``nn_handler.checkpointing``: what a file says of a handler, and what a handler takes from it."""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

from distman import checkpoint
from distman._base.process_state import puts_back
from distman.checkpoint import check_state
from distman.compat.nnhandler._ddp import start
from distman.errors import CheckpointError

H = TypeVar("H")
KEY = "nnhandler"
"""Where a checkpoint says how the handler was made; the rest of it is that of distman's handler."""

_CONVERT = (
    "If it is one that NNHandler itself has saved, it holds pickled classes, which are run when they are loaded. Take "
    "the rest out of it, once, where you trust the file: state = torch.load(path, weights_only=False); torch.save("
    "{key: state[key] for key in ('model_state_dict', 'optimizer_state_dict', 'scheduler_state_dict', "
    "'train_losses', 'val_losses') if state.get(key)}, new_path). Make the handler and call handler.load(new_path)."
)
_OF_TORCH = {
    torch.nn.Module: torch.nn,
    torch.optim.Optimizer: torch.optim,
    torch.optim.lr_scheduler.LRScheduler: torch.optim.lr_scheduler,
}

_used: weakref.WeakSet[type] = weakref.WeakSet()
"""Classes with which the program itself has made or set up a handler: what only a file names is not called."""


@puts_back
def forget() -> None:
    _used.clear()


def remember(used: object) -> None:
    """Note a class that the program uses with a handler, or a function that makes such a thing."""
    if isinstance(used, type):
        _used.add(used)


def describe(handler: Any) -> dict[str, Any]:
    """Return how a handler was made, as plain values: classes by their names, and of arguments those that are plain."""
    return {
        "model": _made_by(handler._model_class, handler.model_kwargs),
        "model_type": handler._model_type.value,
        "optimizer": _made_by(type(handler._optimizer), handler._optimizer_kwargs) if handler._optimizer else None,
        "scheduler": _made_by(type(handler._scheduler), handler._scheduler_kwargs) if handler._scheduler else None,
        "seed": handler.seed,
        "complimentary_kwargs": _plain(handler.complimentary_kwargs),
        "sampler": _plain({"state": handler.sampler.save()}) if handler.sampler is not None else None,
    }


class Load:
    """The method ``load``: called on the class it makes a handler, called on a handler it loads into that one."""

    def __get__(self, handler: H | None, owner: type[H]) -> Callable[..., H]:
        return functools.partial(_load, owner, handler)


def _load(
    owner: Callable[..., Any],
    handler: Any,
    path: str,
    device: torch.device | str | None = None,
    strict_load: bool = False,
    skip_optimizer: bool = False,
    skip_scheduler: bool = False,
    skip_history: bool = False,
    skip_callbacks: bool = False,
    skip_sampler_sde: bool = False,
    skip_ema: bool = False,
    *,
    classes: Sequence[type] = (),
) -> Any:
    """Return a handler with the state in a file; the next training goes on from it.

    Collective. Blocking. Nothing in the file is run. To make a handler, the classes that the file names are called with
    its arguments: public ones of torch, those that this program has used with a handler, and ``classes``.

    The file is one of :meth:`NNHandler.save`, or, for a handler that there is, weights: bare, as of a model in
    DistributedDataParallel, or at ``model_state_dict`` beside other states. Where the names of weights differ from the
    model's, a warning says so; with ``strict_load`` that is an error. ``skip_optimizer`` leaves out the schedule and
    the position of its training too. Callbacks get the states of those of the same classes when they are added.

    Raises:
        CheckpointError: The file holds something else; or it names another class.
        RuntimeError: The weights do not fit.
    """
    start(device)
    state = _read(path)
    if KEY not in state:
        if handler is None:
            raise CheckpointError(
                f"{path} holds weights and does not say of which model. Write NNHandler.initialize_from_checkpoint("
                "path, ModelClass), or make the handler and call load() on it."
            )
        _load_plain(handler, state, strict_load, skip_optimizer, skip_scheduler, skip_history)
        return handler
    made = state.pop(KEY)
    if handler is None:
        model_class = _class_of(made["model"], torch.nn.Module, classes)
        arguments = _saved_arguments(made["model"]["kwargs"], owner)
        handler = owner(model_class, device or "cpu", model_type=made["model_type"], **arguments)
        if made["optimizer"] and not skip_optimizer:
            optimizer_class = _class_of(made["optimizer"], torch.optim.Optimizer, classes)
            handler.set_optimizer(
                optimizer_class, **_saved_arguments(made["optimizer"]["kwargs"], handler.set_optimizer)
            )
            if made["scheduler"] and not skip_scheduler:
                scheduler_class = _class_of(made["scheduler"], torch.optim.lr_scheduler.LRScheduler, classes)
                handler.set_scheduler(
                    scheduler_class, **_saved_arguments(made["scheduler"]["kwargs"], handler.set_scheduler)
                )
    handler._seed = made["seed"]
    handler.complimentary_kwargs = made["complimentary_kwargs"]
    if made["sampler"] and handler.sampler is not None and not skip_sampler_sde:
        handler.sampler.load(**made["sampler"]["state"])
    _load_weights(handler, state["model"]["module"], strict=strict_load)
    state["model"]["module"] = checkpoint.model_state(handler.module)
    if skip_ema:
        state["model"]["average"] = None
    if skip_history:
        state["history"] = {"records": [], "validations": []}
    if skip_callbacks:
        state["callbacks"] = []
    training = None if skip_optimizer else state["training"]
    if training is not None:
        training["reason"] = ""  # the program wants to train on, even where that training had stopped
        training["scheduler"] = {} if skip_scheduler else training["scheduler"]
        if handler.optimizer is not None:
            handler.optimizer.load_state_dict(training["optimization"]["optimizers"]["optimizer"])
    state["training"] = training
    handler.distman.load_state_dict(state)
    handler._bridge.done = 0 if training is None else training["epoch"]
    return handler


def load_model(handler: Any, path: str, *, strict: bool) -> None:
    """Load the weights in a file, and nothing else of it."""
    state = _read(path)
    weights = state["model"]["module"] if KEY in state else state.get("model_state_dict", state)
    _load_weights(handler, weights, strict=strict)


def _load_weights(handler: Any, weights: Mapping[str, Any], *, strict: bool) -> None:
    """Load weights into the model; names that do not fit are an error if ``strict``, else a warning."""
    missing, unexpected = checkpoint.load_model_state(handler.module, weights, strict=strict)
    if missing or unexpected:
        handler.warn(f"weights that the file lacks: {missing}; that the model lacks: {unexpected}", RuntimeWarning)


def _load_plain(
    handler: Any,
    state: Mapping[str, Any],
    strict: bool,
    skip_optimizer: bool,
    skip_scheduler: bool,
    skip_history: bool,
) -> None:
    """Load weights, and what is beside them under the names of NNHandler's own files."""
    _load_weights(handler, state.get("model_state_dict", state), strict=strict)
    if "model_state_dict" not in state:
        return
    if handler.optimizer is not None and state.get("optimizer_state_dict") and not skip_optimizer:
        handler.optimizer.load_state_dict(state["optimizer_state_dict"])
        if handler.scheduler is not None and state.get("scheduler_state_dict") and not skip_scheduler:
            handler.scheduler.load_state_dict(state["scheduler_state_dict"])
    if not skip_history:
        losses = zip(state.get("train_losses", []), state.get("val_losses", []), strict=True)
        records = [{"epoch": float(epoch), "loss": one, "val_loss": val} for epoch, (one, val) in enumerate(losses)]
        handler.distman.history.load_state_dict({"records": records, "validations": []})


def _read(path: str) -> dict[str, Any]:
    try:
        state = checkpoint.load(path)
    except CheckpointError as error:
        raise CheckpointError(f"{error} {_CONVERT}") from error
    if not isinstance(state, Mapping):
        raise CheckpointError(
            f"{path} must hold a dict, got a {type(state).__name__}. Save model.state_dict(), for one."
        )
    return dict(state)


def _class_of(made: Mapping[str, Any], base: type, classes: Iterable[type] = ()) -> Any:
    """Return the class that a file names: a public one of torch, one that the program has used, or one of its list."""
    named = made["module"], made["name"]
    for one in (*vars(_OF_TORCH[base]).values(), *_used, *classes):
        if isinstance(one, type) and issubclass(one, base) and (one.__module__, one.__qualname__) == named:
            return one
    raise CheckpointError(
        f"{named[0]}.{named[1]} must be a class of {base.__name__} that this program has used, got one that only the "
        "file names. If you trust the file with its arguments, pass classes=[...] with this class to load(), or make "
        "the handler and call load() on it."
    )


def _made_by(cls: type, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    return {"module": cls.__module__, "name": cls.__qualname__, "kwargs": _plain(kwargs)}


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that a checkpoint can hold."""
    kept = {}
    for name, value in values.items():
        try:
            check_state(value)
        except ValueError:
            continue
        kept[name] = value
    return kept


def with_suffix(path: str) -> Path:
    """Return the path of a checkpoint, which ends in ``.pth``."""
    return Path(path if path.endswith(".pth") else f"{path}.pth")


def _saved_arguments(saved: Mapping[str, Any], function: Callable[..., Any]) -> dict[str, Any]:
    """Return the arguments of a checkpoint for what a function passes them on to; none may be for the function."""
    kinds = {name: one.kind for name, one in inspect.signature(function).parameters.items()}
    own = {name for name, kind in kinds.items() if kind is not inspect.Parameter.VAR_KEYWORD}
    if meant := sorted(own & saved.keys()):
        raise CheckpointError(
            f"the arguments in a checkpoint must be for the class that it names, got {', '.join(meant)} for "
            f"{function.__name__}. Do not trust its source."
        )
    return dict(saved)
