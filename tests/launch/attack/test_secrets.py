"""A rank that has not the job's secret: it says so, and the others say what they miss."""

from contextlib import ExitStack

from ..preloaded import PYTHON
from ..processes import start
from .attacking import LIMIT

SECRET = "0123456789abcdef" * 4
ANOTHER = "f" * 64
START = "from distman import DistributedManager as M; M.initialize(rendezvous_timeout=4)"
PLACES = ("n1", "n1", "n2")
NO_STORE = "See whether rank 0 started with the same secret, runs on n1"
REFUSED = "another program listens there: it does not know this job, or the job's secret"
MISSING = (
    "2 of 3 ranks joined tcp://n1:",
    "missing: rank 2",
    "See whether the missing ranks started with the same secret",
)
UNPROVED = ", and have this job's secret, which "


def start_job(stack, hosts, name, job, odd):
    """Start a job whose last rank has other variables than the others."""
    ranks = []
    for rank, host in enumerate(PLACES):
        env = {"RANK": str(rank), "WORLD_SIZE": str(len(PLACES)), "MASTER_ADDR": "n1", "DISTMAN_JOB_ID": name, **job}
        env |= {**hosts.environment, **(odd if rank == 2 else {})}
        ranks.append(stack.enter_context(start([*hosts.enter(host), PYTHON, "-c", START], env=env)))
    return ranks


def last_line(running):
    finished = running.wait(timeout=LIMIT)
    assert finished.returncode == 1
    assert SECRET not in finished.stderr
    assert ANOTHER not in finished.stderr
    return finished.stderr.splitlines()[-1]


def test_a_rank_without_the_secret_says_so_and_the_others_say_who_is_missing(namespace_hosts, tmp_path):
    good, open_to_all, absent = (tmp_path / name for name in ("good", "open", "absent"))
    for path, mode in ((good, 0o600), (open_to_all, 0o644)):
        path.write_text(SECRET)
        path.chmod(mode)
    variable, file = {"DISTMAN_SECRET": SECRET}, {"DISTMAN_SECRET_FILE": str(good)}
    another, none = {"DISTMAN_SECRET": ANOTHER}, {"DISTMAN_SECRET": None}
    cases = {
        "another": (variable, another, NO_STORE, ""),
        "another, at one port": (variable | {"MASTER_PORT": "29500"}, another, REFUSED, UNPROVED),
        "none": (variable, none, NO_STORE, ""),
        "none, at one port": (variable | {"MASTER_PORT": "29501"}, none, REFUSED, UNPROVED),
        "open": (file, {"DISTMAN_SECRET_FILE": str(open_to_all)}, f"{open_to_all} must have mode 0600, got 0644", ""),
        "absent": (file, {"DISTMAN_SECRET_FILE": str(absent)}, f"{absent} must be a file that this user can read", ""),
    }
    with ExitStack() as stack:
        jobs = {
            name: start_job(stack, namespace_hosts, f"secrets {name}", job, odd)
            for name, (job, odd, *_) in cases.items()
        }
        said = {name: [last_line(rank) for rank in ranks] for name, ranks in jobs.items()}
    for name, (_, _, word, hint) in cases.items():
        *others, alone = said[name]
        assert word in alone
        assert all(text in line for line in others for text in (*MISSING, hint)), others
