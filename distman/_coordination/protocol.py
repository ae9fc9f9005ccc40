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
    work          ->  beat(rank)                            ->  the rank before watches the first
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
run code. A key lives on until the store is closed, unless its entry says otherwise. Those that exist several times, by
a name, a rank or a number, are made by functions.
"""

from collections.abc import Callable

ByName = Callable[[str], str]
ByNumber = Callable[[int], str]

# Prefixes: each is the part of a store that belongs to a job or a group.


def job(*parts: object) -> str:
    """The whole job; the parts tell its starts apart in a store that outlives them, that of another group say."""
    return "/".join(["distman", *map(str, parts)])


in_job: ByName = "distman/{}".format
"""One of the keys below as it stands in the whole store, for a process that is not a rank yet."""

store_beside: ByName = "{}/store".format
"""In the store of a process group of other code: where the job's own is and what lets in there, or why it could not be
opened. Rank 0 writes it."""

PROCESS_GROUP = "group"
"""What torch keeps for the default process group."""

group: ByName = "group {}".format
"""The members of a process group, by the group's name."""

node: ByNumber = "node {}".format
"""The ranks of one host, by the smallest of them."""

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
the store; all read it: those that come later at once, and those that wait where rank 0 does not judge."""

TURNED_AWAY = "turned away"
"""Counter of processes that did not join, because they failed before, or were told that another one had. Each adds
itself; the opener waits for it."""

join_record: ByNumber = "join record/{}".format
"""A ``JoinRecord``, by arrival, since two processes may claim one rank; rank 0 reads it, and ranks that give up."""

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

straggler_ender: ByNumber = "straggler ender {}".format
"""The rank of a host that ends those which do not react to a failure: the first one that looks."""

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

left: ByNumber = "left/{}".format
"""Flag: this rank left the job of its own accord. Its watcher and the process of the store read it."""

beat: ByNumber = "beat/{}".format
"""Heartbeat: the time, a space, and what the rank waits in.

Its watcher writes it, and deletes it when it gives up, or the rank knows of FAILURE; the rank before reads it, and
after a failure the ranks that look for stragglers.
"""

peer_address: ByNumber = "peer address/{}".format
"""Hosts and port at which the others try whether they reach the rank, while all make their process group."""

# Hangs.

HANG_REPORTER = "hang reporter"
"""The rank that reports a hang: the first one that waits too long. It deletes it once its wait is over or it watches no
more."""

QUERY_NUMBERS = "query numbers"
"""Counter that numbers the queries."""

queries: ByNumber = "queries {}".format
"""List of the queries where this rank is. Each rank that asks appends one; its watcher answers the new ones."""

answered: ByNumber = "answered {}".format
"""Counter of ranks that answered a query. The rank that asked begins it, waits for all of them, and deletes it."""

answer: Callable[[int, int], str] = "answer {}/{}".format  # number, rank
"""An ``Answer``. The watcher of that rank writes it; the rank that asked reads and deletes it, if it is in time."""

# Slow ranks.

TIMED = "timed"
"""List of the ranks that take steps and have told of their times. Each appends itself once; rank 0 reads it."""

SLOW_RANKS = "slow ranks"
"""Which ranks are slow: triples of rank, phase and factor. Rank 0 writes it at each change, all may read it."""


step_times: ByNumber = "step times/{}".format
"""A number that grows, and the seconds of each phase in some steps, see ``step_times.py``; rank 0 reads it."""


# Ranks that wait for each other.

waiting: ByNumber = "waiting {}".format
"""What a rank has been waiting in for a second. Its watcher writes it, and deletes it when the wait is over."""

suspected: ByNumber = "suspected {}".format
"""Ranks that wait for this one, which seems to wait for them in another call: each watcher appends a line with its
rank, what it waits in, and what this one does."""

deadlock: ByName = "deadlock {}".format
"""Why those that wait in something wait for ever. A watcher writes it, all that wait there read it."""

# Calls that a rank refuses.

REFUSAL_NUMBERS = "refusal numbers"
"""Counter that numbers the refusals."""

REFUSALS = "refusals"
"""List of the refusals. A rank that refuses appends one that is written; watchers look at those they have not seen."""

refusal: ByNumber = "refusal {}".format
"""A ``Refusal``. The rank that refuses a call writes it, and deletes it when the others have answered."""

refusal_answer: Callable[[int, int], str] = "refusal {}/{}".format  # number, rank
"""A ``Posted``. The watcher of that rank writes it; the rank that refuses reads and deletes it."""

# Operations of several ranks: each has a name of its own, which is also what messages call it.


def barrier(number: int, name: str | None) -> str:
    """A barrier of all ranks. Those of each name are counted by themselves."""
    return f"barrier {number}" + (f" {name!r}" if name else "")


groups: ByNumber = "groups {}".format
"""The decision which groups to make."""

groups_made: ByNumber = "groups {} made".format
"""The decision to go on with these groups."""

first_use: ByName = "the first use of group {}".format
"""The first use of a group that is made then."""

collective: Callable[[int, object], str] = "collective {} of group {}".format  # number, group
"""The comparison of a collective's calls in debug mode."""

section: ByNumber = "section {}".format
"""The exclusive sections of a group, a sequence of operations; nested ones have keys of their own."""

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

stop_passed: ByNumber = "stop/passed {}".format
"""The last step that a rank passed before it heard of a stop, or left; null for none. The last one reads all."""

nth: Callable[[str, int], str] = "{} {}".format  # sequence, number
"""An operation of a sequence. It is deleted once all ranks have asked for a later page of keys."""

page: Callable[[str, int], str] = "{} page {}".format  # sequence, number
"""Counter of ranks that began a page of keys. Each adds itself; the last one deletes it and the page before."""

# Keys of one operation. The last rank to leave deletes them, unless it was given up or it says otherwise.

arrived: ByName = "{}/arrived".format
"""List of the members that came to a barrier, or raised a joint error, whose list is deleted with its page."""

outcome: ByName = "{}/outcome".format
"""Whether a barrier is open, or which members are missing and a ``FailureRecord``.

The last rank to come writes it, or the one that gives up; all read it.
"""

passages: ByName = "{}/passages".format
"""Counter of a barrier: each member adds one when it comes and one when it leaves, so that the last one knows.

It is far below zero where the barrier was given up.
"""

late: ByName = "{}/late".format
"""The one rank that looks which ranks are missing at a barrier: the first one that has waited for too long."""

first_proposal: ByName = "{}/first".format
"""What the first rank at a decision wants: rank, digest and text. All read it."""

other_proposal: ByName = "{}/other".format
"""What the first rank wants that wants something else. All read it."""

call: Callable[[str, int], str] = "{}/call {}".format  # operation, index
"""What a member compares, by name, and where it is in the program. All read it."""

failure_of: ByName = "{}/failure".format
"""The ``FailureRecord`` of the first member that failed. All read it; the making of a group ends by it."""

read_by: ByName = "{}/read".format
"""Counter of ranks that have read all of the above."""

done_by: ByName = "{}/done by".format
"""List of the ranks that have done their part of an exclusive section of several. It is deleted with its page."""

done: ByName = "{} count".format
"""Counter of these.

The section's own key holds its name, and the ``FailureRecord`` of a rank that failed, or null. Both are deleted
with their page.
"""

# What the threads exchange that write a checkpoint in parts.

part: Callable[[str, int], str] = "{}/part {}".format  # folder, rank
"""What a rank has written of a checkpoint; nothing where it failed, and ``failure_of(folder)`` has the reason.

The thread of that rank writes it; that of rank 0 reads and deletes it, unless the save was given up.
"""

# What commands exchange.

report: Callable[[int, str, int], str] = "report {} of {}/{}".format  # number, name, rank
"""What a rank found out. It writes it; rank 0 reads and deletes it."""

message: Callable[[int, str], str] = "message {} of {}".format  # number, name
"""What rank 0 has to say. It writes it, all others read it."""
