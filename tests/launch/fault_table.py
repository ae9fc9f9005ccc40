"""The fault matrix as a page of Markdown."""

import os
from collections.abc import Iterator, Mapping

from .fault_cells import LAUNCHERS, RANKS, Cell, Outcome, judge
from .scripts.fault import FAULTS, PLACES

NAMELESS = "\\*"
BROKEN = "!"

HEAD = """\
# The fault matrix

What becomes of a job of three ranks when one of them fails, in {num_cells} jobs, each with one fault: they differ in
the launcher, the fault, the rank that fails, and where it is when it does. An entry such as `0.4 s, 1` is the number of
seconds from the fault until the last surviving process was gone, and the exit code of the launcher; `0.4 s + 30 s, 1`
says that the launcher took 30 s more. A survivor that ended by itself without naming the failed rank and its host is
marked \\*, any other broken promise !.

Every job runs with `DISTMAN_TIMEOUT=15`, `DISTMAN_SILENCE_TIMEOUT=4` and `rendezvous_timeout=8`, here on a machine of
{cpus} cores; under Slurm every rank has a virtual host of its own. In Python code the others wait for nobody, and would
come to a barrier after 20 s.

`raise` is a `ValueError`, `unpicklable` an exception that holds a lock and so cannot be pickled, `two arguments` one
whose class takes two arguments, so that a pickle of it cannot be read. The others must be told of all three alike.

`python -m tests.launch.fault_matrix --output docs/fault_matrix.md` runs all of it and writes this page.
"""


def as_markdown(outcomes: Mapping[Cell, Outcome]) -> str:
    """Return the page: a table for each launcher, then every broken promise."""
    parts = [HEAD.format(num_cells=len(outcomes), cpus=os.cpu_count())]
    for launcher in LAUNCHERS:
        if any(cell.launcher == launcher for cell in outcomes):
            parts += [f"## {launcher}\n", *_table(launcher, outcomes), ""]
    parts += ["## Broken promises\n", *(_broken_promises(outcomes) or ["None."])]
    return "\n".join(parts) + "\n"


def entry(cell: Cell, outcome: Outcome) -> str:
    """Return what the table says of a cell, such as ``0.4 s, 1``."""
    complaints = judge(cell, outcome)
    nameless = [complaint for complaint in complaints if "must name" in complaint]
    marks = NAMELESS * bool(nameless) + BROKEN * (len(complaints) > len(nameless))
    return f"{_end(outcome)} {marks}".strip()


def _end(outcome: Outcome) -> str:
    if not outcome.has_failed:
        return "no fault"
    survivors, launcher = outcome.survivors_seconds, outcome.launcher_seconds
    if survivors is None:
        return "hangs"
    if launcher is None:
        return f"{survivors:.1f} s, launcher hangs"
    later = f" + {launcher - survivors:.0f} s" if launcher - survivors > 1.0 else ""
    return f"{survivors:.1f} s{later}, {outcome.launcher_code}"


def _table(launcher: str, outcomes: Mapping[Cell, Outcome]) -> Iterator[str]:
    yield _row("fault", "rank", *PLACES)
    yield _row(*["---"] * (2 + len(PLACES)))
    for fault in FAULTS:
        for rank in RANKS:
            row = [Cell(launcher, fault, place, rank) for place in PLACES]
            if any(cell in outcomes for cell in row):
                cells = [entry(cell, outcomes[cell]) if cell in outcomes else "" for cell in row]
                yield _row(fault, str(rank), *cells)


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _broken_promises(outcomes: Mapping[Cell, Outcome]) -> list[str]:
    return [
        f"- {cell}: {'; '.join(f'`{complaint}`' for complaint in complaints)}"
        for cell, outcome in outcomes.items()
        if (complaints := judge(cell, outcome))
    ]
