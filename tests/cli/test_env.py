"""``distman env``, as a user or a script runs it."""

import json
import socket
import subprocess
import sys

import pytest

from distman._job.meeting import secret
from distman.testing import fake_environment

from ..environments.recordings import recorded
from . import commands

FIELDS = ["launcher", "rank", "world_size", "local_rank", "local_world_size", "node_rank", "num_nodes"]
FIELDS += ["main_address", "main_port", "job_id"]
SECRET = "0123456789abcdef" * 2


def run(environ, *arguments):
    return commands.run("env", *arguments, environ=environ)


def json_of(environ, *arguments):
    finished = run(environ, "--json", *arguments)
    assert (finished.returncode, finished.stderr) == (0, "")
    return json.loads(finished.stdout)


def test_json_has_the_fields_of_the_launch_environment_and_the_explanation():
    answer = json_of(recorded("slurm-srun-N2n4")[3])
    explanation, warnings = answer.pop("explanation"), answer.pop("warnings")
    answer.pop("protected_by")
    assert list(answer) == FIELDS
    assert all(isinstance(warning, str) for warning in warnings)
    assert list(answer.values()) == ["slurm", 3, 4, 1, 2, 1, 2, "n1", None, "slurm-3.0"]
    assert explanation[0].startswith("slurm was chosen: rank 3 (SLURM_PROCID=3), ")
    assert "openmpi was passed over: OMPI_COMM_WORLD_RANK, OMPI_COMM_WORLD_SIZE are not set." in explanation


def test_json_is_null_where_the_launcher_is_silent():
    answer = json_of(recorded("openmpi5-pypi-2hosts")[3])
    assert {name for name in FIELDS if answer[name] is None} == {"node_rank", "num_nodes", "main_address", "main_port"}


def test_without_a_launcher_it_is_one_process():
    command = [sys.executable, "-m", "distman", "env", "--json"]
    answer = json.loads(subprocess.run(command, env={}, capture_output=True, timeout=60, check=True).stdout)
    assert answer == json_of({})
    assert (answer["launcher"], answer["rank"], answer["world_size"]) == ("single", 0, 1)
    place = [answer[name] for name in ("local_rank", "local_world_size", "node_rank", "num_nodes")]
    assert place == [0, 1, 0, 1]
    assert answer["explanation"][0] == "single was chosen: no launcher speaks."


def test_a_forgotten_srun_is_told():
    finished = run(recorded("slurm-sbatch-nosrun")[0])
    assert finished.returncode == 0
    assert "start it with: srun python" in finished.stdout


WELL = {"OMP_NUM_THREADS": "1"}
MISSPELT = {"DISTMAN_TIMEOUTS": "80"}


def test_a_well_job_has_no_warnings():
    assert json_of(WELL)["warnings"] == []
    assert "warning" not in run(WELL).stdout


def test_warnings_are_in_both_forms():
    (warning,) = json_of(WELL | MISSPELT)["warnings"]
    assert warning.startswith("DISTMAN_TIMEOUTS has no effect, because distman reads no such variable")
    assert run(WELL | MISSPELT).stdout.endswith(f"\n\nwarning: {warning}\n")


def test_a_warning_of_the_detection_is_told_once():
    environ = recorded("slurm-sbatch-nosrun")[0]
    (warning, *_) = json_of(environ)["warnings"]
    assert warning.startswith("This is one process: it runs in Slurm allocation 7 ")
    assert run(environ).stdout.count(warning) == 1


@pytest.mark.parametrize(("variables", "code"), [({}, 0), (MISSPELT, 1)])
@pytest.mark.parametrize("arguments", [[], ["--json"]])
def test_warnings_count_when_they_shall(variables, code, arguments):
    strict = run(WELL | variables, "--strict", *arguments)
    assert (strict.returncode, strict.stdout) == (code, run(WELL | variables, *arguments).stdout)


def test_a_name_that_nobody_knows_is_told_and_not_waited_for():
    environ = fake_environment("torchrun", nodes=2, tasks=2)[0] | {"MASTER_ADDR": "nobody.invalid"}
    (warning,) = [warning for warning in json_of(environ)["warnings"] if "nobody.invalid" in warning]
    assert warning.startswith(("This host cannot resolve the main address", "Resolving the main address"))


def test_rank_zero_knows_its_own_address():
    environ = fake_environment("torchrun", nodes=2, tasks=2)[0]
    assert "must not be a loopback address, but it is 127.0.0.1" in run(environ | {"MASTER_ADDR": "localhost"}).stdout
    assert "192.0.2.1, which is not this host" in run(environ | {"MASTER_ADDR": "192.0.2.1"}).stdout


def test_a_port_that_refuses_is_reachable():
    environ = fake_environment("torchrun", nodes=2, tasks=2)[1] | {"MASTER_PORT": "1"}
    assert "does not answer" not in run(environ | {"MASTER_ADDR": socket.gethostname()}).stdout


def test_an_interface_that_is_there_is_found():
    assert json_of(WELL | {"GLOO_SOCKET_IFNAME": "lo"})["warnings"] == []
    (warning,) = json_of(WELL | {"GLOO_SOCKET_IFNAME": "nix0"})["warnings"]
    assert "It has lo" in warning


def test_the_text_is_a_table_and_the_reasoning():
    finished = run(fake_environment("hydra", nodes=2, tasks=3)[2] | {"GLOO_SOCKET_IFNAME": "lo"})
    assert (finished.returncode, finished.stderr) == (0, "")
    table, reasoning = finished.stdout.split("\n\n")
    assert [line.split() for line in table.splitlines()] == [
        ["launcher", "hydra"],
        ["rank", "2"],
        ["world_size", "3"],
        ["local_rank", "0"],
        ["local_world_size", "1"],
        ["node_rank", "-"],
        ["num_nodes", "-"],
        ["main_address", "-"],
        ["main_port", "-"],
        ["job_id", "-"],
    ]
    assert reasoning.startswith("hydra was chosen: rank 2 (PMI_RANK=2), ")


@pytest.mark.parametrize(
    ("arguments", "variables"),
    [(["--method", "SLURM"], {}), ([], {"DISTMAN_INITIALIZATION_METHOD": "SLURM"})],
    ids=["argument", "variable"],
)
def test_a_method_chooses_the_launcher(arguments, variables):
    environ = fake_environment("slurm", tasks=2)[1] | fake_environment("openmpi", tasks=3)[2]
    answer = json_of(environ | variables, *arguments)
    assert (answer["launcher"], answer["rank"], answer["world_size"]) == ("slurm", 1, 2)
    assert answer["explanation"][-1].startswith("SLURM was asked for by ")


SEVERAL = fake_environment("openmpi", nodes=2, tasks=2)[1] | {"MASTER_ADDR": socket.gethostname()}


@pytest.mark.parametrize(
    ("environ", "source"),
    [
        ({}, "the kernel, which says whose process is at the other end: all ranks are on one host"),
        ({"DISTMAN_SECRET": SECRET}, "the secret in DISTMAN_SECRET"),
        (SEVERAL | {"DISTMAN_SECRET": SECRET}, "the secret in DISTMAN_SECRET"),
        (SEVERAL, None),
    ],
    ids=["one process", "one process with a secret", "several hosts with a secret", "several hosts"],
)
def test_it_says_what_protects_the_job_and_not_the_secret(environ, source):
    shown, text = json_of(environ), run(environ).stdout
    assert shown["protected_by"] == source
    assert f"\nThe job is protected by {source or 'nothing'}.\n" in text
    warnings = [warning for warning in shown["warnings"] if warning.startswith("Nothing keeps other users out of this")]
    assert len(warnings) == (source is None)
    assert SECRET not in text + json.dumps(shown)


def test_under_torchrun_it_says_what_the_agents_are_open_to():
    """The run id is a UUID with --standalone; of any other one the variables do not tell."""
    standalone = recorded("torchrun-standalone")[0]
    shown, text = json_of(standalone), run(standalone).stdout
    assert (secret.OPEN_AGENTS in shown["warnings"], shown["protected_by"]) == (True, None)
    assert "\nThe job is protected by nothing.\n" in text
    shown = json_of(standalone | {"TORCHELASTIC_RUN_ID": "none"})
    assert secret.OPEN_AGENTS not in shown["warnings"]
    assert shown["protected_by"].startswith("the kernel, ")
    assert shown["protected_by"].endswith(f", {secret.IF_STATIC}")


def test_a_misspelt_name_does_not_show_the_secret():
    finished = run({"DISTMAN_SECRETS": SECRET})
    assert "DISTMAN_SECRETS has no effect" in finished.stdout
    assert SECRET not in finished.stdout + finished.stderr


@pytest.mark.parametrize("arguments", [[], ["--json"]])
@pytest.mark.parametrize(
    ("environ", "method", "sentence"),
    [
        ({"RANK": "1"}, [], "WORLD_SIZE must be set where RANK is, got RANK=1 "),
        ({"RANK": "x", "WORLD_SIZE": "2"}, [], "RANK must be a whole number of at least 0, got RANK='x' "),
        ({}, ["--method", "slurm"], "method must name the launcher that started this process, got 'slurm' "),
        ({}, ["--method", "slrum"], "method must be one of "),
        ({"DISTMAN_SECRET": "short"}, [], "DISTMAN_SECRET must hold a secret of at least 32 characters, got 5. "),
        (SEVERAL | {"DISTMAN_SECRET": "required"}, [], "DISTMAN_SECRET must be a secret in this job, got 'required' "),
    ],
    ids=["half", "no number", "not found", "unknown", "a short secret", "no secret"],
)
def test_a_broken_environment_is_one_line_on_standard_error(environ, method, sentence, arguments):
    finished = run(environ, *method, *arguments)
    assert (finished.returncode, finished.stdout) == (1, "")
    (line,) = finished.stderr.splitlines()
    assert line.startswith(f"distman env: {sentence}")


@pytest.mark.parametrize("environ", [{}, fake_environment("slurm", tasks=2)[1]], ids=["one process", "a rank"])
def test_it_imports_neither_torch_nor_numpy_nor_mpi4py(environ):
    command = [sys.executable, "-X", "importtime", "-m", "distman", "env"]
    finished = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60, check=True)
    imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in finished.stderr.splitlines()}
    assert {"argparse", "distman"} <= imported
    assert not imported & {"torch", "numpy", "mpi4py"}
