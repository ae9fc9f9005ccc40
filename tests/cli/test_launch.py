"""``distman launch``, and the scripts in launchers/, which it wrote."""

import functools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

from distman._cli import main
from distman._cli.launch.job_script import BACKENDS, JobRequest, read_time, render
from distman._job.meeting.places import find_meeting
from distman._job.meeting.secret import Source, find_protection
from distman.environments import LaunchEnvironment, detect
from distman.testing import fake_environment

from ..test_docs import assert_shown

LAUNCHERS = Path(__file__).parents[2] / "launchers"
SCRIPTS = sorted(LAUNCHERS.glob("*.sh"))
ROW = re.compile(r"^\| \[(\w+\.sh)\].* \| `distman (launch .*)` \|$", re.MULTILINE)
ARGUMENTS = ["a b", "it's", '"$HOME" `id` $(id)', "--", "*", "", "two\n#PBS -N lines", "\\"]

# Stands in for a launcher that cannot be installed: it starts the ranks one after another, each with its variables, and
# runs a command for which it has none once, without any.
STAND_IN = """\
#!{python}
import json, os, subprocess, sys
words = sys.argv[1:]
program = words[words.index("python"):] if "python" in words else ["hostname"]
if "python" in words:
    with open("options.json", "w") as file:
        json.dump([os.path.basename(sys.argv[0]), *words[: words.index("python")]], file)
for variables in json.load(open("ranks.json")) if "python" in words else [{{}}]:
    subprocess.run(program, env={{**os.environ, **variables}}, check=True)
"""
TELL = "import json, os, sys\nprint(json.dumps([dict(os.environ), sys.argv[1:]]))\n"


def launch(capsys, *arguments):
    """Return exit code, output and errors of the command, run in this process."""
    try:
        code = main(["launch", *arguments])
    except SystemExit as error:
        code = error.code
    return (code, *capsys.readouterr())


def shellcheck(script):
    if shutil.which("shellcheck") is None:
        pytest.skip("not installed: shellcheck")
    checked = subprocess.run(
        ["shellcheck", "--shell=bash", "-"], input=script, capture_output=True, text=True, check=False, timeout=60
    )
    assert checked.stdout == ""
    parsed = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True, check=False, timeout=60)
    assert (parsed.returncode, parsed.stderr) == (0, "")


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_a_script_is_what_the_command_beside_it_writes(capsys, tmp_path, script):
    commands = dict(ROW.findall((LAUNCHERS / "README.md").read_text()))
    assert sorted(commands) == [path.name for path in SCRIPTS]
    file = tmp_path / script.name
    words = shlex.split(commands[script.name])
    assert launch(capsys, *words[1:], f"--output={file}")[0] == 0
    assert file.read_text() == script.read_text(), "make launchers writes it again"
    assert os.access(file, os.X_OK)
    assert os.access(script, os.X_OK)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_a_script_is_clean_and_short(script):
    text = script.read_text()
    shellcheck(text)
    assert max(map(len, text.splitlines())) <= 120
    assert "\nset -euo pipefail\n" in text
    assert "@{" not in text


MANY = {"nodes": 16, "gpus_per_node": 8, "account": "a-1", "partition": "gpu", "program": ("-m", "a.b", "it's", "-x")}
JOBS = [
    {"nodes": 1},
    {"nodes": 1, "gpus_per_node": 0},
    {"nodes": 3, "gpus_per_node": 0, "tasks_per_node": 5, "cpus_per_task": 2, "time": "01:30:01"},
    MANY,
]


@pytest.mark.parametrize("job", JOBS, ids=["one GPU", "one CPU process", "CPUs", "many"])
@pytest.mark.parametrize("backend", [*BACKENDS, "slurm with torchrun"])
def test_every_kind_of_script_is_clean(backend, job):
    shellcheck(render(JobRequest(backend=backend.split()[0], with_torchrun="with" in backend, **job)))


def test_a_script_with_spare_nodes_asks_for_them_and_is_clean():
    script = render(JobRequest(backend="slurm", nodes=2, gpus_per_node=0, spare_nodes=1, restarts=5))
    shellcheck(script)
    assert "\n#SBATCH --nodes=3\n" in script
    assert "\n#SBATCH --no-kill\n" in script
    assert "\ndistman keep --restarts 5 --spare 1 -- srun --kill-on-bad-exit=1 \\\n    python train.py\n" in script


@given(arguments=st.lists(st.text(st.characters(exclude_characters="\0", exclude_categories=("Cs",)))))
@settings(deadline=None, max_examples=30)
def test_bash_reads_the_arguments_as_they_were_given(arguments):
    script = render(JobRequest(backend="mpich", program=("train.py", *arguments)))
    shown = f"mpiexec() {{ printf '%s\\0' \"$@\"; }}\nhostname() {{ :; }}\npython() {{ :; }}\n{script}"
    said = subprocess.run(["bash", "-c", shown], capture_output=True, check=True, timeout=60).stdout.decode()
    assert said.split("\0")[4:-1] == ["python", "train.py", *arguments]


BACKENDS_OF_SCRIPTS = [*BACKENDS, "slurm with torchrun"]
HOSTILE = st.text(
    st.one_of(
        st.sampled_from("\n\r\t\v\f\x1b\u2028\u202e\u2066\u200b\ufeff'\"`$;&|<>(){}*?!#=%@/.- \\\udc80\udcff"),
        st.characters(exclude_characters="\0", exclude_categories=("Cs",)),
    ),
    min_size=1,
)


def job_script(backend, *, file=None, **options):
    return render(JobRequest(backend=backend.split()[0], with_torchrun="with" in backend, **options), file)


@functools.cache
def num_lines(backend, name=None):
    return len(job_script(backend, **({} if name in (None, "time") else {name: "x"})).split("\n"))


@functools.cache
def plain_script(backend, num_arguments):
    return job_script(backend, file="x", program=("train.py", *["x"] * num_arguments))


@given(backend=st.sampled_from(BACKENDS_OF_SCRIPTS), file=HOSTILE, arguments=st.lists(HOSTILE, max_size=3))
@settings(max_examples=1_000)
def test_no_name_and_no_argument_becomes_a_line_of_the_script(backend, file, arguments):
    script = job_script(backend, file=file, program=("train.py", *arguments))
    lines, expected = script.split("\n"), plain_script(backend, len(arguments)).split("\n")
    assert len(lines) == len(expected)
    assert all(line.isprintable() for line in lines)
    changed = [line for line, other in zip(lines, expected, strict=True) if line != other]
    assert all(line.startswith(("# ", "    ")) for line in changed), "in comments, and at the end of the last command"


@given(
    backend=st.sampled_from(BACKENDS_OF_SCRIPTS),
    name=st.sampled_from(["job_name", "account", "partition", "gpu_type", "time"]),
    value=st.one_of(HOSTILE, st.from_regex(r"[\w.-]{1,8}(\n#(SBATCH|PBS|BSUB) -x)?", fullmatch=True)),
)
@settings(max_examples=1_000)
def test_what_stands_in_a_line_for_the_scheduler_is_one_word(backend, name, value):
    try:
        script = job_script(backend, **{name: read_time(value) if name == "time" else value})
    except ValueError:
        return
    assert name == "time" or re.fullmatch(r"[A-Za-z0-9_.+@:-]+", value)
    assert len(script.split("\n")) == num_lines(backend, name)


@pytest.mark.parametrize("name", ["a\nrm -rf x\n.sh", "-v", "--wrap=x", "\u202ehs.x", "it's $(x).sh"])
def test_the_line_that_submits_a_script_is_one_line_with_the_name_of_the_file(capsys, tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    code, out, err = launch(capsys, "--backend=torchrun", f"--output={name}")
    assert (code, err) == (0, "")
    assert out.removesuffix("\n").isprintable()
    command = out.removesuffix("\n").partition(" is written: ")[2]
    said = subprocess.run(
        ["bash", "-c", f'bash() {{ cat "$@"; }}; {command}'], capture_output=True, text=True, timeout=60
    )
    assert said.stdout == (tmp_path / name).read_text()
    assert len(said.stdout.splitlines()) == len(job_script("torchrun").splitlines())


@pytest.mark.parametrize(
    ("backend", "launcher", "options"),
    [
        ("pbs", "pals", "mpiexec -n 4 --ppn 2 --depth 8 --cpu-bind depth"),
        (
            "lsf",
            "jsrun",
            "jsrun --nrs 2 --rs_per_host 1 --tasks_per_rs 2 --cpu_per_rs 16 --gpu_per_rs 2 --bind packed:8",
        ),
        (
            "flux",
            "flux",
            "flux run --nodes=2 --ntasks=4 --cores-per-task=8 --signal=SIGTERM@120s --gpus-per-task=1",
        ),
    ],
)
def test_ranks_of_a_launcher_that_is_not_here_find_their_place(tmp_path, backend, launcher, options):
    """The launchers' variables are as their manuals have them; the script adds what they do not tell."""
    program = tmp_path / options.split()[0]
    program.write_text(STAND_IN.format(python=sys.executable))
    program.chmod(0o755)
    (tmp_path / "hostname").write_text("#!/bin/sh\necho n1\n")
    (tmp_path / "hostname").chmod(0o755)
    (tmp_path / "hosts").write_text("n1\nn2\n")
    (tmp_path / "tell.py").write_text(TELL)
    (tmp_path / "ranks.json").write_text(json.dumps(fake_environment(launcher, nodes=2, tasks=4)))
    environ = {
        "PATH": f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PBS_O_WORKDIR": str(tmp_path),
        "PBS_NODEFILE": str(tmp_path / "hosts"),
    }
    request = JobRequest(backend=backend, nodes=2, gpus_per_node=2, program=("tell.py", *ARGUMENTS))
    command = ["bash", "-c", render(request)]
    told = subprocess.run(command, env=environ, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=60)
    assert json.loads((tmp_path / "options.json").read_text()) == options.split()
    ranks = [json.loads(line) for line in told.stdout.splitlines()]
    assert [arguments for _, arguments in ranks] == [ARGUMENTS] * 4
    places = [detect(variables).environment for variables, _ in ranks]
    assert [(place.launcher, place.rank, place.world_size) for place in places] == [
        (launcher, rank, 4) for rank in range(4)
    ]
    points = [find_meeting(place, variables) for place, (variables, _) in zip(places, ranks, strict=True)]
    addresses = [getattr(meeting, "point", meeting).addresses for meeting in points]
    assert addresses == [("n1",)] * 4
    assert [meeting.is_host for meeting in points] == [True, False, False, False]
    assert {variables["OMP_NUM_THREADS"] for variables, _ in ranks} == {"8"}
    protections = {find_protection(place, variables) for place, (variables, _) in zip(places, ranks, strict=True)}
    assert [protection.source for protection in protections] == [Source.VARIABLE], "the same secret on all ranks"


# Stands in for whatever starts the ranks: it tells the words and the secret that it is given.
STARTER = """\
{name}() {{ printf '%s\n' "$*" "$(env | sed -n 's/^DISTMAN_SECRET=//p')" "${{DISTMAN_SECRET_FILE:-}}"; }}
python() {{ return 1; }}
hostname() {{ echo n1; }}
scontrol() {{ echo n1; }}
"""
STARTERS = {
    "slurm with torchrun": "srun",
    "openmpi": "mpirun",
    "mpich": "mpiexec",
    "pbs": "mpiexec",
    "lsf": "jsrun",
    "flux": "flux",
}


def started(backend, folder, nodes, name):
    """Return the words that the starter is given, the secret in its environment and the path of one."""
    request = JobRequest(backend=backend.split()[0], with_torchrun="with" in backend, nodes=nodes)
    (folder / "hosts").write_text("n1\n")
    environ = {
        "HOME": str(folder),
        "PATH": os.environ["PATH"],
        "PBS_NODEFILE": str(folder / "hosts"),
        "PBS_O_WORKDIR": str(folder),
        "SLURM_CPUS_PER_TASK": "8",
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "n1",
    }
    script = f"{STARTER.format(name=name)}{render(request)}"
    arguments = [] if backend == "torchrun" and nodes == 1 else ["n1", "0"]
    command = ["bash", "-c", script, "train.sh", *arguments]
    told = subprocess.run(command, env=environ, capture_output=True, text=True, check=True, timeout=60)
    assert told.stderr == ""
    return told.stdout.split("\n")[:3]


@pytest.mark.parametrize("backend", STARTERS)
def test_a_script_for_several_hosts_draws_a_secret_and_puts_it_on_no_command_line(tmp_path, backend):
    found = [started(backend, tmp_path, 2, STARTERS[backend]) for _ in range(3)]
    secrets = {secret for _, secret, _ in found}
    assert len(secrets) == 3
    assert all(re.fullmatch("[0-9a-f]{64}", secret) for secret in secrets)
    assert not any(secret in words for words, secret, _ in found)
    assert all((" -x DISTMAN_SECRET " in words) is (backend == "openmpi") for words, _, _ in found)


@pytest.mark.parametrize("backend", [*STARTERS, "torchrun"])
def test_a_script_for_one_host_needs_no_secret(tmp_path, backend):
    assert started(backend, tmp_path, 1, STARTERS.get(backend, backend))[1:] == ["", ""]
    assert [path.name for path in tmp_path.iterdir()] == ["hosts"]


def test_torchruns_of_several_nodes_share_a_file_whoever_comes_first(tmp_path):
    command = ["bash", "-c", f"{STARTER.format(name='torchrun')}{render(JobRequest(backend='torchrun', nodes=2))}"]
    environ = {"HOME": str(tmp_path), "PATH": os.environ["PATH"]}
    command += ["train.sh", "n1", "0"]
    running = [subprocess.Popen(command, env=environ, stdout=subprocess.PIPE) for _ in range(8)]
    paths = {one.communicate(timeout=60)[0].decode().split("\n")[2] for one in running}
    assert [one.returncode for one in running] == [0] * 8
    assert paths == {str(tmp_path / ".distman_secret")}
    assert [path.name for path in tmp_path.iterdir()] == [".distman_secret"], "no draft is left"
    (environ["DISTMAN_SECRET_FILE"],) = paths
    first = find_protection(LaunchEnvironment.lone(), environ)
    assert first.source is Source.FILE
    subprocess.run(command, env=environ, capture_output=True, check=True, timeout=60)
    assert find_protection(LaunchEnvironment.lone(), environ) == first


def test_the_script_on_the_page_is_real(capsys):
    page = (LAUNCHERS.parent / "docs" / "job_scripts.md").read_text()
    command, shown = re.search(r"```sh\ndistman (launch .*)\n```\n\n```text\n(.*?)```", page, re.DOTALL).groups()
    assert_shown(shown, launch(capsys, *shlex.split(command)[1:])[1])


def test_without_a_file_the_script_is_printed(capsys):
    assert launch(capsys, "--backend=flux") == (0, render(JobRequest(backend="flux")), "")


def test_mpi_is_open_mpi(capsys):
    assert launch(capsys, "--backend=mpi")[1] == render(JobRequest(backend="openmpi"))


def test_options_come_to_stand_in_the_script(capsys):
    options = ["--nodes=3", "--gpus-per-node=4", "--gpu-type=a100", "--cpus-per-task=12", "--time=02:00:00"]
    names = ["--account=physics", "--partition=gpu", "--job-name=deep"]
    code, script, _ = launch(capsys, "--backend=slurm", *options, *names, "--", "a.py", "--epochs", "3")
    assert code == 0
    directives = re.findall(r"^#SBATCH (.*)$", script, re.MULTILINE)
    wanted = ["--nodes=3", "--ntasks-per-node=4", "--gpus-per-node=a100:4", "--cpus-per-task=12", "--time=02:00:00"]
    assert {*wanted, *names} <= {*directives}
    assert script.endswith("    python a.py --epochs 3\n")


def test_json_tells_script_and_command(capsys, tmp_path):
    file = tmp_path / "a job.sh"
    code, printed, _ = launch(capsys, "--backend=lsf", f"--output={file}", "--json")
    answer = json.loads(printed)
    assert code == 0
    assert answer.pop("script") == file.read_text()
    assert answer == {"backend": "lsf", "file": str(file), "submit": f"bsub < '{file}'"}


def test_a_file_that_is_there_stays(capsys, tmp_path):
    file = tmp_path / "job.sh"
    file.write_text("mine")
    code, printed, complaint = launch(capsys, "--backend=slurm", f"--output={file}")
    assert (code, printed, file.read_text()) == (1, "", "mine")
    assert (
        complaint == f"distman launch: {file} must not exist yet, but it does. Choose another name, or pass --force.\n"
    )
    assert launch(capsys, "--backend=slurm", f"--output={file}", "--force")[0] == 0
    assert file.read_text() == render(JobRequest(backend="slurm"), "job.sh")


def test_a_folder_that_is_missing_is_one_line(capsys, tmp_path):
    code, _, complaint = launch(capsys, "--backend=slurm", f"--output={tmp_path / 'no' / 'job.sh'}")
    assert (code, complaint.count("\n")) == (1, 1)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--tasks-per-node=2"], "--tasks-per-node must be left out where there are GPUs, got 2 with 1 GPUs. "),
        (["--time=1 hour"], "--time must be a time such as 90m, 2h30m, 01:30:00 or 1-12:00:00, got '1 hour'. "),
        (["--time=00:00:00"], "--time must be a time such as 90m, 2h30m, 01:30:00 or 1-12:00:00, got '00:00:00'. "),
        (["--account=a\n#SBATCH -x"], "--account must consist of letters, digits and . _ + @ -, got 'a\\n"),
        (["--job-name=a/b"], "--job-name must consist of letters, digits and . _ + @ -, got 'a/b'. "),
        (
            ["--gpu-type=a100", "--gpus-per-node=0"],
            "--gpu-type must be used with --backend slurm and at least one GPU, got 'a100' ",
        ),
        (
            ["--gpu-type=a100", "--backend=flux"],
            "--gpu-type must be used with --backend slurm and at least one GPU, got 'a100' ",
        ),
        (["--spare-nodes=1", "--backend=pbs"], "--spare-nodes and --restarts must be used with --backend slurm "),
        (["--restarts=3", "--with-torchrun"], "--spare-nodes and --restarts must be used with --backend slurm "),
        (["--with-torchrun", "--backend=pbs"], "--with-torchrun must be used with --backend slurm, got pbs. "),
        (["--", "python", "a.py"], "the program must begin with a script, or with -m and a module, got 'python'. "),
        (["--", "/usr/bin/python3.11", "a.py"], "the program must begin with a script, or with -m and a module, "),
        (["--", "-u", "a.py"], "the program must begin with a script, or with -m and a module, got '-u'. "),
        (["--", "-m"], "the program must begin with a script, or with -m and a module, got '-m'. "),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_options_without_meaning_are_one_sentence(capsys, arguments, sentence):
    code, printed, complaint = launch(capsys, "--backend=slurm", *arguments)
    assert (code, printed) == (2, "")
    assert complaint.startswith(f"distman launch: {sentence}")
    assert complaint.count("\n") == 1


@pytest.mark.parametrize("option", ["--nodes=0", "--gpus-per-node=-1", "--cpus-per-task=0", "--tasks-per-node=x"])
def test_numbers_without_meaning_are_refused(capsys, option):
    code, printed, complaint = launch(capsys, "--backend=slurm", option)
    assert (code, printed) == (2, "")
    name, _, value = option.partition("=")
    assert f"argument {name}: it must be a whole number of at least" in complaint
    assert complaint.endswith(f"got {value!r}\n")


def test_it_imports_neither_torch_nor_numpy():
    command = [sys.executable, "-X", "importtime", "-m", "distman", "launch", "--backend=slurm"]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in finished.stderr.splitlines()}
    assert {"argparse", "distman"} <= imported
    assert not imported & {"torch", "numpy", "mpi4py"}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1h", "01:00:00"),
        ("90m", "01:30:00"),
        ("1d2h3m4s", "26:03:04"),
        ("45", "00:45:00"),
        ("45:30", "00:45:30"),
        ("100:00:00", "100:00:00"),
        ("1-12", "36:00:00"),
        ("1-12:30", "36:30:00"),
        ("2-00:00:10", "48:00:10"),
    ],
)
def test_times_are_as_people_and_slurm_write_them(text, expected):
    assert read_time(text) == expected


@pytest.mark.parametrize("arguments", [["train.py", "--epochs", "3"], ["--", "train.py", "--epochs", "3"]])
def test_arguments_of_the_script_need_no_dashes_before_them(arguments, capsys):
    assert main(["launch", "--backend", "slurm", *arguments]) == 0
    assert "python train.py --epochs 3" in capsys.readouterr().out


def test_a_module_has_its_arguments(capsys):
    assert main(["launch", "--backend", "slurm", "-m", "package.train", "--epochs", "3"]) == 0
    assert "python -m package.train --epochs 3" in capsys.readouterr().out
