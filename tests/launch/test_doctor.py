"""What is wrong with two hosts, ``distman check`` finds, and names the right ones: twenty faults, each for real."""

import re
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from .conftest import require_namespaces
from .hosts import NamespaceHosts
from .preloaded import PYTHON, server_variables

LIMIT = 100
PACKAGE = Path(__file__).parents[2] / "distman"
# Under /sys a mount namespace shows the interfaces of the network in which that was mounted.
ON_A_HOST = ["unshare", "--mount", "sh", "-c", 'mount -t sysfs sysfs /sys; exec "$@"', "sh"]


@dataclass
class Fault:
    """What is wrong, and what must be told; ranks 0 and 1 are on n1, and 2 and 3 on n2."""

    told: str
    before: str = ""  # a script for n2
    ranks: Sequence[int] = (2, 3)  # to which the rest applies
    env: Mapping[str, str | None] = field(default_factory=dict)
    prefix: str = ""  # in front of the interpreter
    missing: Sequence[int] = ()  # ranks that do not start
    options: Sequence[str] = ("--timeout=30",)
    prepare: Callable[[Path], Mapping[str, str]] = lambda _: {}  # more variables, once there is a folder


def other_version(folder):
    """A copy of the package that says another version."""
    copy = folder / "other" / "distman"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    version = copy / "_version.py"
    version.write_text(version.read_text().replace('"0.', '"7.'))
    return {"PYTHONPATH": str(copy.parent)}


FAULTS = {
    "little shared memory": Fault(
        r"WRONG: n2 has less than 64 MiB free in /dev/shm\.", "mount -t tmpfs -o size=8M tmpfs /dev/shm"
    ),
    "a folder that cannot be written": Fault(
        r"WRONG: n2 cannot write to the current folder \(Read-only file system\)\.",
        "mount --bind {folder} {folder}; mount -o remount,bind,ro {folder}",
    ),
    "few open files": Fault(
        r"on n2: The limit of open files is 100, but rank 2 of 4 needs about 108", prefix="prlimit --nofile=100"
    ),
    "ranks bound to one core": Fault(r"ranks 2-3 on n2 take turns on core 0 of \d+\. Bind each", prefix="taskset -c 0"),
    "threads for every core": Fault(
        r"on n1, n2: OMP_NUM_THREADS is not set", ranks=range(4), env={"OMP_NUM_THREADS": None}
    ),
    "a variable that is misspelt": Fault(r"on n2: DISTMAN_TIMEUOT has no effect", env={"DISTMAN_TIMEUOT": "9"}),
    "small packets": Fault(
        r"the largest packet \(MTU\) differs: 1500 on n1; 1400 on n2\.", "ip link set eth0 mtu 1400"
    ),
    "the address of another host": Fault(
        r"the main address 'n2' \(from MASTER_ADDR\) is 10\.77\.0\.12, which is not this host \(n1\)",
        ranks=range(4),
        env={"MASTER_ADDR": "n2"},
        options=("--timeout=6",),
    ),
    "an interface that is not there": Fault(
        r"GLOO_SOCKET_IFNAME='ib7' names 'ib7', which is not a network interface of this host",
        env={"GLOO_SOCKET_IFNAME": "ib7"},
        options=("--timeout=6",),
    ),
    "a GPU twice": Fault(r"on n2: CUDA_VISIBLE_DEVICES='0,0' names a GPU twice", env={"CUDA_VISIBLE_DEVICES": "0,0"}),
    "a link of little bandwidth": Fault(
        r"rank \d \(n1\) to rank \d \(n2\) is slow: \d+ of 10,000 Mbit/s for 1 MiB",
        "tc qdisc add dev eth0 root tbf rate 200mbit burst 64kb latency 100ms",
    ),
    "a folder of one host": Fault(
        r"WRONG: --folder must be one that all ranks see, got /dev/shm, .* not that of rank 0 on n2 \(ranks 2-3\)",
        options=("--timeout=30", "--folder=/dev/shm"),
    ),
    "another version of distman": Fault(r"n2.*Install one version of distman on all hosts\.", prepare=other_version),
    "a name that nobody knows": Fault(
        r"This host cannot resolve the main address 'n9'",
        env={"MASTER_ADDR": "n9"},
        ranks=range(4),
        options=("--timeout=4",),
    ),
    "a name that one host does not know": Fault(
        r"This host cannot resolve the main address 'nowhere'", env={"MASTER_ADDR": "nowhere"}, options=("--timeout=4",)
    ),
    "a wall between the hosts": Fault(
        r"This host cannot reach the main address 'n1' .* a firewall or another network is in the way",
        "ip route add blackhole 10.77.0.11/32",
        options=("--timeout=6",),
    ),
    "a rank that does not start": Fault(
        r"3 of 4 ranks joined .*missing: rank 3", missing=[3], options=("--timeout=6",)
    ),
    "a rank twice": Fault(r"rank 2 must be one process, got 2", ranks=[3], env={"RANK": "2"}, options=("--timeout=6",)),
    "world sizes that differ": Fault(
        r"world_size.*Start all ranks with one command", ranks=[3], env={"WORLD_SIZE": "5"}, options=("--timeout=6",)
    ),
    "the loopback for another host": Fault(
        r"the main address 'localhost' \(from MASTER_ADDR\) must not be a loopback address",
        ranks=range(4),
        env={"MASTER_ADDR": "localhost"},
        options=("--timeout=6",),
    ),
}


OF_A_HOST = (
    "little shared memory",
    "a folder that cannot be written",
    "small packets",
    "a link of little bandwidth",
    "a folder of one host",
    "threads for every core",
)
OF_PROCESSES = (
    "few open files",
    "ranks bound to one core",
    "a variable that is misspelt",
    "a GPU twice",
)
END_THE_START = [(name,) for name in FAULTS if name not in (*OF_A_HOST, *OF_PROCESSES)]


def check(hosts, faults, folder, port):
    """Run ``distman check`` on four ranks of two hosts that have all these faults; return what all ranks say."""
    common = {
        "WORLD_SIZE": "4",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "n1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "1000",
        "DISTMAN_SECRET": "0123456789abcdef" * 4,
        **server_variables(),
    }
    prepared = [fault.prepare(folder) for fault in faults]
    options = dict.fromkeys(option for fault in faults for option in fault.options)
    for fault in faults:
        if fault.before:
            assert hosts.run(["sh", "-ec", fault.before.format(folder=folder)], host="n2").returncode == 0
    with ExitStack() as stack:
        running = []
        for rank in set(range(4)) - {missing for fault in faults for missing in fault.missing}:
            env = {**common, "RANK": str(rank), "LOCAL_RANK": str(rank % 2)}
            command = [*ON_A_HOST]
            for fault, more in zip(faults, prepared, strict=True):
                if rank in fault.ranks:
                    env |= {**fault.env, **more}
                    command += fault.prefix.split()
            host = "n1" if rank < 2 else "n2"
            command += [PYTHON, "-m", "distman", "check", *options]
            running.append(stack.enter_context(hosts.start(command, host=host, env=env, cwd=folder)))
        finished = [one.wait(timeout=LIMIT) for one in running]
    said = "\n".join(text for one in finished for text in (one.stdout, one.stderr))
    sys.stdout.write(said)
    return said


@pytest.fixture
def hosts():
    require_namespaces()
    with NamespaceHosts() as hosts:
        yield hosts


def test_nothing_is_told_where_nothing_is_wrong(hosts, tmp_path, free_port):
    said = check(hosts, [Fault("")], tmp_path, free_port)
    assert re.search(r"^gloo uses eth0 \(10 Gbit/s, MTU 1500\) on n1, n2$", said, re.MULTILINE), said
    told = [line for line in said.splitlines() if line.startswith(("warning", "WRONG"))]
    assert [line for line in told if "slow" not in line] == [], "what is measured may be, on a busy machine"


@pytest.mark.parametrize("names", [OF_A_HOST, OF_PROCESSES, *END_THE_START], ids=" and ".join)
def test_faults_are_told(hosts, names, tmp_path, free_port):
    faults = [FAULTS[name] for name in names]
    said = " ".join(check(hosts, faults, tmp_path, free_port).split())
    assert [fault.told for fault in faults if not re.search(fault.told, said)] == [], said
