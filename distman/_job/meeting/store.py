"""The job's store: a small process, which one rank starts and the others find.

Where no address is known beforehand, the rank that has started it tells the others over what they share already: MPI,
the store of a launcher's agent, or that of a process group which other code has made.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import secrets
import time
from collections.abc import Callable
from datetime import timedelta
from urllib.parse import urlsplit

import torch.distributed as dist

from distman._base.text import printable
from distman._coordination import protocol
from distman._coordination.failure.record import FailureRecord, Here, Place
from distman._coordination.messages import MalformedMessageError, decode, decode_text, drop, read_at_once
from distman._coordination.monitor.presence import own_addresses
from distman._job.meeting import mpi
from distman._job.meeting.address import UNREACHABLE_AFTER, Endpoint
from distman._job.meeting.door import alike, find_store, listed, try_all, url_of
from distman._job.meeting.opening import nothing, start_or_enter
from distman._job.meeting.secret import Protection, Source
from distman._job.meeting.sockets import leads_here
from distman._job.meeting.told import Told, UnprovedError, unseal, useful_elsewhere
from distman._store.client import Client
from distman._store.connection import StoreLostError
from distman._store.dialing import PATIENCE
from distman._store.memory import Memory
from distman._store.torch_store import TorchStore
from distman.environments import LaunchEnvironment
from distman.errors import RendezvousError

_PAUSE = 0.01  # seconds between two looks whether rank 0 has told its address: it starts within milliseconds
_LONGEST_PAUSE = 0.5  # seconds between two looks at an address where it is not
_OPEN_LIMIT = 30.0  # seconds to find a store that was open when its place was told

ADOPTED = "the process group that existed before"
"""Where such ranks meet, for messages."""

_left: set[str] = set()
"""Sessions of stores that this process has left; a new start must find a new one."""

_told_by_agent = itertools.count()
"""How often this process has met others through the store of an agent, which remembers those before."""


@dataclasses.dataclass
class JobStore:
    """This process's connection to the store of its job."""

    store: TorchStore
    url: str  # where the ranks met, such as ``tcp://n1:23145``
    # what who enters it has to prove; None where there is nothing
    secret: bytes | None = dataclasses.field(default=None, repr=False)
    is_opened_here: bool = False  # then it stays for others where the start fails
    opener: int | None = None  # the rank that opened it, once the verdict has told; None where none did
    # asks rank 0's agent, until the verdict, for a rank that failed on its way here
    find_failure: Callable[[], FailureRecord | None] = lambda: None

    @property
    def key(self) -> bytes:
        """What the ranks of the job share with nobody; empty where there is nothing that could be the source of it."""
        return self.store.client.job_key

    def leave_will(
        self,
        store: TorchStore,
        me: Place,
        key: str = protocol.FAILURE,
        counter: str = protocol.NEWS,
        pack: Callable[[FailureRecord], str | bytes] = FailureRecord.to_json,
        *,
        unless: str,
    ) -> None:
        """Let the process that serves the store tell of the end of this one, at once, as a :class:`Will` does."""
        died = FailureRecord.died(me)
        unreachable = FailureRecord.unreachable(me, self.store.client.unreachable_after)
        store.register_will(key, counter, unless=unless, if_closed=pack(died), if_unreachable=pack(unreachable))

    def close(self) -> None:
        """Leave the store and never use it again; it goes with its last user."""
        _left.add(self.store.client.session)
        self.store.close()


def keep_store() -> JobStore:
    """Return the store of a job of one rank, which meets nobody."""
    return JobStore(TorchStore(Memory()), "the memory of its only rank")


def open_or_join(point: Endpoint, rank: int, timeout: float, meanwhile: Callable[[], None] = nothing) -> JobStore:
    """Return the store of the job that meets at this point."""
    # ``meanwhile`` does what else takes milliseconds, while the process of the store starts.
    if point.is_host and not point.has_agent:
        return open_store(point, rank, timeout, meanwhile)
    meanwhile()
    return _tell_over_agent(point, rank, timeout) if point.has_agent else join_store(point, rank, timeout)


def open_store(point: Endpoint, rank: int, timeout: float, meanwhile: Callable[[], None] = nothing) -> JobStore:
    """Start the store of the job, at a name of this host's own or at the first free port of the endpoint."""
    # Where another process of the same job has done so already, join it: the verdict will say that this rank came
    # twice.
    client, is_own = start_or_enter(point, rank, timeout, left=_left, meanwhile=meanwhile)
    if not is_own:
        return _entered(client, timeout)
    job_store = _connected(client, timeout, is_opened_here=True)  # of a failure that was left since, all hear from it
    # Before anybody is told where it is: who enters waits for this rank, which may die before it has joined.
    part, event = job_store.store.part(protocol.job()), protocol.MEMBERSHIP_EVENT
    job_store.leave_will(part, Here(rank), protocol.EARLY_FAILURE, event, unless=protocol.VERDICT)
    if not isinstance(client.door.address, str):
        job_store.url = url_of((point.addresses[0], client.door.address[1]))  # it has dialled itself
    return job_store


def join_store(point: Endpoint, rank: int, timeout: float) -> JobStore:
    """Find the store of the job, as soon as it is opened."""
    return _entered(find_store(point, rank, timeout, left=_left), timeout)


def tell_over_mpi(environment: LaunchEnvironment, point: Endpoint, timeout: float) -> JobStore:
    """Open the store on rank 0, at any free port, and tell the others over MPI where it is."""
    opened: list[JobStore] = []

    def open_here() -> tuple[Told, bytes | None]:
        job_store, told = _open_anywhere(point, timeout)
        opened.append(job_store)
        return told, job_store.secret

    try:
        told, secret = mpi.broadcast_from_rank_zero(environment, open_here, timeout)
    except BaseException:  # Ctrl-C too: a connection that is left open would count as a member
        for job_store in opened:
            job_store.close()
        raise
    return opened[0] if opened else join_store(_place_told(told, point, secret), environment.rank, timeout)


@dataclasses.dataclass(frozen=True)
class _Beside:
    """What the rank that opens the store beside a group of other code tells the others."""

    told: Told | None = None
    secret: str = ""  # hexadecimal
    failure: FailureRecord | None = None  # why it could not

    @property
    def key(self) -> bytes:
        try:
            return bytes.fromhex(self.secret)
        except ValueError as error:
            raise MalformedMessageError("the secret of the job's store", str(error)) from None


def open_beside(
    group_store: dist.Store, job: str, rank: int, timeout: float, unreachable_after: float = UNREACHABLE_AFTER
) -> JobStore:
    """Open the store of a job whose process group other code has made, and tell the others over that group's store."""
    # The first rank to come opens it. Who reads the group's store is let in.
    try:
        return _open_beside(group_store, job, rank, timeout, unreachable_after)
    except dist.DistError as error:
        raise RendezvousError(
            f"joining failed: the store of the process group was lost: {str(error).splitlines()[0]} [{ADOPTED}]. See "
            "what ended the process that serves it, which is mostly rank 0."
        ) from error


def _open_beside(group_store: dist.Store, job: str, rank: int, timeout: float, unreachable_after: float) -> JobStore:
    me, key = str(Here(rank)), protocol.store_beside(job)
    protection = Protection(Source.TOLD)
    point = Endpoint(job, (), (), ADOPTED, is_host=False, protection=protection, unreachable_after=unreachable_after)
    opener = decode_text(group_store.compare_set(protocol.opener_beside(job), "", me))
    if opener == me:
        try:
            opened, told = _open_anywhere(point, timeout, rank)
        except BaseException as error:  # Ctrl-C too: the others would wait for it
            group_store.set(key, json.dumps(dataclasses.asdict(_Beside(failure=FailureRecord.of(error, rank)))))
            raise
        try:
            group_store.set(key, json.dumps(dataclasses.asdict(_Beside(told, (opened.secret or b"").hex()))))
        except BaseException:  # Ctrl-C too: it would keep the store, where no rank can find it
            opened.close()
            raise
        return opened
    beside = _read_beside(group_store, key, printable(opener), timeout)
    if beside.failure is not None:
        raise beside.failure.to_failure()
    if beside.told is None:
        raise MalformedMessageError(key, "it tells no place")
    place = _place_told(beside.told, point, beside.key)
    return _entered(find_store(place, rank, min(timeout, _OPEN_LIMIT), left=_left), timeout)


def _read_beside(group_store: dist.Store, key: str, opener: str, timeout: float) -> _Beside:
    until, pause = time.monotonic() + timeout, _PAUSE
    while not group_store.check([key]):  # torch's stores have no wait that Ctrl-C interrupts
        if time.monotonic() > until:
            raise RendezvousError(
                f"{opener}, the first to call DistributedManager.initialize(), must tell where it has opened the job's "
                f"store within {timeout:g} s, got nothing in the store of the process group [{ADOPTED}]. See its "
                "error; set rendezvous_timeout for slow starts."
            )
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)
    return decode(group_store.get(key), _Beside, "where the job's store is, in that of the group")


def _tell_over_agent(point: Endpoint, rank: int, timeout: float) -> JobStore:
    """Open the store on rank 0, at any free port, and tell the others in the agent's store where it is."""
    # Anybody can write there. It leads a rank to a store, which has to prove that it is this job's, or ends the start.
    agent = _connect(point, timeout)
    start = next(_told_by_agent)
    key = protocol.store_address(point.job_id, start)

    def find_failure() -> FailureRecord | None:  # at the first start: later ones find what was left then
        told = read_at_once(agent, protocol.start_failure(point.job_id, point.restart)) if start == 0 else None
        return FailureRecord.told(told.encode()) if told is not None else None

    secret = point.protection.key if point.protection is not None else None
    if point.is_host:
        opened, told = _open_anywhere(point, timeout)
        try:
            agent.set(key, told.seal(key, secret))
        except BaseException:  # Ctrl-C too: it would keep the store, where no rank can find it
            opened.close()
            raise
        opened.find_failure = find_failure
        return opened
    return _find_over_agent(agent, key, secret, point, rank, timeout, find_failure)


def _find_over_agent(
    agent: dist.Store,
    key: str,
    secret: bytes | None,
    point: Endpoint,
    rank: int,
    timeout: float,
    find_failure: Callable[[], FailureRecord | None],
) -> JobStore:
    """Find the store where rank 0 says that it is, in spite of what others say, or rank 0 said before a restart."""
    what = f"where {point.host} has opened the job's store, in the agent's at {point.url}"
    until, found, pause = time.monotonic() + timeout, "nothing", _PAUSE
    while True:
        if agent.check([key]):
            try:
                there = _place_told(unseal(agent.get(key), key, secret, what), point)
            except UnprovedError:
                found = "an answer of somebody who does not know this job's secret"
            except MalformedMessageError as error:
                found = "a malformed answer"
                drop(error)
            else:
                client, reasons, _ = try_all(there, rank, PATIENCE, left=_left)
                if client is not None:
                    return _entered(client, timeout)
                found = f"a place without it ({listed(reasons)})"
                pause = min(2 * pause, _LONGEST_PAUSE)
        failure = find_failure()
        if failure is not None:
            raise failure.to_failure()
        if time.monotonic() > until:
            raise RendezvousError(
                f"{point.host} must tell where it has opened the job's store within {timeout:g} s, got {found} in the "
                f"agent's at {point.url} [{point.source}]. See whether {point.host} started{alike(point)} and reached "
                "DistributedManager.initialize(); set rendezvous_timeout for slow starts."
            )
        time.sleep(pause)


def tell_agent(point: Endpoint, failure: str, timeout: float) -> None:
    """Leave word with the launcher's agent that this rank failed on its way to the job's store."""
    agent = _connect(point, timeout)
    with contextlib.suppress(dist.DistError):  # it has ended, and so do the others
        agent.compare_set(protocol.start_failure(point.job_id, point.restart), "", failure)


def _open_anywhere(point: Endpoint, timeout: float, rank: int = 0) -> tuple[JobStore, Told]:
    """Open the store at any free port, and return it and what this rank tells the others of it."""
    name = f"{point.job_id}/{secrets.token_hex(8)}"
    here = dataclasses.replace(point, job_id=name, addresses=("0.0.0.0",), ports=())  # noqa: S104 - for all nodes
    opened = open_store(here, rank, timeout)
    addresses = useful_elsewhere([*dict.fromkeys([*filter(leads_here, point.addresses), *own_addresses()])])
    told = Told(addresses, urlsplit(opened.url).port or 0, name)
    opened.url = url_of((told.addresses[0], told.port))
    return opened, told


def _place_told(told: Told, point: Endpoint, secret: bytes | None = None) -> Endpoint:
    if secret and point.protection is not None:
        point = dataclasses.replace(point, protection=dataclasses.replace(point.protection, key=secret))
    return dataclasses.replace(
        point, job_id=told.job, addresses=told.addresses, ports=(told.port,), is_host=False, has_agent=False
    )


def _entered(client: Client, timeout: float) -> JobStore:
    """Return the connection to a store that another process has opened."""
    if client.failure:
        with contextlib.closing(client), contextlib.suppress(StoreLostError):  # then nobody counts any more
            client.add(protocol.in_job(protocol.TURNED_AWAY).encode(), 1)
        raise FailureRecord.told(client.failure).to_failure()
    return _connected(client, timeout)


def _connected(client: Client, timeout: float, *, is_opened_here: bool = False) -> JobStore:
    store = TorchStore(client)
    store.set_timeout(timedelta(seconds=timeout))
    return JobStore(store, url_of(client.door.address), client.door.secret, is_opened_here=is_opened_here)


def _connect(point: Endpoint, timeout: float) -> dist.TCPStore:
    try:
        return dist.TCPStore(
            point.addresses[0],
            point.ports[0],
            None,
            is_master=False,
            timeout=timedelta(seconds=timeout),
            wait_for_workers=False,
        )
    except dist.DistError as error:
        raise RendezvousError(
            f"the store of the launcher's agent at {point.url} could not be reached from this host within {timeout:g} "
            f"s: {str(error).splitlines()[0]} [{point.source}]. See that no firewall closes the port and the name is "
            "right."
        ) from error
