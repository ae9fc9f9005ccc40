"""The records of launchers: nothing else knows them by name, and a site may add its own."""

import ast
import dataclasses
import importlib.metadata
from pathlib import Path

import pytest

import distman
from distman.environments import LAUNCHERS, Family, Launcher, OnFailure, detect, explain, register_launcher
from distman.environments._launchers import HYDRA
from distman.errors import LaunchEnvironmentError
from distman.testing import fake_environment
from distman.testing._environments import server_environ

PACKAGE = Path(distman.__file__).parent
# `distman launch` writes job scripts: its backends are whom it writes for, not who started this process.
WRITES_JOB_SCRIPTS = PACKAGE / "_cli" / "launch"
# The command `distman env` has the name of a launcher by accident, and a package of Python is called as one.
OTHER_MEANINGS = {
    ("_cli/parser.py", "env"),
    ("_coordination/stop_signals.py", "submitit"),
    ("_coordination/time_limit.py", "flux"),
}

OURRUN = Launcher(
    name="ourrun",
    family=Family.STEP,
    fields={"rank": ("OURRUN_RANK",), "world_size": ("OURRUN_SIZE",), "job_id": ("OURRUN_JOB",)},
    variables=("OURRUN_*",),
    on_failure=OnFailure.WAITS,
)


@pytest.fixture(autouse=True)
def registered_for_one_test(monkeypatch):
    for name in ("_records", "_is_discovered"):
        monkeypatch.setattr(LAUNCHERS, name, getattr(LAUNCHERS, name))


@pytest.fixture
def entry_point(monkeypatch, tmp_path):
    """Install a module under a name of its own as an entry point, and have them looked for again."""

    def install(name, text):
        (tmp_path / f"{name}.py").write_text(text)
        info = tmp_path / f"{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[distman.launchers]\n{name} = {name}\n")
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.setattr(LAUNCHERS, "_is_discovered", False)

    return install


def named_elsewhere():
    """Return the texts outside of the package of launchers that are the name of one, each with its file.

    `compat` speaks of them as other libraries do.
    """
    for source in sorted(PACKAGE.rglob("*.py")):
        if not {PACKAGE / "environments", WRITES_JOB_SCRIPTS, PACKAGE / "compat"}.isdisjoint(source.parents):
            continue
        for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and node.value in LAUNCHERS:
                yield source.relative_to(PACKAGE).as_posix(), node.value


def test_nothing_outside_of_the_launchers_knows_one_by_its_name():
    assert set(named_elsewhere()) == OTHER_MEANINGS


def test_the_records_are_in_the_order_of_asking_and_one_that_is_none_is_last():
    asked = [line.split()[0] for line in explain({}).splitlines() if " was passed over: " in line]
    assert [*LAUNCHERS] == [*asked, "single"]


def test_a_record_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        LAUNCHERS["slurm"].name = "other"


@pytest.mark.parametrize(("before", "follows"), [("torchrun", "torchrun"), ("slurm", "slurm"), (None, "env")])
def test_a_registered_launcher_is_asked_where_it_was_put(before, follows):
    register_launcher(OURRUN, before=before)
    names = [*LAUNCHERS]
    assert names[names.index("ourrun") + 1] == follows
    assert "ourrun was passed over: OURRUN_RANK, OURRUN_SIZE are not set." in detect({}).explanation


def test_a_registered_launcher_is_found_explained_asked_for_and_faked():
    register_launcher(OURRUN, before="slurm")
    environ = fake_environment("slurm")[0] | fake_environment("ourrun", nodes=2, tasks=4)[3]
    detection = detect(environ)
    assert (detection.environment.launcher, detection.environment.rank) == ("ourrun", 3)
    assert detection.explanation[0] == (
        "ourrun was chosen: rank 3 (OURRUN_RANK=3), world_size 4 (OURRUN_SIZE=4), job_id 1000 (OURRUN_JOB=1000)."
    )
    assert detect(environ, "Ourrun").environment == detection.environment
    assert detect(environ | {"DISTMAN_INITIALIZATION_METHOD": "slurm"}).environment.launcher == "slurm"


def test_an_mpi_of_a_site_is_an_mpi():
    register_launcher(dataclasses.replace(OURRUN, family=Family.MPI))
    environ = fake_environment("ourrun", tasks=2)[1]
    assert detect(environ, "mpi").environment.launcher == "ourrun"
    with pytest.raises(LaunchEnvironmentError, match="must agree with the MPI that started this process"):
        detect(environ | {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"})


@pytest.mark.parametrize("variable", ["OURRUN_RANK", "OURRUN_ANYTHING", "SLURM_PROCID", "MVP_NODE_ID", "RANK"])
def test_workers_are_started_without_the_variables_of_any_launcher(monkeypatch, variable):
    register_launcher(OURRUN)
    monkeypatch.setenv(variable, "1")
    assert variable not in server_environ()


def test_the_same_record_again_changes_nothing():
    register_launcher(OURRUN, before="slurm")
    names = [*LAUNCHERS]
    register_launcher(dataclasses.replace(OURRUN))
    assert [*LAUNCHERS] == names


def changed(**traits):
    return dataclasses.replace(OURRUN, **traits)


@pytest.mark.parametrize(
    ("launcher", "before", "message"),
    [
        (changed(name="slurm"), None, r"launcher\.name must be none of torchrun, .*, single, mpi, got 'slurm'\."),
        (changed(name="mpi"), None, r"got 'mpi'\. Choose another name"),
        (OURRUN, "slrum", r"before must name one of torchrun, .*, got 'slrum'\."),
        (changed(imitated_by=("slrum",)), None, r"launcher\.imitated_by must name one of torchrun, .*, got 'slrum'\."),
        (changed(fields={"rank": ("OURRUN_RANK",)}), None, "got none of world_size from ourrun"),
        (changed(fields={"rank": (), "world_size": ("OURRUN_SIZE",)}), None, "got none of rank from ourrun"),
    ],
)
def test_what_cannot_be_registered_is_told_and_leaves_nothing(launcher, before, message):
    names = [*LAUNCHERS]
    for _ in range(2):
        with pytest.raises(ValueError, match=message):
            register_launcher(launcher, before=before)
    assert [*LAUNCHERS] == names


@pytest.mark.parametrize(
    ("traits", "message"),
    [
        ({"name": "Our run"}, "name must be lower-case letters, digits, '-' and '_', .* got 'Our run'"),
        ({"fields": {"size": ("OURRUN_SIZE",)}}, "fields of launcher 'ourrun' must be among rank, .* got size"),
        ({"derived": {"node_rank": len}}, "derived of launcher 'ourrun' must be among rank, .* got node_rank"),
    ],
)
def test_a_record_with_names_that_mean_nothing_is_refused(traits, message):
    with pytest.raises(ValueError, match=message):
        changed(**traits)


def test_what_must_be_said_of_every_launcher_has_no_default():
    with pytest.raises(TypeError, match="'family', 'variables', and 'on_failure'"):
        Launcher(name="ourrun", fields=OURRUN.fields)


def test_an_entry_point_is_loaded_before_a_launcher_is_looked_for(entry_point):
    entry_point(
        "oursite_entry",
        "from distman.environments import register_launcher\n"
        "from tests.environments.test_launchers import OURRUN\n"
        "register_launcher(OURRUN)\n",
    )
    assert detect({"OURRUN_RANK": "0", "OURRUN_SIZE": "2"}).environment.launcher == "ourrun"


def test_an_entry_point_that_cannot_be_loaded_is_named_each_time(entry_point):
    entry_point("oursite_broken", "raise RuntimeError('no licence')\n")
    for _ in range(2):
        with pytest.raises(LaunchEnvironmentError) as caught:
            detect({})
        assert "oursite_broken = oursite_broken (an entry point of distman.launchers) failed" in str(caught.value)
        assert "RuntimeError: no licence. Repair or uninstall the package" in str(caught.value)


def test_entry_points_are_looked_for_once(monkeypatch):
    looked = []
    monkeypatch.setattr(LAUNCHERS, "_is_discovered", False)
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda **group: looked.append(group) or ())
    detect({})
    detect({})
    assert looked == [{"group": "distman.launchers"}]


def test_marks_of_a_launcher_are_asked_before_anything_else_is_read():
    assert HYDRA.read({"PMI_RANK": "x", "PMI_SIZE": "4"}) is None


def test_flux_names_its_jobs_in_letters_and_digits():
    assert [environ["FLUX_JOB_ID"] for environ in fake_environment("flux", tasks=2)] == ["f1000", "f1000"]
