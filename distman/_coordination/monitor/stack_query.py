"""Asking other ranks where they are: their watchers answer, whatever their main threads do."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch.distributed as dist

from distman._coordination import tracking
from distman._coordination.failure.record import shortened

if TYPE_CHECKING:
    from torch.distributed import Store


_PAUSE = 0.01
_MAX_STACKS = 100_000


@dataclasses.dataclass(frozen=True)
class Answer:
    """Where a rank is.

    Attributes:
        waiting: What it waits in, or waited in last, in words; empty if it never did.
        stacks: The stacks of its threads.
    """

    waiting: str
    stacks: str

    @classmethod
    def here(cls) -> Answer:
        """Return where this process is.

        Not for the main thread, whose stack is wanted.
        """
        return cls(tracking.describe_here(), shortened(tracking.stacks(), _MAX_STACKS))

    @property
    def place(self) -> str:
        """What the rank waits in and since when; of one that waits for nobody, the last line of its main thread."""
        if self.waiting.startswith("in "):
            return self.waiting
        lines = re.findall(r'File "(.+)", line (\d+), in (\S+)', self.stacks.partition("\n\n")[0])
        place = f"at {lines[-1][0]}:{lines[-1][1]} in {lines[-1][2]}" if lines else ""
        return ", ".join(filter(None, (place, self.waiting)))


@dataclasses.dataclass
class StackQueries:
    """The questions of a job, numbered.

    Attributes:
        store: The job's store.
        rank: This process's rank.
        num_seen: How many of the questions this rank has looked at.
    """

    store: Store
    rank: int
    num_seen: int = 0

    def ask(self, ranks: Sequence[int], timeout: float) -> dict[int, Answer]:
        """Return where these ranks are, as far as they answer.

        Blocking.

        Args:
            ranks: Whom to ask.
            timeout: Seconds to wait for answers.
        """
        number = self.store.add("questions", 1)
        self.store.set(f"question {number}", json.dumps(list(ranks)))
        self.store.add("news", 1)
        until = time.monotonic() + timeout
        waiting = set(ranks)
        answers: dict[int, Answer] = {}
        while waiting and time.monotonic() < until:
            time.sleep(_PAUSE)
            for rank in sorted(waiting):
                key = f"answer {number}/{rank}"
                if self.store.check([key]):
                    answers[rank] = Answer(**json.loads(self.store.get(key)))
                    self.store.delete_key(key)
                    waiting.discard(rank)
        self.store.delete_key(f"question {number}")
        return answers

    def answer(self) -> None:
        """Answer the questions that are new."""
        num_asked = self.store.add("questions", 0)
        for number in range(self.num_seen + 1, num_asked + 1):
            key = f"question {number}"
            with contextlib.suppress(dist.DistStoreError):  # who asked may have given up just now
                if self.store.check([key]) and self.rank in json.loads(self.store.get(key)):
                    self.store.set(f"answer {number}/{self.rank}", json.dumps(dataclasses.asdict(Answer.here())))
        self.num_seen = num_asked
