"""What is wrong with the outcome of a case, by five promises.

No rank hangs; no survivor ends with 0; every survivor names the guilty rank and no other; within the promised time;
nothing is left. Of a fault that harms nobody: every rank goes on and ends with 0, and nobody is named.
"""

import re
from collections.abc import Iterator

from .cases import ACKNOWLEDGED, BY_NAME, FAULTS, IN_THE_LOOP, OF_MPI, Case, Effect, Fault
from .observe import End, Outcome

# A sentence that says that a rank failed: `rank 2 (n1, pid 77) raised`, with what it is for the job in between.
BLAME = re.compile(
    r"\brank (\d+) \([^,()]*, pid \d+\)(?:, which served the job's store[^,]*,)?"
    r" (?:raised|died|ended with|has been silent|left|is on a host that has not answered)"
)
MISSING = re.compile(r"missing: ranks? (.*)\. Present")  # such as `ranks 2 (expected on n3), 4`
OPENS_STORE = "must open the job's store"  # rank 0, by whatever name
WAITED_IN_MPI = "in MPI for the other ranks of"  # which does not say for whom
EXITS = ("sys.exit(0)", "os._exit(0)")
CONNECTS_MPI = re.compile(r'_job/meeting/mpi\.py", line \d+ in _broadcast')  # rank 0 does more there
UNHANDLED = 76  # exit code of a program that has not handled the failure of another rank
OVER_THE_STORE = ("barrier", "on_rank", "save")  # places at which the ranks wait in calls to the store
CUT_OFF = "This process "  # begins what a rank says that is ended by force
NOT_INTERRUPTED = "This process could not be interrupted:"  # what a rank says that does not come back to Python


def judge(case: Case, outcome: Outcome) -> list[str]:
    """Return the promises that were broken, a sentence each."""
    if not outcome.has_failed:
        errors = "; ".join(f"rank {end.rank} ({end.exit_code}): {last_error(end.said)}" for end in outcome.ends)
        return [f"the fault must happen, got another end. {errors} {last_error(outcome.said)}"]
    survivors = [end for end in outcome.ends if end.rank in case.survivors]
    return [
        *_hangs(case, outcome, survivors),
        *_late(case, outcome, survivors),
        *(_goes_wrong(case, outcome) if _must_end_well(case) else _goes_on(case, outcome, survivors)),
        *_left(case, outcome, survivors),
    ]


def blamed(text: str) -> set[int]:
    """Return the ranks of which a text says that they failed."""
    missing = {int(rank) for found in MISSING.findall(text) for rank in re.findall(r"(?:^|, )(\d+)", found)}
    return {int(rank) for rank in BLAME.findall(text)} | missing


def last_error(text: str) -> str:
    """Return the last error that was said, else the last line."""
    errors = re.findall(r"^(?:\[rank\d+\]: )?(\w[\w.]*(?:Error|Exit)\b.*)", text, re.MULTILINE)
    return str((errors or text.strip().splitlines() or ["nothing"])[-1])[:300]


def _must_end_well(case: Case) -> bool:
    return case.is_harmless or case.place == "end"


def _hangs(case: Case, outcome: Outcome, survivors: list[End]) -> Iterator[str]:
    for end in survivors:
        if end.seconds is None:
            yield f"rank {end.rank} hangs"
    if outcome.launcher_seconds is None and case.launcher != "env":
        yield "the launcher hangs"


def _late(case: Case, outcome: Outcome, survivors: list[End]) -> Iterator[str]:
    if case.is_harmless:
        return
    for end in survivors:
        if end.seconds is not None and end.seconds - outcome.delay > case.limit:
            yield f"rank {end.rank} must end within {case.limit:g} s, got {end.seconds:.1f} s"


def _goes_wrong(case: Case, outcome: Outcome) -> Iterator[str]:
    """Where nobody waits for the rank that fails, the others end well and blame nobody."""
    for end in outcome.ends:
        fault = case.fault_of(end.rank)
        if fault is not None and fault.effect is not Effect.NONE:
            continue
        if end.exit_code == UNHANDLED and blamed(end.said) and blamed(end.said) <= case.guilty(end.rank):
            continue  # it was still there when the failure became known
        allowed = (0,) if case.launcher == "env" else (0, None)
        if end.exit_code not in allowed:
            yield f"rank {end.rank} must end with 0, got {end.exit_code}: {last_error(end.said)}"
        named = blamed(end.said) - (case.guilty(0) if end.rank == 0 else set())  # it serves the store to the last one
        if end.exit_code == 0 and named:
            yield f"rank {end.rank} names {sorted(named)} though nobody waits for it"
    if outcome.launcher_code and all(fault.effect is Effect.NONE or fault.name in EXITS for fault in case.faults):
        yield f"the launcher must end with 0, got {outcome.launcher_code}"


def _goes_on(case: Case, outcome: Outcome, survivors: list[End]) -> Iterator[str]:
    for end in survivors:
        yield from _wrong_end(case, outcome, end)
    for fault in case.faults:
        (end,) = (end for end in outcome.ends if end.rank == fault.rank)
        if fault.effect is Effect.RAISES and end.exit_code == 0:
            yield f"rank {end.rank} raised and must not end with 0"
    if outcome.launcher_code == 0:
        yield "the launcher must not end with 0"
    reasons = (OPENS_STORE, WAITED_IN_MPI) if case.place == "start" else ()
    has_reason = any(
        end.exit_code is not None or blamed(end.said) or any(reason in end.said for reason in reasons)
        for end in survivors
    )
    if not has_reason and not _is_ended_by_launcher(case):
        yield "no survivor says why it ended"


def _wrong_end(case: Case, outcome: Outcome, end: End) -> Iterator[str]:
    guilty, named = case.guilty(end.rank), blamed(end.said)
    who = ", ".join(f"rank {rank}" for rank in sorted(guilty))
    if end.exit_code == 0:
        yield f"rank {end.rank} must not end with 0"
    if "Fatal Python error" in end.said and end.seconds is not None and not _is_crash_of_mpi(case, end):
        yield f"rank {end.rank} crashed"
    if end.exit_code is None and end.seconds is not None and case.launcher == "env":
        yield f"rank {end.rank} was killed"
    if wrong := named - guilty:
        yield f"rank {end.rank} must name {who} and no other, got {sorted(wrong)}: {_sentence(end.said, wrong)}"
    elif end.exit_code not in (None, 0) and not _names(case, outcome, end.said, guilty):
        yield f"rank {end.rank} must name {who} and the host, got: {last_error(end.said)}"
    elif end.exit_code not in (None, 0) and (missing := _unsaid(case, end)):
        yield f"rank {end.rank} must say {missing!r}, got: {_sentence(end.said, named)}"
    # The error of torch's own collective may come before the other rank's, when that ends.
    is_first = case.place != "collective"
    is_of_work = case.place in ("on_rank", "save") and "RankFailedError" in end.said  # which is none of the job's
    has_caught = is_first and not (is_of_work or _is_held_by_store(case, end))
    if case.around == "acknowledge" and has_caught and end.exit_code not in (None, 0, ACKNOWLEDGED):
        yield f"rank {end.rank} caught the failure and must end with {ACKNOWLEDGED}, got {end.exit_code}"
    is_by_name = case.around in BY_NAME
    is_of_call = case.is_mismatch and "PlanMismatchError" in end.said  # which two ranks raise
    if (
        case.place in IN_THE_LOOP
        and not (is_by_name or is_of_work or is_of_call)
        and end.exit_code not in (None, 0, UNHANDLED)
    ):
        yield f"rank {end.rank} must end with {UNHANDLED}, got {end.exit_code}"
    if (
        case.around in ("files", "with", "exit-handler", "save")
        and end.exit_code == UNHANDLED
        and CUT_OFF not in end.said
    ):
        yield from (f"rank {end.rank} left a file that is not whole: {what}" for what in end.broken)


def _is_crash_of_mpi(case: Case, end: End) -> bool:
    """Return whether it is MPI that a rank crashed in, which was connecting to a process that died."""
    is_connecting = end.rank > 0 and CONNECTS_MPI.search(end.said) is not None
    return case.launcher in OF_MPI and case.place == "start" and is_connecting


def _is_held_by_store(case: Case, end: End) -> bool:
    """Return whether a rank had to end without its handlers: in a call to a store whose process is stopped."""
    is_stopped = case.launcher != "torchrun" and Fault("SIGSTOP", 0) in case.faults  # else its agent serves the store
    is_held = end.exit_code == UNHANDLED and NOT_INTERRUPTED in end.said
    return is_stopped and case.place in OVER_THE_STORE and is_held


def _names(case: Case, outcome: Outcome, text: str, guilty: set[int]) -> bool:
    """Return whether a text says which rank failed, and where: who never came to the start has not said it."""
    places = ((rank, *outcome.places.get(rank, ("", 0))) for rank in guilty)
    if any(f"rank {rank} ({host}, pid {pid})" in text for rank, host, pid in places):
        return True
    return case.place == "start" and bool(blamed(text) & guilty or (0 in guilty and OPENS_STORE in text))


def _unsaid(case: Case, end: End) -> str:
    """Return what a survivor must have been told of an exception and was not; of two faults, it hears of one."""
    (first, *others) = case.faults
    if others or first.effect is not Effect.RAISES or FAULTS[first.name].says in end.said:
        return ""
    return FAULTS[first.name].says


def _sentence(text: str, ranks: set[int]) -> str:
    lines = [line for line in text.splitlines() if any(f"rank {rank} (" in line for rank in ranks)]
    return (lines or [last_error(text)])[-1][:300]


def _is_ended_by_launcher(case: Case) -> bool:
    """Return whether the launcher ends the survivors because of a fault, so that they may say nothing."""
    return any(_ends_the_rest(case, fault) for fault in case.faults)


def _ends_the_rest(case: Case, fault: Fault) -> bool:
    if fault.name == "os._exit(0)":  # over several hosts the ranks meet by MPI, which must be finalized
        return case.launcher in OF_MPI and case.hosts > 1
    return fault.effect in (Effect.RAISES, Effect.DIES) and case.launcher not in ("env", "srun")


def _is_store_silent(case: Case) -> bool:
    fault = case.fault_of(0)
    return fault is not None and fault.effect is Effect.SILENT


def _left(case: Case, outcome: Outcome, survivors: list[End]) -> Iterator[str]:
    yield from (f"left behind: {what}" for what in outcome.left_behind)
    for end in survivors:
        yield from (f"rank {end.rank} left {what}" for what in end.left if end.exit_code is not None)
        # MPI itself stays as it is to the end of the process; a call to a store that is stopped has no end.
        is_closed = case.launcher not in OF_MPI and not (len(case.faults) > 1 and _is_store_silent(case))
        if is_closed:
            yield from (f"rank {end.rank} left open {what}" for what in end.open)
