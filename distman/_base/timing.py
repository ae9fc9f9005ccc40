"""How long things may take, in seconds: one table for the whole package. A test says what must be longer than what.

What a user may set by a variable has its default here. ``PAUSE`` and ``EVERY`` are between two looks, ``QUIET`` is
before a word in the log, and ``PER_RANK`` is multiplied by the number of ranks, so that many ask no more than a few do.
"""

# What a program may set, see ``docs/variables.md``.
TIMEOUT = 3600.0  # of a collective: ranks may do different work for long, such as saving on one of them
RENDEZVOUS_TIMEOUT = 300.0  # imports from a shared file system take minutes
SILENCE_TIMEOUT = 300.0  # without a heartbeat: native code may hold the GIL for minutes
HANG_TIMEOUT = 300.0  # a report costs little, and ends nothing
FAILURE_GRACE = 60.0  # for handlers of a failure, which may save for as long
FAILURE_GRACE_NATIVE = 1.5 * FAILURE_GRACE  # for code that does not return to Python

# The store: a connection to it, and the process that serves it.
DIAL = 3.0  # to connect and to prove it: a foreign service may accept and never answer; a store takes milliseconds
DIAL_SHORTEST = 0.2  # also where no time is left: a store on another host answers in milliseconds
DIAL_NEXT_ADDRESS = 0.25  # before the next address of a name is tried, too
SOCKET_SHORTEST = 0.001  # a limit of zero would mean to a socket that it must not wait
SOCKET_DEAF = 1  # that a wait may not hear of a signal: Python's handlers run between two calls of the system
ENTER_PAUSE = 0.01  # before one that a flood has pushed out tries again: to be let in takes a tenth of a millisecond
GUEST = 3.0  # for the whole handshake, which takes milliseconds
LISTENER_RESTS = 0.1  # where the host can open nothing: the listener would be found ready all the time
POLL_LONGEST = 3600.0  # the system takes no number that is much larger
UNREACHABLE_UNWATCHED = 45.0  # where nobody watches: a network that is repaired sooner ends no job
UNREACHABLE_SHORTEST = 5.0  # what is lost on the way is sent again within them several times

# The meeting of the ranks, until the verdict.
FIND_FIRST_PAUSE = 0.002  # ranks of one launch start within milliseconds of each other, and a start takes ten
FIND_LONGEST_PAUSE = 0.5  # more would delay a job whose first rank starts late
FIND_QUIET = 10.0  # what else listens there may be about to end
OPEN_LOOK = 3.0  # for the opener to see whether the store is open already, and to have its turn to look
OPEN_PAUSE = 0.01  # between two tries for a place: a store takes milliseconds to start, and to end
OPEN_ENDING = 2.0  # for a store to end, or a service that closes connections; then it is in the way
OPEN_ENTRY = 10.0  # longer than the ranks try to come: then nobody does
ANNOUNCED_PAUSE = 0.01  # rank 0 starts within milliseconds
ANNOUNCED_LONGEST_PAUSE = 0.5  # between two looks at an address where the store is not
ANNOUNCED_OPEN = 30.0  # to find a store that was open when it was announced
AGENT_ANSWER = 3.0  # of the launcher's agent, which serves its store on this host
JOIN_PAUSE_PER_RANK = 500e-6  # 2,000 looks a second in all, beside ranks that are still connecting
JOIN_SHORTEST_PAUSE = 0.01  # longer ones would delay the start of a small job
JOIN_LONGEST_PAUSE = 1.0  # longer ones would delay a large job more than its looks cost
JOIN_PROGRESS_EVERY = 10.0  # between two lines of the log that name the missing ranks
JOIN_BESIDE_RANK_ZERO = 1.0  # that the others wait longer than rank 0, whose verdict is better than theirs
JOIN_QUIET = 1.0  # in a failed start: longer looks like a hang
JOIN_PARTING = 2.0  # for the others to read the verdict, when all had the time they were given
JOIN_PARTING_WITH_ALL = 10.0  # also for ranks that are still on their way, to tell them why the job ended
EARLY_FAILURE = 10.0  # for ranks that were started at the same time, and arrive later
EARLY_FAILURE_PAUSE = 0.02  # no more than this rank's end may be late
SAME_START = 30.0  # between the starts of ranks of one job, as far as they are told from those of another
WALLS_QUIET = 10.0  # before other hosts are tried: groups of many ranks take some
WALLS_CONNECT = 2.0  # to another host; one that needs longer is cut off or behind a firewall
MPI_ABORT = 5.0  # another thread may be in a call of MPI that does not return

# Watching the other ranks.
WATCH_EVERY = 0.2  # a failure is known to all soon enough, and five looks a second cost nothing
WATCH_EVERY_PER_RANK = 0.4e-3  # 2,500 looks a second in all, some 17 % of one core of the store's host
WATCH_LATE = 1.0  # that a look may be late on a busy host, beside its interval
WATCH_ANSWER = 1.0  # for a failure to become known, and for a watcher to answer: far more than a free host needs
WATCH_ANSWER_PAUSE = 0.01  # between two looks for what another rank, or thread, is about to write
WATCH_END = 2.0  # for the thread to end, which takes milliseconds unless the store is stuck
KNOWN_PAUSE = 0.02  # between two looks whether the others know of a failure: short beside their own interval
MUTUAL_WAIT = 1.0  # that ranks may be apart before the store is asked; a hang is not worse for them

SLOW_WINDOW = 0.4  # of steps that are compared, at least: what else a machine does may last some tenths of a second
SLOW_EVERY_PER_RANK = 2e-3  # 500 looks of rank 0 a second in all

# Ranks that wait for each other over the store.
WAIT_FIRST_PAUSE = 0.0002  # a few calls into the store
WAIT_PAUSE_PER_RANK = 50e-6  # 20,000 looks a second in all, about what a store answers
WAIT_SHORTEST_PAUSE = 0.005  # longer ones would delay a small job for nothing
WAIT_LONGEST_PAUSE = 1.0  # longer ones would delay a large job more than its looks cost
LOOK_AROUND_EVERY = 0.5  # at what else happened: several calls into the store, too many for a wait of milliseconds
LOOK_AROUND_PER_RANK = 1e-3  # at most 1,000 times a second in all
DEPARTED = 1.5  # for which a rank that left is waited for: what knows why it left may end the others with that error
BARRIER_NEXT_ROUND = 1.0  # before a rank that is late asks again whether it is to look for the missing: it costs a call
BARRIER_LOOK = 10.0  # then a rank looks for the missing itself, though another one should have
JOINT_RAISE = 0.5  # for the others to raise, and between two questions where they are
JOINT_WAIT = 1.0  # in one call: then a rank waits for those that raised, and does not just take part in it
JOINT_LIMIT = 10.0  # for ranks that neither raise nor wait in a call of ours: they may compute, or wait in torch's

# A failure on its way through this process.
ERROR_TEXT = 5.0  # it may be made by a collective, or by a program's code that never ends
ABORT_GROUPS = 3.0  # NCCL may wait for the other ranks of the host, and the failure has to be delivered
DELIVERY_EVERY = 0.1  # between two looks what became of the error: short beside the interval of the watchers
DELIVERY_LONGEST_PAUSE = 1.0  # a program that swallows the error may print it each time, and is not in haste
DELIVERY_DEFERRAL = 0.005  # before the next try where the main thread may not be interrupted
GIVE_IN = 10.0  # from when it was swallowed first; launchers leave as much from SIGTERM to SIGKILL, Docker the least
WRITE = 1.0  # standard error may be a pipe that nobody reads
PRINT = 10.0  # a terminal over a slow line shows a long traceback in less
PUBLISH = 10.0  # the process of the store may be stopped, and this one has to end
STAY_TO_BE_READ = 1.5  # the others look several times a second, and a launcher ends the rest soon after
END_OF_WORK = 60.0  # a large checkpoint may be half written, but a job must end
END_OF_PROCESS = 30.0  # from the end of a failed program: threads, exit handlers, files
END_MARGIN = 5.0  # more for the same while something holds the interpreter
END_EVERY = 0.1  # between two looks whether the program is over

# The end of a failed job, where its launcher does not end it.
CANCEL = 3.0  # in which the other ranks end by themselves, and say why
CANCEL_TURN = 0.5  # between two ranks that cancel the job: the next one need not, unless the first is stuck too
CANCEL_COMMAND = 10.0  # the scheduler may be busy
STOPPED = 1.5  # for the others to find a stopped process silent before it is ended; they would take it for dead
STRAGGLERS = 60.0  # for handlers elsewhere, of which nobody knows; they get as long as work in the background
STRAGGLERS_SLACK = 1.0  # beside the time in which others may learn of the failure
STRAGGLERS_PAUSE = 0.1  # short beside what a program needs to end

# The end of a job in order.
START_OF_OTHERS = 10.0  # ranks that still make their process group: a loaded machine needs them to start one
FAREWELL = 2.5  # to tell the others: the process that serves the store may be suspended, or gone
LEAVE_PAUSE = 0.005  # between two looks at a counter: short beside what a rank takes to start or to leave
LEAVE_LONGEST_PAUSE = 0.1  # it harms nothing that a process ends so much later
STAY = 10.0  # for others to reach their end; more would keep a launcher from ending them after ``sys.exit(1)`` here
GROUPS_END = 10.0  # ranks that leave together do so within them on a loaded machine, and one alone waits in vain
GLOO = 1.0  # for its threads: they need milliseconds, unless another thread holds the interpreter
GLOO_PAUSE = 0.001  # in which the interpreter is free for them

# Stops, and the scheduler.
STOP_EVERY = 0.5  # a preempted job has half a minute or more to save
STOP_EVERY_PER_RANK = 1e-3  # at most 1,000 looks a second in all reach the store
STOP_MARGIN = 10.0  # before the end of the job's time, for a save that nobody has measured yet
ORPHAN_EVERY = 1.0  # between two looks of a loader's worker whether its rank is still there
SCHEDULER = 30.0  # for a command's answer: a busy controller takes several, and its commands retry

# Parts on top of the core.
TRANSPORT_CONNECT = 3.0  # where strangers wait too
TRANSPORT_SLEEP = 0.1  # after which a wait looks whether another thread has read its message
PARTS_AFTER_FAILURE = 30.0  # for the other ranks' parts of a checkpoint: they end once they have written
PARTS_PAUSE = 0.1  # between two looks in that time
TRACKER_REST = 30.0  # until all has been written at the end of a training: a server takes as long to restart
TRACKER_AFTER_ERROR = 5.0  # for the same where an error waits, which is to be shown and may have to end the job
NUMBERS_UNREAD = 2.0  # of slow steps, for a person who watches the training

# Processes that this package starts: workers, and the ranks of a test.
WORKER_START = 300.0  # to import torch takes minutes where a thousand nodes load it from one network file system
WORKER_END = 30.0  # after SIGKILL: the kernel may keep a process that long while it is in a call of a driver
WORKER_POLL = 0.5  # between two looks whether the process that it works for is still there
SERVERS_END = 5.0  # of the supervisor and its server, which kill and wait for all below them within milliseconds
SERVER_END = 1.0  # of the server alone; one that needs longer hangs in a driver or a file system
DEVICE_WORKER_END = 2.0  # a worker that was asked to write its stacks and end does so in milliseconds if it can
DEVICE_OTHERS_END = 0.5  # a mistake often shows on all devices at once; one that has ended by then need not be replaced
TEST_OTHERS_END = 2.0  # after the first failure: leaving ends collectives at once, and what needs longer is stuck
TEST_DESCRIPTION = 10.0  # it parses the source of every function on the way of an error, and shows objects of the test
TEST_RELEASE = 10.0  # to leave the group is one message between neighbours; a busy machine may take seconds
TEST_STACKS = 2.0  # faulthandler writes at once, unless the process was stopped or is in a call of a driver
TEST_STACKS_PAUSE = 0.02  # nothing says when a process has written its stacks to the end
TEST_DEATH = 5.0  # a process that dies closes its connection first, and is waited for by its server a moment later
TEST_GROUP_MARGIN = 60.0  # after the test's limit, for a collective, so that the report shows where it was stuck

# Commands.
RUN_AFTER_FAILURE = 5.0  # for the other ranks to end by themselves once one has failed: one may handle it, and save
RUN_AFTER_INTERRUPT = 5.0  # from Ctrl-C to SIGKILL: somebody waits at the terminal
RUN_GRACE = 30.0  # from SIGTERM to SIGKILL; torchrun and Slurm's ``KillWait`` give as many
KEEP_EVERY = 0.5  # between two looks for a failure
KEEP_AFTER_TERM = 5.0  # from SIGTERM to SIGKILL
KEEP_GRACE = 10.0  # for the other ranks to end once one has failed
KEEP_CHECK = 20.0  # a check takes up to 5, and a busy controller some
CHECK_COLLECTIVE = 60.0  # a check that takes longer has found its answer
CHECK_FOLDER = 2.0  # for a network file system that shows a new file late
CHECK_FOLDER_PAUSE = 0.05  # few enough looks for a metadata server
CHECK_SLOW = 2.0  # for what takes milliseconds on a healthy host
CHECK_LATENCY = 5e-3  # of a message between hosts, of which those of one site take a tenth at most
CHECK_LATE = 0.1  # by which a rank is late at the barrier
CHECK_LONGEST_SPEED = 0.1  # of one operation: larger sizes are left out
NETWORK_QUESTION = 1.0  # for its answer
BENCH_COLLECTIVE = 240.0  # of one operation
BENCH_OPERATION = 0.2  # for the rounds of one, where their number is not given
