"""Membership: every rank writes a join record into the store, rank 0 looks, and all learn the same verdict.

Each join record is a key of its own, so nothing is lost when two processes claim one rank. What travels is JSON.
Rank 0 waits for one key, the event, that the last arrival or a failed rank sets; the others wait for the
verdict. They ask again and again, ever more slowly, instead of blocking inside the store: so Ctrl-C works,
and no time-out of a wait is printed by torch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import time
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist

from distman._coordination import protocol
from distman._coordination.failure.record import FailureRecord
from distman._coordination.timeouts import run_with_timeout
from distman._log import logger
from distman._rendezvous.peers import JoinRecord, Peer, Peers, complete, describe_missing, describe_present, find_faults
from distman._rendezvous.store import JobStore
from distman.errors import RankFailedError, RendezvousError

_FIRST_PAUSE = 0.00005  # seconds: about one call into the store
_GROWTH = 1.3  # per pause, so that a wait is overrun by a third of itself at most
_STEPS = 20  # the first pause of a large job is this part of its longest one
_PAUSE_PER_RANK = 500e-6  # seconds; 2,000 looks a second in all, beside ranks that are still connecting
_SHORTEST_LIMIT = 0.01  # seconds: longer pauses would delay the start of a small job
_LONGEST_LIMIT = 1.0  # seconds: longer ones would delay a large job more than its looks cost
_PROGRESS_EVERY = 10.0  # seconds between two lines of the log that name who is missing
_GRACE = 1.0  # seconds that the others wait longer than rank 0, whose verdict is better than theirs
_JUDGING = 2.0  # seconds; rank 0 judges 10,000 ranks in less
_PARTING = 2.0  # seconds for the others to read the verdict, when all had the time they were given
_PARTING_WITH_ALL = 10.0  # seconds also for ranks that are still on their way, to tell them why the job ended


def establish_membership(
    job_store: JobStore,
    store: dist.Store,
    me: JoinRecord,
    *,
    timeout: float,
    source: str,
    expected: Mapping[int, str],
) -> Peers:
    """Join, wait for all ranks of the job, and return them.

    Collective.

    Args:
        job_store: Where the ranks meet.
        store: The part of its store that belongs to this start alone.
        me: What this rank says of itself.
        timeout: Seconds to wait for the others.
        source: Where the address came from, for messages.
        expected: Host of each rank, as far as the launcher tells.

    Returns:
        One peer per rank, in rank order, the same on all ranks.

    Raises:
        RendezvousError: On every rank that arrived: ranks are missing, double, unlike or share a GPU.
        RankFailedError: On every rank that arrived: a rank raised before it got here.
    """
    membership = _Membership(job_store, store, me, timeout, source, expected)
    peers: list[Peers] = []

    def take_part() -> None:
        membership.join_record()
        peers.append(membership.accept(membership.judge() if me.rank == 0 else membership.wait_for_verdict()))

    try:
        if not run_with_timeout(take_part, timeout + _PARTING_WITH_ALL + _GRACE):
            raise RendezvousError(
                f"joining failed: the store at {job_store.url} did not answer within {timeout:g} s [{source}]. "
                "See what stopped the process that serves it."
            )
        return peers[0]
    except dist.DistError as error:
        raise RendezvousError(
            f"joining failed: the store at {job_store.url} was lost: {str(error).splitlines()[0]} [{source}]. "
            "See what ended the process that serves it."
        ) from error


@dataclasses.dataclass(frozen=True)
class _Verdict:
    """What rank 0 found: the peers and who serves the store, or what is wrong."""

    peers: Peers = dataclasses.field(default_factory=lambda: Peers(()))
    error: str | None = None
    failure: dict[str, Any] | None = None
    store_rank: int | None = None

    def pack(self) -> bytes:
        """Return the verdict for the store: a line of JSON on what is wrong, then a line for each peer."""
        wrong = json.dumps({"error": self.error, "failure": self.failure, "store_rank": self.store_rank}).encode()
        return zlib.compress(b"\n".join([wrong, *self.peers.rows]), 1)

    @classmethod
    def unpack(cls, data: bytes) -> _Verdict:
        wrong, *rows = zlib.decompress(data).split(b"\n")
        return cls(Peers(rows), **json.loads(wrong))


@dataclasses.dataclass
class _Membership:
    job_store: JobStore
    store: dist.Store
    me: JoinRecord
    timeout: float
    source: str
    expected: Mapping[int, str]

    def __post_init__(self) -> None:
        self.started = time.monotonic()
        self.num_arrived = 0
        self.has_waited = False

    def join_record(self) -> None:
        if self.job_store.is_host:
            self.store.set(protocol.STORE_RANK, str(self.me.rank))
        place = self.store.add(protocol.JOINED, 1)
        self.store.set(protocol.join_record(place), json.dumps(vars(self.me)))
        if place >= self.me.world_size:
            self.store.set(protocol.MEMBERSHIP_EVENT, "full")

    def judge(self) -> _Verdict:
        """Return rank 0's verdict, and publish it."""
        verdict = self._wait(self._look, self.timeout, self._log_progress) or _Verdict(error=self._missing())
        self.store.set(protocol.VERDICT, verdict.pack())  # type: ignore[arg-type]  # bytes do as well
        self.store.set(protocol.MEMBERSHIP_EVENT, "judged")
        return verdict

    def wait_for_verdict(self) -> _Verdict:
        return self._wait(self._verdict, self.timeout + _GRACE) or _Verdict(error=self._missing())

    def accept(self, verdict: _Verdict) -> Peers:
        if verdict.failure is None and verdict.error is None:
            self._check_my_place(verdict.peers)
            self.job_store.store_rank = verdict.store_rank
            return verdict.peers
        self._part()
        if verdict.failure is not None:
            raise RankFailedError(**verdict.failure)
        raise RendezvousError(verdict.error)

    def _look(self) -> _Verdict | None:
        if not self.store.check([protocol.MEMBERSHIP_EVENT]):
            return None
        arrived = self._arrived()
        faults = find_faults(arrived, self.me.world_size)
        if faults:
            return _Verdict(error=self._with_missing(faults, arrived))
        if describe_missing(arrived, self.me.world_size, {}):
            record = FailureRecord.read(self.store)
            return _Verdict(failure=dataclasses.asdict(record)) if record is not None else None
        return _Verdict(complete(arrived), store_rank=self._store_rank())

    def _store_rank(self) -> int | None:
        return int(self.store.get(protocol.STORE_RANK)) if self.store.check([protocol.STORE_RANK]) else None

    def _verdict(self) -> _Verdict | None:
        if not self.store.check([protocol.MEMBERSHIP_EVENT]):
            return None
        if not self.has_waited:  # rank 0 is judging: what it finds is there in a moment
            self.has_waited = True
            with contextlib.suppress(dist.DistStoreError):
                self.store.wait([protocol.VERDICT], datetime.timedelta(seconds=_JUDGING))
        return _Verdict.unpack(self.store.get(protocol.VERDICT)) if self.store.check([protocol.VERDICT]) else None

    def _arrived(self) -> list[JoinRecord]:
        """Return all join records so far; one that is just being written is left for the next look."""
        keys = [protocol.join_record(place) for place in range(1, self.store.add(protocol.JOINED, 0) + 1)]
        if not self.store.check(keys):
            keys = [key for key in keys if self.store.check([key])]
        arrived = [_join(text) for text in (self.store.multi_get(keys) if keys else [])]
        self.num_arrived = len(arrived)
        return arrived

    def _wait(
        self,
        look: Callable[[], _Verdict | None],
        timeout: float,
        report: Callable[[], None] = lambda: None,
    ) -> _Verdict | None:
        """Return what ``look`` finds, or None after ``timeout`` seconds without a find."""
        longest = min(max(_SHORTEST_LIMIT, _PAUSE_PER_RANK * self.me.world_size), _LONGEST_LIMIT)
        pause, next_report = max(_FIRST_PAUSE, longest / _STEPS), _PROGRESS_EVERY
        while (found := look()) is None:
            self._pass_on_failure()
            waited = time.monotonic() - self.started
            if waited > timeout:
                return None
            if waited > next_report:
                report()
                next_report += _PROGRESS_EVERY
            time.sleep(pause)
            pause = min(_GROWTH * pause, longest)
        return found

    def _pass_on_failure(self) -> None:
        """Bring what a failed rank left at the handshake server, if it is here, to where rank 0 looks."""
        server = self.job_store.server
        if server is not None and server.failure and FailureRecord.read(self.store) is None:
            FailureRecord.told(server.failure).publish(self.store)
            self.store.set(protocol.MEMBERSHIP_EVENT, "failure")

    def _log_progress(self) -> None:
        missing = describe_missing(self._arrived(), self.me.world_size, self.expected)
        if missing:
            logger.warning(
                "%d of %d ranks joined %s after %.0f s; missing: %s",
                self.num_arrived,
                self.me.world_size,
                self.job_store.url,
                time.monotonic() - self.started,
                missing,
            )

    def _missing(self) -> str:
        arrived = self._arrived()
        return self._with_missing(find_faults(arrived, self.me.world_size), arrived)

    def _with_missing(self, faults: list[str], arrived: list[JoinRecord]) -> str:
        missing = describe_missing(arrived, self.me.world_size, self.expected)
        if not missing:
            return " ".join(faults) or f"rank 0 gave no verdict within {self.timeout:g} s. See its error."
        present = describe_present(arrived)
        sentence = (
            f"{len({join_record.rank for join_record in arrived})} of {self.me.world_size} ranks joined "
            f"{self.job_store.url} within {time.monotonic() - self.started:.0f} s; missing: {missing}. "
            f"Present: {present} [{self.source}]. See whether the missing ranks started and reached "
            "DistributedManager.initialize(); set rendezvous_timeout for slow starts."
        )
        return " ".join([*faults, sentence])

    def _check_my_place(self, peers: Peers) -> None:
        holder = peers[self.me.rank] if self.me.rank < len(peers) else None
        if holder is None or (holder.host, holder.pid) != (self.me.host, self.me.pid):
            raise RendezvousError(
                f"rank {self.me.rank} must be one process, got pid {self.me.pid} on {self.me.host} "
                f"after all ranks had joined{_held_by(holder)}. Give each process its own rank, and each "
                "job its own address and port."
            )

    def _part(self) -> None:
        """Leave a failed start: who serves the store stays until the others have heard of it.

        Those that are still on their way are waited for too, unless they had all the time they were given.
        """
        self.store.add(protocol.VERDICT_HEARD, 1)
        server = self.job_store.server
        if server is None:
            return
        is_late = time.monotonic() - self.started > self.timeout
        until = time.monotonic() + (_PARTING if is_late else _PARTING_WITH_ALL)
        while time.monotonic() < until:
            all_left = self.store.add(protocol.VERDICT_HEARD, 0) >= self.store.add(protocol.JOINED, 0)
            if all_left and (is_late or server.num_answered >= self.me.world_size - 1):
                break
            time.sleep(_SHORTEST_LIMIT)


def _held_by(holder: Peer | None) -> str:
    return f", and pid {holder.pid} on {holder.host}" if holder else ""


def _join(text: bytes) -> JoinRecord:
    fields = json.loads(text)
    return JoinRecord(**{**fields, "visible": tuple(fields["visible"])})
