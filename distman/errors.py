"""The errors of distman.

::

    JobFailed (SystemExit)        another rank has failed, and with it the job: which, where and why
    DistmanError (RuntimeError)
     ├── NotInitializedError      the manager is asked before initialize()
     ├── LaunchEnvironmentError   variables missing, not numbers, or contradicting each other
     ├── RendezvousError          ranks missing, double, unlike, or the address not reachable
     ├── UndefinedGroupError      no group or mesh axis of that name
     ├── PlanMismatchError        ranks ask for different groups, collectives, keys or shapes
     ├── RankFailedError          what one rank did for all, such as a save, raised there; the job goes on
     ├── BarrierTimeoutError      names the ranks that did not come to a barrier
     ├── CheckpointError          a checkpoint is damaged, not a checkpoint, or holds code; or a save failed
     ├── DivergenceError          replicas hold different numbers
     ├── NonFiniteLossError       the loss of a training is NaN or infinite on some rank
     └── WorkerError              a task of a ParallelExecutor has no answer, and no exception that could be sent
          └── WorkerDiedError     its worker died, was too late, or did not start; also a BrokenExecutor

Wrong arguments are ``ValueError`` or ``TypeError``; their messages read
``<name> must <condition>, got <value> [from <where>]. <What to do>.`` Messages of events read
``<What> failed: <reason>. <What to do>.``
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Callable, Iterable
from concurrent.futures import BrokenExecutor
from typing import Any

from distman._base.text import listed, printable, printable_lines

__all__ = [
    "BarrierTimeoutError",
    "CheckpointError",
    "DistmanError",
    "DivergenceError",
    "JobFailed",
    "LaunchEnvironmentError",
    "NonFiniteLossError",
    "NotInitializedError",
    "PlanMismatchError",
    "RankFailedError",
    "RendezvousError",
    "UndefinedGroupError",
    "WorkerDiedError",
    "WorkerError",
]

_SHOWN = 5  # names of tensors in a message


class DistmanError(RuntimeError):
    """Base of every error that distman raises on its own account.

    Raised itself where a call comes too early or at the wrong place, such as :meth:`~distman.handler.NNHandler.train`
    without an optimizer; the message names the call to make instead. Wrong arguments are ``ValueError`` or
    ``TypeError``.

    Example:
        >>> try:
        ...     DistributedManager().rank
        ... except DistmanError as error:
        ...     print(type(error).__name__)
        NotInitializedError
    """


class NotInitializedError(DistmanError):
    """The manager was asked before ``DistributedManager.initialize()``, or after ``cleanup()``.

    Raised by ``DistributedManager()``, and so by collectives, loaders and metrics. Call ``initialize()`` once, at the
    start of the script. Code that may run without a job asks ``DistributedManager.find()``, which returns None there.

    Example:
        >>> DistributedManager()
        Traceback (most recent call last):
            ...
        distman.errors.NotInitializedError: DistributedManager must be initialized before it is used. ...
    """


class LaunchEnvironmentError(DistmanError):
    """Variables of a launcher are missing, not numbers, or contradict each other.

    Raised by ``DistributedManager.initialize()`` and :func:`distman.environments.detect`, before this rank meets
    others. Correct or unset the variable that the message names; ``distman env`` shows what a rank has been told.

    Example:
        >>> from distman.environments import detect
        >>> detect({"RANK": "0", "WORLD_SIZE": "two", "LOCAL_RANK": "0", "MASTER_ADDR": "n1", "MASTER_PORT": "29500"})
        Traceback (most recent call last):
            ...
        distman.errors.LaunchEnvironmentError: WORLD_SIZE must be ...
    """


class RendezvousError(DistmanError):
    """The ranks of the job could not be brought together.

    Raised by ``DistributedManager.initialize()``, on every rank that arrived: ranks are missing when
    ``rendezvous_timeout`` has passed, double, unlike each other, share a GPU, or do not reach the job's store. The
    message names them and where the address came from. Look at the ranks that it names, or at the network between the
    hosts.

    Example:
        >>> try:
        ...     manager = DistributedManager.initialize(rendezvous_timeout=60)
        ... except RendezvousError as error:
        ...     raise SystemExit(f"not all ranks are here: {error}")
        >>> manager.world_size
        1
    """


class UndefinedGroupError(DistmanError):
    """There is no group, mesh axis or node of that name, or it has been destroyed.

    Raised by whatever takes the name of one. The message has the names that there are; correct it, or make the group
    first.

    Example:
        >>> manager = DistributedManager.initialize()
        >>> manager.group_size("spatial")
        Traceback (most recent call last):
            ...
        distman.errors.UndefinedGroupError: 'spatial' must be ...
    """


class PlanMismatchError(DistmanError):
    """The ranks ask for different groups, or come to a collective with different operations, keys or shapes.

    Raised on every rank that waits: where groups are made, and by metrics, ``fused_all_reduce`` and
    :mod:`distman.score`, at once; by other collectives after a second, or before each of them with ``DISTMAN_DEBUG=1``.
    The message shows the calls that differ. Make the same calls on all ranks, in the same order.

    Example on two ranks:
        >>> aggregate_metrics({"loss": 0.5} if rank == 0 else {"los": 0.5})
        Traceback (most recent call last):
            ...
        distman.errors.PlanMismatchError: ...
    """


class _OfAnotherRank(BaseException):
    """What is known of a rank that failed; base of the errors that tell of one."""

    def __init__(
        self, *, rank: int, host: str, pid: int, error_type: str, error_text: str, traceback_text: str
    ) -> None:
        self.rank = rank
        self.host = host
        self.pid = pid
        self.error_type = error_type
        self.error_text = error_text
        self.traceback_text = traceback_text
        who, text = printable(f"rank {rank} ({host}, pid {pid})"), printable(error_text)
        super().__init__(
            f"{who} raised {printable(error_type)}: {text}\n\nIts traceback:\n{printable_lines(traceback_text)}"
            if traceback_text
            else f"{who}{text if text.startswith(',') else f' {text}'}"
        )

    def __reduce__(self) -> tuple[object, ...]:
        names = ("rank", "host", "pid", "error_type", "error_text", "traceback_text")
        return functools.partial(type(self), **{name: getattr(self, name) for name in names}), ()


class RankFailedError(_OfAnotherRank, DistmanError):
    """What one rank did for all, such as a save or a function under ``on_rank``, raised there; the job goes on.

    Raised on the other ranks, in the call that waits for that work. The rank itself raises the original error, and so
    does a job of one process. Where all ranks must take the same way, catch both. The message has the error and the
    traceback of the rank that failed.

    Attributes:
        rank: The rank that failed, in the world.
        host: Its host name.
        pid: Its process id on that host.
        error_type: Name of the type that was raised there, such as ``"ValueError"``.
        error_text: Text of that error as that rank gave it, while the message of this error escapes control characters
            and ends of lines.
        traceback_text: The traceback as that rank printed it.

    Example on two ranks:
        >>> def load_shard():
        ...     raise OSError("the disk is full")
        >>> try:
        ...     on_rank(1)(load_shard)()
        ... except (OSError, RankFailedError) as error:
        ...     print(f"on rank {rank}: {type(error).__name__}")
        on rank ...
    """


class JobFailed(_OfAnotherRank, SystemExit):
    """Another rank has failed, and with it the job: a request to end this process, with exit code 76.

    Raised in the main thread of every rank but the one that failed, wherever it is, and by calls that wait for other
    ranks. ``except Exception`` lets it pass, as it does any ``SystemExit``. To save something first, write ``except
    JobFailed: save(state, path, local=True); raise``, or a ``finally``. To go on without the other ranks, do the work
    in a :func:`distman.surviving_failure` block.

    Attributes:
        rank: The rank that failed, in the world.
        host: Its host name.
        pid: Its process id on that host.
        error_type: Name of the type that was raised there, such as ``"ValueError"``; of a rank that did not raise,
            ``"died"``, ``"exited"``, ``"left"`` or ``"silent"``.
        error_text: Text of that error, or what is known.
        traceback_text: The traceback as that rank printed it; empty if it did not raise.
        code: The exit code, 76.

    Example:
        >>> manager = DistributedManager.initialize()
        >>> try:
        ...     manager.barrier()
        ... except JobFailed as failure:
        ...     save({"step": 7}, f"last/rank{manager.rank}.pt", local=True)
        ...     raise
    """

    EXIT_CODE = 76
    """Exit code of a process that ends by it: ``EX_PROTOCOL`` of sysexits.h, a remote error."""
    code = EXIT_CODE

    def acknowledge(self) -> None:
        """Go on without the other ranks: the failure is not raised again, and the exit code is the program's.

        Local. :func:`distman.surviving_failure` does it; this is for what runs programs and shows their errors, such as
        plugins of pytest and notebooks. Calls that wait for ranks that are gone raise again.

        Example:
            >>> def run_cell(cell):
            ...     try:
            ...         cell()
            ...     except JobFailed as failure:
            ...         failure.acknowledge()
            ...         print(failure)
        """
        for action in _ACKNOWLEDGING:
            action(self)


_ACKNOWLEDGING: list[Callable[[JobFailed], None]] = []  # what is called with a failure that the program survives


def _on_acknowledgement(action: Callable[[JobFailed], None]) -> Callable[[JobFailed], None]:
    """Let a function of the core hear of each failure that the program survives."""
    _ACKNOWLEDGING.append(action)
    return action


class BarrierTimeoutError(DistmanError):
    """Ranks did not come to a barrier in time.

    Raised by :meth:`~distman.DistributedManager.barrier`, and where groups are made, on every rank that came. The
    message names those that are missing, and where they are. See what they do instead, or pass a longer ``timeout``.

    Example:
        >>> manager = DistributedManager.initialize()
        >>> try:
        ...     manager.barrier("data is there", timeout=600)  # seconds
        ... except BarrierTimeoutError as error:
        ...     raise SystemExit(f"still without data: {error}")
    """


class DivergenceError(DistmanError):
    """Ranks that ought to hold the same parameters, buffers or optimizer state do not.

    Raised on every rank by :meth:`~distman.DistributedManager.check_replicas` and the callback
    :class:`~distman.handler.ReplicaCheck`. Resume from a checkpoint, without the host of the odd rank if
    ``distman check --quick`` finds something there; otherwise look for what differs between the ranks: a parameter that
    not all of them change, a seed, or a kernel that is not deterministic.

    Attributes:
        tensors: Names of all that differ.
        ranks: The odd ranks; all of them where no value has a majority, as on two ranks.
        step: The step that was named, or None.

    Example on two ranks:
        >>> model = torch.nn.Linear(2, 1)
        >>> _ = torch.nn.init.constant_(model.weight, 1.0)
        >>> _ = torch.nn.init.constant_(model.bias, float(rank))
        >>> manager.check_replicas(model)
        Traceback (most recent call last):
            ...
        distman.errors.DivergenceError: ...bias...
    """

    def __init__(
        self, *, tensors: list[str], ranks: list[int], places: list[str], step: int | None, is_majority: bool
    ) -> None:
        self.tensors = tensors
        self.ranks = ranks
        self.step = step
        self._all: dict[str, Any] = {
            "tensors": tensors,
            "ranks": ranks,
            "places": places,
            "step": step,
            "is_majority": is_majority,
        }
        odd = " and ".join(places) + (f" and {len(ranks) - len(places)} more" if len(ranks) > len(places) else "")
        where = f"{odd} differ{'s' * (len(ranks) == 1)} from the others" if is_majority else f"{odd} differ"
        super().__init__(
            f"replicas must hold the same numbers{'' if step is None else f' in step {step}'}, but {where} in "
            f"{listed(tensors, _SHOWN)}. Resume from a checkpoint, and run `distman check --quick` on these hosts."
        )

    def __reduce__(self) -> tuple[object, ...]:
        return functools.partial(type(self), **self._all), ()


class CheckpointError(DistmanError):
    """A checkpoint is damaged, not a checkpoint at all, or holds code; or a save in the background failed.

    Raised by the functions of :mod:`distman.checkpoint` that load, on the rank that could not; and by the save that
    follows one that failed in the background. Load an older one; nothing in this one was run.

    Example:
        >>> import pathlib
        >>> _ = pathlib.Path("state.pt").write_bytes(b"half a file")
        >>> load("state.pt")
        Traceback (most recent call last):
            ...
        distman.errors.CheckpointError: ...state.pt ...
    """


class NonFiniteLossError(DistmanError):
    """The loss of a training, or its gradient, is NaN or infinite on some rank.

    Raised by :meth:`~distman.handler.NNHandler.train` on every rank. On the CPU that is before the optimizer steps: the
    weights are those of the step before. On a GPU some steps may have been taken since; then the message says so, and
    saving the handler or training it on raises this again until a checkpoint is loaded. The message names the step and
    the ranks. Lower the learning rate, pass ``clip_norm``, or skip such steps with ``non_finite="skip"``.

    Example:
        >>> handler = NNHandler(torch.nn.Linear, in_features=1, out_features=1)
        >>> handler.set_optimizer(torch.optim.SGD, lr=0.1)
        >>> handler.set_loss_fn(lambda outputs, targets: outputs.mean() / 0)
        >>> handler.set_train_loader(TensorDataset(torch.ones(4, 1)), batch_size=4)
        >>> handler.train(1)
        Traceback (most recent call last):
            ...
        distman.errors.NonFiniteLossError: the loss must be finite in step 0, got ...
    """


class WorkerError(DistmanError):
    """A task of a ``ParallelExecutor`` has no answer: what its function returned or raised cannot be sent.

    Raised by the executor's calls. Let the function return plain values and tensors. It is also the ``__cause__`` of an
    exception that the function raised, and says where that was.

    Args:
        message: What happened. The other arguments are the attributes.

    Attributes:
        device: The worker's device, such as ``"cuda:1"``.
        index: The worker's place among the devices.
        pid: Its process id.
        exit_code: Its exit code, minus the number of the signal that ended it, or None while it lives.
        error_type: Name of the type of the exception raised there, such as ``"ValueError"``; may be empty.
        traceback_text: The traceback as the worker saw it, or the stacks of its threads; may be empty.

    Example:
        >>> with ParallelExecutor(devices=["cpu"], pass_device=False) as executor:
        ...     try:
        ...         executor.run(lambda: 1 / 0)
        ...     except ZeroDivisionError as error:
        ...         print(f"worker {error.__cause__.index} on {error.__cause__.device}: {error}")
        worker 0 on cpu: division by zero
    """

    def __init__(
        self,
        message: str,
        *,
        device: str = "",
        index: int = -1,
        pid: int = 0,
        exit_code: int | None = None,
        error_type: str = "",
        traceback_text: str = "",
    ) -> None:
        self.device = device
        self.index = index
        self.pid = pid
        self.exit_code = exit_code
        self.error_type = error_type
        self.traceback_text = traceback_text
        super().__init__(message)


class WorkerDiedError(WorkerError, BrokenExecutor):
    """A worker of a ``ParallelExecutor`` died, by ``sys.exit`` too, took longer than ``timeout``, or did not start.

    Raised by the call that needed it; the next call starts a new worker. The message has the signal or exit code, or
    the stacks of the worker that was too late: a kill by signal 9 is often lack of memory. It is a ``BrokenExecutor``,
    too.

    Example:
        >>> import os
        >>> with ParallelExecutor(devices=["cpu"], pass_device=False) as executor:
        ...     try:
        ...         executor.run(os._exit, 3)
        ...     except WorkerDiedError as error:
        ...         print(f"exit code {error.exit_code}")
        exit code 3
    """


def _undefined_group(name: str, known: Iterable[str], what: str) -> UndefinedGroupError:
    """Return the error for a name that means nothing, with the names that do; ``what`` is such as ``"a group"``."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1)
    hint = f"Did you mean {close[0]!r}?" if close else "Create it first, or correct the name."
    return UndefinedGroupError(f"{name!r} must be {what}, known are {', '.join(map(repr, names)) or 'none'}. {hint}")
