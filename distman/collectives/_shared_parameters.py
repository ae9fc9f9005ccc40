"""The mark of modules whose parameters are shared: it finds its parameters again, whatever replaces them.

Copies, saved modules, new tensors in the place of a parameter and the parameters that FSDP2 puts together for a while
have no hooks. So the mark is a forward pre-hook of each module, which travels with the module, and gives the parameters
that it meets what sums their gradients.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from distman._job.groups.registry import Group
from distman._torch_internals import forward_pre_hooks, is_distributed_tensor, own_parameters
from distman.collectives._all_reduce import AllReduceSum
from distman.collectives._validation import resolve_group
from distman.errors import DistmanError

_handles: WeakIdKeyDictionary = WeakIdKeyDictionary()  # the mark that sums each parameter's gradients, and its hook
# The weak references keep torch from swapping a parameter's contents, which would take the hook away with the old ones.


class SharedMark:
    """The mark of one module: the names of its own parameters, and whose gradients are added up."""

    def __init__(self, group: Group | str, names: frozenset[str], *, use_fp32: bool) -> None:
        self._group = group
        self._names = names
        self._use_fp32 = use_fp32
        self._has_looked = False

    def __call__(self, module: torch.nn.Module, _: Any) -> None:
        """Before a forward pass: look at the parameters that it will use."""
        if torch.compiler.is_compiling():
            if not self._has_looked:
                torch.compiler.disable(self._look)(module)
        elif torch.is_grad_enabled():
            self._look(module)

    def _look(self, module: torch.nn.Module) -> None:
        self.attach(module)
        for child in module.children():  # some modules use a child's parameters without calling it
            mark = mark_of(child)
            if mark is not None:
                mark.attach(child, is_used=False)

    def attach(self, module: torch.nn.Module, *, is_used: bool = True) -> None:
        """Let the gradients of the module's own parameters be summed from now on.

        If it ``is_used``, its forward pass is about to begin; else its parameters may be shards that are put together
        then.
        """
        parameters = own_parameters(module)
        if not self._names <= parameters.keys():
            raise DistmanError(
                f"parameters that are marked as shared must stay parameters of their module, got "
                f"{type(module).__name__} without {sorted(self._names - parameters.keys())}. Unmark the module before "
                "it is changed, and mark it again."
            )
        for parameter in parameters.values():
            if not isinstance(parameter, torch.nn.Parameter) or not parameter.requires_grad or parameter in _handles:
                continue
            if not is_distributed_tensor(parameter):
                _handles[parameter] = self, parameter.register_hook(self._sum)
            elif is_used:
                raise TypeError(
                    f"parameters that are marked as shared must be ordinary tensors where they are used, got a DTensor "
                    f"in {type(module).__name__}. Unmark the module, and let its mesh sum the gradients."
                )
        self._has_looked = True

    def detach(self) -> None:
        for parameter, (mark, handle) in list(_handles.items()):
            if mark is self:
                handle.remove()
                del _handles[parameter]

    def _sum(self, grad: torch.Tensor) -> torch.Tensor:
        name = self._group if isinstance(self._group, str) else self._group.name
        group = resolve_group(name) if name else self._group  # of a new job, the group of that name
        total: torch.Tensor = AllReduceSum.apply(grad, group, self._use_fp32)
        return total

    def __deepcopy__(self, memo: dict[int, Any]) -> SharedMark:
        """The mark of a copied module, which has met no parameters yet."""
        return SharedMark(self._group, self._names, use_fp32=self._use_fp32)

    def __reduce__(self) -> tuple[Any, ...]:
        name = self._group if isinstance(self._group, str) else self._group.name
        if not name:
            raise DistmanError(
                "a module that is saved or sent must be shared over a group that has a name, got a process group that "
                "the manager did not make. Unmark the module, or save its state_dict()."
            )
        return functools.partial(SharedMark, name, self._names, use_fp32=self._use_fp32), ()


def add_mark(module: torch.nn.Module, group: Group, *, use_fp32: bool) -> None:
    """Mark one module, if it is not marked yet; its submodules are left as they are."""
    if mark_of(module) is None:
        names = frozenset(name for name, parameter in own_parameters(module).items() if parameter is not None)
        mark = SharedMark(group, names, use_fp32=use_fp32)
        module.register_forward_pre_hook(mark)
        mark.attach(module, is_used=False)


def remove_mark(module: torch.nn.Module) -> None:
    """Unmark one module, whether or not it is marked."""
    hooks = forward_pre_hooks(module)
    for key, mark in list(hooks.items()):
        if isinstance(mark, SharedMark):
            del hooks[key]
            mark.detach()


def mark_of(module: torch.nn.Module) -> SharedMark | None:
    return next((hook for hook in forward_pre_hooks(module).values() if isinstance(hook, SharedMark)), None)


def parameters_of(module: torch.nn.Module, *, recurse: bool) -> Iterator[tuple[str, torch.nn.Parameter, bool]]:
    """Yield name and parameter of a module, and whether it is marked as shared."""
    if not isinstance(module, torch.nn.Module):
        raise TypeError(f"module must be a torch.nn.Module, got {module!r}. Pass the model, or a part of it.")
    for path, owner in module.named_modules() if recurse else [("", module)]:
        is_marked = mark_of(owner) is not None
        for name, parameter in own_parameters(owner).items():
            if parameter is not None:
                yield f"{path}.{name}" if path else name, parameter, is_marked or parameter in _handles
