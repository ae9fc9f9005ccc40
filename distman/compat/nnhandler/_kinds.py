"""``nn_handler.utils.enums``, ``nn_handler.logger`` and ``nn_handler.model_utils.sampler``."""

from __future__ import annotations

import abc
import enum
import logging
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from distman.score import SDE, denoising_loss


class ModelType(enum.Enum):
    """What a model is called with, and what its loss is."""

    CLASSIFICATION = "classification"
    GENERATIVE = "generative"
    REGRESSION = "regression"
    SCORE_BASED = "score_based"

    @classmethod
    def from_string(cls, s: str) -> ModelType:
        """Return the type of that name.

        Raises:
            ValueError: No type has that name.
        """
        return cls(s.lower())

    @classmethod
    def parse(cls, model_type: ModelType | str) -> ModelType:
        """Return the type, given itself or its name."""
        return model_type if isinstance(model_type, cls) else cls.from_string(str(model_type))


class LoggingMode(enum.Enum):
    """Where to log."""

    CONSOLE = "console"
    FILE = "file"
    BOTH = "both"


class DataLoaderType(enum.Enum):
    """Whether a rank keeps its shard of the data in memory."""

    STANDARD = "standard"
    RANK_CACHED = "rank_cached"


class Sampler(abc.ABC):
    """A way to draw samples, to derive from."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__()

    @abc.abstractmethod
    def sample(self, N: int, device: torch.device | None, **kwargs: Any) -> Any:  # noqa: N803 - its name there
        """Draw so many samples."""

    @abc.abstractmethod
    def save(self) -> dict[str, Any]:
        """Return what :meth:`load` needs."""

    @abc.abstractmethod
    def load(self, **state_dict: Any) -> None:
        """Restore such a state."""


def initialize_logger(
    logger_name: str,
    mode: LoggingMode = LoggingMode.CONSOLE,
    filename: str = "NNHandler.log",
    file_mode: str = "a",
    level: int = logging.INFO,
) -> logging.Logger | None:
    """Return a logger that writes to standard output, a file, or both; None on other ranks than 0.

    Local. A logger that has handlers already is left as it is.
    """
    if dist.is_initialized() and dist.get_rank():
        return None
    logger = logging.getLogger(logger_name)
    if logger.handlers:
        return logger
    handlers: list[logging.Handler] = []
    if mode in (LoggingMode.CONSOLE, LoggingMode.BOTH):
        handlers.append(logging.StreamHandler(sys.stdout))
    if mode in (LoggingMode.FILE, LoggingMode.BOTH):
        Path(filename).parent.mkdir(parents=True, exist_ok=True)
        handlers.append(logging.FileHandler(filename, file_mode, encoding="utf-8"))
    for handler in handlers:
        handler.setFormatter(logging.Formatter("[%(levelname)s|%(asctime)s|%(name)s] %(message)s"))
        logger.addHandler(handler)
    logger.setLevel(level)
    logger.propagate = False
    return logger


def denoising_score_matching(samples: torch.Tensor, sde: Any, model: Any, device: object, *args: Any) -> torch.Tensor:
    """Return the denoising score matching loss, of an equation of :mod:`distman.score` or one with ``marginal_prob``.

    Local. Differentiable. The samples are of shape ``(batch, *)``; the network is called with times, noisy samples and
    ``args``. ``device`` makes no difference.
    """
    if isinstance(sde, SDE):
        return denoising_loss(lambda t, x: model(t, x, *args), sde, samples)
    t = torch.empty(len(samples), device=samples.device).uniform_(float(sde.epsilon), float(sde.T))
    mean, std = sde.marginal_prob(t, samples)
    noise = torch.randn_like(samples)
    loss: torch.Tensor = (model(t, mean + std * noise, *args) + noise).square().sum() / len(samples)
    return loss
