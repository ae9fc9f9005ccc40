"""The judge finds fault where a promise is broken, and none where it is kept."""

from dataclasses import replace

import pytest

from .cases import Case
from .judge import blamed, judge
from .observe import End, Outcome
from .page import Finding, as_markdown

NAMED = "JobFailed: rank 2 (n3, pid 77) raised ValueError: boom"
DIED = "JobFailed: rank 2 (n3, pid 77) died: its connection broke."
ABSENT = "2 of 3 ranks joined within 6 s; missing: rank 2 (expected on n3). Present: 0 (n1, pid 75)"
STORE_MISSED = "rank 0 (n1, pid 75), which serves the job's store at tcp://n1:3, has been silent for 4 s"
HELD_UP = f"distman: {STORE_MISSED}\n\nThis process could not be interrupted:\nthread MainThread"
MISSED = "JobFailed: rank 2 (n3, pid 77) has been silent for 4 s"
NOT_OPENED = "RendezvousError: rank 0 must open the job's store at tcp://n1:3 within 8 s"
MPI_CRASHED = """Fatal Python error: Segmentation fault
  File "<frozen importlib._bootstrap>", line 1232 in _handle_fromlist
  File "distman/_job/meeting/mpi.py", line 54 in _broadcast
"""


def case(fault="raise@barrier:2", launcher="env", around="plain"):
    return Case.parse(f"launcher={launcher} hosts=1 ranks=3 fault={fault} around={around}")


BARRIER = case()
SRUN = case(launcher="srun")
TORCHRUN = case(launcher="torchrun")
KILLED = case("SIGKILL@barrier:2")
STOPPED = case("SIGSTOP@barrier:2")
EARLY = case("SIGKILL@start:2")
LAST = case("SIGKILL@end:2")
HARMLESS = case("raise-in-del@barrier:2")
LEFT = case("sys.exit(0)@python:2")
CAUGHT = case(around="acknowledge")
HELD = case("SIGSTOP@barrier:0", around="acknowledge")
CUT = Case.parse("launcher=env hosts=2 ranks=2 fault=cut@python:0 around=plain")


def seen(*ends, failing=None, **more):
    """Return what is seen of a good case, with the ends of the survivors and other changes."""
    outcome = Outcome(
        places={0: ("n1", 75), 1: ("n2", 76), 2: ("n3", 77)},
        has_failed=True,
        ends=(*(ends or (ended(0), ended(1))), failing or ended(2, code=1, said="ValueError: boom")),
        launcher_seconds=None,
        launcher_code=None,
        left_behind=(),
        said="",
        seconds=5.0,
    )
    return replace(outcome, **more)


def ended(rank=1, seconds=0.4, code=76, said=NAMED, **more):
    return End(rank, seconds, code, said, **more)


def killed(rank=1, said=""):
    return ended(rank, code=None, said=said)


def held(*, said=HELD_UP, code=76, **more):
    """Return what is seen where the rank that serves the store is stopped, and one of two others ends so."""
    first = ended(0, seconds=None, code=None, said="")
    return seen(first, ended(1, 8.1, code, said), failing=ended(2, 8.1, 5, STORE_MISSED), **more)


def done(rank=1):
    return ended(rank, code=0, said="")


def launched(*ends, code=1, seconds=0.9, **more):
    return seen(*ends, launcher_seconds=seconds, launcher_code=code, **more)


def each(said, **more):
    return ended(0, said=said, **more), ended(1, said=said, **more)


@pytest.mark.parametrize(
    ("case", "outcome"),
    [
        (BARRIER, seen()),
        (SRUN, launched()),
        (TORCHRUN, launched(killed(0), killed(1))),
        (KILLED, seen(*each(DIED), failing=killed(2))),
        (STOPPED, seen(*each(MISSED, seconds=11.0), failing=ended(2, seconds=None, code=None, said=""))),
        (BARRIER, seen(ended(0), ended(1, 8.2), delay=3.5)),
        (LAST, seen(done(0), done(1), failing=killed(2))),
        (HARMLESS, seen(done(0), done(1), failing=ended(2, code=0, said="ValueError: boom"))),
        (LEFT, seen(done(0), done(1), failing=done(2))),
        (EARLY, seen(*each(ABSENT, seconds=8.5), failing=killed(2))),
        (CAUGHT, seen(*each(NAMED, code=5))),
        (HELD, held()),
        (
            case("sys.exit(3)@start:0", "srun"),
            launched(killed(1, said=NOT_OPENED), killed(2), failing=ended(0, code=3)),
        ),
        (case("SIGSEGV@start:0", "mpich"), launched(killed(1, said=MPI_CRASHED), killed(2), failing=killed(0))),
        (
            CUT,
            seen(
                places={0: ("n1", 75), 1: ("n2", 76)},
                ends=(
                    ended(0, said="rank 1 (n2, pid 76) has been silent for 4 s"),
                    ended(1, said="rank 0 (n1, pid 75), which served the job's store at tcp://n1:3, has been silent"),
                ),
            ),
        ),
    ],
)
def test_kept_promises(case, outcome):
    assert judge(case, outcome) == []


@pytest.mark.parametrize(
    ("case", "outcome", "complaint"),
    [
        (BARRIER, seen(has_failed=False), "the fault must happen"),
        (BARRIER, seen(ended(0), ended(1, seconds=None)), "rank 1 hangs"),
        (SRUN, launched(seconds=None, code=None), "the launcher hangs"),
        (BARRIER, seen(ended(0), ended(1, 5.2)), "rank 1 must end within 5 s, got 5.2 s"),
        (BARRIER, seen(ended(0), ended(1, 8.2), delay=3.0), "rank 1 must end within 5 s, got 8.2 s"),
        (STOPPED, seen(ended(0, said=MISSED), ended(1, 22.0, said=MISSED)), "within 21 s"),
        (BARRIER, seen(ended(0), done(1)), "rank 1 must not end with 0"),
        (SRUN, launched(code=0), "the launcher must not end with 0"),
        (BARRIER, seen(failing=done(2)), "rank 2 raised and must not end with 0"),
        (BARRIER, seen(ended(0), ended(1, said="RuntimeError: connection closed")), "got: RuntimeError: connection"),
        (BARRIER, seen(ended(0), ended(1, said=NAMED.replace("n3", "n2"))), "rank 1 must name rank 2 and the host"),
        (BARRIER, seen(ended(0), ended(1, said=NAMED.replace("rank 2", "rank 0"))), "no other, got [0]"),
        (BARRIER, seen(ended(0), ended(1, said=NAMED + NAMED.replace("rank 2", "rank 0"))), "no other, got [0]"),
        (BARRIER, seen(ended(0), ended(1, said=DIED)), "rank 1 must say 'ValueError: boom'"),
        (BARRIER, seen(ended(0), killed(1)), "rank 1 was killed"),
        (SRUN, launched(killed(0), killed(1)), "no survivor says why it ended"),
        (SRUN, launched(ended(0), killed(1, said="Fatal Python error: Aborted")), "rank 1 crashed"),
        (
            case("SIGSEGV@start:0", "srun"),
            launched(killed(1, said=MPI_CRASHED + NOT_OPENED), failing=killed(0)),
            "rank 1 crashed",
        ),
        (case("SIGSEGV@python:0", "mpich"), launched(killed(1, said=MPI_CRASHED), failing=killed(0)), "rank 1 crashed"),
        (BARRIER, seen(left_behind=("pid 5: python",)), "left behind: pid 5"),
        (BARRIER, seen(ended(0), ended(1, left=("$TMPDIR/x",))), "rank 1 left $TMPDIR/x"),
        (BARRIER, seen(ended(0), ended(1, code=1)), "rank 1 must end with 76, got 1"),
        (case(around="files"), seen(ended(0), ended(1, broken=("log.gz: cut",))), "not whole: log.gz: cut"),
        (CAUGHT, seen(ended(0, code=5), ended(1, code=5, open=("7: pipe",))), "rank 1 left open 7: pipe"),
        (CAUGHT, seen(ended(0, code=5), ended(1, code=1)), "must end with 5, got 1"),
        (HELD, held(said=STORE_MISSED), "must end with 5, got 76"),
        (HELD, held(code=1), "must end with 5, got 1"),
        (case("GIL@barrier:0", around="acknowledge"), held(), "must end with 5, got 76"),
        (case("SIGSTOP@python:0", around="acknowledge"), held(), "must end with 5, got 76"),
        (
            case("SIGSTOP@barrier:0", "torchrun", "acknowledge"),
            held(launcher_seconds=9.0, launcher_code=1),
            "must end with 5, got 76",
        ),
        (
            EARLY,
            seen(ended(0, said="missing: rank 1. Present"), ended(1, said=ABSENT)),
            "got [1]",
        ),
        (LAST, seen(done(0), ended(1, code=1)), "rank 1 must end with 0, got 1"),
        (HARMLESS, seen(done(0), ended(1, code=1), failing=done(2)), "rank 1 must end with 0, got 1"),
        (HARMLESS, seen(done(0), ended(1, code=0), failing=done(2)), "rank 1 names [2] though nobody waits"),
        (HARMLESS, seen(done(0), done(1), failing=ended(2, code=1)), "rank 2 must end with 0, got 1"),
    ],
)
def test_broken_promises(case, outcome, complaint):
    (said,) = judge(case, outcome)
    assert complaint in said


def test_who_is_said_to_have_failed():
    served = "rank 0 (vm, pid 7), which served the job's store at tcp://127.0.0.1:31419, died: its connection broke"
    assert blamed(served) == {0}
    assert blamed("rank 1 (vm, pid 7) waits in barrier 3; rank 2 (vm, pid 8), at train.py:7") == set()
    assert blamed("1 of 3 ranks joined within 6 s; missing: ranks 1 (expected on n2), 2. Present: 0 (n1, pid 5).") == {
        1,
        2,
    }


def test_the_page():
    good = Finding(BARRIER, seen(), ())
    bad = Finding(TORCHRUN, launched(ended(0), ended(1, seconds=None)), ("rank 1 hangs",))
    page = as_markdown([good, good, bad], "python -m tests.explore --seed 1")
    assert "| fault | env | torchrun |" in page
    assert "| `raise` | 2: 0.4 s | 1: no end ! |" in page
    assert f"* `{TORCHRUN}`\n  * `rank 1 hangs`\n" in page
    assert "A promise was broken in 1." in " ".join(page.split())
    assert "## Broken promises\n\nNone.\n" in as_markdown([good], "")
