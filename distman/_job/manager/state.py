"""The one state that all instances of the manager share, who may change it, and what it says of this process."""

from __future__ import annotations

import contextlib
import copyreg
import dataclasses
import os
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from distman._coordination.monitor.watcher import Watcher
from distman._coordination.preemption import StopAgreement
from distman._job.device import backend_for, pick_device
from distman._job.groups.registry import Groups
from distman._job.job import Job
from distman._job.meeting.peers import Peer
from distman.environments import is_env_distributed
from distman.errors import NotInitializedError

View = TypeVar("View", bound="SharedState")

if TYPE_CHECKING:
    instance_property = property  # by this name alone do type checkers know what it does
else:

    class instance_property(property):  # noqa: N801 - it stands for property
        """A property that raises where the parentheses of ``DistributedManager()`` were forgotten.

        The error is an AttributeError, so that ``inspect`` and ``help()`` find the property all the same, in the
        dictionary of the class.
        """

        def __get__(self, instance: object, owner: type | None = None) -> Any:
            if instance is not None:
                return super().__get__(instance, owner)
            raise AttributeError(
                f"{self.fget.__name__} must be asked of an instance, got the class {owner.__name__}. Write "
                f"{owner.__name__}().{self.fget.__name__}, with parentheses."
            )


@dataclasses.dataclass
class ManagerState:
    """All that :class:`distman.DistributedManager` keeps, from ``initialize()`` to ``cleanup()``."""

    job: Job
    groups: Groups
    watcher: Watcher | None  # None where there are no other ranks, or they are not watched
    stop: StopAgreement
    find_unused_parameters: bool
    broadcast_buffers: bool = False
    mesh: DeviceMesh | None = None  # of all ranks
    mesh_dims: dict[str, int] = dataclasses.field(default_factory=dict)  # length of each of its axes by its name


class SharedState:
    """The same state in every instance (Borg).

    The parts of the manager are base classes since their methods are the manager's own for users: behind objects that
    the manager asks, each of the fifty would stand, with its docstring, in two places.
    """

    _shared_state: ClassVar[dict[str, Any]] = {}

    def __new__(cls: type[View], *_: object, **__: object) -> View:
        """Return a view, whether or not there is a job yet: a program may read a model before it initializes."""
        view = super().__new__(cls)
        view.__dict__ = cls._shared_state
        return view

    def __init__(self) -> None:
        if not self.is_initialized():
            raise _not_initialized()

    def __reduce__(self) -> tuple[object, ...]:
        """Be copied, and sent to other processes, as a view of the one state that there is there."""
        return copyreg.__newobj__, (type(self),)  # type: ignore[attr-defined]  # the stub lacks what pickles name

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

    @classmethod
    def find(cls: type[View]) -> View | None:
        """Return the manager, or None in a process that is alone and has not initialized it.

        Local. For code that must work, too, where there is no job.

        Raises:
            NotInitializedError: It is not initialized, though a launcher or a process group says that this process is
                a rank of a job, be it the only one.
            LaunchEnvironmentError: The variables of the launcher contradict each other.
        """
        if cls.is_initialized() or dist.is_initialized() or is_env_distributed(os.environ):
            return cls()
        return None


def _not_initialized() -> NotInitializedError:
    if dist.is_initialized():
        return NotInitializedError(
            "DistributedManager must be initialized before it is used, got a process group alone. Call "
            "DistributedManager.initialize() once on every rank of the group: it adopts the group."
        )
    return NotInitializedError(
        "DistributedManager must be initialized before it is used. Call DistributedManager.initialize() "
        "once at the start of the script."
    )


class OneAtATime:
    """Lets one thread at a time start or end the job.

    A thread that waits here can be interrupted, by Ctrl-C or by the failure of another rank: waits for locks let signal
    handlers run.
    """

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Begin anew, in a forked child: it has none of the threads that were at it."""
        self._lock = threading.RLock()  # a signal may come between its acquisition and the note of its owner
        self._owner: int | None = None

    @property
    def is_here(self) -> bool:
        """Whether this thread is at it already: a signal handler asks, or the destructor of an object."""
        return self._owner == threading.get_ident()

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Wait until no other thread starts or ends the job, and let none begin."""
        with self._lock:
            self._owner = threading.get_ident()
            try:
                yield
            finally:
                self._owner = None


class Place(SharedState):
    """The part of :class:`distman.DistributedManager` that says where this process stands."""

    @instance_property
    def rank(self) -> int:
        """Index of this process in the job."""
        return self._state.job.peer.rank

    @instance_property
    def world_size(self) -> int:
        """Number of processes in the job."""
        return self._state.job.world_size

    @instance_property
    def local_rank(self) -> int:
        """Index of this process on its host."""
        return self._state.job.peer.local_rank

    @instance_property
    def local_world_size(self) -> int:
        """Number of the job's processes on this host."""
        return self._state.job.peer.local_world_size

    @instance_property
    def node_rank(self) -> int:
        """Index of this host among the job's hosts."""
        return self._state.job.peer.node_rank

    @instance_property
    def num_nodes(self) -> int:
        """Number of hosts in the job."""
        return self._state.job.peer.num_nodes

    @instance_property
    def device(self) -> torch.device:
        """Device on which this rank computes."""
        return self._state.job.device

    @instance_property
    def cuda(self) -> bool:
        """Whether this rank computes on a CUDA or ROCm device."""
        return self._state.job.device.type == "cuda"

    @instance_property
    def distributed(self) -> bool:
        """Whether a process group is up, be it of one rank."""
        return self._state.job.backend is not None

    @instance_property
    def backend(self) -> str | None:
        """Backend of the process group, such as ``"cpu:gloo"``; None where there is none."""
        return self._state.job.backend

    @instance_property
    def is_main(self) -> bool:
        """Whether this is rank 0."""
        return self._state.job.peer.rank == 0

    @instance_property
    def is_local_main(self) -> bool:
        """Whether this is local rank 0 of its host."""
        return self._state.job.peer.local_rank == 0

    @instance_property
    def initialization_method(self) -> str:
        """Name of the launcher that was believed, such as ``"slurm"``."""
        return self._state.job.peer.launcher

    @instance_property
    def roll_call(self) -> tuple[Peer, ...]:
        """Every rank of the job with its host, pid, device and versions, in rank order; the same on all ranks."""
        return self._state.job.roll_call

    @instance_property
    def broadcast_buffers(self) -> bool:
        """Whether DDP broadcasts rank 0's buffers before each forward, not only once; False unless set."""
        return self._state.broadcast_buffers

    @broadcast_buffers.setter
    def broadcast_buffers(self, value: bool) -> None:
        self._state.broadcast_buffers = value

    @instance_property
    def find_unused_parameters(self) -> bool:
        """Whether DDP looks for unused parameters; first from ``DDP_FIND_UNUSED_PARAMETERS``."""
        return self._state.find_unused_parameters

    @find_unused_parameters.setter
    def find_unused_parameters(self, value: bool) -> None:
        self._state.find_unused_parameters = value

    @staticmethod
    def get_available_backend() -> str:
        """Return the backend that carries tensors of the accelerator that is here, ``"gloo"`` without one.

        Local.
        """
        return backend_for(pick_device()).rpartition(":")[2]
