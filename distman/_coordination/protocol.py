"""The control protocol: every key that ranks exchange over the job's store.

Each entry says what the key holds, who writes and reads it, and how long it lives; the others may be anywhere in the
package, but no other module spells a key out. The life of a job, as one rank sees it::

    this rank                      keys                             the others
    ---------                      ----                             ----------
    join          ->  OPENER, JOINED +1, join_record(n)
                      MEMBERSHIP_EVENT = full | failure     ->  rank 0 looks: all here? any at fault?
    verdict       <-  VERDICT, MEMBERSHIP_EVENT = judged    <-  rank 0
     |  at fault  ->  VERDICT_HEARD +1                      ->  the opener waits for it, then all end
     v
    started       ->  STARTED +1, the process group is up   ->  who leaves early waits for all to have started
     |
    work          ->  beat(rank), peer_address(rank)        ->  the rank before watches both
     |  ^             NEWS +1: look at FAILURE, query(n) and CLOSING, which every watcher does at its next look
     |  |         <-> query(n), answer(n, rank)             <-> who waits too long asks where the others are
     |  +-----------  keys of operations: barriers, consensus, sections, stops
     |
     +- fails     ->  FAILURE (the first one counts), NEWS  ->  each raises it, FAILURE_SEEN +1
     |  or ends: the same, by the process of the store
     |
    leaves        ->  left(rank), LEFT +1                   ->  who awaits this rank gives up
     v
    gone          ->  GONE +1: lets go of the store         ->  the holder waits for all, or a failure
    closing       ->  CLOSING, NEWS: from the holder        ->  who still uses the store: GONE +1; then it is closed

The opener is the rank that started the process of the store, which ends with its last member. It is the holder, too,
where the launcher may end that process with the last rank of its host. In other jobs nobody waits for GONE, and
CLOSING is never set.

A counter is a number that ``Store.add`` raises; a flag is a key whose presence alone counts. All other values are JSON
or plain text, which ``messages.py`` reads, and never a pickle, which can run code. "Lives on" means until the store is
closed.
"""

# Prefixes: each is the part of a store that belongs to a job or a group.


def job(*parts: object) -> str:
    """The whole job; the parts tell its starts apart in a store that outlives them, that of another group say."""
    return "/".join(["distman", *map(str, parts)])


def in_job(key: str) -> str:
    """One of the keys below as it stands in the whole store, for a process that is no rank yet."""
    return f"{job()}/{key}"


def store_address(job_id: str, start: int) -> str:
    """In the store of a launcher's agent: where rank 0 has opened the job's own at this start. It lives on."""
    return f"distman/{job_id}/start {start}"


def start_failure(job_id: str, restart: str) -> str:
    """In the store of a launcher's agent: fields of the ``FailureRecord`` of a rank that failed before it joined.

    That rank writes it, the first one; rank 0 reads it until the verdict, the others until they know where to meet.
    """
    return f"distman/{job_id}/start failure {restart}"


def opener_beside(job: str) -> str:
    """In the store of a process group of other code: who opens the job's own, in words. The first to come writes it.

    All read it; it lives on.
    """
    return f"{job}/opener"


def store_beside(job: str) -> str:
    """In the same store: where the job's own is and what lets in there, or why it could not be opened.

    The opener writes it, the others read it; it lives on.
    """
    return f"{job}/store"


PROCESS_GROUP = "group"
"""What torch keeps for the default process group."""


def group(name: str) -> str:
    """The members of a process group, by the group's name."""
    return f"group {name}"


def node(first_rank: int) -> str:
    """The ranks of one host, by the smallest of them."""
    return f"node {first_rank}"


# Joining, until the verdict. All of it lives on.

OPENER = "opener"
"""Number of the opener. That rank writes it, rank 0 reads it."""

JOINED = "joined"
"""Counter of processes that joined. Each adds itself; rank 0 reads it, who gives up waiting for the verdict, and the
opener when it has to end."""

MEMBERSHIP_EVENT = "membership event"
"""``full``, ``failure`` or ``judged``: a reason to look. The last to join, a process that failed before it joined, a
rank that is interrupted, or rank 0 writes it, all read it. The process of the store counts it up when one ends that
had joined."""

VERDICT = "verdict"
"""Who takes part, or what is wrong, compressed. Rank 0 writes it, the first one if two claim that rank, or the process
of the store, if rank 0 ends before; all read it."""

VERDICT_HEARD = "verdict heard"
"""Counter of processes that joined and know why the start failed. Each adds itself; the opener waits for
it."""

EARLY_FAILURE = "early failure"
"""Fields of the ``FailureRecord`` of a rank that failed before it joined. That rank writes it, or for the opener the
process of the store; rank 0 reads it, and so do the others where rank 0 does not judge."""

TURNED_AWAY = "turned away"
"""Counter of processes that did not join, because they failed before, or were told that another one had. Each adds
itself, or rank 0 does it for one that has told of its failure elsewhere; the opener waits for it."""


def join_record(place: int) -> str:
    """Fields of a ``JoinRecord``; the place is by arrival, since two may claim one rank.

    The process writes it; rank 0 reads it, and so does who gives up waiting for the verdict, or finds its rank taken.
    """
    return f"join record/{place}"


# The life of a rank. All of it lives on, unless it says otherwise.

STARTED = "started"
"""Counter of ranks whose process group is up. Each adds itself; ranks that leave wait for all, and who finds the store
looks whether the job has started."""

NEWS = "news"
"""Counter of events. Once the job is up, who writes FAILURE, a query or CLOSING raises it; every watcher looks at it
several times a second, and at the rest only when it has changed."""

FAILURE = "failure"
"""Fields of the ``FailureRecord`` of the first failure. The rank that fails writes it, or the one that misses another;
after the verdict also a process that came too late, where the job may be made of two. The process of the store writes
what each rank has left there for its end, unless left(rank) is set. All read it, and who finds the store: if the job
has started, that is an earlier one."""


def keeper(first_rank: int) -> str:
    """The rank of a host that ends those which do not react to a failure. The first to look writes it; it lives on."""
    return f"keeper {first_rank}"


CARETAKER = "caretaker"
"""The rank that finds out, after a failure, whether one that does nothing would keep the launcher waiting. The first
one that knows of the failure and can look writes it, the failing one perhaps; all read it."""

FAILURE_SEEN = "failure seen"
"""Counter of ranks that know of FAILURE and have not left since, without the one that failed. Each adds itself; the
holder waits for all of them before its program learns of it, and may end."""

LEFT = "left"
"""Counter of ranks that left the job. Each adds itself; who waits looks for left(rank) only if it is not 0."""

FIRST_TO_LEAVE = "first to leave"
"""The rank that was the first to leave. It writes it; who finds a connection broken reads it, and who finds the store:
if the job has started, that is an earlier one."""

CLOSING = "closing"
"""Flag: the store will be closed. Its holder writes it when it leaves; all watchers read it."""

GONE = "gone"
"""Counter of ranks that need the store no more. Each adds itself, once; its holder waits for all others, and adds
itself only if it does not watch."""


def left(rank: int) -> str:
    """Flag: this rank left the job of its own accord.

    It writes it; who awaits or watches it reads it, and so does the process of the store when the rank ends.
    """
    return f"left/{rank}"


def beat(rank: int) -> str:
    """Sign of life: the time, a space, and what the rank waits in.

    Its watcher writes it, and it is deleted when that gives up, or the rank knows of FAILURE; the rank before reads it,
    and after a failure the caretaker, to find those that do not know.
    """
    return f"beat/{rank}"


def peer_address(rank: int) -> str:
    """Hosts and port at which the rank's watcher accepts a connection, and the word that opens it.

    It writes it, the rank before reads it, and after a failure the caretaker.
    """
    return f"peer address/{rank}"


# Hangs.

HANG_REPORTER = "hang reporter"
"""The rank that reports a hang.

The first one that waits too long writes it, and deletes it once its wait is over or it watches no more.
"""

QUERY_NUMBERS = "query numbers"
"""Counter that numbers the queries. Who asks raises it; it lives on."""

QUERIES = "queries"
"""Numbers of the queries, each with a comma after it. Who asks appends one once that query is written; the watchers
answer those that they have not seen. It lives on."""


def answered(number: int) -> str:
    """Counter of ranks that answered a query. Each adds itself; who asked waits for all of them, and deletes it."""
    return f"answered {number}"


def query(number: int) -> str:
    """Ranks that are asked for their stacks. Who asks writes it, and deletes it when it waits no longer."""
    return f"query {number}"


def answer(number: int, rank: int) -> str:
    """Fields of an ``Answer``. The watcher of that rank writes it; who asked reads and deletes it.

    One that comes too late lives on.
    """
    return f"answer {number}/{rank}"


# Ranks that wait for each other.


def waiting(rank: int) -> str:
    """What a rank has been waiting in for a second. Its watcher writes it, and deletes it when the wait is over."""
    return f"waiting {rank}"


def suspected(rank: int) -> str:
    """That other ranks wait for this one, which seems to wait for them in another call: a line for each.

    The watchers of those append a line, this rank's reads them. It lives on.
    """
    return f"suspected {rank}"


def deadlock(key: str) -> str:
    """Why those that wait in something wait for ever. A watcher writes it, all that wait there read it; it lives on."""
    return f"deadlock {key}"


# Calls that a rank refuses.

REFUSAL_NUMBERS = "refusal numbers"
"""Counter that numbers the refusals. Who refuses raises it; it lives on."""

REFUSALS = "refusals"
"""Numbers of the refusals, each with a comma after it. Who refuses appends one once that refusal is written; the
watchers look at those that they have not seen. It lives on."""


def refusal(number: int) -> str:
    """Fields of a ``Refusal``. The rank that refuses a call writes it, and deletes it when the others have answered."""
    return f"refusal {number}"


def refusal_answer(number: int, rank: int) -> str:
    """Fields of a ``Posted``. The watcher of that rank writes it; the rank that refuses reads and deletes it."""
    return f"refusal {number}/{rank}"


def asker(operation: str) -> str:
    """The one rank that asks where those are that did not come. The first one to ask writes it; it lives on."""
    return f"{operation}/asker"


def places(operation: str) -> str:
    """What the asker found out, as pairs of rank and place. It writes it, all that came read it; it lives on."""
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
    """The exclusive sections of a group, a sequence of operations; nested ones are apart from the outer one."""
    return f"section {depth}"


JOINT_ERRORS = "joint error"
"""Who raised an error that left a joint block, a sequence of operations. Each member that raised appends itself to what
arrived there, and reads who else did."""

STOP = "stop"
"""Why to stop. Any rank that was asked to writes it, all look for it; it lives on."""

STOP_FIRST_STEP = "stop/first step"
"""The first step at which a rank asked whether to stop. The first rank writes it, all compare theirs; it lives on."""

STOP_ANSWERS = "stop/answers"
"""Counter of ranks that wrote which step they passed. Each adds itself; the last one writes STOP_AFTER."""

STOP_AFTER = "stop/after"
"""The furthest step that any rank passed, or null. All wait for it, and stop at their next step; it lives on."""

STOP_STEP = "stop/step"
"""The step at which the first rank stopped. All compare theirs; it lives on."""


def stop_passed(rank: int) -> str:
    """The last step that a rank passed before it heard of a stop, or left the job; null for none. It lives on.

    Each writes its own; the last one to do so reads them all.
    """
    return f"stop/passed {rank}"


def nth(sequence: str, number: int) -> str:
    """An operation of a sequence. It is deleted once all ranks have asked for a later page of keys."""
    return f"{sequence} {number}"


def page(sequence: str, number: int) -> str:
    """Counter of ranks that began a page of keys. Each adds itself; the last one deletes it and the page before."""
    return f"{sequence} page {number}"


# Keys of one operation. The last rank to leave deletes them, unless it says otherwise.


def arrived(operation: str) -> str:
    """Who came to a barrier: each member appends its index and a comma. Who looks for the missing reads it.

    The last one to leave deletes it; that of a barrier which was given up lives on. That of a joint error is deleted
    with its page.
    """
    return f"{operation}/arrived"


def outcome(operation: str) -> str:
    """Whether a barrier is open, or who did not come and a ``FailureRecord``'s fields.

    The last rank to come writes it, or the one that gives up; all read it. That of a barrier which was given up lives
    on.
    """
    return f"{operation}/outcome"


def passages(operation: str) -> str:
    """Counter of a barrier: each member adds one when it comes and one when it leaves, so that the last one knows.

    It is far below zero where the barrier was given up, and lives on like the outcome.
    """
    return f"{operation}/passages"


def looker(operation: str, cause: str) -> str:
    """The one rank that looks for those that do not come, because it is late or somebody left the job.

    The first one to wait for too long writes it, or who takes its place; it deletes it when its own wait ends.
    """
    return f"{operation}/looks, {cause}"


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
    """Fields of the ``FailureRecord`` of the first member that failed.

    It writes it; all read it, and those that still wait for its part in making a group give up.
    """
    return f"{operation}/{FAILURE}"


def read_by(operation: str) -> str:
    """Counter of ranks that have read all of the above."""
    return f"{operation}/read"


def done_by(operation: str) -> str:
    """The ranks that have done their part of an exclusive section of several, each with a comma after it."""
    return f"{operation}/done by"


def done(operation: str) -> str:
    """Counter of ranks that have done their part of an exclusive section.

    The section's own key holds its name and the ``FailureRecord``'s fields of a rank that failed, or null. Both are
    deleted with their page.
    """
    return f"{operation} count"


# What the threads exchange that write a checkpoint in parts.


def part(folder: str, rank: int) -> str:
    """What a rank has written of a checkpoint; nothing where it failed, and ``failure_of(folder)`` has the reason.

    The thread of that rank writes it; that of rank 0 reads and deletes it. One of a save that was given up lives on.
    """
    return f"{folder}/part {rank}"


# What commands exchange.

STANDING_STILL = "who stands still"
"""Why a step of a command ended early, in words. The first rank that knows writes it, all read it; it lives on."""


def report(number: int, name: str, rank: int) -> str:
    """What a rank found out. It writes it; rank 0 reads and deletes it."""
    return f"report {number} of {name}/{rank}"


def message(number: int, name: str) -> str:
    """What rank 0 has to say. It writes it, all others read it; it lives on."""
    return f"message {number} of {name}"
