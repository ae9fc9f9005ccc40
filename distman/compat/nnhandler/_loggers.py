"""``nn_handler.callbacks.monitor``: those that write curves elsewhere, by the trackers of distman."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from distman.compat.nnhandler._callbacks import Callback
from distman.compat.nnhandler._setup import refuse
from distman.handler import TensorBoardTracker, Tracker, WandbTracker

if TYPE_CHECKING:
    from distman.compat.nnhandler._handler import NNHandler


class _Logger(Callback):
    """A callback that lets a tracker write the results of steps and epochs, on rank 0."""

    tracker: Tracker

    def set_handler(self, handler: NNHandler) -> None:
        """Take the handler, and add the tracker to it."""
        super().set_handler(handler)
        handler.distman.add_callback(self.tracker)


class TensorBoardLogger(_Logger):
    """Writes curves for TensorBoard; each run has a folder of its own in there.

    Args:
        log_dir: The folder of all runs.
        comment: Name of the run; without one it is made.
    """

    def __init__(self, log_dir: str = "./logs", comment: str = "") -> None:
        self.tracker = TensorBoardTracker(log_dir, run=comment or None)


class WandbLogger(_Logger):
    """Writes curves to Weights & Biases.

    Args:
        project: The project.
        entity: The user or team; None is the default one.
        run_name: Name of the run; None makes one.
        config: Hyperparameters.
        log_freq_epoch: Is refused, but for 1.
        log_model_topology: Is left out.
        log_model_weights: Is refused.
        log_weight_freq_epoch: Is left out.
    """

    def __init__(
        self,
        project: str,
        entity: str | None = None,
        run_name: str | None = None,
        config: dict[str, Any] | None = None,
        log_freq_epoch: int = 1,
        log_model_topology: bool = True,
        log_model_weights: bool = False,
        log_weight_freq_epoch: int = 10,
    ) -> None:
        refuse(log_freq_epoch=log_freq_epoch != 1, log_model_weights=log_model_weights)
        self.tracker = WandbTracker(run_name, project=project, entity=entity, config=config)
