"""Loops of your own: gradients and steps that are the same on any number of ranks."""

from __future__ import annotations

from distman.training._engine import (
    Engine as Engine,
    StepOptions as StepOptions,
    check_loss as check_loss,
    to_device as to_device,
)
from distman.training._model import TrainedModel as TrainedModel, check_strategy as check_strategy

# What is imported as itself is for other parts of the package.
from distman.training._optimizers import (
    UNNAMED as UNNAMED,
    Changes as Changes,
    OnChange as OnChange,
    Schedules as Schedules,
    Scheduling as Scheduling,
    options_of as options_of,
)
from distman.training._sharding import place_parts as place_parts
from distman.training._sources import (
    NumSamples as NumSamples,
    Source as Source,
    Step as Step,
    check_starts_over as check_starts_over,
    count_samples as count_samples,
    counted as counted,
    drawn_numbers as drawn_numbers,
    make_source as make_source,
)
from distman.training._stepper import Stepper, as_text as as_text, training_logger as training_logger

__all__ = ["Stepper"]
