"""``physicsnemo.distributed.manager``."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import distman.manager
from distman._job.manager.state import instance_property
from distman.errors import NotInitializedError, UndefinedGroupError
from distman.topology import READY_MADE

__all__ = [
    "DistributedManager",
    "PhysicsNeMoUndefinedGroupError",
    "PhysicsNeMoUninitializedDistributedManagerWarning",
]

PhysicsNeMoUndefinedGroupError = UndefinedGroupError

_METHOD = "PHYSICSNEMO_DISTRIBUTED_INITIALIZATION_METHOD"
_METHODS = {"ENV": "env", "SLURM": "slurm", "OPENMPI": "openmpi"}
_NAMES_OF_METHODS = {"torchrun": "env", "distman-run": "env", "single": "None"}


class PhysicsNeMoUninitializedDistributedManagerWarning(NotInitializedError, Warning):
    """Raised, in spite of its name, where a manager is made before it is initialized."""

    def __init__(self, message: str = "") -> None:
        super().__init__(
            message
            or "DistributedManager must be initialized before it is made. Call DistributedManager.initialize() once at "
            "the start of the script."
        )


class _OneState(type):
    """Lets a program that sets ``_shared_state``, as tests do to forget a job, set that of distman's manager."""

    @property
    def _shared_state(cls) -> dict[str, Any]:
        return distman.manager.DistributedManager._shared_state

    @_shared_state.setter
    def _shared_state(cls, state: dict[str, Any]) -> None:
        distman.manager.DistributedManager._shared_state = state


class DistributedManager(distman.manager.DistributedManager, metaclass=_OneState):
    """The manager of distman, with the calls and the defaults of physicsnemo's.

    Raises:
        PhysicsNeMoUninitializedDistributedManagerWarning: Made before :meth:`initialize`, or after :meth:`cleanup`.
    """

    def __init__(self) -> None:
        if not self.is_initialized():
            raise PhysicsNeMoUninitializedDistributedManagerWarning

    @classmethod
    def initialize(cls, **options: Any) -> distman.manager.DistributedManager:
        """Find out who this process is and bring the job together; NumPy's generator is seeded with the rank.

        Collective. Takes what :meth:`distman.DistributedManager.initialize` takes; without ``method`` the variable
        ``PHYSICSNEMO_DISTRIBUTED_INITIALIZATION_METHOD`` is asked first: ENV, SLURM or OPENMPI.

        Raises:
            RuntimeError: That variable has another value.
            DistmanError: As there.
        """
        if cls.is_initialized():
            warnings.warn("Distributed manager is already initialized", stacklevel=2)
            return cls()
        method = os.environ.get(_METHOD)
        if method is not None and method not in _METHODS:
            raise RuntimeError(
                f"{_METHOD} must be one of {', '.join(_METHODS)}, got {method!r}. Set it right or unset it."
            )
        if method is not None:
            options.setdefault("method", _env_method() if method == "ENV" else _METHODS[method])
        manager = super().initialize(**options)
        with contextlib.suppress(ModuleNotFoundError):  # torch works without it
            import numpy as np

            np.random.seed(manager.rank)
        return manager

    @classmethod
    def initialize_env(cls) -> None:
        """Initialize by ``RANK``, ``WORLD_SIZE``, ``MASTER_ADDR`` and ``MASTER_PORT``, as torchrun sets them.

        Collective.
        """
        cls.initialize(method=_env_method())

    @classmethod
    def initialize_slurm(cls, port: int | str | None = None) -> None:
        """Initialize by what srun says. Collective."""
        _meet_at(None, port)
        cls.initialize(method="slurm")

    @classmethod
    def initialize_open_mpi(cls, addr: str | None = None, port: int | str | None = None) -> None:
        """Initialize by what Open MPI's mpirun says. Collective."""
        _meet_at(addr, port)
        cls.initialize(method="openmpi")

    @classmethod
    def setup(
        cls,
        rank: int = 0,
        world_size: int = 1,
        local_rank: int | None = None,
        addr: str = "localhost",
        port: int | str = "12355",
        backend: str = "nccl",
        method: str = "env",
    ) -> None:
        """Initialize with numbers of your own, which are written into ``os.environ``; ``method`` is a name only.

        Collective.
        """
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size))
        if local_rank is not None:
            os.environ["LOCAL_RANK"] = str(local_rank)
        _meet_at(addr, port)
        cls.initialize(method="env", backend=backend)

    @instance_property
    def _initialization_method(self) -> str:
        return _NAMES_OF_METHODS.get(self.initialization_method, self.initialization_method)

    @instance_property
    def _distributed(self) -> bool:
        return self.distributed

    @instance_property
    def group_names(self) -> tuple[str, ...]:
        """Names of the groups that this program has created."""
        return tuple(name for name in super().group_names if name not in READY_MADE)

    def group(self, name: str | None = None) -> dist.ProcessGroup | None:
        """Return the process group of that name.

        Local.

        Returns:
            The group; None for the world.

        Raises:
            PhysicsNeMoUndefinedGroupError: There is no group of that name.
        """
        return None if name is None else super().group(name)

    def group_name(  # type: ignore[override]  # None for the world, as there
        self, group: dist.ProcessGroup | None = None
    ) -> str | None:
        """Return the name of a process group.

        Local.

        Returns:
            The name; None for the world.
        """
        return None if group is None else super().group_name(group)

    @instance_property
    def global_mesh(self) -> DeviceMesh:
        """The mesh of all ranks; where there is none yet, one with the single axis ``"world"`` is made.

        Collective at the first use if :meth:`initialize_mesh` was not called.
        """
        return super().global_mesh or self.initialize_mesh((-1,), ("world",))

    def initialize_mesh(self, mesh_shape: Sequence[int], mesh_dim_names: Sequence[str]) -> DeviceMesh:
        """Make the mesh of all ranks, see :meth:`distman.DistributedManager.initialize_mesh`.

        Collective.

        Raises:
            RuntimeError: The mesh does not fit the world, or there is one already.
        """
        try:
            return super().initialize_mesh(mesh_shape, mesh_dim_names)
        except ValueError as error:
            raise RuntimeError(str(error)) from None

    def __str__(self) -> str:
        return (
            f"Initialized process {self.rank} of {self.world_size} using method '{self._initialization_method}'. "
            f"Device set to {self.device}"
        )


def _env_method() -> str:
    return "torchrun" if "TORCHELASTIC_RUN_ID" in os.environ else "env"  # both set RANK and WORLD_SIZE


def _meet_at(addr: str | None, port: int | str | None) -> None:
    if addr is not None:
        os.environ["MASTER_ADDR"] = addr
    if port is not None:
        os.environ["MASTER_PORT"] = str(port)
