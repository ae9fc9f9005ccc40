"""What a handler keeps of its training, the state that checkpoints hold, and how the next run finds it; warm starts."""

from __future__ import annotations

import dataclasses
import io
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, NoReturn, cast

import torch

from distman import checkpoint
from distman._base.arguments import check_number, require
from distman._base.text import listed, printable
from distman._coordination.wait_scope import WaitScope, has_failed
from distman._torch_internals import is_distributed_tensor
from distman.checkpoint import CheckpointFolder, locate, map_state, model_state
from distman.decorators import _on_all_ranks as on_all_ranks, on_rank
from distman.errors import CheckpointError
from distman.handler._events import Callbacks
from distman.handler._history import History
from distman.handler._reporting import Reporter
from distman.manager import DistributedManager
from distman.training import Changes, OnChange, TrainedModel, place_parts

if TYPE_CHECKING:
    from distman.handler._nn_handler import NNHandler
    from distman.handler._training import Limits, Training

_CONTENTS = ("model", "training", "history", "callbacks")  # what a checkpoint of a handler holds

_REST = "rest"
_PARTS = "parts"
_MARK = "part of a sharded state"  # stands in the rest of a state for a tensor, in a list with the tensor's name

_HOLDERS = ("module", "state_dict", "model_state_dict", "model")
"""Names of the weights in checkpoints: of a handler, within ``model``; of Lightning; of torch's tutorials; of many."""

_MOST_SHOWN = 5


class Preempted(SystemExit):
    """The job was asked to stop, and has saved what the next run resumes; the program ends with exit code 75.

    Raised by :meth:`NNHandler.train` on every rank. Catch it for what is to be done before the program ends, and raise
    it again.

    Example:
        >>> def train(handler):
        ...     try:
        ...         handler.train(100)
        ...     except Preempted:
        ...         print("asked to stop after", len(handler.history), "epochs")
        ...         raise
    """


@dataclasses.dataclass
class AutoSave:
    """When and where to save; ``is_awaited`` until a training resumes from the latest checkpoint."""

    folder: CheckpointFolder
    every_epochs: int | None
    every_steps: int | None
    requeues: bool
    on_change: OnChange | None
    is_awaited: bool
    found: Any = None  # the latest state, as long as its call of train() may be one of those to come

    def __post_init__(self) -> None:
        for name in ("every_epochs", "every_steps"):
            value = getattr(self, name)
            if value is not None:
                check_number(name, value, remedy="Pass None for never.")
        Changes(self.on_change)  # refuses any other value

    def is_due(self, *, step: int | None, epoch: int | None) -> bool:
        pairs = ((epoch, self.every_epochs), (step, self.every_steps))
        return any(count is not None and every is not None and count % every == 0 for count, every in pairs)


class Archive:
    """The history of a training, how far it is, and the state from which it is resumed."""

    def __init__(self, model: TrainedModel, callbacks: Callbacks, reporter: Reporter) -> None:
        self._model, self.callbacks, self.reporter = model, callbacks, reporter
        self.history = History()
        self.auto_save: AutoSave | None = None
        self.training: Training | None = None  # of the latest run, or of the current one
        # Since the latest run: the next one resumes from it; empty if it is from before any training.
        self._loaded: Mapping[str, Any] | None = None
        self._changes = Changes()
        self._phases: list[dict[str, Any]] = []  # of each call of train() that is over, how far it was
        self._is_passed = False  # all of them by an earlier run of the program

    @property
    def num_steps(self) -> int:
        if self._loaded is not None:
            return int(self._loaded["optimization"]["num_steps"]) if self._loaded else 0
        if self._is_passed:
            return int(self._phases[-1]["steps"])
        return self.training.engine.num_steps if self.training is not None else 0

    def follow(self, training: Training) -> None:
        """Let a new training resume from the state that was loaded, else from the latest run, and follow it."""
        if self._loaded:
            training.load_state_dict(self._loaded, self._changes)
        elif self._loaded is not None:
            self.callbacks.begin()
            self._changes.report()
        elif self.training is not None:
            training.go_on_from(self.training)
        self.training, self._loaded, self._is_passed = training, None, False

    def end_phase(self, training: Training) -> None:
        self._phases.append(
            {
                "epochs": training.epoch,
                "steps": self.num_steps,
                "reason": training.reason,
                "records": len(self.history),
                "validations": len(self.history.validations),
            }
        )

    def state_dict(self) -> dict[str, Any]:
        training = self._loaded
        if training is None and self.training is not None:
            training = {**self.training.state_dict(), "phases": self._phases}
        return {
            "model": self._model.state_dict(),
            "training": training or None,
            "history": self.history.state_dict(),
            "callbacks": self.callbacks.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any], changes: Changes | None = None) -> None:
        changes = changes or Changes()
        self._model.load_state_dict(state["model"], changes)
        self.history.load_state_dict(state["history"])
        self.callbacks.load_state_dict(state["callbacks"])
        self._loaded, self._changes = state["training"] or {}, changes

    def load(self, path: str | os.PathLike[str], changes: Changes) -> None:
        """Restore a training that the program wants to go on with, even where it had stopped. Collective."""
        state = _read_sharded(path, self._model.module)
        if state is None:
            state = checkpoint.load(path)
        lacking = [name for name in _CONTENTS if not isinstance(state, Mapping) or name not in state]
        if lacking:
            raise CheckpointError(
                f"the file must hold what NNHandler.save() wrote, but has no {', '.join(lacking)}. Begin with the "
                "weights of a file of Lightning, torch.save or another library by handler.load(path, only='model')."
            )
        if state["training"] is not None:
            state["training"]["reason"] = ""
        self.load_state_dict(state, changes)

    def save(self, path: str | os.PathLike[str], *, sharded: bool) -> None:
        """Write the state. Collective; local once another rank has failed."""
        state = self.state_dict()
        if has_failed() and not (sharded or self._model.is_sharded):
            name = os.fspath(path)  # or a URL, which is not a Path
            suffix = PurePath(name).suffix
            own_path = f"{name.removesuffix(suffix)}.rank{DistributedManager().rank}{suffix}"
            checkpoint.save(state, own_path, local=True)
        elif sharded:
            checkpoint.save_sharded(_parts_of(state), path)
        else:
            checkpoint.save(whole(state), path)

    def export(self, path: str | os.PathLike[str]) -> None:
        if self._loaded is None and self.training is not None:
            self.training.engine.check()
        location = locate(path)
        state = whole(self._model.evaluated_state())
        if location.place.endswith(".safetensors"):
            on_rank(0)(checkpoint.write_safetensors)(state, location)
        else:
            checkpoint.save(state, path)

    def resume(self, limits: Limits) -> bool:
        """Load what an earlier run of the program has saved; return True if it did all of this call of train()."""
        auto_save = self.auto_save
        if auto_save is None or not auto_save.is_awaited:
            return False
        saved = auto_save.found = auto_save.found or self._load_latest(auto_save.folder)
        phases = saved["training"]["phases"] if saved is not None and saved["training"] is not None else []
        if len(self._phases) < len(phases):
            end = phases[len(self._phases)]
            if end["reason"] or limits.are_reached(end["epochs"], end["steps"]):
                self._show_phase(saved, end)
                return True
        auto_save.is_awaited, auto_save.found = False, None
        if saved is not None:
            self.load_state_dict(saved, Changes(auto_save.on_change))
            self.reporter.log("resuming from step %d, saved in %s", self.num_steps, auto_save.folder.path)
        return False

    def _load_latest(self, folder: CheckpointFolder) -> Any:
        if folder.sharded:
            return checkpoint.read_latest(folder, lambda location: _read_sharded(location.path, self._model.module))
        return folder.load_latest(device="cpu")

    def _show_phase(self, saved: Mapping[str, Any], end: Mapping[str, Any]) -> None:
        """Let the program see the latest weights, and the history that it had after a call of train()."""
        self._phases.append(dict(end))
        self._is_passed = True
        self._model.load_state_dict(saved["model"], Changes("program"))
        self.history.load_state_dict({name: saved["history"][name][: end[name]] for name in ("records", "validations")})
        self.reporter.log("train() number %d was done by an earlier run", len(self._phases))

    def end_program(self) -> NoReturn:
        if self.auto_save is None:
            self.reporter.log("asked to stop; nothing was saved: call auto_save() before train()")
        else:
            self.reporter.log("asked to stop; saved in %s", self.auto_save.folder.path)
            if self.auto_save.requeues:
                DistributedManager().requeue()
        raise Preempted(os.EX_TEMPFAIL)  # try again later


def whole(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state with sharded tensors made whole, in rank 0's host memory; elsewhere empty. Collective."""
    is_main = DistributedManager().is_main

    def gather(value: Any, _: str) -> Any:
        if not is_distributed_tensor(value):
            return value
        full = value.full_tensor()  # one after another: a device has room for one
        return full.cpu() if is_main else full.new_empty(0, device="cpu")

    with WaitScope("gathering the state"):
        return cast("dict[str, Any]", map_state(state, gather))


def save_in(folder: CheckpointFolder, handler: NNHandler, **options: Any) -> None:
    """Save a training in a folder of checkpoints, whole or in parts. Collective."""
    state = _parts_of(handler.state_dict()) if folder.sharded else handler.whole_state_dict()
    folder.save(state, handler.num_steps, **options)


def _parts_of(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return this rank's parts of sharded tensors, and the rest, for :func:`save_sharded`. Collective."""
    parts: dict[str, torch.Tensor] = {}

    def take(value: Any, name: str) -> Any:
        if not is_distributed_tensor(value):
            return value
        parts[name] = value.detach()
        return [_MARK, name]

    rest = map_state(state, take)
    on_all_ranks(checkpoint.check_state, rest)
    contents: dict[str, Any] = {_PARTS: parts}
    if DistributedManager().is_main:
        file = io.BytesIO()
        torch.save(checkpoint.without_unused_memory(rest), file)
        contents[_REST] = torch.frombuffer(bytearray(file.getbuffer()), dtype=torch.uint8)
    return contents


def _read_sharded(path: str | os.PathLike[str], module: torch.nn.Module, names: Sequence[str] = _CONTENTS) -> Any:
    """Return what such a folder holds by these names, sharded as a module is; None if it is not one. Collective."""
    if not on_rank(0, broadcast=True)(checkpoint.is_sharded)(path):
        return None
    location = locate(path)
    found = checkpoint.saved_tensors(location)
    if _REST not in found:
        raise CheckpointError(
            f"{path} holds no training, but other tensors: {', '.join(found)}. Load it with load_sharded()."
        )
    file = torch.empty(found[_REST][0], dtype=torch.uint8)
    checkpoint.load_sharded({_REST: file}, path)
    rest = on_all_ranks(checkpoint.read_plain, io.BytesIO(file.numpy().tobytes()), location)
    parts: dict[str, torch.Tensor] = {}

    def make_room(value: Any, _: str) -> Any:
        if type(value) is not list or len(value) != 2 or value[0] != _MARK:
            return value
        return parts.setdefault(value[1], _empty_part(*found[f"{_PARTS}.{value[1]}"], module))

    state = map_state({name: rest[name] for name in names if name in rest}, make_room)
    if parts:
        checkpoint.load_sharded({_PARTS: parts}, path)
    return state


def _empty_part(shape: torch.Size, dtype: torch.dtype, module: torch.nn.Module) -> torch.Tensor:
    like: Any = next(module.parameters(), None)
    if not is_distributed_tensor(like):
        return torch.empty(shape, dtype=dtype, device=DistributedManager().device)
    from torch.distributed import tensor as dtensors

    return dtensors.empty(*shape, dtype=dtype, device_mesh=like.device_mesh, placements=like.placements)


def take_weights(module: torch.nn.Module, path: str | os.PathLike[str], *, strict: bool) -> dict[str, list[str]]:
    """Load weights into a model, see :meth:`NNHandler.load`. Collective."""
    found = _find_weights(_read(path, module), path)
    weights = {checkpoint.without_compiled(name): value for name, value in found.items()}
    own = model_state(module)
    prefixes = Counter(name.removesuffix(one) for name in weights for one in _ends(name) if one in own)
    prefix = max(prefixes, key=lambda one: prefixes[one], default="")  # before most of the model's names
    named = {name.removeprefix(prefix): value for name, value in weights.items()}
    common = [name for name in own if name in named]
    taken = [name for name in common if _shape(named[name]) == _shape(own[name])]
    result = {
        "taken": taken,
        "missing": [name for name in own if name not in named],
        "misshapen": [name for name in common if name not in taken],
        "unexpected": [name for name in weights if name.removeprefix(prefix) not in own],
    }
    if not taken or (strict and any(result[what] for what in result if what != "taken")):
        raise CheckpointError(
            f"the file must hold the weights of the model, got {as_text(result)} in {os.fspath(path)}. "
            + ("Pass strict=False to take those that fit." if taken else "Load it into the model that it is of.")
        )
    checkpoint.load_model_state(module, place_parts(module, {name: named[name] for name in taken}), strict=False)
    return result


def _read(path: str | os.PathLike[str], module: torch.nn.Module) -> Any:
    """Return what is in a file; of a sharded training the model alone, in parts if it is sharded here. Collective."""
    if os.fspath(path).endswith(".safetensors"):
        return on_all_ranks(lambda: require("safetensors.torch", os.fspath(path)).load_file(path))
    saved = _read_sharded(path, module, ["model"])
    return checkpoint.load(path, device="cpu") if saved is None else saved


def _find_weights(state: Any, path: str | os.PathLike[str]) -> Mapping[str, Any]:
    """Return the weights in a checkpoint: itself, or what it has under one of the usual names."""
    while isinstance(state, Mapping):
        inner = next((state[name] for name in _HOLDERS if isinstance(state.get(name), Mapping)), None)
        if inner is None:
            break
        state = inner
    is_named = isinstance(state, Mapping) and all(isinstance(name, str) for name in state)
    if not is_named or not any(isinstance(value, torch.Tensor) for value in state.values()):
        raise CheckpointError(
            f"the file must hold weights, by themselves or as one of {', '.join(_HOLDERS)}, got none in "
            f"{os.fspath(path)}. Take them out of it, and load them with handler.module.load_state_dict()."
        )
    named: Mapping[str, Any] = state
    return named


def _ends(name: str) -> Iterator[str]:
    while name:
        yield name
        name = name.partition(".")[2]


def _shape(value: Any) -> object:
    return value.shape if isinstance(value, torch.Tensor) else type(value)


def as_text(result: Mapping[str, Sequence[str]]) -> str:
    return "; ".join(f"{what}: {listed(map(printable, names), _MOST_SHOWN)}" for what, names in result.items() if names)
