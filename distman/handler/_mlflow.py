"""The numbers of a training for MLflow."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from distman.handler._history import Record
from distman.handler._tracking import Kind, Status, Tracker, check_installed, curves

_RUN = "distman.run"
"""The tag by which a resumed training finds its run: MLflow chooses the ids of runs itself."""

_STATUS = {"finished": "FINISHED", "preempted": "KILLED", "failed": "FAILED"}


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
        """Find the run, or create it.

        Local. On rank 0, in a thread.
        """
        from mlflow import MlflowClient

        self._client = client = MlflowClient(self._uri)
        experiment = client.get_experiment_by_name(self._experiment)
        number = experiment.experiment_id if experiment else client.create_experiment(self._experiment)
        found = client.search_runs([number], f"tags.`{_RUN}` = '{run}'", max_results=1)
        if found:
            self._id = found[0].info.run_id
            client.update_run(self._id, status="RUNNING")
            self._written = {name: self._last_step(name) for name in found[0].data.metrics}
            return
        self._id = client.create_run(number, tags={_RUN: run}, run_name=run).info.run_id
        for name, value in self._params.items():
            client.log_param(self._id, name, value)

    def _last_step(self, name: str) -> int:
        steps: list[int] = [metric.step for metric in self._client.get_metric_history(self._id, name)]
        return max(steps)

    def write(self, kind: Kind, records: Sequence[Record]) -> None:
        """Log metrics.

        Local. On rank 0, in a thread.
        """
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
        """Set the status of the run.

        Local. On rank 0, in a thread.
        """
        self._client.set_terminated(self._id, _STATUS[status])
