"""Where the secret of a job comes from, on every rank alike, and what is said of one that is none."""

import os
import secrets
import uuid

import pytest

from distman._job.meeting import mpi, munge, secret
from distman._job.meeting.munge import CredentialError
from distman._job.meeting.secret import Agents, Protection, Source, check_adoption, find_protection
from distman._store import transport
from distman.environments import LaunchEnvironment, detect
from distman.errors import LaunchEnvironmentError, RendezvousError
from distman.testing import fake_environment

from ...launch.conftest import require_programs
from .munged import munge_daemon

SECRET = "0123456789abcdef" * 2
LAUNCHED = ["torchrun", "env", "openmpi", "hydra", "mvapich", "pals", "jsrun", "flux", "slurm"]
MPI = ["openmpi", "hydra", "mvapich", "pals"]


@pytest.fixture(autouse=True)
def no_munge(monkeypatch, tmp_path):
    """Have no munge but the one that a test starts: the machine may have one."""
    monkeypatch.setattr(munge, "_CONFIGURATIONS", (str(configuration(tmp_path, "nowhere")),))


def configuration(folder, socket):
    file = folder / "slurm.conf"
    file.write_text(f"AuthInfo=socket={socket}\n")
    return file


def protections(launcher, nodes=1, tasks=4, **variables):
    environs = [{**environ, **variables} for environ in fake_environment(launcher, nodes=nodes, tasks=tasks)]
    return [find_protection(detect(environ).environment, environ) for environ in environs]


def agents_under(launcher):
    return Agents.UNKNOWN if launcher == "torchrun" else None


def agreed(found):
    """Return what all ranks have found alike."""
    (same,) = set(found)
    return same


@pytest.mark.parametrize("launcher", ["torchrun", *MPI, "jsrun", "flux", "slurm", "env"])
def test_on_one_host_the_kernel_tells(launcher):
    variables = {"MASTER_ADDR": "localhost"} if launcher == "env" else {}
    assert agreed(protections(launcher, **variables)) == Protection(Source.KERNEL, agents=agents_under(launcher))


def test_an_address_that_means_every_host_itself_does_not_make_it_one_host():
    assert agreed(protections("torchrun", nodes=2, MASTER_ADDR="localhost")).source is Source.NONE


def test_one_process_needs_no_secret():
    assert find_protection(LaunchEnvironment.lone(), {}).source is Source.KERNEL


NOT_STATIC = [{"TORCHELASTIC_USE_AGENT_STORE": "False"}, {"TORCHELASTIC_RUN_ID": str(uuid.uuid4())}]


@pytest.mark.parametrize("variables", NOT_STATIC, ids=["no shared store", "standalone"])
@pytest.mark.parametrize("nodes", [1, 2])
def test_agents_that_do_not_meet_statically_are_told_by_variables(variables, nodes):
    """A job that must be protected does not start under them, whatever its name and its own secret are."""
    variables |= {"DISTMAN_JOB_ID": "mine", "DISTMAN_SECRET": SECRET}
    found = agreed(protections("torchrun", nodes=nodes, **variables))
    assert (found.warnings, found.protected_by) == ((secret.OPEN_AGENTS,), None)
    with pytest.raises(RendezvousError, match="must not be 'required' in a job with open agents"):
        protections("torchrun", **variables | {"DISTMAN_SECRET": "required"})


@pytest.mark.parametrize("launcher", MPI)
@pytest.mark.parametrize("is_installed", [True, False], ids=["mpi4py", "without mpi4py"])
def test_mpi_on_several_hosts_tells_it_with_the_address(launcher, is_installed, monkeypatch):
    monkeypatch.setattr(mpi, "is_installed", lambda: is_installed)
    found = agreed(protections(launcher, nodes=2))
    assert found == Protection(Source.MPI)
    assert len({found.draw("job")[0] for _ in range(10)}) == 10
    assert found.draw("job")[1] == b""


@pytest.mark.parametrize("launcher", LAUNCHED)
def test_without_a_source_there_is_one_warning(launcher):
    found = agreed(protections(launcher, nodes=2, MASTER_ADDR="n1"))
    assert (found.source, found.key) == (Source.NONE, None)
    (warning,) = found.warnings
    assert warning.startswith(
        "Nothing keeps other users out of this job: it may run on several hosts, which share no secret. "
    )
    assert 'write export DISTMAN_SECRET="$(' in warning
    assert found.protected_by is None


@pytest.mark.parametrize("launcher", LAUNCHED)
@pytest.mark.parametrize("nodes", [1, 2])
def test_a_secret_of_the_users_stands_above_all(launcher, nodes):
    found = agreed(protections(launcher, nodes=nodes, DISTMAN_SECRET=SECRET, MASTER_ADDR="n1"))
    assert found == Protection(Source.VARIABLE, SECRET.encode(), agents=agents_under(launcher))
    assert found.warnings == ()
    assert found.draw("job") == (SECRET.encode(), b"")
    assert found.read("job", b"") == SECRET.encode()


def file_of(folder, text=SECRET + "\n", mode=0o600):
    file = folder / "secret"
    file.write_text(text)
    file.chmod(mode)
    return file


def from_file(path):
    return find_protection(LaunchEnvironment.lone(), {"DISTMAN_SECRET_FILE": str(path)})


@pytest.mark.parametrize("mode", [0o600, 0o400])
def test_a_file_holds_the_same_secret(tmp_path, mode):
    assert from_file(file_of(tmp_path, mode=mode)) == Protection(Source.FILE, SECRET.encode())


def test_the_variable_stands_above_the_file(tmp_path):
    both = {"DISTMAN_SECRET": SECRET, "DISTMAN_SECRET_FILE": str(tmp_path / "missing")}
    assert find_protection(LaunchEnvironment.lone(), both).source is Source.VARIABLE
    both = {"DISTMAN_SECRET": "required", "DISTMAN_SECRET_FILE": str(file_of(tmp_path))}
    assert find_protection(LaunchEnvironment.lone(), both).source is Source.FILE


@pytest.mark.parametrize("text", ["", " \n", "x", "x" * 31, " " * 40, "x" * 31 + "\n"])
def test_a_short_secret_is_refused_and_not_shown(tmp_path, text):
    condition = f"must hold a secret of at least 32 characters, got {len(text.strip())}. Draw one in the job script: "
    with pytest.raises(LaunchEnvironmentError) as caught:
        find_protection(LaunchEnvironment.lone(), {"DISTMAN_SECRET": text})
    assert str(caught.value).startswith(f"DISTMAN_SECRET {condition}")
    file = file_of(tmp_path, text)
    with pytest.raises(LaunchEnvironmentError) as caught:
        from_file(file)
    assert str(caught.value).startswith(f"DISTMAN_SECRET_FILE={file} {condition}")


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o602, 0o620, 0o610, 0o777])
def test_a_file_that_others_can_use_is_refused(tmp_path, mode):
    file = file_of(tmp_path, mode=mode)
    with pytest.raises(LaunchEnvironmentError, match=f"DISTMAN_SECRET_FILE={file} must have mode 0600, got {mode:04o}"):
        from_file(file)


def test_a_file_of_another_user_is_refused(tmp_path):
    if os.geteuid() != 0:
        pytest.skip("to give a file away needs root")
    file = file_of(tmp_path)
    os.chown(file, 65534, 65534)
    with pytest.raises(LaunchEnvironmentError, match="must belong to this user, uid 0, got one of uid 65534"):
        from_file(file)


@pytest.mark.parametrize("kind", ["link", "missing", "folder", "pipe", "large"])
def test_what_is_no_such_file_is_refused_at_once(tmp_path, kind):
    file, path = file_of(tmp_path), tmp_path / "other"
    if kind == "link":
        path.symlink_to(file)
    elif kind == "folder":
        path.mkdir(mode=0o700)
    elif kind == "pipe":
        os.mkfifo(path, mode=0o600)
    elif kind == "large":
        path.touch(mode=0o600)
        path.write_text(SECRET * 1000)
    reasons = {
        "link": "be a file that this user can read, got a symbolic link.",
        "missing": "be a file that this user can read, got No such file or directory.",
        "folder": "be a regular file, got something else.",
        "pipe": "be a regular file, got something else.",
        "large": "have at most 4096 bytes, got 32000.",
    }
    with pytest.raises(LaunchEnvironmentError) as caught:
        from_file(path)
    assert str(caught.value).startswith(f"DISTMAN_SECRET_FILE={path} must {reasons[kind]} Make it anew")


def test_a_secret_in_the_place_of_a_path_is_not_shown():
    with pytest.raises(LaunchEnvironmentError, match="a text of 32 characters that does not begin with /") as caught:
        from_file(SECRET)
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize("word", ["required", "REQUIRED", " required\n"])
def test_required_refuses_a_job_that_nothing_protects(word):
    assert agreed(protections("openmpi", DISTMAN_SECRET=word)).source is Source.KERNEL
    assert agreed(protections("openmpi", nodes=2, DISTMAN_SECRET=word)).source is Source.MPI
    with pytest.raises(RendezvousError, match=r"^DISTMAN_SECRET must be a secret in this job, got 'required' from the"):
        protections("torchrun", nodes=2, DISTMAN_SECRET=word)


def test_a_user_whom_the_kernel_cannot_name_needs_a_secret_where_there_are_others(tmp_path, monkeypatch):
    file = tmp_path / "overflowuid"
    file.write_text(f"{os.geteuid()}\n")
    monkeypatch.setattr(transport, "_OVERFLOW_UID", str(file))
    assert find_protection(LaunchEnvironment.lone(), {}).source is Source.KERNEL
    with pytest.raises(RendezvousError, match=f"must have a secret, .*, got uid {os.geteuid()}, .* write export DIST"):
        protections("torchrun")
    for found in protections("torchrun", DISTMAN_SECRET=SECRET):
        assert (found.source, found.asks_kernel) == (Source.VARIABLE, False)
    assert agreed(protections("torchrun", nodes=2)).source is Source.NONE


def test_nothing_shows_a_secret(tmp_path):
    text = secrets.token_hex(32)
    found = [
        find_protection(LaunchEnvironment.lone(), {"DISTMAN_SECRET": text}),
        from_file(file_of(tmp_path, text)),
    ]
    shown = [f"{one} {one!r} {one.source.value}" for one in found]
    assert all(text not in line and "key" not in line for line in shown)


@pytest.fixture(scope="module")
def munged():
    require_programs("munged", "setpriv")
    with munge_daemon() as daemon:
        yield daemon


@pytest.fixture
def slurm_conf(munged, tmp_path):
    return str(configuration(tmp_path, munged.socket))


def test_under_slurm_munge_shows_it_to_ranks_on_all_hosts(slurm_conf):
    found = agreed(protections("slurm", nodes=2, SLURM_CONF=slurm_conf))
    assert (found.source, found.key, found.warnings) == (Source.MUNGE, None, ())
    key, credential = found.draw("slurm-7.0")
    assert len(key) == 32
    assert key not in credential
    assert found.read("slurm-7.0", credential) == key
    assert found.draw("slurm-7.0")[0] != key


def test_munge_is_not_asked_elsewhere(slurm_conf):
    assert agreed(protections("slurm", SLURM_CONF=slurm_conf)).source is Source.KERNEL
    assert agreed(protections("slurm", nodes=2, SLURM_CONF=slurm_conf, DISTMAN_SECRET=SECRET)).key == SECRET.encode()
    assert agreed(protections("torchrun", nodes=2, SLURM_CONF=slurm_conf)).source is Source.NONE


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"text for another service",
        b"distman door 1\0slurm-7.0\0" + b"k" * 31,
        b"distman door 1\0slurm-7.0\0" + b"k" * 33,
        b"distman door 1\0slurm-7.1\0" + b"k" * 32,
        b"distman door 2\0slurm-7.0\0" + b"k" * 32,
    ],
)
def test_a_credential_for_something_else_proves_nothing(munged, slurm_conf, payload):
    found = agreed(protections("slurm", nodes=2, SLURM_CONF=slurm_conf))
    with pytest.raises(CredentialError, match=r"must be made for job 'slurm-7\.0', got one for something else"):
        found.read("slurm-7.0", munge.seal(payload, munged.socket))


def test_nobody_is_talked_out_of_his_secret(slurm_conf):
    by_munge = agreed(protections("slurm", nodes=2, SLURM_CONF=slurm_conf))
    credential = by_munge.draw("job")[1]
    with pytest.raises(CredentialError, match="got one that sends no credential of munge"):
        by_munge.read("job", b"")
    for other in (Protection(Source.VARIABLE, SECRET.encode()), Protection(Source.KERNEL), Protection(Source.NONE)):
        with pytest.raises(CredentialError, match="got one that sends one of munge"):
            other.read("job", credential)


def test_who_must_be_protected_adopts_no_group_of_other_code():
    check_adoption({})
    check_adoption({"DISTMAN_SECRET": SECRET})
    with pytest.raises(RendezvousError, match="must be made by"):
        check_adoption({"DISTMAN_SECRET": " Required"})
