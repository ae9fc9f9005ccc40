"""A start that goes wrong says so at once: no test here comes near a limit of the package."""

import contextlib
import os
import random
import re
import signal
import subprocess
from contextlib import ExitStack
from pathlib import Path

import pytest

from .conftest import require_namespaces
from .hosts import NamespaceHosts
from .preloaded import PYTHON
from .processes import start

LIMIT = 60
WITHOUT_MPI4PY = Path(__file__).parent / "without_mpi4py"
INITIALIZE = "from distman import DistributedManager as M; m = M.initialize(rendezvous_timeout=600)"
SUM = f"{INITIALIZE}; import torch, torch.distributed as d; t = torch.ones(1); d.all_reduce(t); print('sum', t.item())"
STAY = f"{INITIALIZE}; print('up', flush=True); import time; time.sleep(600)"
MEET = f"{INITIALIZE}; m.barrier('the end', timeout=600)"


@pytest.fixture(scope="module")
def debian_hosts():
    """Two hosts on which the host's own name is 127.0.1.1, as in the /etc/hosts that Debian writes."""
    require_namespaces()
    with NamespaceHosts(2, own_address="127.0.1.1") as hosts:
        yield hosts


def bare(rank, world_size, port, **more):
    variables = {"RANK": rank, "WORLD_SIZE": world_size, "MASTER_ADDR": "localhost", "MASTER_PORT": port, **more}
    return {name: str(value) for name, value in variables.items()}


def start_on(stack, hosts, host, code, env):
    command = [*hosts.enter(host), PYTHON, "-c", code]
    return stack.enter_context(start(command, env={**hosts.environment, **env}))


@pytest.mark.parametrize("first", ["n1", "n2"])
def test_hosts_whose_own_name_is_the_loopback_meet_and_compute(debian_hosts, first):
    places = [first, first, "n1", "n2"]
    with ExitStack() as stack:
        ranks = [
            start_on(
                stack,
                debian_hosts,
                host,
                SUM,
                bare(rank, len(places), 29500, MASTER_ADDR=first, DISTMAN_SECRET="s" * 32),
            )
            for rank, host in enumerate(places)
        ]
        finished = [rank.wait(timeout=LIMIT) for rank in ranks]
    assert [(rank.returncode, rank.stdout, rank.stderr) for rank in finished] == [(0, "sum 4.0\n", "")] * len(places)


ADOPT = """\
import os, sys, time, torch, torch.distributed as dist
from distman import DistributedManager
dist.init_process_group("gloo", init_method=sys.argv[1], rank=int(os.environ["RANK"]), world_size=3)
time.sleep(float(sys.argv[2]))
for _ in range(2):
    manager = DistributedManager.initialize()
    manager.barrier()
    hosts = len({peer.host for peer in manager.roll_call})
    if sys.argv[3] == "dies" and manager.rank == 1:
        os.kill(os.getpid(), 9)
    if sys.argv[3] == "dies":
        time.sleep(60)
    DistributedManager.cleanup()
print(hosts, dist.is_initialized())
"""
"""The ranks come to initialize() one after another, in any order."""


@pytest.mark.parametrize("ends", ["well", "dies"])
@pytest.mark.parametrize("kind", ["tcp", "file"])
def test_a_group_of_other_code_on_two_hosts(namespace_hosts, tmp_path, kind, ends):
    where = f"file://{tmp_path}/store" if kind == "file" else "env://"
    delays = random.sample([0.0, 0.3, 0.6], 3)
    with ExitStack() as stack:
        ranks = []
        for rank, host in enumerate(("n1", "n2", "n2")):
            command = [*namespace_hosts.enter(host), PYTHON, "-c", ADOPT, where, str(delays[rank]), ends]
            env = {**namespace_hosts.environment, **bare(rank, 3, 29533, MASTER_ADDR=namespace_hosts.addresses["n1"])}
            ranks.append(stack.enter_context(start(command, env=env)))
        finished = [rank.wait(timeout=LIMIT) for rank in ranks]
    if ends == "well":
        assert [(rank.returncode, rank.stdout) for rank in finished] == [(0, "2 True\n")] * 3
    else:
        assert [rank.returncode for rank in finished] == [76, -signal.SIGKILL, 76]
        assert all(re.search(r"JobFailed: rank 1 \(n2, pid \d+\) died", finished[rank].stderr) for rank in (0, 2))


FIRST_FAILS = """\
import os, sys, time, torch.distributed as dist
from distman import DistributedManager
from distman._job import start
from distman._job.meeting import announced, join

when, how = sys.argv[1:]

def fail(*_args, **_kwargs):
    if when == "is awaited":
        time.sleep(2)  # in which the others enter, and wait there
    os.kill(os.getpid(), 9)

rank = int(os.environ["RANK"])
if how == "adopted":
    dist.init_process_group("gloo", init_method="env://", rank=rank, world_size=3)
    dist.barrier()  # else the others may still connect
if rank:
    time.sleep(0.5)
elif when == "is awaited":
    start.join_at = join.join_at = fail
else:
    announced.AtPorts.open = fail
DistributedManager.initialize(rendezvous_timeout=6 if when == "is opening" else 600)
"""
DIED = r"JobFailed: {who} died"


@pytest.mark.parametrize(
    ("when", "how", "said"),
    [
        ("is opening", "adopted", r"the store of the process group was lost: .* mostly rank 0"),
        ("is awaited", "adopted", DIED),
        ("is awaited", "bare", DIED),
    ],
)
def test_who_opens_the_store_fails_before_it_has_joined(free_port, when, how, said):
    with ExitStack() as stack:
        command = [PYTHON, "-c", FIRST_FAILS, when, how]
        ranks = [stack.enter_context(start(command, env=bare(rank, 3, free_port))) for rank in range(3)]
        finished = [rank.wait(timeout=LIMIT) for rank in ranks]
        said = said.replace("{who}", rf"rank 0 \(\S+, pid {ranks[0].pid}\)")
    for rank in (1, 2):
        assert re.search(said, finished[rank].stderr), finished[rank].stderr


OPENMPI_4 = {
    "OMPI_COMM_WORLD_RANK": "0",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
    "OMPI_MCA_orte_hnp_uri": "7.0;tcp://10.77.0.11:3000",
    "PYTHONPATH": str(WITHOUT_MPI4PY),
}


AS_NODE = [PYTHON, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", "--master-port=29511"]
NAMELESS = 'hostname nameless-$1; shift; exec "$@"'


@pytest.mark.parametrize("is_agents", [True, False], ids=["torchrun", "bare"])
def test_hosts_whose_names_nobody_knows_meet_at_the_address_that_the_launcher_has(namespace_hosts, tmp_path, is_agents):
    """They have no route to anywhere else, so no other address is found by the way out."""
    (tmp_path / "train.py").write_text(SUM)
    address = namespace_hosts.addresses["n1"]
    with ExitStack() as stack:
        nodes = []
        for node, host in enumerate(("n1", "n2")):
            agent = [*AS_NODE, f"--node-rank={node}", f"--master-addr={address}", "train.py"]
            program = agent if is_agents else [PYTHON, "train.py"]
            command = [*namespace_hosts.enter(host, cwd=tmp_path), "unshare", "--uts", "sh", "-c", NAMELESS, "sh"]
            variables = {} if is_agents else bare(node, 2, 29512, MASTER_ADDR=address)
            variables |= {"DISTMAN_SECRET": "s" * 32}
            nodes.append(stack.enter_context(start([*command, str(node), *program], env=variables, cwd=tmp_path)))
        finished = [node.wait(timeout=LIMIT) for node in nodes]
    assert [(node.returncode, node.stdout) for node in finished] == [(0, "sum 2.0\n")] * 2


@contextlib.contextmanager
def walls_between(hosts, port, *, is_silent):
    """Let nothing pass between two hosts but what belongs to one port: the rest is dropped, or refused."""
    nowhere = f"{hosts.addresses['n1'].rpartition('.')[0]}.250"
    with ExitStack() as stack:
        for host, other in (("n1", "n2"), ("n2", "n1")):
            address = hosts.addresses[other]
            dropped = f"route add {address} via {nowhere} dev eth0 onlink table 100"
            commands = [
                f"neigh add {nowhere} lladdr 02:00:00:00:00:01 dev eth0",
                dropped if is_silent else f"route add unreachable {address} table 100",
                f"rule add pref 10 ipproto tcp dport {port} lookup main",
                f"rule add pref 11 ipproto tcp sport {port} lookup main",
                f"rule add pref 12 to {address} ipproto tcp lookup 100",
            ]
            for command in commands:
                subprocess.run([*hosts.enter(host), "ip", *command.split()], check=True)
                undo = command.replace(" add ", " del ").split()
                stack.callback(subprocess.run, [*hosts.enter(host), "ip", *undo], check=True)
        yield


@pytest.mark.parametrize("is_silent", [True, False])
def test_a_firewall_that_lets_only_the_ranks_meet_is_told_of_and_ends_the_start(namespace_hosts, free_port, is_silent):
    code = "from distman import DistributedManager; DistributedManager.initialize(rendezvous_timeout=15)"
    with walls_between(namespace_hosts, free_port, is_silent=is_silent), ExitStack() as stack:
        ranks = [
            start_on(stack, namespace_hosts, f"n{1 + rank // 2}", code, bare(rank, 4, free_port, MASTER_ADDR="n1"))
            for rank in range(4)
        ]
        finished = [rank.wait(timeout=LIMIT) for rank in ranks]
    for rank, one in enumerate(finished):
        assert one.returncode in (1, 76)
        assert re.search(r"rank \d \(n\d, pid \d+\) cannot reach rank \d \(n\d, .*\) at port \d+ of n\d", one.stderr)
        assert "open all ports between the hosts of the job" in one.stderr
        assert ("the ranks have not connected after 10 s: rank" in one.stderr) is (is_silent and rank in (0, 2))


@pytest.mark.parametrize(("limit", "is_enough"), [(64, True), (20, True), (18, False)])
def test_few_open_files_are_enough_or_all_ranks_are_told(free_port, limit, is_enough):
    limited = f"import resource; resource.setrlimit(resource.RLIMIT_NOFILE, ({limit}, {limit}))"
    program = "from distman import DistributedManager; DistributedManager.initialize()"
    with ExitStack() as stack:
        ranks = [
            stack.enter_context(
                start([PYTHON, "-c", f"{limited}\n{program}" if rank == 0 else program], env=bare(rank, 5, free_port))
            )
            for rank in range(5)
        ]
        finished = [rank.wait(timeout=LIMIT) for rank in ranks]
    if is_enough:
        assert [(one.returncode, one.stderr) for one in finished] == [(0, "")] * 5
    else:
        assert [one.returncode for one in finished] == [1, *[76] * 4]
        assert all("open 20 files for 5 ranks, got 18, the hard limit on this host" in one.stderr for one in finished)


RESTARTED = """
import os, signal, socket, sys, time
from pathlib import Path
from urllib.parse import urlsplit
rank, count = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
dying, times, when = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
is_dying = rank == dying and count < times
if is_dying and when == "before":
    os.kill(os.getpid(), signal.SIGKILL)
from distman import DistributedManager
from distman._job.meeting.places import AtPorts
from distman.collectives import all_gather_objects

def open_and_die(point, *arguments, open_it=AtPorts.open):
    opened = open_it(point, *arguments)
    Path("opened.new").write_text(opened.url)
    Path("opened.new").rename("opened")
    time.sleep(3 if when == "while awaited" else 0)
    os.kill(os.getpid(), signal.SIGKILL)

def is_gone():
    try:
        socket.create_connection(("n1", urlsplit(Path("opened").read_text()).port)).close()
    except ConnectionRefusedError:
        return True

if is_dying:
    AtPorts.open = open_and_die
while when == "after opening" and rank != dying and not (Path("opened").exists() and is_gone()):
    time.sleep(0.05)
manager = DistributedManager.initialize(rendezvous_timeout=60)
print(sorted(all_gather_objects((manager.rank, count))), flush=True)
"""


@pytest.mark.parametrize(
    ("dying", "times", "when"),
    [(0, 1, "before"), (1, 2, "before"), (0, 1, "after opening"), (0, 1, "while awaited")],
)
def test_ranks_whose_agents_have_restarted_them_unlike_often_meet(namespace_hosts, tmp_path, dying, times, when):
    (tmp_path / "train.py").write_text(RESTARTED)
    options = ["--master-addr=n1", "--max-restarts=3", "--monitor-interval=0.2"]
    with ExitStack() as stack:
        nodes = []
        for node, host in enumerate(("n1", "n2")):
            agent = [*AS_NODE, *options, f"--node-rank={node}", "train.py", str(dying), str(times), when]
            running = namespace_hosts.start(agent, host=host, env={"DISTMAN_SECRET": "s" * 32}, cwd=tmp_path)
            nodes.append(stack.enter_context(running))
        finished = [node.wait(timeout=LIMIT) for node in nodes]
    counts = [times if rank == dying or when == "while awaited" else 0 for rank in range(2)]
    assert [(node.returncode, node.stdout) for node in finished] == [(0, f"{list(enumerate(counts))}\n")] * 2


@pytest.mark.parametrize(
    ("env", "source"),
    [
        (bare(0, 2, 29500, MASTER_ADDR="n1"), "address from MASTER_ADDR"),
        (OPENMPI_4, "address from the variables of openmpi, which are a guess without mpi4py"),
    ],
    ids=["bare", "Open MPI 4 without mpi4py"],
)
def test_rank_zero_on_another_host_than_its_address_says_so(debian_hosts, env, source):
    with ExitStack() as stack:
        finished = start_on(stack, debian_hosts, "n2", INITIALIZE, env).wait(timeout=LIMIT)
    assert finished.returncode == 1
    assert "rank 0 must run on the host at which the ranks meet, got" in finished.stderr
    assert f"10.77.0.11{')' if 'RANK' in env else ''}, which is not this host, n2 [{source}" in finished.stderr
    assert "Set MASTER_ADDR to n2 on all ranks" in finished.stderr


@pytest.mark.parametrize("seed", range(2))
def test_two_jobs_that_mix_are_ended(free_port, seed):
    """A rank of each of two jobs meet; what is left of them comes later, and cannot have both."""
    draw = random.Random(seed)  # noqa: S311 - no secret
    jobs = draw.sample("ab", 2)
    late = draw.randrange(2)

    with ExitStack() as stack:

        def start_rank(rank, job):
            return stack.enter_context(start([PYTHON, "-c", STAY, job], env=bare(rank, 2, free_port)))

        mixed = [start_rank(rank, jobs[rank]) for rank in range(2)]
        for rank in mixed:
            rank.wait_for_output("up")
        surplus = start_rank(late, jobs[1 - late])
        finished = [rank.wait(timeout=LIMIT) for rank in (*mixed, surplus)]
    for rank in finished:
        assert rank.returncode != 0
        assert f"rank {late} must be one process" in rank.stderr
        assert "give each its own MASTER_PORT or DISTMAN_JOB_ID" in rank.stderr


def test_jobs_of_one_rank_need_no_port_of_their_own(free_port):
    with ExitStack() as stack:
        jobs = [stack.enter_context(start([PYTHON, "-c", MEET], env=bare(0, 1, free_port))) for _ in range(3)]
        assert [(job.wait(timeout=LIMIT).returncode, job.stderr) for job in jobs] == [(0, "")] * 3


HELPER = """
import distman
raise ValueError("boom in a helper")
"""
STARTS_HELPER = f"""
import subprocess, sys
helper = [sys.executable, "helper.py"]
assert subprocess.run(helper).returncode == 1
{INITIALIZE}
assert subprocess.run(helper).returncode == 1
m.barrier("the end", timeout=600)
"""


@pytest.mark.parametrize("with_helper", [0, 1])
def test_a_process_that_a_rank_starts_may_fail_without_ending_the_job(free_port, tmp_path, with_helper):
    (tmp_path / "helper.py").write_text(HELPER)
    (tmp_path / "train.py").write_text(STARTS_HELPER)
    with ExitStack() as stack:
        ranks = [
            stack.enter_context(
                start([PYTHON, "train.py"], env=bare(rank, 2, free_port), cwd=tmp_path)
                if rank == with_helper
                else start([PYTHON, "-c", MEET], env=bare(rank, 2, free_port))
            )
            for rank in range(2)
        ]
        finished = [rank.wait(timeout=LIMIT) for rank in ranks]
    assert [rank.returncode for rank in finished] == [0, 0]
    assert finished[with_helper].stderr.count("ValueError: boom in a helper") == 2


WAITS = """
import os, signal, sys
from distman import DistributedManager
from distman._job.meeting import early_failure, membership

def interrupt(*_):
    os.write(1, b"heard\\n")
    signal.sigwait([signal.SIGUSR2])
    raise KeyboardInterrupt

signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])
signal.signal(signal.SIGINT, interrupt)
early_failure.timing.EARLY_FAILURE = 600.0  # who interrupts must not wait for it
join = membership._Membership.join_record

def join_and_say_so(self):
    join(self)
    print("joined", flush=True)

membership._Membership.join_record = join_and_say_so
times, last = int(sys.argv[1]), sys.argv[2]
for attempt in range(times):
    try:
        print("attempt", flush=True)
        DistributedManager.initialize(rendezvous_timeout=600)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
        if attempt + 1 == times and last == "raise":
            raise
"""


@pytest.mark.parametrize(
    ("present", "interrupted", "times", "last"),
    [
        ([0, 1], [0, 1], 1, "raise"),
        ([0, 1], [0, 1], 2, "end"),
        ([0, 1, 2], [0], 1, "raise"),
        ([0, 1, 2], [1], 1, "raise"),
        ([1, 2], [1, 2], 2, "end"),
    ],
    ids=["all", "all, twice", "rank 0", "rank 1", "before rank 0, twice"],
)
def test_ctrl_c_while_ranks_wait_for_each_other(free_port, present, interrupted, times, last):
    """One of four ranks is missing. Who is interrupted ends, and so do those that wait with it; nobody aborts."""
    with ExitStack() as stack:

        def start_rank(rank):
            command = [PYTHON, "-c", WAITS, str(times if rank in interrupted else 1), last]
            return stack.enter_context(start(command, env=bare(rank, 4, free_port)))

        ranks = {rank: start_rank(rank) for rank in present}
        for process in ranks.values():
            process.wait_for_output("joined" if 0 in present else "attempt")
        for time in range(1, times + 1):
            for rank in interrupted:
                ranks[rank].wait_for_output("joined" if rank == 0 else "attempt", times=time)
                os.kill(ranks[rank].pid, signal.SIGINT)
            for rank in interrupted:  # all of them, before one can tell another
                ranks[rank].wait_for_output("heard", times=time)
            for rank in interrupted:
                os.kill(ranks[rank].pid, signal.SIGUSR2)
            for rank in interrupted:
                ranks[rank].wait_for_output("interrupted", times=time)
        if 0 in present and 0 not in interrupted:
            ranks[3] = start_rank(3)  # rank 0 waits some seconds for it, to tell it too
        finished = {rank: process.wait(timeout=LIMIT) for rank, process in ranks.items()}
    for rank, process in finished.items():
        if rank in interrupted:
            assert process.returncode == (0 if last == "end" else -signal.SIGINT)
        else:
            assert process.returncode == 76
            assert f"JobFailed: rank {interrupted[0]} " in process.stderr
            assert "raised KeyboardInterrupt" in process.stderr
