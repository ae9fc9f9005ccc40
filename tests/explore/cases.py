"""The explorer's cases as values: what is drawn, and the line that repeats it."""

import random
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from enum import Enum, auto

LAUNCHERS = ("env", "torchrun", "srun", "srun-K", "openmpi", "mpich", "intel-mpi")
WEIGHTS = (20, 2, 2, 1, 1, 1, 1)  # without a launcher nobody else ends the survivors: such a job proves most
WITH_SEVERAL_HOSTS = ("env", "srun", "srun-K", "openmpi", "mpich", "intel-mpi")
MOST_RANKS = 8
SHARE_OF_TWO_HOSTS = 0.2
SHARE_OF_TWO_FAULTS = 0.15
ENDED_BY_RANKS = ("srun", "srun-K", "mpich", "intel-mpi")  # a silent rank would keep these waiting
OF_MPI = ("openmpi", "mpich", "intel-mpi")

ACKNOWLEDGED = 5  # exit code of a program that catches the failure itself

SILENCE_LIMIT = 4  # seconds, for DISTMAN_SILENCE_TIMEOUT
GRACE = 6  # seconds, for DISTMAN_FAILURE_GRACE
NATIVE = 1.5 * GRACE  # seconds after which code that does not return to Python is ended
CHILDREN = 15.0  # seconds after which the children of a program that has ended are ended
WAITING = 3.0  # seconds until an error counts whose handler waits for ranks that wait elsewhere
RENDEZVOUS_LIMIT = 8  # seconds, for rendezvous_timeout; a DataLoader looks after its workers every 5
SHORTEST = 5.0  # seconds within which a failure reaches everyone, and everyone has ended
LATENESS = 4.0  # seconds by which a limit of the library may be passed
SILENCE = 12.0  # seconds within which everyone has missed a silent rank, and has ended
START_LIMIT = 10.0  # seconds that a rank stays at its end for those that still start
WORKER_LIMIT = 5.0  # seconds after which a DataLoader looks whether its workers are alive
COLLECTIVE_LIMIT = 15  # seconds, for DISTMAN_TIMEOUT
CANCELLING = 8.0  # seconds that a rank which has Slurm cancel the job leaves to the others, and those of the command
HANDLING = 60.0  # seconds for which a program may be busy with the failure, such as by waiting for a thread
GIVING_IN = 10.0  # seconds after which a program that swallows the failure is ended

IN_THE_LOOP = ("python", "collective", "barrier", "on_rank", "save")
PLACES = ("start", *IN_THE_LOOP, "native", "end")
AROUND = (
    "plain",
    "finally",
    "retry",
    "bare",
    "logging",
    "del",
    "callback",
    "asyncio",
    "thread",
    "loader",
    "ddp",
    "files",
    "children",
    "pool",
    "with",
    "exit-handler",
    "click",
    "save",
    "notebook",
    "acknowledge",
)


SWALLOWING = ("bare", "del")  # where the failure is caught, and the program goes on
BY_NAME = ("notebook", "acknowledge")  # where the failure counts as handled
WITH_CHILDREN = ("children", "pool")
COMPARED = ("plain", "with", "exit-handler", "click", "files")  # where no thread may do what another one waits for
JOINING = ("asyncio", "thread")  # where the program waits for a thread, which may be waiting for the rank that failed


class Effect(Enum):
    """What a fault is to the other ranks."""

    RAISES = auto()
    """An exception: they are told at once, and why."""
    DIES = auto()
    """The process is gone without a word."""
    LEAVES = auto()
    """It ends normally: that concerns only who waits for it."""
    SILENT = auto()
    """The process is there, and does nothing."""
    CUT = auto()
    """Its host cannot be reached: each side is silent to the other."""
    NONE = auto()
    """Nothing: the job goes on, and ends as if nothing had been."""


@dataclass(frozen=True)
class Kind:
    """What is known of a fault.

    Attributes:
        effect: What it is to the other ranks.
        says: What they must be told, besides which rank it was.
        places: Where it can happen.
        rank: The only rank that it can happen to; None is any.
        needs_hosts: Whether it needs two virtual hosts.
        needs_no_launcher: Whether a launcher would wait for that rank.
    """

    effect: Effect
    says: str = ""
    places: Collection[str] = PLACES
    rank: int | None = None
    needs_hosts: bool = False
    needs_no_launcher: bool = False


FAULTS = {
    "raise": Kind(Effect.RAISES, "ValueError: boom"),
    "raise-unpicklable": Kind(Effect.RAISES, "UnpicklableError: boom"),
    "raise-two-arguments": Kind(Effect.RAISES, "TwoArgumentsError: boom number 2"),
    "raise-without-text": Kind(Effect.RAISES, "TextlessError"),
    "raise-closed-outputs": Kind(Effect.RAISES, "ValueError: boom"),
    "raise-no-stderr": Kind(Effect.RAISES, "ValueError: boom"),
    "raise-full-stderr": Kind(Effect.RAISES, "ValueError: boom"),
    "raise-blocked-stderr": Kind(Effect.RAISES, "ValueError: boom", needs_no_launcher=True),
    "raise-in-worker": Kind(Effect.RAISES, "ValueError: boom"),
    "kill-worker": Kind(Effect.RAISES, "DataLoader worker"),
    "exit-worker": Kind(Effect.RAISES, "DataLoader worker"),
    "memory-limit": Kind(Effect.RAISES, "MemoryError"),
    "full-disk": Kind(Effect.RAISES, "No space left", places=("save",), rank=0),
    "sys.exit(0)": Kind(Effect.LEAVES, places=("start", *IN_THE_LOOP, "end")),
    "sys.exit(3)": Kind(Effect.RAISES, "ended with exit code 3", places=("start", *IN_THE_LOOP, "end")),
    "sys.exit(1)-in-handler": Kind(Effect.RAISES, "ValueError: boom", places=("start", *IN_THE_LOOP, "end")),
    "raise-and-wait": Kind(Effect.RAISES, "ValueError: boom", places=("collective", "barrier", "save")),
    "wait-elsewhere": Kind(
        Effect.RAISES, "two wait for each other in different ones", places=("collective", "barrier")
    ),
    "os._exit(0)": Kind(Effect.DIES),
    "os._exit(3)": Kind(Effect.DIES),
    "SIGKILL": Kind(Effect.DIES),
    "SIGSEGV": Kind(Effect.DIES),
    "oom-kill": Kind(Effect.DIES),
    "SIGSTOP": Kind(Effect.SILENT),
    "GIL": Kind(Effect.SILENT, places=("start", *IN_THE_LOOP, "native")),
    "cut": Kind(Effect.CUT, places=("python", "collective", "barrier", "native"), needs_hosts=True),
    "link-down": Kind(Effect.CUT, places=("python", "collective", "barrier", "native"), needs_hosts=True),
    "SIGSTOP+SIGCONT": Kind(Effect.NONE, places=IN_THE_LOOP),
    "GIL-briefly": Kind(Effect.NONE, places=IN_THE_LOOP),
    "slow-network": Kind(Effect.NONE, places=("python", "collective", "barrier"), needs_hosts=True),
    "raise-in-thread": Kind(Effect.NONE, places=IN_THE_LOOP),
    "raise-in-del": Kind(Effect.NONE, places=IN_THE_LOOP),
    "raise-in-callback": Kind(Effect.NONE, places=IN_THE_LOOP),
}
SECOND_FAULTS = ("raise", "os._exit(0)", "SIGKILL", "SIGSTOP")


@dataclass(frozen=True)
class Fault:
    """A fault on one rank."""

    name: str
    rank: int

    @property
    def effect(self) -> Effect:
        return FAULTS[self.name].effect


@dataclass(frozen=True)
class Case:
    """A job with one fault, or with two at the same moment.

    Attributes:
        launcher: Who starts the ranks; ``env`` is nobody, they find their places in bare variables.
        hosts: Number of hosts.
        ranks: Number of ranks.
        place: Where the ranks are when it happens.
        faults: What happens to whom.
        around: The code around the place, on the other ranks.
    """

    launcher: str
    hosts: int
    ranks: int
    place: str
    faults: tuple[Fault, ...]
    around: str

    def __str__(self) -> str:
        faults = ",".join(f"{fault.name}@{self.place}:{fault.rank}" for fault in self.faults)
        return f"launcher={self.launcher} hosts={self.hosts} ranks={self.ranks} fault={faults} around={self.around}"

    @classmethod
    def parse(cls, line: str) -> "Case":
        """Return the case that a line stands for.

        Raises:
            ValueError: It stands for none.
        """
        fields = dict(word.split("=", 1) for word in line.split())
        parts = [part.replace("@", ":").split(":") for part in fields.pop("fault").split(",")]
        faults = tuple(Fault(name, int(rank)) for name, _, rank in parts)
        hosts, ranks = int(fields.pop("hosts")), int(fields.pop("ranks"))
        case = cls(hosts=hosts, ranks=ranks, place=parts[0][1], faults=faults, **fields)
        if str(case) != line or not case.is_possible:
            msg = f"case must be one that can be drawn, written as it is printed, got {line!r}"
            raise ValueError(msg)
        return case

    @property
    def survivors(self) -> list[int]:
        """The ranks that nothing happens to; where a host is cut off, those on both sides."""
        failing = set() if self.effects == {Effect.CUT} else {fault.rank for fault in self.faults}
        return sorted({*range(self.ranks)} - failing)

    def guilty(self, rank: int) -> set[int]:
        """Return the ranks that a rank may name as those that failed."""
        if self.effects == {Effect.CUT}:
            return {other for other in range(self.ranks) if self.host_of(other) != self.host_of(rank)}
        if self.is_mismatch:  # two ranks say so, each of both
            return {*range(self.ranks)}
        return {fault.rank for fault in self.faults if fault.effect is not Effect.NONE}

    @property
    def limit(self) -> float:
        """Seconds from the fault within which the last survivor must have ended."""
        if self.place == "end":
            return SHORTEST + START_LIMIT
        until_raised = WORKER_LIMIT if self.faults[0].name in ("kill-worker", "exit-worker") else 0.0
        if self.place == "start" and self.effects != {Effect.RAISES}:
            is_told = Effect.RAISES in self.effects  # then rank 0 stays for the rank that does not come
            return until_raised + (START_LIMIT if is_told else RENDEZVOUS_LIMIT) + LATENESS
        is_silent = bool(self.effects & {Effect.SILENT, Effect.CUT})
        limit = until_raised + (SILENCE if is_silent else SHORTEST)
        if self.place == "native":
            limit += NATIVE
        if self.around in WITH_CHILDREN:
            limit += CHILDREN
        if is_silent and self.launcher == "env":
            limit += NATIVE  # a rank of its host stays to end it
        if self.faults[0].name in ("raise-and-wait", "wait-elsewhere"):
            limit += WAITING
        if self.around in SWALLOWING:
            limit += GIVING_IN
        if is_silent and self.launcher in ("srun", "srun-K"):
            limit += CANCELLING
        # Who has handled that the store's rank is silent does not know whether handlers elsewhere are busy.
        if self.launcher in ENDED_BY_RANKS and self.around in BY_NAME and self._is_store_silent:
            limit += HANDLING
        # A rank that cannot print why it failed is there, and silent, for as long as it tries.
        if self.around in JOINING and (is_silent or self.faults[0].name == "raise-blocked-stderr"):
            limit += GRACE
        return limit

    @property
    def _is_store_silent(self) -> bool:
        return any(fault.rank == 0 and fault.effect is Effect.SILENT for fault in self.faults)

    @property
    def is_mismatch(self) -> bool:
        """Whether a rank waits in something else than the others do."""
        return self.faults[0].name == "wait-elsewhere"

    @property
    def effects(self) -> set[Effect]:
        return {fault.effect for fault in self.faults}

    def fault_of(self, rank: int) -> Fault | None:
        return next((fault for fault in self.faults if fault.rank == rank), None)

    def host_of(self, rank: int) -> int:
        """Return the index of a rank's host; hosts get as many ranks as possible, in blocks, or one more."""
        return rank * self.hosts // self.ranks

    @property
    def is_harmless(self) -> bool:
        """Whether the job must go on to its end: nothing failed, or nobody waits for who left."""
        if self.effects == {Effect.NONE}:
            return True
        is_awaited = self.place != "python" and not (self.place == "save" and self.faults[0].rank != 0)
        return self.effects == {Effect.LEAVES} and not is_awaited and self.around != "ddp"

    @property
    def is_possible(self) -> bool:
        """Whether there can be such a job."""
        return (
            self.launcher in LAUNCHERS
            and self.place in PLACES
            and self.around in AROUND
            and self.hosts <= min(2, self.ranks)
            and self.ranks <= MOST_RANKS
            and (self.hosts == 1 or self.launcher in WITH_SEVERAL_HOSTS)
            and (self.hosts == 1 or self.launcher not in OF_MPI or self.ranks % 2 == 0)
            and (self.around == "plain" or self.place in IN_THE_LOOP)
            and (
                self.around not in WITH_CHILDREN or self.launcher == "env"
            )  # else the launcher ends ranks before they end those
            and len({fault.rank for fault in self.faults}) == len(self.faults) < self.ranks
            and all(self._can_happen(fault) for fault in self.faults)
            and not self._is_left_to_torch
            and not (self.is_mismatch and (self.around not in COMPARED or len(self.faults) > 1))
            and (len(self.faults) == 1 or self.faults[1].name in SECOND_FAULTS)
            and (len(self.faults) == 1 or not self.effects & {Effect.NONE, Effect.CUT, Effect.LEAVES})
        )

    @property
    def _is_left_to_torch(self) -> bool:
        """Whether a rank only leaves, and the error of torch's own collective that this breaks comes to no hook."""
        is_kept = self.around in (*SWALLOWING, "notebook")
        return self.effects == {Effect.LEAVES} and self.place == "collective" and is_kept

    def _can_happen(self, fault: Fault) -> bool:
        kind = FAULTS[fault.name]
        return (
            fault.rank < self.ranks
            and (
                fault.name != "raise-and-wait" or self.place != "save" or fault.rank == 0
            )  # who alone is awaited there
            and self.place in kind.places
            and kind.rank in (None, fault.rank)
            and (not kind.needs_hosts or self.hosts == 2)
            and (self.launcher == "env" or not (kind.needs_hosts or kind.needs_no_launcher))
        )


def draw(seed: int) -> Iterator[Case]:
    """Return the cases of a seed, without end or repetition: each fault once, then each again, and so on."""
    source = random.Random(seed)  # noqa: S311 - nothing to protect
    seen: set[Case] = set()
    while True:
        for fault in source.sample(list(FAULTS), len(FAULTS)):
            case = _draw_one(source, fault)
            while not case.is_possible or case in seen:
                case = _draw_one(source, fault)
            seen.add(case)
            yield case


def _draw_one(source: random.Random, fault: str) -> Case:
    kind = FAULTS[fault]
    (launcher,) = source.choices(LAUNCHERS, WEIGHTS)
    ranks = min(source.randint(2, MOST_RANKS), source.randint(2, MOST_RANKS))  # few are cheaper than many
    rank = source.choice([0, ranks - 1, source.randrange(ranks)]) if kind.rank is None else kind.rank
    faults = [Fault(fault, rank)]
    if source.random() < SHARE_OF_TWO_FAULTS:
        faults.append(Fault(source.choice(SECOND_FAULTS), source.randrange(ranks)))
    place = source.choice(list(kind.places))
    return Case(
        launcher="env" if kind.needs_hosts or kind.needs_no_launcher else launcher,
        hosts=2 if kind.needs_hosts or source.random() < SHARE_OF_TWO_HOSTS else 1,
        ranks=ranks,
        place=place,
        faults=tuple(faults),
        around=source.choice(AROUND) if place in IN_THE_LOOP else "plain",
    )
