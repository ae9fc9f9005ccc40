"""The one state that all instances of the manager share."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from torch.distributed.device_mesh import DeviceMesh

from distman._coordination.monitor.watcher import Watcher
from distman._coordination.preemption import StopAgreement
from distman._groups.registry import Groups
from distman._job.job import Job
from distman.errors import NotInitializedError


@dataclasses.dataclass
class ManagerState:
    """All that :class:`distman.DistributedManager` keeps, from ``initialize()`` to ``cleanup()``.

    Attributes:
        job: The job.
        groups: Its groups.
        watcher: Watches the other ranks; None where there are none, or they are not watched.
        stop: Lets all ranks stop at the same step.
        find_unused_parameters: Whether DDP looks for unused parameters.
        broadcast_buffers: Whether DDP broadcasts rank 0's buffers before each forward.
        mesh: The mesh of all ranks; None before there is one.
    """

    job: Job
    groups: Groups
    watcher: Watcher | None
    stop: StopAgreement
    find_unused_parameters: bool
    broadcast_buffers: bool = False
    mesh: DeviceMesh | None = None


class SharedState:
    """The same state in every instance (Borg).

    The parts of the manager are base classes since their methods are the manager's own for users: behind objects that
    the manager asks, each of the fifty would stand, with its docstring, in two places.
    """

    _shared_state: ClassVar[dict[str, Any]] = {}

    def __init__(self) -> None:
        self.__dict__ = type(self)._shared_state
        if not self.is_initialized():
            raise _not_initialized()

    def __reduce__(self) -> tuple[object, ...]:
        """Be copied, and sent to other processes, as a view of the one state that there is there."""
        return _view, (type(self),)

    @property
    def _state(self) -> ManagerState:
        state: ManagerState | None = type(self)._shared_state.get("_state")
        if state is None:
            raise _not_initialized()
        return state

    @classmethod
    def is_initialized(cls) -> bool:
        """Return whether ``initialize()`` has succeeded and ``cleanup()`` was not called since.

        Local.
        """
        return "_state" in cls._shared_state


def _view(cls: type[SharedState]) -> SharedState:
    """Return an instance, whether or not there is a job yet: a program may read a model before it initializes."""
    view = cls.__new__(cls)
    view.__dict__ = cls._shared_state
    return view


def _not_initialized() -> NotInitializedError:
    return NotInitializedError(
        "DistributedManager must be initialized before it is used. Call DistributedManager.initialize() "
        "once at the start of the script."
    )
