"""The control protocol: every key that ranks exchange over the job's store.

Each entry says what the key holds, which ranks write and read it, and how long it lives; those may be anywhere in the
package, but no other module spells a key out. The life of a job, as one rank sees it::

    this rank                      keys                             the others
    ---------                      ----                             ----------
    join          ->  OPENER, JOINED +1, join_record(n)
                      MEMBERSHIP_EVENT = full | failure     ->  rank 0 looks: all here? any at fault?
    verdict       <-  VERDICT, MEMBERSHIP_EVENT = judged    <-  rank 0
     |  at fault  ->  VERDICT_HEARD +1                      ->  the opener waits for it, then all end
     v
    started       ->  STARTED +1, the process group is up   ->  a rank that leaves early waits for all to have started
     |
    work          ->  beat(rank), peer_address(rank)        ->  the rank before watches the first
     |  ^             NEWS +1: look at FAILURE, queries and CLOSING, which every watcher does at its next look
     |  |         <-> queries(rank), answer(n, rank)         <-> a rank that waits too long asks where the others are
     |  +-----------  keys of operations: barriers, consensus, sections, stops
     |
     +- fails     ->  FAILURE (the first one counts), NEWS  ->  each raises it, FAILURE_SEEN +1
     |  or ends: the same, by the process of the store
     |
    leaves        ->  left(rank), LEFT                      ->  ranks that wait for this one give up
     v
    gone          ->  GONE +1: lets go of the store         ->  the holder waits for all, or a failure
    closing       ->  CLOSING, NEWS: from the holder        ->  ranks that still use the store: GONE +1; it is closed

The opener is the rank that started the process of the store, which ends with its last member. It is the holder, too,
where the launcher may end that process with the last rank of its host. In other jobs nobody waits for GONE, and
CLOSING is never set.

A counter is a number that ``Store.add`` raises; a flag is a key whose presence alone counts; a list has a comma after
each of its numbers. All other values are JSON or plain text, which ``messages.py`` reads, and never a pickle, which can
run code. A key lives on until the store is closed, unless its entry says otherwise.
"""

# Prefixes: each is the part of a store that belongs to a job or a group.


def job(*parts: object) -> str:
    """The whole job; the parts tell its starts apart in a store that outlives them, that of another group say."""
    return "/".join(["distman", *map(str, parts)])


def in_job(key: str) -> str:
    """One of the keys below as it stands in the whole store, for a process that is not a rank yet."""
    return f"{job()}/{key}"


def store_address(job_id: str, start: int) -> str:
    """In the store of a launcher's agent: where rank 0 has opened the job's own at this start."""
    return f"distman/{job_id}/start {start}"


def start_failure(job_id: str, restart: str) -> str:
    """There: the ``FailureRecord`` of the first rank that failed before it joined; all that wait to meet read it."""
    return f"distman/{job_id}/start failure {restart}"


def opener_beside(job: str) -> str:
    """In the store of a process group of other code: the rank that opens the job's own, in words, the first to come."""
    return f"{job}/opener"


def store_beside(job: str) -> str:
    """There: where the job's own is and what lets in there, or why it could not be opened. The opener writes it."""
    return f"{job}/store"


PROCESS_GROUP = "group"
"""What torch keeps for the default process group."""


def group(name: str) -> str:
    """The members of a process group, by the group's name."""
    return f"group {name}"


def node(first_rank: int) -> str:
    """The ranks of one host, by the smallest of them."""
    return f"node {first_rank}"


# Joining, until the verdict.

OPENER = "opener"
"""Number of the opener. That rank writes it, rank 0 reads it."""

JOINED = "joined"
"""Counter of processes that joined. Each adds itself; rank 0 reads it, ranks that give up waiting for the verdict, and
the opener when it has to end."""

MEMBERSHIP_EVENT = "membership event"
"""``full``, ``failure`` or ``judged``: a reason to look. The last to join, a process that failed before it joined, a
rank that is interrupted, or rank 0 writes it, all read it. The process of the store counts it up when one ends that
had joined."""

VERDICT = "verdict"
"""The ranks that take part, or what is wrong, compressed. Rank 0 writes it, the first one if two claim that rank, or
the process of the store, if rank 0 ends before; all read it."""

VERDICT_HEARD = "verdict heard"
"""Counter of processes that joined and know why the start failed. Each adds itself; the opener waits for it."""

EARLY_FAILURE = "early failure"
"""The ``FailureRecord`` of a rank that failed before it joined. That rank writes it, or for the opener the process of
the store; rank 0 reads it, and so do the others where rank 0 does not judge."""

TURNED_AWAY = "turned away"
"""Counter of processes that did not join, because they failed before, or were told that another one had. Each adds
itself, or rank 0 does it for one that has told of its failure elsewhere; the opener waits for it."""


def join_record(place: int) -> str:
    """A ``JoinRecord``, by arrival, since two processes may claim one rank; rank 0 reads it, and ranks that give up."""
    return f"join record/{place}"


# The life of a rank.

STARTED = "started"
"""Counter of ranks whose process group is up. Each adds itself; ranks that leave wait for all, and a process that finds
the store looks whether the job has started."""

NEWS = "news"
"""Counter of events. Once the job is up, it is raised where FAILURE, a query or CLOSING is written; every watcher looks
at it several times a second, and at the rest only when it has changed."""

FAILURE = "failure"
"""The ``FailureRecord`` of the first failure. The rank that fails writes it, or the one that misses another; after the
verdict also a process that came too late, where the job may be made of two. The process of the store writes what each
rank has left there for its end, unless left(rank) is set. All read it, and so does a process that finds the store: if
the job has started, that is an earlier one."""

JOB_ENDER = "job ender"
"""The rank that finds out, after a failure, whether one that does nothing would keep the launcher waiting: the first
one that knows of the failure and can look, the failing one perhaps."""


def straggler_ender(first_rank: int) -> str:
    """The rank of a host that ends those which do not react to a failure: the first one that looks."""
    return f"straggler ender {first_rank}"


FAILURE_SEEN = "failure seen"
"""Counter of ranks that know of FAILURE and have not left since, without the one that failed. Each adds itself; the
holder waits for all of them before its program learns of it, and may end."""

LEFT = "left"
"""List of the ranks that left the job, in the order in which they did. Each appends itself; ranks that wait, or find a
connection broken, read it, and so does a process that finds the store: if the job has started, that is an earlier
one."""

CLOSING = "closing"
"""Flag: the store will be closed. Its holder writes it when it leaves; all watchers read it."""

GONE = "gone"
"""Counter of ranks that need the store no more. Each adds itself, once; its holder waits for all others, and adds
itself only if it does not watch."""


def left(rank: int) -> str:
    """Flag: this rank left the job of its own accord. Its watcher and the process of the store read it."""
    return f"left/{rank}"


def beat(rank: int) -> str:
    """Sign of life: the time, a space, and what the rank waits in.

    Its watcher writes it, and deletes it when it gives up, or the rank knows of FAILURE; the rank before reads it, and
    after a failure the ranks that look for stragglers.
    """
    return f"beat/{rank}"


def peer_address(rank: int) -> str:
    """Hosts and port at which the rank shows its presence; after a failure, or before a firewall, others read it."""
    return f"peer address/{rank}"


# Hangs.

HANG_REPORTER = "hang reporter"
"""The rank that reports a hang: the first one that waits too long. It deletes it once its wait is over or it watches no
more."""

QUERY_NUMBERS = "query numbers"
"""Counter that numbers the queries."""


def queries(rank: int) -> str:
    """List of the queries where this rank is. Each rank that asks appends one; its watcher answers the new ones."""
    return f"queries {rank}"


def answered(number: int) -> str:
    """Counter of ranks that answered a query. The rank that asked waits for all of them, and deletes it."""
    return f"answered {number}"


def answer(number: int, rank: int) -> str:
    """An ``Answer``. The watcher of that rank writes it; the rank that asked reads and deletes it, if it is in time."""
    return f"answer {number}/{rank}"


# Slow ranks.

TIMED = "timed"
"""List of the ranks that take steps and have told of their times. Each appends itself once; rank 0 reads it."""

SLOW_RANKS = "slow ranks"
"""Which ranks are slow: triples of rank, phase and factor. Rank 0 writes it at each change, all may read it."""


def step_times(rank: int) -> str:
    """A number that grows, and the seconds of each phase in some steps, see ``step_times.py``; rank 0 reads it."""
    return f"step times/{rank}"


# Ranks that wait for each other.


def waiting(rank: int) -> str:
    """What a rank has been waiting in for a second. Its watcher writes it, and deletes it when the wait is over."""
    return f"waiting {rank}"


def suspected(rank: int) -> str:
    """Ranks that wait for this one, which seems to wait for them in another call: each watcher appends a line."""
    return f"suspected {rank}"


def deadlock(key: str) -> str:
    """Why those that wait in something wait for ever. A watcher writes it, all that wait there read it."""
    return f"deadlock {key}"


# Calls that a rank refuses.

REFUSAL_NUMBERS = "refusal numbers"
"""Counter that numbers the refusals."""

REFUSALS = "refusals"
"""List of the refusals. A rank that refuses appends one that is written; watchers look at those they have not seen."""


def refusal(number: int) -> str:
    """A ``Refusal``. The rank that refuses a call writes it, and deletes it when the others have answered."""
    return f"refusal {number}"


def refusal_answer(number: int, rank: int) -> str:
    """A ``Posted``. The watcher of that rank writes it; the rank that refuses reads and deletes it."""
    return f"refusal {number}/{rank}"


def asker(operation: str) -> str:
    """The one rank that asks where those are that did not come: the first one."""
    return f"{operation}/asker"


def places(operation: str) -> str:
    """What the asker found out, as pairs of rank and place. It writes it, all that came read it."""
    return f"{operation}/places"


# Operations of several ranks: each has a name of its own, which is also what messages call it.


def barrier(number: int, name: str | None) -> str:
    """A barrier of all ranks. Those of each name are counted by themselves."""
    return f"barrier {number}" + (f" {name!r}" if name else "")


def groups(number: int) -> str:
    """The decision which groups to make."""
    return f"groups {number}"


def groups_made(number: int) -> str:
    """The decision to go on with these groups."""
    return f"groups {number} made"


def first_use(group: str) -> str:
    """The first use of a group that is made then."""
    return f"the first use of group {group}"


def collective(number: int, group: object) -> str:
    """The comparison of a collective's calls in debug mode."""
    return f"collective {number} of group {group}"


def section(depth: int) -> str:
    """The exclusive sections of a group, a sequence of operations; nested ones have keys of their own."""
    return f"section {depth}"


JOINT_ERRORS = "joint error"
"""Errors that left a joint block, a sequence of operations. Each member that raised appends itself to what arrived
there, and reads which others did."""

STOP = "stop"
"""Why to stop. Any rank that was asked to writes it, all look for it."""

STOP_FIRST_STEP = "stop/first step"
"""The first step at which a rank asked whether to stop. The first rank writes it, all compare theirs."""

STOP_ANSWERS = "stop/answers"
"""Counter of ranks that wrote which step they passed. Each adds itself; the last one writes STOP_AFTER."""

STOP_AFTER = "stop/after"
"""The furthest step that any rank passed, or null. All wait for it, and stop at their next step."""

STOP_END = "stop/end"
"""When the job's time is up, in seconds since the epoch, as rank 0 heard from the scheduler."""

STOP_STEP = "stop/step"
"""The step at which the first rank stopped. All compare theirs."""


def stop_passed(rank: int) -> str:
    """The last step that a rank passed before it heard of a stop, or left; null for none. The last one reads all."""
    return f"stop/passed {rank}"


def nth(sequence: str, number: int) -> str:
    """An operation of a sequence. It is deleted once all ranks have asked for a later page of keys."""
    return f"{sequence} {number}"


def page(sequence: str, number: int) -> str:
    """Counter of ranks that began a page of keys. Each adds itself; the last one deletes it and the page before."""
    return f"{sequence} page {number}"


# Keys of one operation. The last rank to leave deletes them, unless it was given up or it says otherwise.


def arrived(operation: str) -> str:
    """List of the members that came to a barrier, or raised a joint error, whose list is deleted with its page."""
    return f"{operation}/arrived"


def outcome(operation: str) -> str:
    """Whether a barrier is open, or which members are missing and a ``FailureRecord``.

    The last rank to come writes it, or the one that gives up; all read it.
    """
    return f"{operation}/outcome"


def passages(operation: str) -> str:
    """Counter of a barrier: each member adds one when it comes and one when it leaves, so that the last one knows.

    It is far below zero where the barrier was given up.
    """
    return f"{operation}/passages"


def late(operation: str) -> str:
    """The one rank that looks which ranks are missing at a barrier: the first one that has waited for too long."""
    return f"{operation}/late"


def first_proposal(operation: str) -> str:
    """What the first rank at a decision wants: rank, digest and text. All read it."""
    return f"{operation}/first"


def other_proposal(operation: str) -> str:
    """What the first rank wants that wants something else. All read it."""
    return f"{operation}/other"


def call(operation: str, index: int) -> str:
    """What a member compares, by name, and where it is in the program. All read it."""
    return f"{operation}/call {index}"


def failure_of(operation: str) -> str:
    """The ``FailureRecord`` of the first member that failed. All read it; the making of a group ends by it."""
    return f"{operation}/{FAILURE}"


def read_by(operation: str) -> str:
    """Counter of ranks that have read all of the above."""
    return f"{operation}/read"


def done_by(operation: str) -> str:
    """List of the ranks that have done their part of an exclusive section of several. It is deleted with its page."""
    return f"{operation}/done by"


def done(operation: str) -> str:
    """Counter of these.

    The section's own key holds its name, and the ``FailureRecord`` of a rank that failed, or null. Both are deleted
    with their page.
    """
    return f"{operation} count"


# What the threads exchange that write a checkpoint in parts.


def part(folder: str, rank: int) -> str:
    """What a rank has written of a checkpoint; nothing where it failed, and ``failure_of(folder)`` has the reason.

    The thread of that rank writes it; that of rank 0 reads and deletes it, unless the save was given up.
    """
    return f"{folder}/part {rank}"


# What commands exchange.

STANDING_STILL = "who stands still"
"""Why a step of a command ended early, in words. The first rank that knows writes it, all read it."""


def report(number: int, name: str, rank: int) -> str:
    """What a rank found out. It writes it; rank 0 reads and deletes it."""
    return f"report {number} of {name}/{rank}"


def message(number: int, name: str) -> str:
    """What rank 0 has to say. It writes it, all others read it."""
    return f"message {number} of {name}"
