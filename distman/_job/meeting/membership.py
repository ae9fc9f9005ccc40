"""Membership: every rank writes a join record into the store, rank 0 looks, and all learn the same verdict.

Each join record is a key of its own, so nothing is lost when two processes claim one rank. What travels is JSON.
Rank 0 reads the records as they come, and judges as soon as one contradicts another; the others wait for the
verdict, of which the store tells them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import json
import threading
import time
import typing
import zlib
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import torch.distributed as dist

from distman._base import timing
from distman._base.log import logger
from distman._base.text import Line
from distman._coordination import protocol
from distman._coordination.failure.record import DIED, FailureRecord
from distman._coordination.messages import (
    MalformedMessageError,
    claim,
    count,
    decode,
    decode_at_once,
    decode_index,
    encode,
)
from distman._coordination.timeouts import run_with_timeout
from distman._job.meeting.job_store import JobStore
from distman._job.meeting.peers import (
    OWN_RANK,
    JoinRecord,
    Peer,
    complete,
    describe_claim,
    describe_missing,
    describe_present,
    describe_recounted,
    find_faults,
)
from distman.errors import JobFailed, RendezvousError

_MOST_SURPLUS = 1_000  # processes beside the ranks whose records are read: a few show what is wrong
_MOST_VERDICT = 32 << 20  # bytes, unpacked: more than where 100,000 ranks are
_ROW: Any = tuple[*typing.get_type_hints(Peer, include_extras=True).values()]  # type: ignore[misc]  # known at run time


def establish_membership(
    job_store: JobStore, me: JoinRecord, *, timeout: float, source: str, expected: Mapping[int, str]
) -> tuple[Peer, ...]:
    """Join, wait for all ranks of the job, and return them in rank order, the same on all ranks."""
    # ``expected`` has the host of each rank, as far as the launcher tells.
    membership = _Membership(job_store, me, timeout, source, expected)
    peers: list[tuple[Peer, ...]] = []

    def take_part() -> None:
        try:
            membership.join_record()
            peers.append(membership.accept(membership.judge() if me.rank == 0 else membership.wait_for_verdict()))
        finally:
            membership.is_over.set()

    try:
        if not run_with_timeout(take_part, timeout + timing.JOIN_PARTING_WITH_ALL + timing.JOIN_BESIDE_RANK_ZERO):
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
    except (RendezvousError, JobFailed):
        raise
    except BaseException as error:  # Ctrl-C, or what the handler of a signal raised
        membership.withdraw(error)
        raise


@dataclasses.dataclass(frozen=True)
class _Verdict:
    """What rank 0 found: the peers and the rank that opened the store, or what is wrong."""

    peers: tuple[Peer, ...] = ()
    error: str | None = None
    failure: FailureRecord | None = None
    opener: int | None = None

    def pack(self) -> bytes:
        failure = dataclasses.asdict(self.failure) if self.failure is not None else None
        rows = [dataclasses.astuple(peer) for peer in self.peers]
        return zlib.compress(json.dumps([self.error, failure, self.opener, rows]).encode(), 1)

    @classmethod
    def unpack(cls, data: bytes) -> _Verdict:
        what = "the verdict on who takes part"
        stream = zlib.decompressobj()
        try:
            unpacked = stream.decompress(data, _MOST_VERDICT)
        except zlib.error as error:
            raise MalformedMessageError(what, f"{error}") from None
        reason, failure, opener, rows = decode(
            unpacked, tuple[Line | None, FailureRecord | None, int | None, list[_ROW]], what
        )
        if opener is not None and not 0 <= opener < len(rows):
            raise MalformedMessageError(what, f"there is no rank {opener}")
        return cls(tuple(Peer(*row) for row in rows), reason, failure, opener)


@dataclasses.dataclass
class _Membership:
    job_store: JobStore
    me: JoinRecord
    timeout: float
    source: str
    expected: Mapping[int, str]

    def __post_init__(self) -> None:
        self.store = self.job_store.store
        self.started = time.monotonic()
        self.arrived: dict[int, JoinRecord] = {}
        self.ranks: set[int] = set()
        self.kinds: set[tuple[Hashable, ...]] = set()
        self.has_event = False
        self.has_heard = False
        self.is_given_up = threading.Event()
        self.is_over = threading.Event()

    def join_record(self) -> None:
        if self.job_store.is_opened_here:
            self.store.set(protocol.OPENER, str(self.me.rank))
        # Nobody is to wait for this process if it dies before there is a verdict; that of rank 0 is one itself.
        leave = functools.partial(self.job_store.leave_will, self.me, unless=protocol.VERDICT)
        if self.me.rank == 0:
            leave(protocol.VERDICT, protocol.MEMBERSHIP_EVENT, lambda record: _Verdict(failure=record).pack())
        else:
            leave(protocol.FAILURE, protocol.MEMBERSHIP_EVENT)
        place = count(self.store, protocol.JOINED, 1)
        self._receive({place: self.me})
        self.store.set(protocol.join_record(place), encode(self.me))
        if place >= self.me.world_size:
            self.store.set(protocol.MEMBERSHIP_EVENT, "full")

    def judge(self) -> _Verdict:
        verdict = self._wait(self._look, self._next_arrival, self.timeout)
        return self._publish(verdict or _Verdict(error=self._missing()))

    def withdraw(self, error: BaseException) -> None:
        """Tell the ranks that are here why this one ends, and end its part: a thread in the store aborts the exit."""
        self.is_given_up.set()

        def tell() -> None:
            record = FailureRecord.of(error, self.me.rank).publish(self.store)
            self.store.set(protocol.MEMBERSHIP_EVENT, "failure")
            count(self.store, protocol.NEWS, 1)  # they may have had their verdict
            if self.me.rank == 0:
                self._publish(_Verdict(failure=record))
            self._part(error, timing.FAREWELL, with_all=False)

        with contextlib.suppress(dist.DistError):  # the process that serves the store may be interrupted too
            run_with_timeout(tell, timing.FAREWELL)
        self.is_over.wait(timing.FAREWELL)

    def wait_for_verdict(self) -> _Verdict:
        verdict = self._wait(self._verdict, lambda: protocol.VERDICT, self.timeout + timing.JOIN_BESIDE_RANK_ZERO)
        return verdict or _Verdict(error=self._missing())

    def accept(self, verdict: _Verdict) -> tuple[Peer, ...]:
        if verdict.failure is None and verdict.error is None:
            self._check_my_place(verdict.peers)
            self.job_store.opener = verdict.opener
            return verdict.peers
        error = RendezvousError(verdict.error) if verdict.failure is None else verdict.failure.to_failure()
        is_late = time.monotonic() - self.started > self.timeout
        self._part(error, timing.JOIN_PARTING if is_late else timing.JOIN_PARTING_WITH_ALL, with_all=not is_late)
        raise error

    def _publish(self, verdict: _Verdict) -> _Verdict:
        """Make this the verdict unless another process that claims rank 0 has judged, and return the one there is."""
        own = verdict.pack()

        def read(found: bytes) -> _Verdict:
            return verdict if found == own else _Verdict.unpack(found)

        counts = claim(self.store, protocol.VERDICT, own, read)
        self.store.set(protocol.MEMBERSHIP_EVENT, "judged")
        return counts

    def _look(self) -> _Verdict | None:
        self._read_arrivals()
        is_well = len(self.kinds) == 1 and len(self.ranks) == len(self.arrived)
        if is_well and len(self.ranks) < self.me.world_size and not self.store.check([protocol.MEMBERSHIP_EVENT]):
            return None
        arrived = list(self.arrived.values())
        missing = describe_missing(arrived, self.me.world_size, {})
        faults = find_faults(arrived, self.me.world_size)
        if faults:
            return _Verdict(error=" ".join([*faults, f"Not there yet: {missing}."] if missing else faults))
        record = (self._early_failure() if missing else None) or FailureRecord.read(self.store)
        if missing or record is not None:
            return _Verdict(failure=record) if record is not None else None
        peers = complete(arrived)
        if recounted := describe_recounted(arrived, peers):
            logger.warning(
                "the ranks of a host must have local ranks of their own, got %s, as another one says too. They have "
                "those of their order. Count them from 0 on each host, or leave LOCAL_RANK out.",
                recounted,
            )
        return _Verdict(peers, opener=self._opener())

    def _next_arrival(self) -> str:
        """Return the key that is written next when there is something new for rank 0."""
        if not self.has_event:
            return protocol.MEMBERSHIP_EVENT
        return next(protocol.join_record(place) for place in itertools.count(1) if place not in self.arrived)

    def _opener(self) -> int | None:
        if self.job_store.is_opened_here:
            return self.me.rank
        if not self.store.check([protocol.OPENER]):
            return None
        return decode_index(self.store.get(protocol.OPENER), self.me.world_size, "who serves the job's store")

    def _verdict(self) -> _Verdict | None:
        if not self.store.check([protocol.VERDICT]):
            failure = self._early_failure()  # of rank 0 itself, say, which judges nothing then
            return _Verdict(failure=failure) if failure is not None else None
        return _Verdict.unpack(self.store.get(protocol.VERDICT))

    def _read_arrivals(self) -> None:
        """Read the join records that came since the last time; one that is just being written is left for the next."""
        last = min(count(self.store, protocol.JOINED), self.me.world_size + _MOST_SURPLUS)
        new = [place for place in range(1, last + 1) if place not in self.arrived]
        if new and not self.store.check([protocol.join_record(place) for place in new]):
            new = [place for place in new if self.store.check([protocol.join_record(place)])]
        if new:
            texts = self.store.multi_get([protocol.join_record(place) for place in new])
            what = "the join record of the process that came as number {}"
            self._receive(
                {place: decode(text, JoinRecord, what.format(place)) for place, text in zip(new, texts, strict=True)}
            )

    def _receive(self, join_records: Mapping[int, JoinRecord]) -> None:
        """Take note of join records by their places, such that a contradiction shows without a look at all of them."""
        self.arrived.update(join_records)
        self.ranks.update(one.rank for one in join_records.values())
        self.kinds.update(one.common for one in join_records.values())

    def _wait(
        self, look: Callable[[], _Verdict | None], next_key: Callable[[], str], timeout: float
    ) -> _Verdict | None:
        """Return what ``look`` finds, or None after ``timeout`` seconds without a find."""
        # It looks again when the next key is set, or after a pause.
        pause = min(
            max(timing.JOIN_SHORTEST_PAUSE, timing.JOIN_PAUSE_PER_RANK * self.me.world_size), timing.JOIN_LONGEST_PAUSE
        )
        next_report = timing.JOIN_PROGRESS_EVERY
        while (found := look()) is None:
            waited = time.monotonic() - self.started
            if waited > timeout:
                return None
            if waited > next_report:
                if self.me.rank == 0:
                    self._log_progress()
                next_report += timing.JOIN_PROGRESS_EVERY
            key = next_key()
            if self.store.has_come([key], pause) and key == protocol.MEMBERSHIP_EVENT:
                self.has_event = True
            if self.is_given_up.is_set():
                raise RendezvousError("the rank was interrupted. Start the job again.")
        return found

    def _early_failure(self) -> FailureRecord | None:
        """Return what a rank told that failed before it joined."""
        what = "the failure of a process that had not joined"
        return decode_at_once(self.store, protocol.EARLY_FAILURE, FailureRecord, what)

    def _log_progress(self) -> None:
        self._read_arrivals()
        missing = describe_missing(self.arrived.values(), self.me.world_size, self.expected)
        if missing:
            logger.warning(
                "%d of %d ranks joined %s after %.0f s; missing: %s%s",
                len(self.arrived),
                self.me.world_size,
                self.job_store.url,
                time.monotonic() - self.started,
                missing,
                f"; see that all started{unproved}" if (unproved := self._unproved()) else "",
            )

    def _missing(self) -> str:
        self._read_arrivals()
        arrived = list(self.arrived.values())
        faults = find_faults(arrived, self.me.world_size)
        missing = describe_missing(arrived, self.me.world_size, self.expected)
        if not missing:
            return " ".join(faults) or f"rank 0 gave no verdict within {self.timeout:g} s. See its error."
        alike = " with the same secret" if self.job_store.url.startswith("tcp:") else ""  # ports may be derived from it
        sentence = (
            f"{len({join_record.rank for join_record in arrived})} of {self.me.world_size} ranks joined "
            f"{self.job_store.url} within {time.monotonic() - self.started:.0f} s; missing: {missing}. "
            f"Present: {describe_present(arrived)} [{self.source}]. See whether the missing ranks started{alike} and "
            f"reached DistributedManager.initialize(){self._unproved()}; set rendezvous_timeout for slow starts."
        )
        return " ".join([*faults, sentence])

    def _unproved(self) -> str:
        number = self.store.client.num_unproved
        return f", and have this job's secret, which {number} of those that came did not prove" if number else ""

    def _check_my_place(self, peers: tuple[Peer, ...]) -> None:
        """Refuse to take part where another process holds this rank, and end a job that may be made of two."""
        holder = peers[self.me.rank] if self.me.rank < len(peers) else None
        if holder is not None and (holder.machine, holder.pid) == (self.me.machine, self.me.pid):
            return
        self._read_arrivals()
        holders = [
            one
            for one in self.arrived.values()
            if holder is not None and (one.rank, one.machine, one.pid) == (holder.rank, holder.machine, holder.pid)
        ]
        held_by = "".join(f", and {describe_claim(one)}" for one in holders)
        error = RendezvousError(
            f"rank {self.me.rank} must be one process, got {describe_claim(self.me)} after all ranks had joined"
            f"{held_by}. {OWN_RANK}"
        )
        # A job that was complete long before is not blamed for a later one that takes the same port. Of two that start
        # together, nobody can tell which rank belongs to which.
        if any(abs(one.started - self.me.started) < timing.SAME_START for one in holders):
            # Without a traceback: that of a rank's own error is for the others, and this one is for the holder too.
            dataclasses.replace(FailureRecord.of(error, self.me.rank), traceback_text="").publish(self.store)
            count(self.store, protocol.NEWS, 1)
        raise error

    def _part(self, error: BaseException, seconds: float, *, with_all: bool) -> None:
        """Leave a failed start: the rank that opened the store stays until the others have heard of it."""
        if not self.has_heard:  # one that is interrupted here parts once more
            self.has_heard = True
            self.store.revoke_will()
            count(self.store, protocol.VERDICT_HEARD, 1)
        if not self.job_store.is_opened_here:
            return
        is_one_gone = isinstance(error, JobFailed) and error.error_type == DIED
        now = time.monotonic()
        until, report_at = now + seconds, now + timing.JOIN_QUIET
        while time.monotonic() < until and not (with_all and self.is_given_up.is_set()):
            num_joined = count(self.store, protocol.JOINED)
            all_left = count(self.store, protocol.VERDICT_HEARD) + is_one_gone >= num_joined
            num_come = num_joined + count(self.store, protocol.TURNED_AWAY)
            if all_left and (not with_all or num_come >= self.me.world_size):
                break
            if time.monotonic() > report_at:
                reason = str(error).partition("\n")[0]
                logger.warning("%s Ending in %.0f s: ranks that are on their way will be told.", reason, seconds)
                report_at = until
            time.sleep(timing.JOIN_SHORTEST_PAUSE)
