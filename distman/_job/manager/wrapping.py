"""A module as a DistributedDataParallel, or with parameters that are sharded over the ranks."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from distman._base.arguments import check_options
from distman._coordination import protocol
from distman._coordination.step_times import time_reductions
from distman._coordination.tracking import call_site, check_all_run_here, restriction
from distman._coordination.wait_scope import WaitScope
from distman._job.groups.registry import Groups
from distman._torch_internals import is_distributed_tensor


def wrap(module: torch.nn.Module, options: dict[str, Any], device: torch.device) -> DistributedDataParallel:
    """Return the module as a DistributedDataParallel on a device.

    On a GPU it is made on a stream of its own, as torch wants it for CUDA graphs.
    """
    wrapped = _made(module, options, device)
    time_reductions(wrapped)
    wrapped.register_forward_pre_hook(_check_all_run_here)
    return wrapped


def _check_all_run_here(wrapped: DistributedDataParallel, _: object) -> None:
    """Refuse what would wait for other ranks in its backward pass, which no watcher tells from computing."""
    if restriction() is not None and torch.is_grad_enabled() and wrapped.require_backward_grad_sync:
        ranks = dist.get_process_group_ranks(wrapped.process_group)
        check_all_run_here(ranks, "a DistributedDataParallel that computes gradients")


def _made(module: torch.nn.Module, options: dict[str, Any], device: torch.device) -> DistributedDataParallel:
    if device.type != "cuda":
        return DistributedDataParallel(module, **options)
    side_stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch leaves it untyped
    side_stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side_stream):
        wrapped = DistributedDataParallel(module, **{"device_ids": [device.index], "output_device": device, **options})
    torch.cuda.current_stream(device).wait_stream(side_stream)
    return wrapped


def check_module(module: object) -> None:
    if not isinstance(module, torch.nn.Module):
        raise TypeError(f"module must be a torch.nn.Module, got a {type(module).__name__}. Pass the model.")


def check_wrappable(module: torch.nn.Module, options: dict[str, Any]) -> None:
    """Refuse, on any number of ranks, what DistributedDataParallel would on several."""
    check_module(module)
    check_options(options, [*inspect.signature(DistributedDataParallel).parameters][1:], "wrap_ddp")
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise ValueError(
            "module must have a parameter that requires a gradient, got none. Call the module as it is: there is no "
            "gradient to average."
        )


if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy

Parts: TypeAlias = type[torch.nn.Module] | Sequence[type[torch.nn.Module]] | Callable[[torch.nn.Module], bool]
Initialize: TypeAlias = Callable[[torch.nn.Module], object]
Precision: TypeAlias = "Literal['bf16', 'fp16'] | MixedPrecisionPolicy"

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_OPTIONS = ("reshard_after_forward", "shard_placement_fn", "offload_policy")


@dataclasses.dataclass(frozen=True)
class Sharding:
    """How a program wants a model to be sharded: the arguments of ``wrap_fsdp``."""

    parts: Parts | None
    precision: Precision | None
    recomputes: bool
    initialize: Initialize | None
    options: dict[str, Any]  # of ``fully_shard``

    def check(self, module: torch.nn.Module) -> None:
        """Refuse, on any number of ranks, what ``fully_shard`` would on several, there or in the first step."""
        check_module(module)
        own = ["mesh", "shard", "mixed_precision", "checkpoint_activations", "initialize"]
        check_options(self.options, [*_OPTIONS, *own], "wrap_fsdp")
        _policies(self.precision)
        if not any(True for _ in module.parameters()):
            raise ValueError(
                "module must have parameters, got none. Call the module as it is: there is nothing to shard."
            )
        if self.recomputes and self.parts is None:
            raise ValueError(
                "checkpoint_activations must be used with shard, got shard=None. Name the modules to be computed again."
            )
        units = [*self._units(module), module]
        for unit in units:
            if isinstance(unit, torch.nn.ModuleList | torch.nn.ModuleDict):
                kind = type(unit).__name__
                raise ValueError(
                    f"what is sharded must have a forward(), got a {kind}. Name the class of its elements."
                )
        for name, parameter in module.named_parameters():
            _check_parameter(name, parameter)
        for name, part in module.named_modules() if self.initialize is None else ():
            if is_on_meta(part, recurse=False) and not hasattr(part, "reset_parameters"):
                raise ValueError(
                    f"what is on the meta device must be initialized, got {name or 'the model'} of "
                    f"{type(part).__name__} without reset_parameters(). Pass initialize=, a function that sets what a "
                    "module has itself."
                )
        _check_units(module, units)

    def shard(
        self, module: torch.nn.Module, mesh: DeviceMesh, groups: Groups, device: torch.device, *, finds_unused: bool
    ) -> torch.nn.Module:
        """Shard a module in place, with the weights and buffers of the first rank of the mesh.

        What is on the meta device is made and sharded part by part, so that a rank has room for one of them.
        """
        from torch.distributed.fsdp import fully_shard  # the import takes a second
        from torch.utils.checkpoint import checkpoint

        inner, outer = _policies(self.precision)
        units = self._units(module)
        with WaitScope("wrap_fsdp()"):
            _compare(module, mesh, groups, len(units))
            _share([*module.parameters(), *module.buffers()], mesh)
        for unit in units:
            _share(materialize(unit, device, self.initialize), mesh)
            if self.recomputes:
                unit.forward = functools.partial(checkpoint, unit.forward, use_reentrant=False)
            fully_shard(unit, mesh=mesh, mp_policy=inner, **self.options)
        _share(materialize(module, device, self.initialize), mesh)
        sharded = fully_shard(module, mesh=mesh, mp_policy=outer, **self.options)
        if finds_unused:
            sharded.set_reduce_scatter_unused_params(True)
        if mesh.device_type == "cpu":  # gloo of torch 2.8 takes an average for a sum
            parts_of_it: list[Any] = [*units, sharded]
            for part in parts_of_it:
                part.set_force_sum_reduction_for_comms(enable=True)
        return module

    def materialize(self, module: torch.nn.Module, device: torch.device) -> None:
        for unit in [*self._units(module), module] if is_on_meta(module) else []:
            materialize(unit, device, self.initialize)

    def _units(self, module: torch.nn.Module) -> list[torch.nn.Module]:
        """Return the modules within a module that are gathered each by itself, the inner ones first."""
        if self.parts is None:
            return []
        classes = (self.parts,) if isinstance(self.parts, type) else self.parts
        if callable(classes):
            is_unit = classes
        elif all(isinstance(one, type) and issubclass(one, torch.nn.Module) for one in classes):
            kinds = tuple(classes)

            def is_unit(one: torch.nn.Module) -> bool:
                return isinstance(one, kinds)

        else:
            raise TypeError(
                f"shard must be classes of modules, or a function of a module, got {self.parts!r}. Pass one of them."
            )
        units = [one for one in module.modules() if one is not module and is_unit(one)]
        if not units:
            inside = sorted({type(one).__name__ for one in module.modules()})
            raise ValueError(
                f"shard must find modules within the model, got {self.parts!r}. It has {', '.join(inside)}."
            )
        return units[::-1]


def check_mesh(mesh: DeviceMesh, device: torch.device) -> None:
    if mesh.ndim > 2:
        raise ValueError(
            f"mesh must have one axis, to shard along, or two, to replicate and to shard along, got {mesh.ndim}. Pass "
            "a part of it, such as manager.mesh('data')."
        )
    if mesh.device_type != device.type:
        raise ValueError(
            f"mesh must be one of {device.type} devices, as this rank's is, got one of {mesh.device_type}. Pass "
            "manager.mesh()."
        )


def is_on_meta(module: torch.nn.Module, *, recurse: bool = True) -> bool:
    return any(one.is_meta for one in [*module.parameters(recurse=recurse), *module.buffers(recurse=recurse)])


def materialize(module: torch.nn.Module, device: torch.device, initialize: Initialize | None) -> list[torch.Tensor]:
    made: dict[torch.nn.Parameter, torch.nn.Parameter] = {}  # those that are tied stay so
    found: list[torch.Tensor] = []
    for part in module.modules():
        if not is_on_meta(part, recurse=False):
            continue
        before = dict(part.named_parameters(recurse=False))
        is_new = any(one not in made for one in before.values()) or not before
        part.to_empty(device=device, recurse=False)
        for name, old in before.items():
            setattr(part, name, made.setdefault(old, getattr(part, name)))
        if is_new:
            (initialize or _reset)(part)
        found += [*part.parameters(recurse=False), *part.buffers(recurse=False)]
    return [*dict.fromkeys(found)]


def _reset(module: Any) -> None:
    module.reset_parameters()


def _check_units(module: torch.nn.Module, units: Sequence[torch.nn.Module]) -> None:
    """Refuse parameters that cannot be gathered with their unit."""
    unit_of = {part: unit for unit in units[::-1] for part in unit.modules()}  # the innermost one
    gathered: dict[torch.nn.Module, dict[torch.dtype, str]] = {}
    seen: dict[torch.nn.Parameter, tuple[torch.nn.Module, str]] = {}
    for path, part in module.named_modules():
        for name, parameter in part.named_parameters(prefix=path, recurse=False):
            unit, first = seen.setdefault(parameter, (unit_of[part], name))
            if unit is not unit_of[part]:
                raise ValueError(
                    f"parameters that are tied must be sharded together, got {first} and {name}, which are one. Let "
                    "shard find a module around both, or neither."
                )
            if parameter.requires_grad:
                gathered.setdefault(unit, {})[parameter.dtype] = name
    for found in gathered.values():
        if len(found) > 1:
            got = " and ".join(f"{name} of {dtype}" for dtype, name in found.items())
            raise ValueError(
                f"parameters that are sharded together must have one data type, got {got}. Convert them, or let shard "
                "find the modules that they are in."
            )


def _check_parameter(name: str, parameter: torch.nn.Parameter) -> None:
    if not parameter.ndim:
        raise ValueError(
            f"parameters to be sharded must have a dim, got the number {name}. Give it the shape (1,) instead of ()."
        )
    if not parameter.is_contiguous():
        raise ValueError(
            f"parameters to be sharded must be contiguous, got {name} with strides {parameter.stride()}. Make it so."
        )


def _policies(precision: object) -> tuple[MixedPrecisionPolicy, MixedPrecisionPolicy]:
    """Return the policy of the modules within the model, and that of the model."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    if isinstance(precision, MixedPrecisionPolicy):
        return precision, precision
    if precision is None:
        return MixedPrecisionPolicy(), MixedPrecisionPolicy()
    if not isinstance(precision, str) or precision not in _DTYPES:
        raise ValueError(
            f"mixed_precision must be 'bf16', 'fp16', a MixedPrecisionPolicy or None, got {precision!r}. Choose one of "
            "them."
        )
    dtype = _DTYPES[precision]
    return (
        MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32),
        MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, output_dtype=torch.float32),
    )


def _compare(module: torch.nn.Module, mesh: DeviceMesh, groups: Groups, num_units: int) -> None:
    """Go on only if all ranks of the mesh shard the same model in the same way."""
    listed = [f"{name} {tuple(one.shape)} {one.dtype}" for name, one in _named_tensors(module)]
    call = {
        "operation": "wrap_fsdp",
        "model": type(module).__name__,
        "tensors": f"{len(listed)}, digest {hashlib.sha256(repr(listed).encode()).hexdigest()[:8]}",
        "elements": str(sum(one.numel() for _, one in _named_tensors(module))),
        "parts": str(num_units),
    }
    is_whole = mesh.size() == groups.world.size
    for group in [groups.world] if is_whole else map(groups.of, reversed(mesh.get_all_groups())):
        if group.consensus is not None:
            key = protocol.collective(next(group.calls), group.name or group.ranks)
            group.consensus.compare(key, call, place=call_site())


def _named_tensors(module: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [*module.named_parameters(), *module.named_buffers()]


@torch.no_grad()
def _share(tensors: Sequence[torch.Tensor], mesh: DeviceMesh) -> None:
    """Let all ranks of a mesh have the tensors of its first one."""
    for group in reversed(mesh.get_all_groups()):  # within the rows first, then between them
        for tensor in tensors:
            own = tensor.to_local() if is_distributed_tensor(tensor) else tensor  # type: ignore[attr-defined]
            if own.device.type != "meta" and own.numel():
                shared = own.contiguous().view(-1).view(torch.uint8)  # backends lack some data types
                dist.broadcast(shared, group=group, group_src=0)
                own.copy_(shared.view(own.dtype).view(own.shape))
