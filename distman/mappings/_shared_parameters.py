"""The mark of modules whose parameters are shared: it finds its parameters again, whatever replaces them.

Copies, saved modules, new tensors in the place of a parameter and the parameters that FSDP2 puts together for a while
have no hooks. So the mark is a forward pre-hook of each module, which travels with the module, and gives the parameters
that it meets what sums their gradients.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from distman._job.groups.registry import Group
from distman._torch_internals import forward_pre_hooks, is_distributed_tensor, own_parameters
from distman.collectives import GroupLike, all_reduce_sum, linear, resolve_group
from distman.errors import DistmanError

_handles: WeakIdKeyDictionary = WeakIdKeyDictionary()  # the mark that sums each parameter's gradients, and its hook
# The weak references keep torch from swapping a parameter's contents, which would take the hook away with the old ones.


def mark_module_as_shared(
    module: torch.nn.Module, process_group: GroupLike = None, recurse: bool = True, use_fp32: bool = True
) -> torch.nn.Module:
    """Sum the gradients of a module's parameters over a group whose ranks each use them on a part of the data.

    Local; each backward pass through the module becomes collective over the group, one reduction for each parameter,
    so all ranks must use the same parameters in it. What each pass adds to a gradient is summed once: gradients may be
    accumulated over several passes. The gradients are those of the sum of all ranks' losses, to any order: a penalty on
    the summed gradients that each rank adds to its loss counts once for each rank.

    The mark belongs to the module and its submodules. Copies have it, saved modules (over a group with a name), and the
    parameters that are frozen when it is given, take the place of others, or are put together by ``fully_shard``. Not
    summed are the gradients of tensors that :func:`torch.func.functional_call` puts in the place of parameters. A
    module that :func:`torch.compile` has compiled does not look for new parameters: mark it after they are there.

    Args:
        module: The module, with equal parameters on all ranks of the group.
        process_group: A process group, the name of one, or None for the world.
        recurse: Take the parameters of submodules too.
        use_fp32: Add 16-bit floats up in float32.

    Returns:
        The module itself.

    Raises:
        ValueError: A parameter is marked already; then nothing is changed.
        DistmanError: In a later forward pass: a parameter has gone, to a parametrization say, or a module that was
            loaded is shared over a group that is not there.
        TypeError: In a later forward pass: a parameter is a DTensor where it is used.

    Example on two ranks:
        >>> scale = mark_module_as_shared(torch.nn.Linear(1, 1, bias=False))
        >>> scale(torch.tensor([rank + 1.0])).backward()
        >>> scale.weight.grad  # 1 from rank 0, 2 from rank 1
        tensor([[3.]])
    """
    members = resolve_group(process_group)
    marked = [name for name, is_marked in _states(module, recurse=recurse).items() if is_marked]
    if marked:
        raise ValueError(f"parameters must not be marked as shared already, got {marked}. Unmark the module first.")
    for one in module.modules() if recurse else [module]:
        if _mark_of(one) is None:
            names = frozenset(name for name, parameter in own_parameters(one).items() if parameter is not None)
            mark = SharedMark(members.name or members, names, use_fp32=use_fp32)
            one.register_forward_pre_hook(mark)
            mark.attach(one, is_used=False)
    return module


def unmark_module_as_shared(module: torch.nn.Module, recurse: bool = True) -> torch.nn.Module:
    """Undo :func:`mark_module_as_shared`.

    Local.

    Args:
        module: The module.
        recurse: Take the parameters of submodules too.

    Returns:
        The module itself.

    Raises:
        ValueError: None of the parameters is marked.

    Example on two ranks:
        >>> scale = mark_module_as_shared(torch.nn.Linear(1, 1, bias=False))
        >>> unmark_module_as_shared(scale)(torch.tensor([rank + 1.0])).backward()
        >>> all_gather_objects(scale.weight.grad.item())  # each rank its own again
        [1.0, 2.0]
    """
    states = _states(module, recurse=recurse)
    if states and not any(states.values()):
        raise ValueError(
            f"parameters must be marked as shared to be unmarked, got unmarked {list(states)}. Mark the module first."
        )
    for one in module.modules() if recurse else [module]:
        hooks = forward_pre_hooks(one)
        for key, mark in list(hooks.items()):
            if isinstance(mark, SharedMark):
                del hooks[key]
                mark.detach()
    return module


class SharedMark:
    """The mark of one module: the names of its own parameters, and whose gradients are added up."""

    def __init__(self, group: Group | str, names: frozenset[str], *, use_fp32: bool) -> None:
        self._group = group  # by name if it has one: of a new job, the group of that name
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
            mark = _mark_of(child)
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
        group = resolve_group(self._group) if isinstance(self._group, str) else self._group
        return linear(grad, all_reduce_sum, all_reduce_sum, group, self._use_fp32)

    def __deepcopy__(self, memo: dict[int, Any]) -> SharedMark:
        """The mark of a copied module, which has met no parameters yet."""
        return SharedMark(self._group, self._names, use_fp32=self._use_fp32)

    def __reduce__(self) -> tuple[Any, ...]:
        if not isinstance(self._group, str):
            raise DistmanError(
                "a module that is saved or sent must be shared over a group that has a name, got a process group that "
                "the manager did not make. Unmark the module, or save its state_dict()."
            )
        return functools.partial(SharedMark, self._group, self._names, use_fp32=self._use_fp32), ()


def _mark_of(module: torch.nn.Module) -> SharedMark | None:
    return next((hook for hook in forward_pre_hooks(module).values() if isinstance(hook, SharedMark)), None)


def _states(module: torch.nn.Module, *, recurse: bool) -> dict[str, bool]:
    """Return whether each parameter of a module is marked as shared."""
    if not isinstance(module, torch.nn.Module):
        raise TypeError(f"module must be a torch.nn.Module, got {module!r}. Pass the model, or a part of it.")
    return {
        f"{path}.{name}" if path else name: _mark_of(owner) is not None or parameter in _handles
        for path, owner in (module.named_modules() if recurse else [("", module)])
        for name, parameter in own_parameters(owner).items()
        if parameter is not None
    }
