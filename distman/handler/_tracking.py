"""Trackers: where the numbers of a training go besides its history, without ever holding it up."""

from __future__ import annotations

import abc
import contextlib
import importlib.util
import json
import math
import os
import queue
import secrets
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from distman._base import timing
from distman._base.log import logger
from distman._base.text import printable
from distman.handler._archive import Preempted
from distman.handler._events import Callback
from distman.handler._history import Record, as_numbers
from distman.manager import DistributedManager

if TYPE_CHECKING:
    from distman.handler._nn_handler import NNHandler

Kind = Literal["step", "validation", "epoch"]
Status = Literal["finished", "preempted", "failed"]

_MOST_WAITING = 1000
"""Calls that a tracker may have before it, of up to 32 steps each: minutes of training, and some megabytes."""

_NOT_IN_NAMES = frozenset("/\\'\"`")

_TAG = "distman.run"  # the tag by which a resumed training finds its run: MLflow chooses the ids of runs itself
_STATUS_OF_MLFLOW = {"finished": "FINISHED", "preempted": "KILLED", "failed": "FAILED"}
_EXIT_CODES = {"finished": 0, "preempted": os.EX_TEMPFAIL, "failed": 1}


class Tracker(Callback, abc.ABC):
    """Writes the numbers of steps, validations and epochs somewhere; base class of trackers.

    A derived class says how to :meth:`open` a run, :meth:`write` to it and :meth:`close` it. A thread of rank 0 calls
    these, one after the other, so they may take their time. When one of them raises, or is too slow, there is one
    warning and the training goes on without the tracker. The end of a training waits for the last of them, 30 seconds
    at most; after an error, 5 seconds. Add it on all ranks.

    Args:
        run: Name of the run, one that a folder can have, without quotes; None makes one. A resumed training goes on
            with the run of its checkpoint.

    Raises:
        ValueError: A folder cannot have this name.

    Example:
        >>> class Print(Tracker):
        ...     def open(self, run, step):
        ...         print("a new run" if step == 0 else f"{run} goes on after step {step}")
        ...     def write(self, kind, records):
        ...         print(kind, [record["step"] for record in records])
        ...     def close(self, status):
        ...         print(status)
        >>> handler = NNHandler(torch.nn.Linear, in_features=1, out_features=1)
        >>> handler.set_optimizer(torch.optim.SGD, lr=0.5)
        >>> handler.set_loss_fn(torch.nn.functional.mse_loss)
        >>> handler.set_train_loader(TensorDataset(torch.ones(4, 1), torch.ones(4, 1)), batch_size=4)
        >>> handler.add_callback(Print())
        >>> history = handler.train(1)
        a new run
        step [1.0]
        epoch [1.0]
        finished
    """

    def __init__(self, run: str | None = None) -> None:
        if run is not None and not _is_name(run):
            raise ValueError(
                f"run must be one name without slashes, quotes and control characters, got {run!r}. Choose another."
            )
        self._run = run
        self._is_off = False
        self._writing: _Writing | None = None

    @property
    def run(self) -> str | None:
        """Name of the run; None before the training of a new one has begun, and on other ranks than 0."""
        return self._run

    @abc.abstractmethod
    def open(self, run: str, step: int) -> None:
        """Begin a run, or go on with one; called at the start of each training.

        Local. On rank 0, in a thread.

        Args:
            run: Name of the run.
            step: Number of steps taken so far. What an earlier program has written of later ones is done again.
        """

    @abc.abstractmethod
    def write(self, kind: Kind, records: Sequence[Record]) -> None:
        """Write some numbers.

        Local. On rank 0, in a thread.

        Args:
            kind: ``"step"``, see :meth:`Callback.on_step_records`; ``"validation"``, one within an epoch; ``"epoch"``.
            records: The numbers by name. ``step`` is the number of the latest step.
        """

    @abc.abstractmethod
    def close(self, status: Status) -> None:
        """End the run, or interrupt it.

        Local. On rank 0, in a thread.

        Args:
            status: ``"finished"``, ``"preempted"`` if the job was asked to stop, or ``"failed"``.
        """

    def on_train_begin(self, handler: NNHandler) -> None:
        if self._is_off or not DistributedManager().is_main:
            return
        self._run = run = self._run or time.strftime("%Y%m%d-%H%M%S-") + secrets.token_hex(3)
        step = handler.num_steps
        self._writing = _Writing(type(self).__name__)
        self._writing.put(lambda: self.open(run, step))

    def on_step_records(self, handler: NNHandler, records: Sequence[Record]) -> None:
        self._put("step", records)

    def on_validation_end(self, handler: NNHandler, record: Record) -> None:
        if "step" in record:
            self._put("validation", [record])

    def on_epoch_end(self, handler: NNHandler, record: Record) -> None:
        self._put("epoch", [{"step": float(handler.num_steps), **record}])

    def on_train_end(self, handler: NNHandler) -> None:
        self._finish("finished", timing.TRACKER_REST)

    def on_exception(self, handler: NNHandler, error: BaseException) -> None:
        self._finish("preempted" if isinstance(error, Preempted) else "failed", timing.TRACKER_AFTER_ERROR)

    def state_dict(self) -> dict[str, Any]:
        return {"run": self._run}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        run = state["run"]
        if _is_name(run):
            self._run = run
        elif run is not None and DistributedManager().is_main:  # a training that had not begun has none
            logger.warning(
                "%s does not go on with the run of the checkpoint, %s: that is not a name",
                type(self).__name__,
                printable(repr(run)),
            )

    def _put(self, kind: Kind, records: Sequence[Record]) -> None:
        if self._writing is None:
            return
        copies = as_numbers(records)
        self._writing.put(lambda: self.write(kind, copies))

    def _finish(self, status: Status, patience: float) -> None:
        if self._writing is not None:
            self._writing.put(lambda: self.close(status))
            self._is_off = not self._writing.finish(patience)
            self._writing = None


class _Writing:
    """A thread that makes calls, one after the other, until one of them raises."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._calls: queue.Queue[Callable[[], None] | None] = queue.Queue(_MOST_WAITING)
        self._is_off = False
        self._thread = threading.Thread(target=self._run, name="distman-tracker", daemon=True)
        self._thread.start()

    def put(self, call: Callable[[], None]) -> None:
        if self._is_off:
            return
        try:
            self._calls.put_nowait(call)
        except queue.Full:
            self._give_up(f"is too slow: {_MOST_WAITING} calls are waiting")

    def finish(self, patience: float) -> bool:
        """Wait for the calls to be made; return whether all were made in so many seconds, and none raised."""
        if not self._is_off:
            with contextlib.suppress(queue.Full):
                self._calls.put_nowait(None)
                self._thread.join(patience)
            if self._thread.is_alive():
                self._give_up(f"is too slow: the last numbers were not written within {patience:.0f} s")
        return not self._is_off

    def _run(self) -> None:
        while (call := self._calls.get()) is not None and not self._is_off:
            try:
                call()
            except Exception as error:  # noqa: BLE001 - of any library that tracks; the training does not depend on it
                self._give_up(f"failed: {printable(f'{type(error).__name__}: {error}').rstrip('.')}")
                return

    def _give_up(self, reason: str) -> None:
        """Warn, once, and make no call from now on."""
        if not self._is_off:
            self._is_off = True
            logger.warning("%s %s. It is switched off; the training goes on without it", self._name, reason)


def _is_name(run: object) -> bool:
    """Return whether something can be the name of a run: of one folder, and in a question to a server."""
    return isinstance(run, str) and run.isprintable() and not _NOT_IN_NAMES & {*run} and bool(run.strip(". "))


def curves(kind: Kind, record: Record) -> dict[str, float]:
    """Return the numbers by the names of their curves: ``step/loss``, ``epoch/loss``, ``validation/loss`` and so on."""
    return {
        f"{'validation' if name.startswith('val_') else kind}/{name.removeprefix('val_')}": value
        for name, value in record.items()
        if name not in ("step", "epoch")
    }


def check_installed(package: str, tracker: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise ImportError(f"{tracker} needs {package}, which is not installed. Run pip install {package}.")


class JsonLinesTracker(Tracker):
    """Appends a line of JSON to a file for each step, validation within an epoch, and epoch.

    A line has the ``run``, the ``kind``, one of ``"step"``, ``"validation"`` and ``"epoch"``, the ``step``, and the
    other numbers, null for those that are not finite. A resumed run first cuts off its lines of the steps that it does
    again.

    Args:
        path: The file. Folders above it are made.
        run: Name of the run; None makes one. A resumed training goes on with the run of its checkpoint.

    Example:
        >>> handler = NNHandler(torch.nn.Linear, in_features=1, out_features=1)
        >>> handler.set_optimizer(torch.optim.SGD, lr=0.5)
        >>> handler.set_loss_fn(torch.nn.functional.mse_loss)
        >>> handler.set_train_loader(TensorDataset(torch.ones(8, 1), torch.ones(8, 1)), batch_size=4)
        >>> handler.add_callback(JsonLinesTracker("numbers.jsonl", run="first"))
        >>> history = handler.train(1)
        >>> with open("numbers.jsonl") as file:
        ...     print(file.read())
        {"run": "first", "kind": "step", "step": 1, "epoch": 0, "lr": 0.5, "loss": ..., "waiting": ...}
        ...
        {"run": "first", "kind": "epoch", "step": 2, "epoch": 0, "loss": ..., "lr": 0.5, ...}
        <BLANKLINE>
    """

    def __init__(self, path: str | os.PathLike[str], run: str | None = None) -> None:
        super().__init__(run)
        self._path = Path(path)
        self._of_run = ""

    def open(self, run: str, step: int) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        if self._path.is_file():
            os.truncate(self._path, _length_until(self._path, run, step))
        self._of_run = run

    def write(self, kind: Kind, records: Sequence[Record]) -> None:
        lines = []
        for record in records:
            numbers = {name: value if math.isfinite(value) else None for name, value in record.items()}
            whole = {name: int(record[name]) for name in ("step", "epoch")}
            lines.append({"run": self._of_run, "kind": kind} | numbers | whole)
        with self._path.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(line, allow_nan=False) + "\n" for line in lines)

    def close(self, status: Status) -> None:
        pass  # all has been written


class TensorBoardTracker(Tracker):
    """Writes curves for TensorBoard, which ``tensorboard --logdir FOLDER`` shows.

    Each run has a folder of its own in there. A resumed run goes on in its folder; TensorBoard leaves out what had been
    written of the steps that it does again.

    Args:
        folder: The folder of all runs.
        run: Name of the run; None makes one. A resumed training goes on with the run of its checkpoint.

    Raises:
        ImportError: The package tensorboard is not installed.

    Example:
        >>> handler = NNHandler(torch.nn.Linear, in_features=1, out_features=1)
        >>> handler.add_callback(TensorBoardTracker("runs", run="first"))
    """

    def __init__(self, folder: str | os.PathLike[str], run: str | None = None) -> None:
        check_installed("tensorboard", type(self).__name__)
        super().__init__(run)
        self._folder = Path(folder)
        self._writer: Any = None

    def open(self, run: str, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(self._folder / run, purge_step=step + 1)

    def write(self, kind: Kind, records: Sequence[Record]) -> None:
        for record in records:
            for name, value in curves(kind, record).items():
                self._writer.add_scalar(name, value, int(record["step"]))
        self._writer.flush()

    def close(self, status: Status) -> None:
        self._writer.close()


class MLflowTracker(Tracker):
    """Logs the numbers as metrics of a run in MLflow, on a server or in a database.

    A resumed run leaves out what it does again, since MLflow cannot replace metrics.

    Args:
        uri: Address of the server, or of a database such as ``"sqlite:///numbers.db"``, which needs the extra
            ``mlflow``; None leaves it to MLflow, and so to ``MLFLOW_TRACKING_URI``. MLflow refuses a folder of files
            unless ``MLFLOW_ALLOW_FILE_STORE=true``.
        experiment: Name of the experiment, which is made if there is none.
        params: Parameters of the run, such as a learning rate.
        run: Name of the run; None makes one. A resumed training goes on with the run of its checkpoint.

    Raises:
        ImportError: Neither mlflow nor mlflow-skinny is installed.

    Example:
        >>> handler = NNHandler(torch.nn.Linear, in_features=1, out_features=1)
        >>> handler.add_callback(MLflowTracker("http://127.0.0.1:5000", experiment="lines", params={"lr": 0.1}))
    """

    def __init__(
        self,
        uri: str | None = None,
        *,
        experiment: str = "Default",
        params: Mapping[str, Any] | None = None,
        run: str | None = None,
    ) -> None:
        check_installed("mlflow", type(self).__name__)
        super().__init__(run)
        self._uri, self._experiment, self._params = uri, experiment, dict(params or {})
        self._client: Any = None
        self._id = ""
        self._written: dict[str, int] = {}  # of each curve, the last step that an earlier program has logged

    def open(self, run: str, step: int) -> None:
        from mlflow import MlflowClient

        self._client = client = MlflowClient(self._uri)
        experiment = client.get_experiment_by_name(self._experiment)
        number = experiment.experiment_id if experiment else client.create_experiment(self._experiment)
        found = client.search_runs([number], f"tags.`{_TAG}` = '{run}'", max_results=1)
        if found:
            self._id = found[0].info.run_id
            client.update_run(self._id, status="RUNNING")
            histories = {name: client.get_metric_history(self._id, name) for name in found[0].data.metrics}
            self._written = {name: max(metric.step for metric in one) for name, one in histories.items()}
            return
        self._id = client.create_run(number, tags={_TAG: run}, run_name=run).info.run_id
        for name, value in self._params.items():
            client.log_param(self._id, name, value)

    def write(self, kind: Kind, records: Sequence[Record]) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)  # MLflow counts milliseconds
        metrics = [
            Metric(name, value, now, int(record["step"]))
            for record in records
            for name, value in curves(kind, record).items()
            if record["step"] > self._written.get(name, 0)
        ]
        self._client.log_batch(self._id, metrics)

    def close(self, status: Status) -> None:
        self._client.set_terminated(self._id, _STATUS_OF_MLFLOW[status])


class WandbTracker(Tracker):
    """Logs the numbers to a run of Weights & Biases.

    Args:
        run: Id of the run; None makes one. A resumed training goes on with the run of its checkpoint.
        options: Arguments of ``wandb.init``, such as ``project``, ``config``, and ``mode="offline"``, which writes
            files that ``wandb sync`` uploads.

    Raises:
        ImportError: The package wandb is not installed.

    Example:
        >>> handler = NNHandler(torch.nn.Linear, in_features=1, out_features=1)
        >>> handler.add_callback(WandbTracker(project="lines", config={"lr": 0.1}, mode="offline"))
    """

    def __init__(self, run: str | None = None, **options: Any) -> None:
        check_installed("wandb", type(self).__name__)
        super().__init__(run)
        self._options = options
        self._of_wandb: Any = None

    def open(self, run: str, step: int) -> None:
        import wandb

        hooks = sys.excepthook, sys.exit
        self._of_wandb = wandb.init(id=run, resume="allow", **self._options)
        sys.excepthook, sys.exit = hooks  # its own would print an error before the other ranks are informed
        self._of_wandb.define_metric("*", step_metric="step")  # its own steps only grow, and count calls of log

    def write(self, kind: Kind, records: Sequence[Record]) -> None:
        for record in records:
            self._of_wandb.log({**curves(kind, record), "step": int(record["step"]), "epoch": int(record["epoch"])})

    def close(self, status: Status) -> None:
        self._of_wandb.finish(exit_code=_EXIT_CODES[status])


def _length_until(path: Path, run: str, step: int) -> int:
    """Return the number of bytes up to the last line that stays: no torn one, and none of the run's later steps."""
    length = 0
    with path.open("rb") as file:
        for line in iter(file.readline, b""):
            with contextlib.suppress(ValueError, TypeError, KeyError):  # a line of another program
                values = json.loads(line)
                if values["run"] == run and values["step"] > step:
                    continue
            if line.endswith(b"\n"):
                length = file.tell()
    return length
