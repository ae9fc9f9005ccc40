"""The one object that knows the place of this process in its job."""

from __future__ import annotations

import atexit
import datetime
import functools
import inspect
import os
import threading
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from distman import _log
from distman._coordination import protocol, tracking
from distman._coordination.failure import hook
from distman._coordination.monitor.watcher import WatchLimits, raise_if_failed
from distman._coordination.preemption import StopAgreement, requeue
from distman._coordination.sync import wait_for_all
from distman._coordination.wait_scope import WaitScope
from distman._device import backend_for, check_backend, pick_device, requested_device
from distman._groups.queries import GroupQueries, ManagerState
from distman._groups.registry import Groups
from distman._job.job import Limits
from distman._job.shutdown import leave, wait_for_gloo
from distman._job.start import adopt, start, watch
from distman._process_state import puts_back
from distman._rendezvous.peers import Peers
from distman._seeds import seed_generators
from distman.environments import LaunchEnvironment, detect, misspelt_variables
from distman.environments._base import read_flag
from distman.errors import DistmanError, NotInitializedError, check_options

__all__ = ["DistributedManager", "initialize_ddp"]

# Variables of the environment, with the seconds that hold without them.
_TIMEOUT = ("DISTMAN_TIMEOUT", 3600.0)  # ranks may do different work for long, such as saving on one of them
_RENDEZVOUS_TIMEOUT = ("DISTMAN_RENDEZVOUS_TIMEOUT", 300.0)  # imports from a shared file system take minutes
_SILENCE_TIMEOUT = ("DISTMAN_SILENCE_TIMEOUT", 300.0)  # native code may hold the GIL for minutes
_HANG_TIMEOUT = "DISTMAN_HANG_TIMEOUT"
_WATCH = "DISTMAN_WATCH"
_FIND_UNUSED = "DDP_FIND_UNUSED_PARAMETERS"


class DistributedManager(GroupQueries):
    """The place of this process in its job: the same state in every instance (Borg).

    Call :meth:`initialize` once, at the start of the script; make an instance wherever the answer is needed.

    Raises:
        NotInitializedError: Made before :meth:`initialize`, or after :meth:`cleanup`.
    """

    _shared_state: ClassVar[dict[str, Any]] = {}

    def __init__(self) -> None:
        self.__dict__ = type(self)._shared_state
        if "_state" not in self.__dict__:
            raise _not_initialized()

    def __getattr__(self, name: str) -> Any:
        if name == "_state":
            raise _not_initialized()
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    @classmethod
    def initialize(
        cls,
        *,
        method: str | None = None,
        backend: str | None = None,
        device: str | torch.device | None = None,
        timeout: float | datetime.timedelta | None = None,
        rendezvous_timeout: float | datetime.timedelta | None = None,
        use_distributed: bool | None = None,
        seed: int | None = None,
        fail_with_threads: bool = False,
    ) -> DistributedManager:
        """Find out who this process is, bring the job together, and return the manager.

        Collective. Writes nothing into ``os.environ`` and prints nothing. A second call warns and changes
        nothing; a call that failed leaves no trace and can be repeated. A default process group that other
        code made is adopted, and left in place by :meth:`cleanup`.

        Args:
            method: Name of the launcher to believe, any case; None asks
                ``DISTMAN_INITIALIZATION_METHOD``, then all launchers in turn (see :func:`distman.explain`).
            backend: Backend of the process group; None takes gloo for CPU tensors and the accelerator's own.
            device: Device of this rank; None picks one by the rank's place on its host.
            timeout: Seconds that a collective may take; None asks ``DISTMAN_TIMEOUT``, then takes 3,600.
            rendezvous_timeout: Seconds to wait for the other ranks; None asks
                ``DISTMAN_RENDEZVOUS_TIMEOUT``, then takes 300.
            use_distributed: True fails where no launcher speaks; False is one process whatever they say; None
                believes them.
            seed: Seeds Python, NumPy and torch with ``seed + rank``; None seeds nothing.
            fail_with_threads: Whether an exception that ends a thread other than the main one ends the job; else
                it is printed, and the program goes on, as it does in Python.

        Raises:
            LaunchEnvironmentError: Variables of the launcher are missing or contradict each other.
            RendezvousError: On every rank that arrived: ranks are missing, double, unlike or share a GPU, or
                the address is not reachable.
            RankFailedError: On every rank that arrived: another rank raised before it got here.
            ValueError: An argument, or the variable that stands for it, has no meaning.
        """
        if cls.is_initialized():
            _log.logger.warning("DistributedManager is already initialized: this call changes nothing")
            return cls()
        limits = Limits(_seconds(timeout, *_TIMEOUT), _seconds(rendezvous_timeout, *_RENDEZVOUS_TIMEOUT))
        watch_limits = _watch_limits()
        requested = requested_device(device)
        if backend is not None:
            check_backend(backend)
        find_unused = read_flag(os.environ, _FIND_UNUSED)
        if dist.is_initialized():
            _warn_of_misspelt(dist.get_rank())
            job = adopt(detect(os.environ, method).environment, requested, limits)
        else:
            environment = _environment(method, use_distributed=use_distributed)
            _warn_of_misspelt(environment.rank)
            job = start(environment, backend, requested, limits)
        cls._shared_state["_state"] = ManagerState(
            job=job,
            groups=Groups(job),
            watcher=watch(job, watch_limits),
            stop=StopAgreement(job.store_group()),
            find_unused_parameters=find_unused,
        )
        watcher = cls._shared_state["_state"].watcher
        hook.set_thread_reporter(watcher.fail if fail_with_threads and watcher is not None else None)
        tracking.enter_rank_process()
        _log.set_rank(job.peer.rank if job.backend else None, job.world_size)
        atexit.register(cls._cleanup_at_exit, os.getpid())
        if seed is not None:
            seed_generators(seed + job.peer.rank)
        return cls()

    @classmethod
    def is_initialized(cls) -> bool:
        """Return whether :meth:`initialize` has succeeded and :meth:`cleanup` was not called since.

        Local.
        """
        return "_state" in cls._shared_state

    @classmethod
    def cleanup(cls, barrier: bool = False) -> None:
        """Leave the job: destroy the process group that :meth:`initialize` made, and forget everything.

        Local; collective with ``barrier=True``. Done at the end of the program by itself; harmless where
        nothing is initialized.

        Args:
            barrier: Wait for the other ranks first.
        """
        if not cls.is_initialized():
            return
        state = cls()._state
        if barrier and state.job.backend:
            cls().barrier("cleanup")
        if state.watcher is not None:
            state.watcher.stop()  # first: a failure elsewhere must not interrupt what follows
        state.stop.restore()
        cls._shared_state.clear()
        atexit.unregister(cls._cleanup_at_exit)
        hook.set_reporter(None)
        hook.set_thread_reporter(None)
        _log.set_rank(None)
        tracking.leave_rank_process()
        state.groups.close()
        leave(state.job, state.watcher)
        if state.watcher is not None:
            state.watcher.close()

    @classmethod
    def _cleanup_at_exit(cls, pid: int) -> None:
        """Clean up at the end of the program; after an uncaught exception, wait for nobody."""
        if os.getpid() != pid or not cls.is_initialized():
            return
        hook.report_at_end()
        if hook.has_failed():
            watcher = cls()._state.watcher
            if watcher is not None:
                watcher.stop()
                watcher.close()
            wait_for_gloo()
        else:
            cls.cleanup()

    @property
    def rank(self) -> int:
        """Index of this process in the job."""
        return self._state.job.peer.rank

    @property
    def world_size(self) -> int:
        """Number of processes in the job."""
        return self._state.job.world_size

    @property
    def local_rank(self) -> int:
        """Index of this process on its host."""
        return self._state.job.peer.local_rank

    @property
    def local_world_size(self) -> int:
        """Number of the job's processes on this host."""
        return self._state.job.peer.local_world_size

    @property
    def node_rank(self) -> int:
        """Index of this host among the job's hosts."""
        return self._state.job.peer.node_rank

    @property
    def num_nodes(self) -> int:
        """Number of hosts in the job."""
        return self._state.job.peer.num_nodes

    @property
    def device(self) -> torch.device:
        """Device on which this rank computes."""
        return self._state.job.device

    @property
    def cuda(self) -> bool:
        """Whether this rank computes on a CUDA or ROCm device."""
        return self._state.job.device.type == "cuda"

    @property
    def distributed(self) -> bool:
        """Whether a process group is up, be it of one rank."""
        return self._state.job.backend is not None

    @property
    def backend(self) -> str | None:
        """Backend of the process group, such as ``"cpu:gloo"``; None where there is none."""
        return self._state.job.backend

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0."""
        return self._state.job.peer.rank == 0

    @property
    def is_local_main(self) -> bool:
        """Whether this is local rank 0 of its host."""
        return self._state.job.peer.local_rank == 0

    @property
    def initialization_method(self) -> str:
        """Name of the launcher that was believed, such as ``"slurm"``."""
        return self._state.job.peer.launcher

    @property
    def roll_call(self) -> Peers:
        """Every rank of the job with its host, pid, device and versions, in rank order; the same on all ranks."""
        return self._state.job.roll_call

    @property
    def broadcast_buffers(self) -> bool:
        """Whether DDP broadcasts rank 0's buffers before each forward, not only once; False unless set."""
        return self._state.broadcast_buffers

    @broadcast_buffers.setter
    def broadcast_buffers(self, value: bool) -> None:
        self._state.broadcast_buffers = value

    @property
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

    def barrier(self, name: str | None = None, timeout: float | datetime.timedelta | None = None) -> None:
        """Wait until all ranks have come here.

        Collective. Blocking. It goes over the store, so it takes no part in the order of collectives; work
        already queued on a GPU is not waited for.

        Args:
            name: Name of the barrier for messages; ranks that wait at different names do not meet.
            timeout: Seconds to wait; None takes the timeout of collectives.

        Raises:
            BarrierTimeoutError: On every rank that came: some did not come in time; it names them, and where they
                are.
            RankFailedError: On every rank that came: another one failed, or left the job; on one that came later: the
                others had given up.
            DistmanError: Called where only some ranks run.
        """
        job = self._state.job
        store_group = job.store_group()
        seconds = _seconds(timeout, "", job.limits.collective)
        with WaitScope(f"barrier {name!r}" if name else "barrier"):
            tracking.check_all_run_here(range(job.world_size))
            raise_if_failed()
            if store_group is not None:
                key = protocol.barrier(next(job.barriers), name)
                locate = functools.partial(self._state.watcher.locate, key) if self._state.watcher is not None else None
                wait_for_all(store_group, key, timeout=seconds, locate=locate)

    def request_stop(self) -> None:
        """Ask all ranks to stop at the next step that :meth:`should_stop` agrees on.

        Local. Any rank may call it, at any time, from any thread.
        """
        self._state.stop.request()

    def should_stop(self, step: int | None = None) -> bool:
        """Return whether to stop at this step: True on all ranks at the same step, once one was asked to.

        Local: it waits for no other rank, and talks to the store about once a second. SIGTERM and SIGUSR1 ask for a
        stop, as :meth:`request_stop` does, from the first call on; a handler that was there before is called too.

        Args:
            step: Number of the step, growing, and the same on all ranks; None counts the calls.

        Raises:
            ValueError: The step is smaller than the one before.
            PlanMismatchError: The ranks ask at different steps.
            DistmanError: Called in a process forked from the rank.
        """
        if tracking.is_child():
            raise DistmanError(f"should_stop() must be called in the process of the rank, got its child {os.getpid()}.")
        self._state.stop.listen()
        return self._state.stop.decide(step)

    def requeue(self) -> None:
        """Let Slurm run this job again from its start, when all ranks have come here.

        Collective. Blocking. To be called last, once everything is saved: Slurm ends what still runs of the job. A job
        that Slurm already ends, because it was cancelled say, is left alone.

        Raises:
            DistmanError: On rank 0: there is no Slurm job, or Slurm refuses.
            RankFailedError: On the other ranks, then.
            BarrierTimeoutError: On every rank that came: some did not.
        """
        self.barrier("requeue")
        if self.is_main:
            requeue(os.environ)
        self.barrier("requeued")  # the first rank to leave may end the step, and rank 0's request with it

    def wrap_ddp(self, module: torch.nn.Module, **kwargs: Any) -> torch.nn.Module:
        """Return the module as a DistributedDataParallel on this rank's device, or unchanged on one process.

        Collective. The module must already be on :attr:`device`. What several ranks refuse, one process refuses too.

        Args:
            module: The model; some parameter of it must require a gradient.
            kwargs: Options of DistributedDataParallel; they go before the manager's own.

        Raises:
            TypeError: It is no module, or DistributedDataParallel has no such option.
            ValueError: No parameter requires a gradient.
        """
        _check_wrappable(module, kwargs)
        if self.world_size == 1:
            return module
        options: dict[str, Any] = {"find_unused_parameters": self.find_unused_parameters}
        if "broadcast_buffers" not in kwargs:
            options["forward_sync_buffers"] = self.broadcast_buffers
        if not self.cuda:
            return DistributedDataParallel(module, **{**options, **kwargs})
        options |= {"device_ids": [self.device.index], "output_device": self.device}
        side_stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        side_stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(side_stream):
            wrapped = DistributedDataParallel(module, **{**options, **kwargs})
        torch.cuda.current_stream(self.device).wait_stream(side_stream)
        return wrapped

    def __str__(self) -> str:
        peer = self._state.job.peer
        return (
            f"DistributedManager(rank {peer.rank} of {self.world_size}, local rank {peer.local_rank} of "
            f"{peer.local_world_size} on {peer.host}, node {peer.node_rank} of {peer.num_nodes}, "
            f"{self.device}, {self.backend or 'no process group'}, {peer.launcher})"
        )

    __repr__ = __str__


@puts_back
def _clean_up() -> None:
    DistributedManager.cleanup()


def initialize_ddp(
    timeout: datetime.timedelta | None = None,
) -> tuple[bool, int, int, int, torch.device] | None:
    """Initialize the manager, and return what it found; None where it is initialized already.

    Collective.

    Args:
        timeout: Limit of a collective; None takes 60 minutes.

    Returns:
        ``(distributed, rank, local_rank, world_size, device)``, or None.

    Raises:
        DistmanError: See :meth:`DistributedManager.initialize`.
    """
    if DistributedManager.is_initialized():
        return None
    manager = DistributedManager.initialize(timeout=timeout)
    return manager.distributed, manager.rank, manager.local_rank, manager.world_size, manager.device


def _environment(method: str | None, *, use_distributed: bool | None) -> LaunchEnvironment:
    if use_distributed is False:
        return LaunchEnvironment.lone()
    detection = detect(os.environ, method)
    for sentence in detection.warnings:
        _log.logger.warning(sentence)
    if use_distributed:
        detection.require_launcher()
    return detection.environment


def _seconds(value: float | datetime.timedelta | None, variable: str, default: float) -> float:
    """Return a limit in seconds: the argument, else the variable, else the default."""
    got = f"{value} from the call"
    seconds = value.total_seconds() if isinstance(value, datetime.timedelta) else value
    if seconds is None:
        text = os.environ.get(variable)
        if not text:
            return default
        seconds, got = _number(text), f"{text!r} from {variable}"
    if seconds is None or not 0 < seconds < threading.TIMEOUT_MAX:
        raise ValueError(f"a timeout must be a positive number of seconds, got {got}. Leave it out for the default.")
    return float(seconds)


def _watch_limits() -> WatchLimits | None:
    """Return the limits of the watcher; None where it is switched off."""
    if not read_flag(os.environ, _WATCH, default=True):
        return None
    hang = _seconds(None, _HANG_TIMEOUT, 0.0) or None
    return WatchLimits(silence=_seconds(None, *_SILENCE_TIMEOUT), hang=hang)


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _warn_of_misspelt(rank: int) -> None:
    """Say on rank 0 which variables have no effect."""
    if rank == 0:
        for sentence in misspelt_variables(os.environ):
            _log.logger.warning(sentence)


def _check_wrappable(module: torch.nn.Module, options: dict[str, Any]) -> None:
    """Refuse, on any number of ranks, what DistributedDataParallel would on several."""
    if not isinstance(module, torch.nn.Module):
        raise TypeError(f"module must be a torch.nn.Module, got a {type(module).__name__}. Pass the model.")
    check_options(options, [*inspect.signature(DistributedDataParallel).parameters][1:], "wrap_ddp")
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise ValueError(
            "module must have a parameter that requires a gradient, got none. Call the module as it is: there is no "
            "gradient to average."
        )


def _not_initialized() -> NotInitializedError:
    return NotInitializedError(
        "DistributedManager must be initialized before it is used. Call DistributedManager.initialize() "
        "once at the start of the script."
    )
