"""``nn_handler.NNHandler`` over distman's handler."""

from __future__ import annotations

import os

from distman import checkpoint
from distman.compat.nnhandler import _checkpoints, _kinds
from distman.compat.nnhandler._base import refuse
from distman.compat.nnhandler._generation import Generation


class NNHandler(Generation):
    """A model and everything that its training needs, with the calls of NNHandler; distman's handler does the work.

    Collective. What is found neither here nor in distman's handler is looked for in the model.

    Args:
        model_class: The model's class.
        device: Device of a process that is alone; a rank of a job has that of its place on its host.
        logger_mode: Where rank 0 logs a line for each epoch; None for nowhere.
        logger_filename: The file.
        logger_filemode: How it is opened.
        logger_level: From which level on to log.
        save_model_code: Is refused.
        model_type: What the model is called with, and what its loss is.
        use_distributed: False is one process whatever the launcher says.
        ddp_kwargs: ``find_unused_parameters`` and ``broadcast_buffers``.
        model_kwargs: Arguments of the model's class.

    Attributes:
        distman: The handler that does the work, for what is not here.
    """

    LoggingMode = _kinds.LoggingMode
    ModelType = _kinds.ModelType

    def save(self, path: str | os.PathLike[str], single_file: bool = True) -> None:
        """Write the handler into a file, completely or not at all.

        Collective. Blocking: call it on all ranks. The loss function, metrics and callbacks themselves are left out.
        """
        refuse(single_file=not single_file)
        checkpoint.save({**self.distman.state_dict(), _checkpoints.KEY: _checkpoints.describe(self)}, path)

    load = _checkpoints.Load()

    initialize_from_checkpoint = classmethod(_checkpoints.initialize_from_checkpoint)
