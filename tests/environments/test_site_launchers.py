"""Launchers of a site, whose records say as much or as little as they like: what they lack is never asked for."""

import contextlib
import random

import pytest

from distman._cli.diagnostics import diagnose
from distman._job.meeting.places import find_meeting
from distman.environments import (
    LAUNCHERS,
    Agent,
    Allocation,
    Family,
    Launcher,
    OnFailure,
    detect,
    explain,
    register_launcher,
)
from distman.environments._base import FIELD_NAMES
from distman.errors import LaunchEnvironmentError, RendezvousError
from distman.testing import fake_environment

from ..cli.test_diagnostics import host

NUM_RECORDS = 100
RANK = {"rank": ("SITE_RANK",), "world_size": ("SITE_WORLD_SIZE",)}


@pytest.fixture(autouse=True)
def registered_for_one_test(monkeypatch):
    for name in ("_records", "_is_discovered"):
        monkeypatch.setattr(LAUNCHERS, name, getattr(LAUNCHERS, name))


AGENT = Agent(
    is_serving=lambda environ: environ.get("SITE_AGENT") == "1",
    may_be_safe=lambda _environ, _job_id: True,
    restart_count="SITE_RESTARTS",
)


def site(**traits):
    return Launcher(
        **{"name": "site", "family": Family.STEP, "fields": RANK, "variables": ("SITE_*",)}
        | {"on_failure": OnFailure.WAITS}
        | traits
    )


def allocation(fields):
    return Allocation(name="site", title="Site", command="siterun", fields=fields)


def some(chance, values):
    return [value for value in values if chance.random() < 0.6]


def random_fields(chance, prefix, needed=()):
    """Return some fields, most of which have a variable; what has none is derived."""
    names = [*needed, *some(chance, [name for name in FIELD_NAMES if name not in needed])]
    has_none = [name for name in names if name not in needed and chance.random() < 0.2]
    return {name: () if name in has_none else (f"{prefix}_{name.upper()}",) for name in names}


def random_value(chance, name):
    return chance.choice(["n1", "10.0.0.1"]) if name == "main_address" else str(chance.choice([0, 1, 2, 4, 70_000]))


def random_site(chance):
    fields = random_fields(chance, "SITE", needed=RANK)
    values = {name: chance.randrange(5) for name in FIELD_NAMES} | {"main_port": chance.choice([0, 1, 70_000])}
    values |= {"main_address": "n1", "job_id": "1"}
    traits = {
        "marks": (("SITE_MARK",),),
        "why_not": lambda environ: environ.get("SITE_WHY_NOT"),
        "imitated_by": ("slurm", "openmpi"),
        "allocation": allocation(random_fields(chance, "SITEALLOC")),
        "meets_on_first_node": True,
        "agent": AGENT,
        "process_names": ("siterun",),
        "expected_hosts": lambda _environ: ["n1"],
        "cancel_command": lambda _environ: ["sitecancel"],
        "may_bind_gpus": False,
        "uses_munge": True,
        "ends_leftovers": True,
        "fake": lambda place: {"SITE_RANK": str(place.rank), "SITE_WORLD_SIZE": str(place.world_size)},
    }
    return site(
        family=chance.choice([Family.ENV, Family.MPI, Family.STEP]),
        on_failure=chance.choice(list(OnFailure)),
        fields=fields,
        derived={name: lambda _environ, value=values[name]: value for name, names in fields.items() if not names},
        **dict(some(chance, traits.items())),
    )


def random_environ(chance, record):
    tables = [record.fields, record.allocation.fields if record.allocation else {}]
    environ = {
        names[0]: random_value(chance, name)
        for fields in tables
        for name, names in some(chance, fields.items())
        if names
    }
    if chance.random() < 0.8:
        environ |= {"SITE_RANK": "1", "SITE_WORLD_SIZE": "4"}
    others = {"SITE_MARK": "1", "SITE_AGENT": "1", "MASTER_ADDR": "n1", "MASTER_PORT": "29400", "RANK": "0"}
    others |= {"WORLD_SIZE": "3", "SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2", "SITE_WHY_NOT": "it is a shell"}
    return environ | {name: value for name, value in others.items() if chance.random() < 0.3}


@pytest.mark.parametrize("seed", range(NUM_RECORDS))
def test_no_record_is_asked_for_what_it_lacks(seed):
    chance = random.Random(seed)  # noqa: S311 - to choose records, not secrets
    record = random_site(chance)
    register_launcher(record, before=chance.choice(["torchrun", "slurm", None]))
    nodes, tasks = chance.choice([(1, 1), (1, 2), (2, 4)])
    for environ in [*fake_environment("site", nodes=nodes, tasks=tasks), random_environ(chance, record)]:
        for method in (None, "site", "mpi"):
            with contextlib.suppress(LaunchEnvironmentError, RendezvousError):
                explain(environ, method)
            with contextlib.suppress(LaunchEnvironmentError, RendezvousError):
                environment = detect(environ, method).environment
                diagnose(environ, environment, host())
                find_meeting(environment, environ)


@pytest.mark.parametrize("lacking", ["job_id", "num_nodes", "rank", "world_size"])
def test_an_allocation_says_what_it_can(lacking):
    names = ("job_id", "num_nodes", "rank", "world_size")
    register_launcher(
        site(allocation=allocation({name: (f"SITE_ALLOCATED_{name}",) for name in names if name != lacking}))
    )
    environ = {f"SITE_ALLOCATED_{name}": "2" for name in names}
    warned = "This is one process: it runs in Site allocation 2" in " ".join(detect(environ).warnings)
    assert warned is (lacking != "job_id")


def test_an_allocation_that_tells_no_rank_is_not_believed():
    register_launcher(site(allocation=allocation({"job_id": ("SITE_JOB",)})))
    with pytest.raises(LaunchEnvironmentError, match="site: SITE_RANK, SITE_WORLD_SIZE are not set"):
        detect({"SITE_JOB": "1"}, "site")


def test_ranks_with_an_agent_need_an_address():
    register_launcher(site(agent=AGENT))
    environ = {"SITE_RANK": "0", "SITE_WORLD_SIZE": "2", "SITE_AGENT": "1"}
    with pytest.raises(RendezvousError, match="MASTER_ADDR must be set when site does not say where rank 0 runs"):
        find_meeting(detect(environ).environment, environ)


def test_a_value_without_a_variable_is_told_by_its_own_name():
    register_launcher(site(fields=RANK | {"main_port": ()}, derived={"main_port": lambda _environ: 70_000}))
    with pytest.raises(LaunchEnvironmentError, match="main_port must be between 1 and 65535, got main_port=70000"):
        detect({"SITE_RANK": "0", "SITE_WORLD_SIZE": "2"})
