"""What a handler has been set to train with."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader

from distman._base.arguments import check_options
from distman.data import RankCachedDataset, TrainingLoader, distributed_loader, rank_cached_loader
from distman.errors import DistmanError
from distman.handler._accumulators import Metric
from distman.handler._objective import Forward, Objective, ScoreBased, default_forward
from distman.training import (
    UNNAMED,
    Engine,
    NumSamples,
    Schedules,
    Scheduling,
    Source,
    StepOptions,
    Stepper,
    TrainedModel,
    check_starts_over,
    make_source,
    options_of,
)

T = TypeVar("T")
StepFunction = Callable[[Stepper, Any], Mapping[str, Any] | torch.Tensor | float | None]

# Parameters of the functions that make loaders which are not for the user: the handler passes the first two, all ranks
# train one model, and the last one stands for the options of torch's DataLoader.
_NO_OPTIONS = {"dataset", "evaluation", "group", "loader_kwargs"}


class Setup:
    """Optimizers, schedules, loss, data and metrics of a handler, and what a training is made of then."""

    def __init__(self) -> None:
        self.forward: Forward = default_forward
        self.num_samples: NumSamples | None = None
        self.objective: Objective | None = None
        self.score_based: ScoreBased | None = None
        self.step: StepFunction | None = None
        self.step_num_samples: NumSamples | None = None
        self.optimizers: dict[str, torch.optim.Optimizer] = {}
        self.given: dict[str, list[dict[str, Any]]] = {}  # options, before a schedule changes them
        self.schedulings: dict[str, Scheduling] = {}
        self.train_data: Any = None
        self.val_data: Any = None
        self.metrics: dict[str, Metric] = {}

    def required_objective(self) -> Objective:
        return required(self.objective, "loss function", "set_loss_fn() or set_sde()")

    def required_val_data(self) -> Any:
        return required(self.val_data, "data to validate with", "set_val_loader()")

    def required_score_based(self) -> ScoreBased:
        return required(self.score_based, "equation of a score-based model", "set_sde()")

    def required_optimizers(self) -> dict[str, torch.optim.Optimizer]:
        return required(self.optimizers or None, "optimizer", "set_optimizer()")

    def add_optimizer(self, name: str | None, optimizer: torch.optim.Optimizer) -> None:
        """Add an optimizer beside those with other names, or in the place of all if it has none."""
        kept = {} if name is None else {one: own for one, own in self.optimizers.items() if one != UNNAMED}
        self.optimizers = kept | {name or UNNAMED: optimizer}
        self.given[name or UNNAMED] = options_of(optimizer)
        self.schedulings = {one: own for one, own in self.schedulings.items() if one in kept and one != name}

    def make_source(self) -> Source:
        data = required(self.train_data, "data to train with", "set_train_loader()")
        return make_source(data, self.step_num_samples or self.num_samples)

    def make_schedules(self) -> Schedules:
        for one in self.schedulings.values():
            monitors = isinstance(one.scheduler, ReduceLROnPlateau) and one.monitor.startswith("val_")
            if monitors and self.val_data is None:
                raise DistmanError(
                    f"ReduceLROnPlateau monitors {one.monitor}, but the handler has no data to validate with. Call "
                    "set_val_loader(), or set_scheduler(..., monitor='loss')."
                )
        return Schedules(self.required_optimizers(), self.schedulings)

    def make_engine(self, model: TrainedModel, options: StepOptions) -> Engine:
        if self.step is None or self.val_data is not None:
            self.required_objective()
        return Engine(model, self.required_optimizers(), options, self.given, wraps=self.step is None)


def check_factory(name: str, factory: object, product: str, remedy: str) -> None:
    if not callable(factory) or isinstance(factory, torch.nn.Module):
        got = repr(factory) if isinstance(factory, (str, int)) else f"a {type(factory).__name__}"
        raise TypeError(f"{name} must be a class or function that makes {product}, got {got}. {remedy}")


def check_numbers(options: Mapping[str, object]) -> None:
    """Refuse numbers that stand in strings, as some configuration files give them: torch compares them with numbers."""
    for name, value in options.items():
        if isinstance(value, str) and re.fullmatch(r"\s*[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?\s*", value, re.IGNORECASE):
            raise TypeError(f"{name} must be a number, got the string {value!r}. Pass float({value!r}).")


def required(value: T | None, what: str, remedy: str) -> T:
    if value is None:
        raise DistmanError(f"the handler has no {what}. Call {remedy} first.")
    return value


def make_loader(method: str, data: Any, options: Mapping[str, Any], *, cached: bool, evaluation: bool = False) -> Any:
    """Return a loader that distributes a dataset over the ranks, or an iterable as it is."""
    if "group" in options:
        raise TypeError("group must be left out: all ranks train one model. Call the functions of distman.data for it.")
    if isinstance(data, str) or not (hasattr(data, "__getitem__") or isinstance(data, Iterable)):
        raise TypeError(
            f"data must be a dataset or an iterable of batches, got {data!r}. Make one of your files first."
        )
    check_starts_over("data", data)
    if evaluation and isinstance(data, TrainingLoader):
        raise TypeError(
            "data to validate with must be read in order, got a TrainingLoader. Make it with evaluation=True."
        )
    if isinstance(data, DataLoader) or not hasattr(data, "__getitem__"):
        given = [name for name in options if name != "seed"]  # the handler passes its own seed
        if cached or given:
            raise TypeError(
                f"loader options must be passed with a dataset, got {given or ['cached']} with a "
                f"{type(data).__name__}. Set them where you make it."
            )
        return data
    if isinstance(data, list | tuple) and {"batch_size", "batch_sampler"}.isdisjoint(options):
        raise TypeError(
            f"data must not be a {type(data).__name__} without batch_size, which could hold samples or batches. Pass "
            "batch_size for samples, or DataLoader(batches, batch_size=None) for batches that each rank has made."
        )
    is_cached = cached or isinstance(data, RankCachedDataset)
    make: Callable[..., Any] = rank_cached_loader if is_cached else distributed_loader
    known = {"cached", *inspect.signature(make).parameters}
    if "loader_kwargs" in known:
        known |= {*inspect.signature(DataLoader).parameters}
    check_options(options, known - _NO_OPTIONS, method)
    return make(data, evaluation=evaluation, **options)


def make_evaluation_loader(method: str, data: Any, options: Mapping[str, Any]) -> Any:
    is_dataset = hasattr(data, "__getitem__") and not isinstance(data, DataLoader | list | tuple)
    given = {"batch_size": 64, **options} if is_dataset else options
    return make_loader(method, data, given, cached=False, evaluation=True)
