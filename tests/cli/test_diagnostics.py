"""What will go wrong later: each warning where it is due, and none where a job is well."""

import dataclasses
import re

import pytest

from distman._cli.diagnostics import Host, diagnose
from distman.environments import LAUNCHERS, detect
from distman.environments._detect import VARIABLES
from distman.testing import fake_environment

from ..environments.recordings import RECORDINGS, recorded
from ..test_docs import rows

ADDRESSES = {"n1": "10.0.0.1", "n2": "10.0.0.2", "localhost": "127.0.0.1", "lonely": "127.0.1.1"}
UNTHREADED = {"OMP_NUM_THREADS": "1"}


def host(number=1, **facts):
    """Return host n1, n2, ..., on which all is well; a literal address is itself, and "slow" never answers."""

    def resolve(name):
        if name == "slow":
            return None
        return [ADDRESSES[name]] if name in ADDRESSES else [name] if name[0].isdigit() else []

    well = Host(
        name=f"n{number}",
        interfaces=["lo", "eth0", "ib0"],
        num_cores=8,
        num_usable_cores=8,
        num_gpus=4,
        first_open_port=1024,
        max_open_files=1024,
        resolve=resolve,
        is_own=lambda address: address in ("127.0.0.1", "127.0.1.1", f"10.0.0.{number}"),
        is_reachable=lambda _address, _port: True,
    )
    return dataclasses.replace(well, **facts)


def warnings(environ, where=None):
    environ = UNTHREADED | environ
    return list(diagnose(environ, detect(environ).environment, where or host()))


def on(launcher, rank=0, nodes=2, tasks=4, **variables):
    """Return the environment of a rank; two nodes of two ranks, unless told."""
    return fake_environment(launcher, nodes=nodes, tasks=tasks)[rank] | variables


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_job_that_is_well_has_no_warning(launcher):
    nodes, tasks = (1, 1) if launcher == "single" else (2, 4)
    for rank, environ in enumerate(fake_environment(launcher, nodes=nodes, tasks=tasks)):
        assert warnings(environ, host(1 + rank // 2)) == []


@pytest.mark.parametrize("name", RECORDINGS)
def test_what_real_launchers_set_gives_no_warning(name):
    here = host(resolve=lambda _name: ["10.0.0.1"])
    assert [warnings(environ, here) for environ in recorded(name)] == [[]] * len(RECORDINGS[name])


def one(environ, where=None):
    (warning,) = warnings(environ, where)
    assert re.search(r"[.:] [A-Zdt].*[.?]$", warning)
    return warning


@pytest.mark.parametrize("place", [0, 3])
def test_every_task_of_srun_that_starts_a_job_of_its_own(place):
    environ = on("slurm", place) | on("torchrun", 0, nodes=1, tasks=1, MASTER_ADDR="localhost")
    assert one(environ).startswith(
        f"slurm says rank {place} of 4, but torchrun says rank 0 of 1 and is believed: if one launcher started the "
    )


def test_one_launcher_on_each_node_is_no_contradiction():
    environ = on("slurm", 1, nodes=2, tasks=2) | on("torchrun", 3)
    assert warnings(environ, host(2)) == []
    environ = on("slurm", 1, nodes=2, tasks=2) | on("openmpi", 3)
    assert warnings(environ, host(2)) == []


def test_the_daemons_of_mpirun_are_no_job():
    daemons = on("slurm", 1, nodes=3, tasks=3, SLURM_JOB_NUM_NODES="4")
    assert warnings(daemons | on("openmpi", 4, nodes=4, tasks=8), host(3)) == []


def test_one_process_needs_no_address_and_no_port():
    assert warnings({"MASTER_ADDR": "n7", "MASTER_PORT": "80"}) == []


def test_a_launcher_that_is_asked_for_is_no_contradiction():
    environ = on("slurm", 1) | on("openmpi", 0, nodes=1, tasks=1) | {"DISTMAN_INITIALIZATION_METHOD": "openmpi"}
    assert warnings(environ) == []


def test_another_launcher_with_broken_variables_is_passed_over():
    assert warnings(on("torchrun", SLURM_PROCID="x", SLURM_STEP_ID="0")) == []
    assert warnings(on("torchrun", nodes=1, SLURM_STEP_ID="abc", SLURM_JOB_NUM_NODES="x")) == []


def test_a_batch_script_that_uses_one_node_of_two():
    environ = on("torchrun", nodes=1, tasks=4, SLURM_JOB_ID="7", SLURM_JOB_NUM_NODES="2")
    assert one(environ).startswith("The Slurm allocation has 2 nodes, but torchrun runs all 4 ranks on one: no step ")
    assert warnings(environ | {"SLURM_JOB_NUM_NODES": "1"}) == []


@pytest.mark.parametrize(
    ("devices", "launcher", "sentence"),
    [
        ("", "slurm", "hides all GPUs"),
        ("-1", "slurm", "hides all GPUs"),
        ("NoDevFiles", "slurm", "hides all GPUs"),
        ("0,0", "slurm", "names a GPU twice"),
        ("0", "torchrun", "shows 1 GPU to 4 ranks on this host"),
        ("0,1,2", "slurm", "shows 3 GPUs to 4 ranks on this host"),
        ("0,1,-1,2,3", "slurm", "shows 2 GPUs to 4 ranks on this host"),
        ("0", "slurm", None),
        ("0,1,2,3", "slurm", None),
        ("GPU-a,GPU-b,GPU-c,GPU-d,GPU-e", "torchrun", None),
    ],
)
def test_visible_gpus_are_compared_with_the_ranks_of_the_host(devices, launcher, sentence):
    environ = on(launcher, nodes=1, tasks=4, CUDA_VISIBLE_DEVICES=devices)
    if sentence is None:
        assert warnings(environ) == []
    else:
        assert sentence in one(environ)
        shared = warnings(environ | {"DISTMAN_ALLOW_SHARED_GPU": "1"})
        assert bool(shared) is ("shows" not in sentence)
        environ["HIP_VISIBLE_DEVICES"] = environ.pop("CUDA_VISIBLE_DEVICES")
        assert one(environ).startswith(f"HIP_VISIBLE_DEVICES={devices!r} {sentence}")


def test_gpus_of_one_task_alone_are_not_compared_with_the_other_tasks():
    bound = {"CUDA_VISIBLE_DEVICES": "2,3", "SLURMD_TRES_BIND": "gpu:per_task:2"}
    assert warnings(on("slurm", nodes=1, tasks=4, **bound)) == []
    assert "2 GPUs to 4 ranks" in one(on("torchrun", nodes=1, tasks=4, **bound))


def test_no_gpu_is_hidden_where_there_is_none():
    assert warnings(on("slurm", CUDA_VISIBLE_DEVICES=""), host(num_gpus=0)) == []


@pytest.mark.parametrize(
    ("address", "rank", "sentence"),
    [
        ("slow", 0, "Resolving the main address 'slow' (from MASTER_ADDR) took too long"),
        ("n7", 0, "This host cannot resolve the main address 'n7' (from MASTER_ADDR), so"),
        ("localhost", 0, "In a job on several nodes the main address 'localhost' (from MASTER_ADDR) must not be a"),
        ("127.0.0.1", 3, "In a job on several nodes the main address '127.0.0.1' (from MASTER_ADDR) must not be a"),
        ("lonely", 3, "In a job on several nodes the main address 'lonely' (from MASTER_ADDR) must not be a loopback"),
        ("n2", 0, "This is rank 0, which the others look for at the main address, but the main address 'n2'"),
        ("n1", 0, None),
        ("10.0.0.1", 3, None),
    ],
)
@pytest.mark.parametrize("launcher", ["slurm", "torchrun", "flux"])
def test_the_main_address_is_rank_zeros_host(address, rank, sentence, launcher):
    found = warnings(on(launcher, rank, MASTER_ADDR=address), host(1 + rank // 2))
    assert [warning[: len(sentence or "")] for warning in found] == ([sentence] if sentence else [])


@pytest.mark.parametrize("address", ["localhost", "lonely"])
def test_one_node_may_meet_at_home(address):
    assert warnings(on("torchrun", nodes=1, MASTER_ADDR=address)) == []


def test_the_node_list_of_slurm_is_an_address_too():
    nowhere = host(2, resolve=lambda name: [] if name == "n1" else ["10.0.0.2"])
    assert one(on("slurm", 3), nowhere).startswith("This host cannot resolve the main address 'n1' (from slurm)")


def test_an_address_that_does_not_answer_is_told_by_the_ranks_that_look_for_it():
    asked = []
    where = host(2, is_reachable=lambda *place: bool(asked.append(place)))
    environ = on("slurm", 3, MASTER_ADDR="n1", MASTER_PORT="23456")
    assert one(environ, where).startswith(
        "This host cannot reach the main address 'n1' (from MASTER_ADDR), 10.0.0.1, on port 23456: a firewall"
    )
    assert asked == [("10.0.0.1", 23456)]
    assert warnings(on("slurm", 0, MASTER_ADDR="n1", MASTER_PORT="23456"), host(1, is_reachable=None)) == []


@pytest.mark.parametrize(
    ("cores", "usable", "ranks", "variables", "threads"),
    [
        (8, 8, 4, {}, 2),
        (2, 2, 4, {}, 1),
        (8, 2, 4, {}, None),
        (8, 8, 1, {}, None),
        (1, 1, 4, {}, None),
        (8, 8, 4, UNTHREADED, None),
    ],
)
def test_ranks_that_would_all_use_all_cores(cores, usable, ranks, variables, threads):
    environ = on("slurm", nodes=1, tasks=ranks) | variables
    here = host(num_cores=cores, num_usable_cores=usable)
    found = diagnose(environ, detect(environ).environment, here)
    assert [f"Set OMP_NUM_THREADS={threads}," in warning for warning in found] == ([True] if threads else [])


@pytest.mark.parametrize(
    ("name", "value", "is_there"),
    [
        ("NCCL_SOCKET_IFNAME", "eth", True),
        ("NCCL_SOCKET_IFNAME", "=eth", False),
        ("NCCL_SOCKET_IFNAME", "=eth1,ib0", True),
        ("NCCL_SOCKET_IFNAME", "^docker,lo", True),
        ("NCCL_SOCKET_IFNAME", "^eth,ib,lo", False),
        ("NCCL_SOCKET_IFNAME", "ens", False),
        ("GLOO_SOCKET_IFNAME", "eth0,ib0", True),
        ("GLOO_SOCKET_IFNAME", "eth", False),
        ("GLOO_SOCKET_IFNAME", "eth0,ib1", False),
    ],
)
def test_interfaces_are_compared_with_those_there_are(name, value, is_there):
    environ = {name: value}
    if is_there:
        assert warnings(environ) == []
    else:
        assert one(environ).startswith(f"{name}={value!r} names ")
        assert "It has lo, eth0, ib0: " in one(environ)


@pytest.mark.parametrize(
    ("port", "sentence"),
    [
        ("http", "MASTER_PORT must be a number between 1 and 65535, got 'http'. "),
        ("70000", "MASTER_PORT must be a number between 1 and 65535, got '70000'. "),
        ("80", "MASTER_PORT=80 is a port that only the administrator may open: rank 0 would fail. "),
        ("1024", None),
    ],
)
def test_a_port_is_one_that_a_user_may_open(port, sentence):
    environ = on("slurm", MASTER_PORT=port)
    assert warnings(environ) == [] if sentence is None else one(environ).startswith(sentence)


def test_the_administrator_may_open_any_port():
    assert warnings(on("slurm", MASTER_PORT="80"), host(first_open_port=1)) == []


def test_the_limit_of_open_files_goes_by_the_size_of_the_job():
    environ, where, needed = on("slurm", 299, nodes=2, tasks=300), host(2), 700
    assert warnings(environ, dataclasses.replace(where, max_open_files=needed)) == []
    assert warnings(environ, dataclasses.replace(where, max_open_files=None)) == []
    assert one(environ, dataclasses.replace(where, max_open_files=needed - 1)).endswith(
        f"Run ulimit -n {needed} before the program, in the job script."
    )


def test_a_misspelt_variable_has_no_effect():
    prefix = "DISTMAN"
    found = warnings({f"{prefix}_TIMEUOT": "3", f"{prefix}_XYZ": "3"})
    assert (
        found[0]
        == f"{prefix}_TIMEUOT has no effect, because distman reads no such variable: did you mean {prefix}_TIMEOUT?"
    )
    assert f"distman reads {', '.join(VARIABLES)}." in found[1]


def test_the_variables_are_those_of_the_documentation():
    documented = {name for row in rows("docs/variables.md") for name in re.findall(r"`(\w+)`", row[0])}
    assert {*VARIABLES} == {name for name in documented if name.startswith("DISTMAN_")}
