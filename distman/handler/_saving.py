"""What a handler keeps of its training: the history, checkpoints, plots."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any, Literal

from distman import checkpoint
from distman._coordination.monitor.current_watcher import has_failed
from distman.checkpoint._location import Location, locate
from distman.checkpoint._safetensors import SUFFIX, check_tensors, write_safetensors
from distman.checkpoint._state import check_state
from distman.decorators import on_rank
from distman.errors import CheckpointError
from distman.handler._changes import Changes
from distman.handler._history import History
from distman.handler._inference import Inference
from distman.handler._model import TrainedModel
from distman.handler._plots import plot_history
from distman.handler._reporting import Reporter
from distman.handler._resumption import AutoSave, Progress
from distman.handler._sharded_state import parts_of, read_parts, read_rest, whole
from distman.handler._warm_start import TakenWeights, take_weights
from distman.manager import DistributedManager

_PARTS = ("model", "model_kwargs", "training", "history", "callbacks")
"""What a checkpoint of a handler holds."""


class Saving(Inference):
    """The history of a training, and the state from which it is resumed.

    Args:
        model: The model.
        seed: See :class:`Setup`.
        model_kwargs: The arguments that the model was made with; checkpoints hold those that they can.
        reporter: What logs.
    """

    def __init__(self, model: TrainedModel, seed: int, model_kwargs: Mapping[str, Any], reporter: Reporter) -> None:
        super().__init__(model, seed)
        self._reporter = reporter
        self._model_kwargs = model_kwargs
        self._progress = Progress()
        self._auto_save: AutoSave | None = None
        self.history = History()

    @property
    def num_steps(self) -> int:
        """Number of steps that the optimizer has taken."""
        return self._progress.num_steps

    @property
    def train_losses(self) -> list[float]:
        """Mean training loss of each epoch."""
        return self.history["loss"]

    @property
    def val_losses(self) -> list[float]:
        """Mean validation loss of each epoch; NaN for epochs without validation."""
        return self.history["val_loss"]

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
            >>> handler.set_optimizer(torch.optim.SGD, lr=0.5)
            >>> handler.set_loss_fn(torch.nn.functional.mse_loss)
            >>> handler.set_train_loader(TensorDataset(torch.ones(8, 1), torch.ones(8, 1)), batch_size=4)
            >>> handler.auto_save("run", every_steps=100)
            >>> len(handler.train(2))  # started again, the program goes on where it was
            2
        """
        requeues = os.environ.get("DISTMAN_REQUEUE") == "1" if requeue is None else requeue
        saves_in = checkpoint.CheckpointFolder(folder, keep=keep, sharded=sharded)
        latest = self._auto_save
        has_resumed = latest is not None and not latest.is_awaited and latest.folder.path == saves_in.path
        self._auto_save = AutoSave(
            saves_in,
            every_epochs,
            every_steps,
            resumes=resume and not has_resumed,
            requeues=requeues,
            on_change=on_change,
        )

    def state_dict(self) -> dict[str, Any]:
        """Return everything that a resumed training depends on, as plain values and tensors.

        Collective. The tensors are those of the model and the optimizer, not copies; ranks may differ in their buffers,
        and in their parts of what is sharded. See :meth:`whole_state_dict`.
        """
        return {
            "model": self._model.state_dict(),
            "model_kwargs": {name: value for name, value in self._model_kwargs.items() if _is_storable(value)},
            "training": self._progress.state_dict(),
            "history": self.history.state_dict(),
            "callbacks": self._callbacks.state_dict(),
        }

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
        self._restore(state)

    def _restore(self, state: Mapping[str, Any], changes: Changes | None = None) -> None:
        self._model.load_state_dict(state["model"], changes)
        self.history.load_state_dict(state["history"])
        self._callbacks.load_state_dict(state["callbacks"])
        self._progress.load_state_dict(state["training"], changes)

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
            ['callbacks', 'history', 'model', 'model_kwargs', 'training']
        """
        if has_failed() and not (sharded or self._model.is_sharded):
            checkpoint.save(self.state_dict(), _own_path(path), local=True)
        elif sharded:
            checkpoint.save_sharded(parts_of(self.state_dict()), path)
        else:
            checkpoint.save(self.whole_state_dict(), path)

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
        self._progress.check()
        location = locate(path)
        state = whole(self._model.evaluated_state())
        if location.place.endswith(SUFFIX):
            on_rank(0)(_export)(state, location)
        else:
            checkpoint.save(state, path)

    def load(
        self,
        path: str | os.PathLike[str],
        *,
        only: Literal["model"] | None = None,
        strict: bool = True,
        on_change: Literal["file", "program", "error"] | None = None,
    ) -> TakenWeights | None:
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
            What has been taken and what has not, which rank 0 logs too; None for a whole training.

        Raises:
            CheckpointError: It holds something else, such as weights alone; or the weights do not fit.
            ImportError: It needs safetensors, which is not installed.
            ValueError: ``only`` is something else, or ``strict`` is False for a whole training.
            Exception: On the rank where reading failed: the reason.
            RankFailedError: On the other ranks.

        Example:
            >>> handler = NNHandler(torch.nn.Linear, in_features=2, out_features=1)
            >>> handler.save("model.pt")
            >>> other = NNHandler(torch.nn.Linear, in_features=2, out_features=1)
            >>> other.load("model.pt")
            >>> torch.equal(handler.module.weight, other.module.weight)
            True
            >>> wider = NNHandler(torch.nn.Linear, in_features=3, out_features=1)
            >>> print(wider.load("model.pt", only="model", strict=False))
            taken: bias; of another shape: weight
        """
        if only not in (None, "model") or (only is None and not strict):
            raise ValueError(
                f"only must be 'model' to load weights alone, got {only!r} with strict={strict}. A training is "
                "restored as a whole."
            )
        if only is None:
            self._load(read_checkpoint(path), Changes(on_change))
            return None
        taken = take_weights(self.module, path, strict=strict)
        self._model.average = None  # of other weights
        self._reporter.log("weights of %s: %s", os.fspath(path), taken)
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
            names = [name for metric in self._metrics for name in (metric, f"val_{metric}")]
            names = [name for name in names if name in self.history.names]
        plot_history(self.history, names, path, title="Metrics")

    def _load(self, state: dict[str, Any], changes: Changes | None = None) -> None:
        """Restore a state that the program has loaded, so it wants to train on even where that training had stopped."""
        if state["training"] is not None:
            state["training"]["reason"] = ""
        self._restore(read_parts(state, self.module), changes)


def _export(state: dict[str, Any], location: Location) -> None:
    check_tensors(state)
    write_safetensors(state, location)


def read_checkpoint(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return what a handler has saved. Collective."""
    state = read_rest(path)
    if state is None:
        state = checkpoint.load(path)
    lacking = [name for name in _PARTS if not isinstance(state, Mapping) or name not in state]
    if lacking:
        raise CheckpointError(
            f"the file must hold what NNHandler.save() wrote, but has no {', '.join(lacking)}. Begin with the "
            "weights of a file of Lightning, torch.save or another library by handler.load(path, only='model')."
        )
    return dict(state)


def _is_storable(value: object) -> bool:
    try:
        check_state(value)
    except ValueError:
        return False
    return True


def _own_path(path: str | os.PathLike[str]) -> str:
    """Return a path beside another one that belongs to this rank alone."""
    name = os.fspath(path)  # or a URL, which is no Path
    suffix = PurePath(name).suffix
    return f"{name.removesuffix(suffix)}.rank{DistributedManager().rank}{suffix}"
