"""The one object that knows the place of this process in its job."""

from __future__ import annotations

import atexit
import datetime
import functools
import inspect
import multiprocessing.process
import multiprocessing.util
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from distman._base import log
from distman._base.arguments import check_seconds
from distman._base.moved_names import missing_attribute
from distman._base.process_state import puts_back
from distman._base.seeds import seed_generators
from distman._coordination import protocol, tracking
from distman._coordination.consensus import wait_for_all
from distman._coordination.failure import hook
from distman._coordination.failure.delivery import call_before_it_is_printed, error_that_ends_process
from distman._coordination.failure.pending_work import complete_all
from distman._coordination.monitor.slowness import SlowRank, slow_ranks
from distman._coordination.preemption import StopAgreement, requeue
from distman._coordination.stop_signals import stop_signals
from distman._coordination.time_limit import TimeLimit, margin
from distman._coordination.wait_scope import WaitScope, failure_behind, note_raised, raise_if_failed
from distman._job.device import check_backend, requested_device
from distman._job.groups.registry import Groups
from distman._job.job import Job, Limits
from distman._job.manager import settings
from distman._job.manager.group_methods import GroupMethods
from distman._job.manager.replicas import check_replicas
from distman._job.manager.state import ManagerState, OneAtATime, Place
from distman._job.manager.wrapping import (
    Initialize,
    Parts,
    Precision,
    Sharding,
    check_mesh,
    check_module,
    check_wrappable,
    wrap,
)
from distman._job.shutdown import abandon, close_kept, leave
from distman._job.start import adopt, reporter_of, start, undo, watch
from distman._torch_internals import check_finds_unused, close_all_connections
from distman.environments import detect
from distman.errors import DistmanError, JobFailed

__all__ = ["DistributedManager", "initialize_ddp"]

_lifecycle = OneAtATime()
os.register_at_fork(after_in_child=_lifecycle.forget)


class DistributedManager(Place, GroupMethods):
    """The place of this process in its job: the same state in every instance (Borg).

    Call :meth:`initialize` once, at the start of the script; make an instance wherever the answer is needed.

    Raises:
        NotInitializedError: Made before :meth:`initialize`, or after :meth:`cleanup`.

    Example:
        >>> manager = DistributedManager.initialize()
        >>> print(f"rank {manager.rank} of {manager.world_size} on {manager.device}")
        rank 0 of 1 on cpu
        >>> manager
        DistributedManager(rank 0 of 1, local rank 0 of 1 on ..., node 0 of 1, cpu, no process group, single)
    """

    __signature__ = inspect.Signature()  # of a call by users; ``__new__`` takes anything for classes based on this one

    if not TYPE_CHECKING:  # else any name would pass

        def __getattr__(self, name: str) -> Any:
            raise missing_attribute(self, name)

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

        Collective. Prints nothing, and writes nothing into ``os.environ`` but the interface for gloo where it would
        choose the loopback. A second call warns and changes nothing; a call that failed leaves no trace and can be
        repeated. Of threads that call at once one initializes, and the others wait for it. A default process group that
        other code made is adopted, with its backend and timeout, and left in place by :meth:`cleanup`.

        A process that has left a group of other code and goes on serving its store, see :meth:`cleanup`, first waits
        until the others have left that job too or one of them has failed, ten seconds at most; a rank that is in
        the new job already waits for it.

        Args:
            method: Name of the launcher to believe, any case; None asks
                ``DISTMAN_INITIALIZATION_METHOD``, then all launchers in turn (see :func:`distman.explain`).
            backend: Backend of the process group; None takes gloo for CPU tensors and the accelerator's own.
            device: Device of this rank, which must be there; None picks one by the rank's place on its host.
            timeout: Seconds that a collective may take; None asks ``DISTMAN_TIMEOUT``, then takes that of the group
                that is adopted, or 3,600.
            rendezvous_timeout: Seconds to wait for the other ranks; None asks
                ``DISTMAN_RENDEZVOUS_TIMEOUT``, then takes 300.
            use_distributed: True fails where no launcher speaks; False is one process whatever they say, and
                whatever process group there is; None believes them.
            seed: Seeds Python, NumPy and torch with ``seed + rank``; None seeds nothing.
            fail_with_threads: Whether an exception that ends a thread other than the main one ends the job; else
                it is printed, and the program goes on, as it does in Python.

        Raises:
            LaunchEnvironmentError: Variables of the launcher are missing or contradict each other.
            RendezvousError: On every rank that arrived: ranks are missing, double, unlike or share a GPU, or
                the address is not reachable.
            JobFailed: On every rank that arrived: another rank raised before it got here.
            ValueError: An argument, or the variable that stands for it, has no meaning.
            TypeError: An argument is of the wrong type.
            DistmanError: Called in a process forked from a rank, which cannot be a rank of that job, too.

        Example:
            >>> manager = DistributedManager.initialize(device="cpu", timeout=600, seed=1)
            >>> manager.initialization_method, manager.is_main
            ('single', True)
        """
        if _lifecycle.is_here:
            raise DistmanError(
                f"initialize() must not be called while this thread starts or ends the job, got a call at "
                f"{tracking.call_site()}. Move it out of the signal handler or destructor."
            )
        with _lifecycle.alone():
            if cls.is_initialized() and tracking.is_outside() and cls()._state.job.backend is None:
                cls._forget(cls()._state.job)  # forked from a process that was alone: it may become a rank of its own
            if not cls.is_initialized():
                close_kept()
                adopted = settings.group_to_adopt(use_distributed=use_distributed)
                limits = settings.limits(timeout, rendezvous_timeout, adopted)
                try:
                    cls._start(method, backend, requested_device(device), limits, use_distributed, settings.seed(seed))
                except JobFailed as error:
                    note_raised(error)
                    raise
                hook.be_outermost()
                watcher = cls()._state.watcher
                if fail_with_threads and watcher is not None:
                    hook.set_thread_reporter(watcher.fail)
            else:
                log.logger.warning("DistributedManager is already initialized: this call changes nothing")
        return cls()

    @classmethod
    def _start(
        cls,
        method: str | None,
        backend: str | None,
        requested: torch.device | None,
        limits: Limits,
        use_distributed: bool | None,
        seed: int | None,
    ) -> None:
        if use_distributed is not False:
            tracking.check_speaks_for_rank("initialize() of a rank")
        watch_limits, signals = settings.watch_limits(), stop_signals(os.environ)
        time_limit, stop_margin = TimeLimit(os.environ), margin(os.environ)
        if backend is not None:
            check_backend(backend)
        find_unused = settings.finds_unused_parameters()
        if settings.group_to_adopt(use_distributed=use_distributed) is not None:
            settings.check_adopted_backend(backend)
            settings.warn_of_misspelt(dist.get_rank())
            job = adopt(detect(os.environ, method).environment, requested, limits, watch_limits)
            watcher = None
        else:
            environment = settings.environment(method, use_distributed=use_distributed)
            settings.warn_of_misspelt(environment.rank)
            job, watcher = start(environment, backend, requested, limits, watch_limits)
        try:
            if job.is_adopted:
                watcher = watch(job, watch_limits)
            state = ManagerState(
                job=job,
                groups=Groups(job),
                watcher=watcher,
                stop=StopAgreement(job.store_group(), signals, time_limit, stop_margin),
                find_unused_parameters=find_unused,
            )
            if seed is not None:
                seed_generators(seed + job.peer.rank)
            tracking.enter_rank_process()
            log.set_rank(job.peer.rank if job.backend else None, job.world_size)
            atexit.register(cls._cleanup_at_exit, os.getpid())
            _end_with_multiprocessing(os.getpid())
            cls._shared_state["_state"] = state  # last: other threads may ask from now on
        except BaseException as error:  # Ctrl-C, or the failure of another rank
            cls._forget(job)
            undo(job, watcher, error)
            raise

    @classmethod
    def cleanup(cls, barrier: bool = False) -> None:
        """Leave the job: destroy the process group that :meth:`initialize` made, and forget everything.

        Local; collective with ``barrier=True``. Done at the end of the program by itself; harmless where
        nothing is initialized. In a process forked from the rank it forgets, and the rank stays in the job.

        Blocking until what this rank saves in the background is written, and until all ranks have started, ten seconds
        at most; under Slurm, on several hosts, the rank that started the store stays as long until the others have left
        too. Groups of NCCL end on all ranks of a host together: one that does not within ten seconds is aborted.

        Args:
            barrier: Wait for the other ranks first.

        Raises:
            DistmanError: Asked to wait in a process forked from the rank.

        Example:
            >>> manager = DistributedManager.initialize()
            >>> DistributedManager.cleanup()
            >>> DistributedManager.is_initialized()
            False
        """
        if not cls.is_initialized() or _lifecycle.is_here:
            return
        if barrier:
            tracking.check_speaks_for_rank("cleanup(barrier=True)")
        complete_all()  # what is saved in parts needs the other ranks
        with _lifecycle.alone():
            if not cls.is_initialized():  # another thread was faster
                return
            state = cls()._state
            if tracking.is_outside():
                cls._forget(state.job)
                return
            if barrier and state.job.backend:
                cls().barrier("cleanup")
            cls._leave(state)

    @classmethod
    def _leave(cls, state: ManagerState, *, stays_known: bool = False) -> None:
        if state.watcher is not None:
            state.watcher.let_program_be()  # first: a failure elsewhere must not interrupt what follows
        if stays_known:
            tracking.end_rank_process()
        else:
            cls._forget(state.job)
        error, rendezvous = sys.exc_info()[1], state.job.rendezvous
        if error is None:
            hook.set_reporter(None)
        elif rendezvous is not None:  # while the watcher can still say where the error comes from
            reporter = reporter_of(state.job, rendezvous, failure_behind(error), state.watcher)
            hook.set_reporter_for(error, reporter)
        hook.set_thread_reporter(None)
        has_failed = error is not None or (state.watcher is not None and state.watcher.record is not None)
        state.groups.close(aborts=has_failed)
        if not has_failed:
            state.stop.leave()
        try:
            leave(state.job, state.watcher)
        finally:
            state.stop.restore()  # last: a second SIGTERM must not end the rank that serves those that still save

    @classmethod
    def _forget(cls, job: Job) -> None:
        """Forget the job; a child that was forked from one of several ranks stays one."""
        cls._shared_state.clear()
        atexit.unregister(cls._cleanup_at_exit)
        log.set_rank(None)
        if job.backend is None or not tracking.is_outside():
            tracking.leave_rank_process()

    @classmethod
    def _cleanup_at_exit(cls, pid: int) -> None:
        """Leave the job at the end of the program; after an uncaught exception, wait for nobody.

        What is known stays, for exit handlers that come later since they were registered before ``initialize()``.
        """
        if os.getpid() != pid or not cls.is_initialized() or tracking.is_outside():
            return
        hook.report_at_end()
        if hook.has_failed():
            abandon(cls()._state.watcher)
            tracking.end_rank_process()
            if dist.is_initialized():  # their destructors would wait for collectives that nobody completes
                close_all_connections()
        else:
            with _lifecycle.alone():
                if cls.is_initialized():
                    cls._leave(cls()._state, stays_known=True)

    def barrier(self, name: str | None = None, timeout: float | datetime.timedelta | None = None) -> None:
        """Wait until all ranks have come here.

        Collective. Blocking. It goes over the store, so it takes no part in the order of collectives; work
        already queued on a GPU is not waited for.

        Args:
            name: Name of the barrier for messages; ranks that wait at different names do not meet. Each name is
                remembered and counted until the job ends: let it be ``"step"``, not one for each step.
            timeout: Seconds to wait; None takes the timeout of collectives.

        Raises:
            BarrierTimeoutError: On every rank that came: some did not come in time; it names them, and where they
                are.
            JobFailed: On every rank that came: another one failed, or left the job.
            RankFailedError: On a rank that came when the others had given up.
            DistmanError: Called where only some ranks run.
            TypeError: The name is not a string, or the timeout is not a number of seconds.

        Example on two ranks:
            >>> if rank == 0:
            ...     table = "prepared"
            >>> manager.barrier("prepared", timeout=60)  # rank 1 waits for rank 0 here
        """
        job = self._state.job
        store_group = job.store_group()
        seconds = job.limits.collective if timeout is None else check_seconds("timeout", timeout)
        if not isinstance(name, str | None):
            raise TypeError(f"name must be a string, got {name!r}. Pass a limit in seconds as timeout={name!r}.")
        with WaitScope(f"barrier {name!r}" if name else "barrier"):
            tracking.check_all_run_here(range(job.world_size))
            raise_if_failed()
            if store_group is not None:
                key = protocol.barrier(next(job.barriers[name]), name)
                locate = self._state.watcher.locate if self._state.watcher is not None else None
                wait_for_all(store_group, key, timeout=seconds, locate=locate)

    def check_replicas(
        self, module: torch.nn.Module, *optimizers: torch.optim.Optimizer, step: int | None = None, buffers: bool = True
    ) -> None:
        """Compare the numbers of a model bit for bit between the ranks that ought to hold the same.

        Collective. Blocking. Sums over the bits of each parameter and buffer, and of the optimizers' states, are
        compared. Of a :class:`~torch.nn.parallel.DistributedDataParallel` its group is compared, of sharded parameters
        the ranks of replicated mesh axes, else all ranks. The statistics that norms keep of each rank's own batches are
        left out, unless they are a :class:`~torch.nn.SyncBatchNorm`'s. Kernels that are not deterministic do no harm:
        all ranks take the same sum of the gradients.

        Args:
            module: A model that all ranks hold.
            optimizers: Its optimizers, if their states are to be compared too.
            step: The step to name in the error.
            buffers: Compare buffers, too. Leave them out where a module changes them by the rank's own batch.

        Raises:
            DivergenceError: On every rank: a tensor differs; the error names it, and the odd rank and its host.
            PlanMismatchError: The ranks pass modules with other tensors.
            JobFailed: Another rank failed.
            TypeError: ``module`` is not a module.

        Example:
            >>> manager = DistributedManager.initialize()
            >>> model = torch.nn.Linear(2, 1)
            >>> for step in range(100):
            ...     if step % 50 == 0:
            ...         manager.check_replicas(model, step=step)
        """
        job = self._state.job
        check_module(module)
        if job.backend is not None:
            tracking.check_all_run_here(range(job.world_size))
            raise_if_failed()
            check_replicas(module, optimizers, step, job, buffers=buffers)

    def slow_ranks(self) -> tuple[SlowRank, ...]:
        """Return which ranks all others wait for in each step, and what takes longer there.

        Local. Timed are the steps of a loop over a loader for training of :func:`distman.data.distributed_loader`, and
        those of :meth:`NNHandler.train` and :meth:`Stepper.batches` with any loader. Rank 0 compares the ranks, and
        logs each change. A rank is slow when one phase takes 1.15 times as long as on the other ranks and costs 5 % of
        a step, over several windows of at least 5 steps and 0.4 seconds each: four, or more on a noisy machine.

        Returns:
            The slow ranks, in rank order; empty where no steps are timed.

        Raises:
            DistmanError: Called in a process forked from the rank.

        Example:
            >>> DistributedManager.initialize().slow_ranks()
            ()
        """
        tracking.check_speaks_for_rank("slow_ranks()")
        watcher = self._state.watcher
        return slow_ranks(watcher.store, [peer.host for peer in self.roll_call]) if watcher is not None else ()

    def request_stop(self) -> None:
        """Ask all ranks to stop at the next step that :meth:`should_stop` agrees on.

        Local. Any rank may call it, at any time, from any thread.

        Raises:
            DistmanError: Called in a process forked from the rank.
        """
        tracking.check_speaks_for_rank("request_stop()")
        self._state.stop.request()

    def time_left(self) -> float | None:
        """Return how many seconds the job may still run; None where nothing says so, or the job has no limit.

        Local. ``DISTMAN_END_TIME`` or ``SLURM_JOB_END_TIME`` say when the time is up, in seconds since 1970. Without
        them rank 0 asks Slurm, PBS, LSF or Flux once, which takes a moment; the other ranks know what it heard once it
        has called :meth:`should_stop`.

        Raises:
            DistmanError: Called in a process forked from the rank.

        Example:
            >>> DistributedManager.initialize().time_left() is None  # outside of a scheduler's job
            True
        """
        tracking.check_speaks_for_rank("time_left()")
        return self._state.stop.time_left()

    def should_stop(self, step: int | None = None) -> bool:
        """Return whether to stop at this step: True on all ranks at the same step, once one was asked to.

        Local: it waits for no other rank until one was asked to stop; then once, for about a second, until all know of
        it. SIGTERM, SIGUSR1 and SIGUSR2 (``DISTMAN_STOP_SIGNALS``) ask for a stop, as :meth:`request_stop` does, from
        the first call in the main thread on; a handler that was there before is called too. So does the end of the
        job's time, see :meth:`time_left`, once less is left than ``DISTMAN_STOP_MARGIN`` seconds. Without that variable
        the margin is measured: 1.25 times the longest time between two calls so far, without the saves of
        :mod:`distman.checkpoint`, and twice the longest of these; twice the former where there are none; at least 10
        seconds.

        Args:
            step: Number of the step, growing, and the same on all ranks; None counts the calls.

        Raises:
            ValueError: The step is smaller than the one before.
            TypeError: The step is not a whole number.
            PlanMismatchError: The ranks ask at different steps.
            JobFailed: A rank was asked to stop, and one failed or left before it knew.
            DistmanError: Called in a process forked from the rank.

        Example:
            >>> manager = DistributedManager.initialize()
            >>> for step in range(1000):
            ...     if step == 2:
            ...         manager.request_stop()  # as Slurm does by a signal
            ...     if manager.should_stop(step):
            ...         print(f"saving and leaving at step {step}")
            ...         break
            saving and leaving at step 2
        """
        tracking.check_speaks_for_rank("should_stop()")
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
        error: Exception | None = None
        if self.is_main:
            try:
                requeue(os.environ)
            except Exception as refused:  # noqa: BLE001 - whatever it is, it is raised on all ranks
                error = refused
        consensus = self._state.groups.world.consensus
        if consensus is not None:  # nobody goes on before: the first to leave may end the step, and rank 0's request
            with WaitScope("requeue()"):
                key = protocol.barrier(next(self._state.job.barriers["requeued"]), "requeued")
                consensus.require_success(key, error)
        elif error is not None:
            raise error

    def wrap_ddp(self, module: torch.nn.Module, **kwargs: Any) -> torch.nn.Module:
        """Return the module as a DistributedDataParallel on this rank's device, or unchanged on one process.

        Collective. The module must already be on :attr:`device`. What several ranks refuse, one process refuses too.

        Args:
            module: The model; some parameter of it must require a gradient.
            kwargs: Options of :class:`torch.nn.parallel.DistributedDataParallel`; they go before the manager's own.

        Raises:
            TypeError: It is no module, or DistributedDataParallel has no such option.
            ValueError: No parameter requires a gradient.
            DistmanError: Called in a process forked from the rank.

        Example on two ranks:
            >>> model = manager.wrap_ddp(torch.nn.Linear(1, 1, bias=False).to(manager.device))
            >>> model(torch.tensor([rank + 1.0])).backward()
            >>> model.module.weight.grad  # the mean of 1 and 2
            tensor([[1.5000]])
        """
        check_wrappable(module, kwargs)
        tracking.check_speaks_for_rank("wrap_ddp()")
        if self.world_size == 1:
            return module
        options = {"find_unused_parameters": self.find_unused_parameters, **kwargs}
        wrapped = wrap(module, options, self.device)
        if kwargs.keys().isdisjoint({"broadcast_buffers", "forward_sync_buffers"}):
            # In every version of torch this is for later: as an argument it would leave out the first broadcast in some
            wrapped.broadcast_buffers = self.broadcast_buffers
        return wrapped

    def wrap_fsdp(
        self,
        module: torch.nn.Module,
        *,
        mesh: DeviceMesh | str | Sequence[str] | None = None,
        shard: Parts | None = None,
        mixed_precision: Precision | None = None,
        checkpoint_activations: bool = False,
        initialize: Initialize | None = None,
        **kwargs: Any,
    ) -> torch.nn.Module:
        """Shard a module's parameters over the ranks, in place, and return it; on one process it stays as it is.

        Collective over the ranks of the mesh. Each rank keeps its part of the parameters, and so of the gradients and
        of an optimizer that is made afterwards; they are gathered where they are computed with. All ranks get the
        weights and buffers of the first one. The module must already be on :attr:`device`, or on the meta device; to
        call it, and to compute with a whole parameter, is collective. What several ranks refuse, one process refuses
        too.

        Args:
            module: The model, whose ranks differ in nothing but values.
            mesh: Over which ranks: axes of :attr:`global_mesh` by their names, or a mesh. Along one axis the parameters
                are sharded; of two, the first one has replicas, and the second one shards. None is all ranks.
            shard: Which modules within the model are gathered one at a time: a class, several, or a function that takes
                a module. The blocks of a transformer, say: then a rank needs room for one whole block. None gathers
                the whole model at once.
            mixed_precision: ``"bf16"`` or ``"fp16"`` computes with, and gathers, parameters of this type, while
                gradients are summed, and parameters kept, as float32; a policy of torch says more.
            checkpoint_activations: Compute what is inside the modules of ``shard`` again in the backward pass, and keep
                their inputs alone.
            initialize: Takes a module within the model and sets its own parameters and buffers, where these are on the
                meta device: of a model that no rank has room for. They are made and sharded one part of ``shard`` at a
                time. None calls ``reset_parameters()``.
            kwargs: The options ``reshard_after_forward``, ``shard_placement_fn`` and ``offload_policy`` of
                :func:`torch.distributed.fsdp.fully_shard`.

        Raises:
            TypeError: It is no module, ``shard`` no class or function, or there is no such option.
            ValueError: The module, its parameters, the mesh or an option cannot be used, such as
                ``checkpoint_activations`` without ``shard``; it says why.
            UndefinedGroupError: There is no such axis.
            PlanMismatchError: On every rank: the ranks have different models.
            DistmanError: Called in a process forked from the rank.

        Example on two ranks:
            >>> model = manager.wrap_fsdp(torch.nn.Linear(1, 2, bias=False).to(manager.device))
            >>> model(torch.tensor([rank + 1.0])).sum().backward()
            >>> model.weight.grad.to_local()  # of this rank's row: the mean of 1 and 2
            tensor([[1.5000]])
        """
        sharding = Sharding(shard, mixed_precision, checkpoint_activations, initialize, kwargs)
        sharding.check(module)
        check_finds_unused(finds_unused=self.find_unused_parameters)
        chosen = mesh if mesh is None or isinstance(mesh, DeviceMesh) else self.mesh(mesh)
        if chosen is not None:
            check_mesh(chosen, self.device)
        tracking.check_speaks_for_rank("wrap_fsdp()")
        if self.world_size == 1:
            sharding.materialize(module, self.device)
            return module
        groups = self._state.groups
        whole = groups.device_mesh((self.world_size,), ("world",)) if chosen is None else chosen
        return sharding.shard(module, whole, groups, self.device, finds_unused=self.find_unused_parameters)

    def __str__(self) -> str:
        peer = self._state.job.peer
        return (
            f"DistributedManager(rank {peer.rank} of {self.world_size}, local rank {peer.local_rank} of "
            f"{peer.local_world_size} on {peer.host}, node {peer.node_rank} of {peer.num_nodes}, "
            f"{self.device}, {self.backend or 'no process group'}, {peer.launcher})"
        )

    __repr__ = __str__


@functools.cache  # once in a process, however often it initializes
def _end_with_multiprocessing(pid: int) -> None:
    """Leave the job at the end of a process of ``multiprocessing``, which may call neither exit handlers nor hooks."""
    if multiprocessing.process.parent_process() is not None:
        multiprocessing.util.Finalize(None, _end_of_process, args=(pid,), exitpriority=1)
        call_before_it_is_printed(functools.partial(_tell_of_end, pid))


def _end_of_process(pid: int) -> None:
    _tell_of_end(pid)
    hook.report_at_end()
    DistributedManager._cleanup_at_exit(pid)
    if not hook.has_failed():
        close_kept()


def _tell_of_end(pid: int) -> None:
    error = error_that_ends_process()
    if isinstance(error, SystemExit) and error.code:
        error = error.__context__  # what torch.multiprocessing.spawn caught, has written for its parent, and ends with
    if isinstance(error, Exception | KeyboardInterrupt) and os.getpid() == pid:
        sys.last_value = error
        hook.report_at_end()


puts_back(DistributedManager.cleanup)


def initialize_ddp(
    timeout: float | datetime.timedelta | None = None,
) -> tuple[bool, int, int, int, torch.device] | None:
    """Initialize the manager, and return what it found; None where it is initialized already.

    Collective.

    Args:
        timeout: Seconds that a collective may take; None asks ``DISTMAN_TIMEOUT``, then takes 3,600.

    Returns:
        ``(distributed, rank, local_rank, world_size, device)``, or None.

    Raises:
        DistmanError: See :meth:`DistributedManager.initialize`.

    Example:
        >>> distributed, rank, local_rank, world_size, device = initialize_ddp()
        >>> rank, world_size, initialize_ddp()
        (0, 1, None)
    """
    if DistributedManager.is_initialized():
        return None
    manager = DistributedManager.initialize(timeout=timeout)
    return manager.distributed, manager.rank, manager.local_rank, manager.world_size, manager.device
