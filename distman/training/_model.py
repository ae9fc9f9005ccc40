"""The model on this rank: bare for evaluation and saving, wrapped for training; and its moving average."""

from __future__ import annotations

import copy
import gc
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import get_ema_multi_avg_fn

from distman._base.arguments import check_choice
from distman._coordination.wait_scope import WaitScope, has_failed
from distman.checkpoint import load_model_state, model_state, without_compiled
from distman.collectives import broadcast_data
from distman.errors import DistmanError
from distman.manager import DistributedManager
from distman.training import _sharding as sharding
from distman.training._optimizers import Changes
from distman.training._sharding import own_part, units

_WITH_MEANS = (torch.nn.BatchNorm1d, torch.nn.BatchNorm2d, torch.nn.BatchNorm3d, torch.nn.SyncBatchNorm)
"""Modules whose buffers training writes on each rank, and evaluation reads: of those rank 0's are enough.

Training reads them too where a program has frozen such a module, by eval().
"""

_STATISTICS = ("running_mean", "running_var")


class TrainedModel:
    """A module that the ranks train, moved to this rank's device, with the weights and buffers of rank 0.

    The calls, the state and the parameters of ``module`` are local unless it is sharded, as it is wrapped itself then.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        *,
        compile_options: Mapping[str, Any] | None = None,
        strategy: Literal["ddp", "fsdp"] = "ddp",
        strategy_options: Mapping[str, Any] | None = None,
        wraps: bool = True,
    ) -> None:
        self._options = strategy_options or {}
        is_on_meta = any(one.is_meta for one in [*module.parameters(), *module.buffers()])
        if is_on_meta and strategy != "fsdp":
            raise ValueError(
                "a model on the meta device must be sharded, got strategy='ddp'. Pass strategy='fsdp', and a function "
                "that sets its values: strategy_options={'initialize': function}."
            )
        self.module = module if is_on_meta else module.to(DistributedManager().device)
        if strategy == "fsdp":
            DistributedManager().wrap_fsdp(self.module, **self._options)
        self.is_sharded = strategy == "fsdp" and bool(units(self.module))
        self._ddp_options = {} if strategy == "fsdp" else self._options
        self.average: Average | None = None
        self._is_training = self._is_evaluated = self._is_used = self._is_sorted = False
        self._trained = self._trainable() if self.is_sharded else []
        if self.is_sharded:
            self.module.register_forward_pre_hook(self._refuse, prepend=True)
        else:
            self._share([*module.parameters(), *module.buffers()])
        if compile_options is not None and self.is_sharded:
            sharding.compile_parts(self.module, compile_options)
        elif compile_options is not None:
            self.module.compile(**compile_options)
        self.wrapped = self.module  # as DistributedDataParallel, on several ranks and where it is not sharded
        if wraps:
            self.wrap()

    @property
    def evaluated(self) -> torch.nn.Module:
        """The bare module, or its average; a sharded one has the average in :meth:`evaluating` alone."""
        copied = None if self.average is None else self.average.module
        return self.module if copied is None else copied

    def wrap(self) -> None:
        """Wrap the module, again if other parameters are trained than before. Collective."""
        trained = self._trainable()
        if [id(one) for one in trained] == [id(one) for one in self._trained]:
            return
        self._trained, self.wrapped = trained, self.module
        if self.is_sharded:
            for unit in units(self.module):  # which sees what is trained as it is put together
                unit.unshard()
                unit.reshard()
        elif trained:
            options = {"gradient_as_bucket_view": True, **self._ddp_options}
            self.wrapped = DistributedManager().wrap_ddp(self.module, **options)
        if isinstance(self.wrapped, DistributedDataParallel):
            self.wrapped.register_forward_pre_hook(self._refuse)
            self._is_sorted = False

    def _trainable(self) -> list[torch.nn.Parameter]:
        return [parameter for parameter in self.module.parameters() if parameter.requires_grad]

    def unwrap(self) -> None:
        self._trained, self.wrapped = [], self.module
        if self._is_used:
            gc.collect()  # a backward pass that an error cut off would go on in the hooks of the wrapped one
            self._is_used = False

    @contextmanager
    def training(self) -> Iterator[torch.nn.Module]:
        """Allow calls of the wrapped module within a ``with`` block, which all ranks must run."""
        self._is_training = self._is_used = True
        try:
            with WaitScope("a step of the sharded model", computes=True) if self.is_sharded else nullcontext():
                yield self.wrapped
        finally:
            self._is_training = False

    @contextmanager
    def explaining_unused(self) -> Iterator[None]:
        """Say which parameters had no gradient on this rank where DistributedDataParallel has waited for them."""
        try:
            yield
        except RuntimeError as error:
            if "Expected to have finished reduction in the prior iteration" not in str(error):
                raise
            found = re.search(rf"for rank {DistributedManager().rank}: ([\d ]+)", str(error))
            names = [name for name, one in self.module.named_parameters() if one.requires_grad]
            unused = [names[int(index)] for index in found[1].split()] if found else ["some"]
            raise DistmanError(
                "all parameters that are trained must have a part in the loss of each step, got none for "
                f"{', '.join(unused)} in the step before. Freeze what is not used, by requires_grad_(False), or set "
                "DDP_FIND_UNUSED_PARAMETERS=1."
            ) from error

    def sort_buckets(self) -> None:
        """Let DistributedDataParallel sort its buckets once and for all, in the reverse order of the parameters.

        It sorts them after the first backward pass, in the order of its gradients, and the last bits of the sums depend
        on it. A run that is resumed would have other buckets in its first step, so each run makes a pass of its own
        first, with gradients of zero.
        """
        wrapped = self.wrapped
        if self._is_sorted or not isinstance(wrapped, DistributedDataParallel):
            return
        if wrapped.find_unused_parameters or wrapped.static_graph:  # does not, or learns the graph from this pass
            return
        wrapped.module = _ZeroGradients(self.module, self._trained)
        try:
            with self.training() as model, WaitScope("the buckets of the gradients", computes=True):
                model().backward()
        finally:
            wrapped.module = self.module
        self.module.zero_grad()
        self._is_sorted = True

    def without_synchronization(self) -> AbstractContextManager[None]:
        if isinstance(self.wrapped, DistributedDataParallel):
            context: AbstractContextManager[None] = self.wrapped.no_sync()
            return context
        return sharding.without_reduction(self.module) if self.is_sharded else nullcontext()

    def keep_average(self, decay: float | None, *, use_buffers: bool | None = None) -> None:
        """Keep a moving average of the weights from now on, or continue the present one; see :class:`Average`."""
        if decay is None:
            self.average = None
            return
        self.average = self.average or Average(self.module, is_sharded=self.is_sharded)
        self.average.set_options(decay, use_buffers=use_buffers)

    @contextmanager
    def evaluating(self) -> Iterator[torch.nn.Module]:
        """Let :attr:`evaluated` have rank 0's buffers on all ranks within a ``with`` block, after which it has its own.

        Collective. Blocking. Running means of normalizations, say, differ between ranks in training.
        """
        was_evaluated, self._is_evaluated = self._is_evaluated, True
        try:
            with self._evaluated_parts() if self.is_sharded else nullcontext():
                buffers = list(self.evaluated.buffers()) if DistributedManager().world_size > 1 else []
                with sharding.put_back(buffers):
                    self._share(buffers)
                    yield self.evaluated
        finally:
            self._is_evaluated = was_evaluated

    @contextmanager
    def _evaluated_parts(self) -> Iterator[None]:
        """Let each rank have all weights of a sharded model, or their average, so that its calls wait for no rank."""
        average = self.average.put_in() if self.average is not None else nullcontext()
        with average, sharding.gathered(self.module, reshards=self._options.get("reshard_after_forward")):
            self._is_training = True
            try:
                yield
            finally:
                self._is_training = False

    def own_buffers(self) -> dict[str, torch.Tensor]:
        """Return what training may read in which this rank differs from rank 0, whose state is saved. Collective."""
        if DistributedManager().world_size == 1 or has_failed():  # then each rank saves its own state
            return {}
        buffers = self._saved_buffers()
        shared = broadcast_data([one for one, _ in buffers.values()])  # all of them: ranks may differ in what is frozen
        return {
            name: own.cpu()
            for (name, (own, is_read)), other in zip(buffers.items(), shared, strict=True)
            if is_read and not torch.equal(own, other)
        }

    @torch.no_grad()
    def load_own_buffers(self, state: Mapping[str, torch.Tensor]) -> None:
        buffers = self._saved_buffers()
        for name in state.keys() & buffers.keys():
            buffers[name][0].copy_(state[name])

    def _saved_buffers(self) -> dict[str, tuple[torch.Tensor, bool]]:
        """Return the buffers that checkpoints hold, and whether training may read them."""
        found: dict[str, tuple[torch.Tensor, bool]] = {}
        average = self.average.module if self.average is not None else None
        models = {"module": self.module} | ({} if average is None else {"average.module": average})
        for part, model in models.items():
            saved = model.state_dict(prefix=f"{part}.").keys()
            for path, module in model.named_modules(prefix=part):
                is_read = not (isinstance(module, _WITH_MEANS) and module.training)
                buffers = module.named_buffers(prefix=path, recurse=False)
                found |= {name: (buffer, is_read) for name, buffer in buffers if name in saved}
        if self.is_sharded and self.average is not None:
            averages = self.average.named
            found |= {
                f"average.{name}": (averages[name.removeprefix("module.")], is_read)
                for name, (_, is_read) in [*found.items()]
            }
        return found

    def state_dict(self) -> dict[str, Any]:
        if self._is_evaluated:
            raise DistmanError(
                "a state must be taken outside of validate(), predict() and sample(), got a call within one, for which "
                "the model may have other values. Save before it or after it."
            )
        average = None if self.average is None else self.average.state_dict()
        return {"module": model_state(self.module), "average": average, "frozen": self._frozen()}

    def evaluated_state(self) -> dict[str, Any]:
        """Return the average, if one is kept, else weights and buffers; under the names of the bare model."""
        if self.is_sharded and self.average is not None:
            averages = {without_compiled(name): value for name, value in self.average.state().items()}
            return model_state(self.module) | averages
        return model_state(self.evaluated)

    def load_state_dict(self, state: Mapping[str, Any], changes: Changes) -> None:
        changes.note("frozen parameters", state["frozen"], self._frozen())
        if not changes.are_of_program:
            for name, parameter in self.module.named_parameters():
                parameter.requires_grad_(without_compiled(name) not in state["frozen"])
        saved = state["module"]
        load_model_state(self.module, sharding.place_parts(self.module, saved) if self.is_sharded else saved)
        if state["average"] is None:
            self.average = None
            return
        self.average = self.average or Average(self.module, is_sharded=self.is_sharded)
        self.average.load_state_dict(state["average"])

    def _frozen(self) -> list[str]:
        named = self.module.named_parameters()
        return [without_compiled(name) for name, one in named if not one.requires_grad]

    @staticmethod
    def _share(tensors: list[torch.Tensor]) -> None:
        if tensors and DistributedManager().world_size > 1:
            sharding.copy_into(tensors, broadcast_data(tensors))

    def _refuse(self, *_: Any) -> None:
        """Raise if the wrapped module is called outside of a step: its backward pass would wait for other ranks."""
        if not self._is_training:
            raise DistmanError(
                "the wrapped model must be called within a training step, on all ranks, got a call on rank "
                f"{DistributedManager().rank} outside of one. "
                + (
                    "Its weights are sharded: call handler.predict(), on all ranks."
                    if self.is_sharded
                    else "Call the bare module, handler.module, which waits for no rank."
                )
            )


class _ZeroGradients(torch.nn.Module):
    """A module whose loss gives a module's parameters gradients of zero, the last one first."""

    def __init__(self, module: torch.nn.Module, parameters: Sequence[torch.nn.Parameter]) -> None:
        super().__init__()
        embeddings = [one for one in module.modules() if isinstance(one, torch.nn.Embedding | torch.nn.EmbeddingBag)]
        self._sparse = {id(one.weight) for one in embeddings if one.sparse}  # as DistributedDataParallel expects them
        self._in_order = list(parameters)

    def forward(self) -> torch.Tensor:
        no_rows = torch.empty(0, dtype=torch.int64, device=self._in_order[0].device)
        parts = [
            torch.nn.functional.embedding(no_rows, one, sparse=True).sum()
            if id(one) in self._sparse
            else one.sum().real * 0
            for one in self._in_order
        ]
        return torch.stack(parts).sum()  # what was computed last is differentiated first


def check_strategy(strategy: str, options: Mapping[str, Any]) -> None:
    check_choice("strategy", strategy, ("ddp", "fsdp"))
    if not isinstance(options.get("reshard_after_forward"), bool | None):
        raise TypeError(
            "reshard_after_forward must be True or False, got "
            f"{options['reshard_after_forward']!r}. Call manager.wrap_fsdp() in a loop of your own for it."
        )


class Average:
    """The moving average of a module's weights, beside a copy of its other buffers.

    Averages are kept of the parameters and, unless a program says otherwise, of the running statistics of norms. The
    average of other buffers, such as tables, counters, or the vectors of a spectral norm, would not be valid.
    """

    def __init__(self, module: torch.nn.Module, *, is_sharded: bool) -> None:
        self._source = module
        self.module = None if is_sharded else copy.deepcopy(module)  # with the averages, which are sharded else
        self._parts = {name: one.detach().clone() for name, one in _tensors(module).items()} if is_sharded else {}
        self._num_updates = 0
        self.set_options(0.0, use_buffers=None)

    @property
    def named(self) -> dict[str, torch.Tensor]:
        return self._parts if self.module is None else _tensors(self.module)

    def set_options(self, decay: float, *, use_buffers: bool | None) -> None:
        self._move = get_ema_multi_avg_fn(decay)
        buffers = [name for name, _ in self._source.named_buffers()] if use_buffers else []
        chosen = [*_statistics(self._source)] if use_buffers is None else buffers
        names = {*dict(self._source.named_parameters()), *chosen}
        numbers = [name for name, one in self.named.items() if one.is_floating_point() or one.is_complex()]
        self._averaged = names.intersection(numbers)

    @torch.no_grad()
    def update(self) -> None:
        """Add the present weights of the module to the average, and copy what is not averaged."""
        named, tensors = self.named, _tensors(self._source)
        groups: dict[Any, tuple[list[torch.Tensor], list[torch.Tensor]]] = defaultdict(lambda: ([], []))
        for name, one in named.items():  # the module may have got more since
            average, value = own_part(one.detach()), own_part(tensors[name].detach())
            if name not in self._averaged or not self._num_updates:
                average.copy_(value)
            elif average.numel():
                averages, values = groups[average.dtype, average.device]
                averages.append(average)
                values.append(value)
        for averages, values in groups.values():
            self._move(averages, values, self._num_updates)
        self._num_updates += 1

    def state(self) -> dict[str, Any]:
        if self.module is not None:
            return model_state(self.module)
        first = {id(one): name for name, one in _tensors(self._source).items()}
        saved = {name: first.get(id(one), "") for name, one in self._source.state_dict(keep_vars=True).items()}
        return {name: self._parts[own] for name, own in saved.items() if own in self._parts}

    def state_dict(self) -> dict[str, Any]:
        averages = {f"module.{name}": value for name, value in self.state().items()}
        return {"n_averaged": torch.tensor(self._num_updates), **averages}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        values = {name.removeprefix("module."): value for name, value in state.items() if name != "n_averaged"}
        if self.module is not None:
            load_model_state(self.module, values)
        else:
            own = self.state()
            if own.keys() != values.keys():
                raise RuntimeError(
                    f"names of the average differ from the model's: {sorted(own.keys() ^ values.keys())}"
                )
            for name, value in own.items():
                value.copy_(sharding.placed_as(value, values[name]))
        self._num_updates = int(state["n_averaged"])

    @contextmanager
    def put_in(self) -> Iterator[None]:
        """Let a sharded module have the averages within a ``with`` block, and its own values after it."""
        named = _tensors(self._source)
        tensors = [own_part(named[name].detach()) for name in self.named]
        with sharding.put_back(tensors):
            sharding.copy_into(tensors, map(own_part, self.named.values()))
            yield


def _tensors(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def _statistics(module: torch.nn.Module) -> Iterator[str]:
    """Yield the names of running means and variances, which norms of all kinds have under these names."""
    for path, part in module.named_modules():
        if all(isinstance(getattr(part, name, None), torch.Tensor) for name in _STATISTICS):
            yield from (f"{path}.{name}" if path else name for name in _STATISTICS)
