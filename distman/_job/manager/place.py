"""What the manager says of the place of this process in its job."""

from __future__ import annotations

import torch

from distman._job.device import backend_for, pick_device
from distman._job.manager.state import SharedState, instance_property
from distman._job.meeting.peers import Peer


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
