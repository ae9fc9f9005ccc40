"""A private Slurm cluster of virtual nodes: no cgroups, database or systemd, no file outside its folder.

Every node is one of the `NamespaceHosts`, with a ``slurmd`` on it; ``slurmctld``, ``munged`` and the commands
of the tests run on ``ctl``. The GPUs are ``/dev/null`` by other names.
"""

import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import pytest

from .hosts import NamespaceHosts
from .processes import Finished, Running, launch_environment, poll, start

PROGRAMS = ("slurmctld", "slurmd", "srun", "munged")

CONFIGURATION = """\
ClusterName=tests
SlurmctldHost=ctl({addresses[ctl]})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
# A job that is queued again begins when the credential of its first run has expired.
AuthInfo=socket={directory}/munge.socket,cred_expire=5
MpiDefault=none
# Nothing that needs cgroups.
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
GresTypes=gpu
# A node may have more CPUs than the machine.
SlurmdParameters=config_overrides
# A batch job starts at once instead of after 3 s, and one that is queued again as soon as it may, not up to 60 s later.
SchedulerParameters=batch_sched_delay=0,sched_min_interval=0,sched_interval=1
KillWait=2
# The job of a killed srun would otherwise keep its nodes for ever.
InactiveLimit=10
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/spool-%n
# A folder for each node, or mpi/pmix of the second one finds its folder taken.
TmpFS={directory}/tmp-%n
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/slurmd-%n.pid
{nodes}
PartitionName=tests Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""

NODE = (
    "NodeName={name} NodeAddr={address} CPUs={cpus} Boards=1 Sockets=1 CoresPerSocket={cpus} ThreadsPerCore=1"
    " RealMemory=1000 Gres=gpu:{gpus} State=UNKNOWN"
)

WAITING = ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING")


@dataclass(frozen=True)
class BatchJob:
    """A job that was submitted."""

    cluster: "SlurmCluster"
    id: str
    output: Path

    def wait_for_output(self, text: str, *, times: int = 1, timeout: float = 60.0) -> None:
        """Return when the job has printed a text so many times."""
        __tracebackhide__ = True
        if not poll(lambda: _read_if_there(self.output).count(text) >= times, timeout, interval=0.1):
            pytest.fail(f"job {self.id} has not printed {text!r} within {timeout:g} s:\n{_read_if_there(self.output)}")

    def cancel(self, *arguments: str) -> None:
        """Run ``scancel ARGUMENTS`` for this job."""
        self.cluster.scancel(*arguments, self.id)


class SlurmCluster:
    """Slurm on the virtual nodes ``n1``, ``n2``, ...; a context manager."""

    def __init__(
        self, num_nodes: int = 4, *, cpus_per_node: int = 4, gpus_per_node: int = 4, gpu_type: str | None = None
    ) -> None:
        self.hosts = NamespaceHosts(num_nodes)
        self.cpus_per_node = cpus_per_node
        self.gpus_per_node = gpus_per_node
        self.gpu_type = gpu_type

    def __enter__(self) -> "SlurmCluster":
        with ExitStack() as undo:
            self.directory = Path(tempfile.mkdtemp(prefix="distman-slurm-"))
            undo.callback(shutil.rmtree, self.directory, ignore_errors=True)
            self.directory.chmod(0o755)
            undo.enter_context(self.hosts)
            self._write_files()
            self._start_munged()
            self._start_slurm()
            self._undo = undo.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._undo.close()

    @property
    def environment(self) -> dict[str, str]:
        """What every Slurm command needs to know."""
        return {"SLURM_CONF": str(self.directory / "slurm.conf")}

    def srun(
        self,
        *arguments: str | Path,
        timeout: float = 30.0,
        env: Mapping[str, str | None] | None = None,
        cwd: Path | None = None,
    ) -> Finished:
        """Run a job step by ``srun ARGUMENTS`` and return its account."""
        __tracebackhide__ = True
        return self._run("srun", arguments, timeout, env, cwd)

    def salloc(
        self,
        *arguments: str | Path,
        timeout: float = 30.0,
        env: Mapping[str, str | None] | None = None,
        cwd: Path | None = None,
    ) -> Finished:
        """Run a command by ``salloc ARGUMENTS``; without ``srun`` in it, it runs on ``ctl``."""
        __tracebackhide__ = True
        return self._run("salloc", arguments, timeout, env, cwd)

    def start_srun(
        self, *arguments: str | Path, env: Mapping[str, str | None] | None = None, cwd: Path | None = None
    ) -> AbstractContextManager[Running]:
        """Start ``srun ARGUMENTS`` for the length of a ``with`` block."""
        return start([*self.hosts.enter(cwd=cwd), "srun", *arguments], env={**self.environment, **(env or {})}, cwd=cwd)

    def sbatch(
        self,
        script: str,
        *arguments: str,
        timeout: float = 60.0,
        env: Mapping[str, str | None] | None = None,
        cwd: Path | None = None,
        meanwhile: Callable[["BatchJob"], object] | None = None,
    ) -> Finished:
        """Submit a script by ``sbatch ARGUMENTS``, wait for the end of the job and return its account.

        A job array has ended when all its tasks have; its exit code is the first of theirs that is not zero.
        ``meanwhile`` is called with the job as soon as it is submitted.
        """
        __tracebackhide__ = True
        files = Path(tempfile.mkdtemp(prefix="job-", dir=self.directory))
        (files / "script").write_text(script)
        (files / "tmp").mkdir()
        output = [f"--output={files}/stdout", f"--error={files}/stderr"]
        submission: list[str | Path] = ["--parsable", *output, *arguments, files / "script"]
        # The job outlives the temporary folder of its submission.
        variables = {"TMPDIR": str(files / "tmp"), **(env or {})}
        submitted = self._run("sbatch", submission, 10.0, variables, cwd)
        if submitted.returncode != 0:
            return submitted
        if meanwhile is not None:
            meanwhile(BatchJob(self, submitted.stdout.strip(), files / "stdout"))
        return self._wait_for_job(submitted, files, timeout)

    def wait_for_end(self, job: str, *, timeout: float = 60.0) -> str:
        """Wait for the end of a job, and return its state."""
        __tracebackhide__ = True
        if not poll(lambda: self._has_ended(job), timeout, interval=0.1):
            pytest.fail(f"job {job} has not ended within {timeout:g} s:\n{self._ask('scontrol', 'show', 'job', job)}")
        return self._tasks(job)[0]["JobState"]

    def scancel(self, *arguments: str) -> None:
        """Run ``scancel ARGUMENTS``."""
        self._ask("scancel", *arguments)

    def cancel_jobs(self) -> None:
        """Cancel what a test left in the queue, such as the job of an ``srun`` that it killed."""
        if self._ask("squeue", "--noheader"):
            self._ask("scancel", "--user=root")
            if not poll(lambda: not self._ask("squeue", "--noheader"), 10.0, interval=0.1):
                pytest.fail(f"jobs cannot be cancelled:\n{self._ask('squeue')}")

    def _run(
        self,
        program: str,
        arguments: Sequence[str | Path],
        timeout: float,
        env: Mapping[str, str | None] | None,
        cwd: Path | None,
    ) -> Finished:
        __tracebackhide__ = True
        variables = {**self.environment, **(env or {})}
        return self.hosts.run([program, *arguments], env=variables, timeout=timeout, cwd=cwd)

    def _wait_for_job(self, submitted: Finished, files: Path, timeout: float) -> Finished:
        __tracebackhide__ = True
        job = submitted.stdout.strip()
        began = time.monotonic()
        ended = poll(lambda: self._has_ended(job), timeout, interval=0.1)
        if not ended:
            self._ask_for_stacks()
            self._ask("scancel", job)
            poll(lambda: self._has_ended(job), 5.0, interval=0.1)
        finished = Finished(
            command=(*submitted.command, (files / "script").read_text()),
            returncode=self._exit_code(job),
            stdout=_read_if_there(files / "stdout"),
            stderr=_read_if_there(files / "stderr"),
            seconds=time.monotonic() - began,
        )
        if not ended:
            pytest.fail(f"the job was ended by the test, which waited {timeout:g} s\n{finished}")
        sys.stdout.write(f"{finished}\n")  # pytest shows it when the test fails
        return finished

    def _ask_for_stacks(self) -> None:
        for process in self.hosts.processes():
            if process.is_python:
                process.send(signal.SIGABRT)
        poll(lambda: not any(process.is_python for process in self.hosts.processes()), 3.0)

    def _has_ended(self, job: str) -> bool:
        return all(task["JobState"] not in WAITING for task in self._tasks(job))

    def _exit_code(self, job: str) -> int:
        for task in self._tasks(job):
            code, number = (int(part) for part in task["ExitCode"].split(":"))
            if code or number:
                return -number if number else code
        return 0

    def _tasks(self, job: str) -> list[dict[str, str]]:
        """Return what ``scontrol`` knows of a job, or of each task of a job array."""
        lines = self._ask("scontrol", "show", "job", "--oneliner", job).splitlines()
        if not lines:
            pytest.fail(f"Slurm does not know job {job}")
        return [dict(re.findall(r"(\S+?)=(\S*)", line)) for line in lines]

    def _ask(self, *command: str) -> str:
        """Return what a Slurm command says, whatever it thinks of the question."""
        answer = subprocess.run(
            [*self.hosts.enter(), *command],
            env=launch_environment(self.environment),
            capture_output=True,
            text=True,
            check=False,
            timeout=10,
        )
        return answer.stdout

    def _write_files(self) -> None:
        nodes = "\n".join(
            NODE.format(
                name=name,
                address=self.hosts.addresses[name],
                cpus=self.cpus_per_node,
                gpus=f"{self.gpu_type}:{self.gpus_per_node}" if self.gpu_type else self.gpus_per_node,
            )
            for name in self.hosts.names
        )
        configuration = CONFIGURATION.format(addresses=self.hosts.addresses, directory=self.directory, nodes=nodes)
        (self.directory / "slurm.conf").write_text(configuration)
        devices = [self.directory / f"gpu{index}" for index in range(self.gpus_per_node)]
        for device in devices:
            os.mknod(device, stat.S_IFCHR | 0o666, os.makedev(1, 3))
        kind = f" Type={self.gpu_type}" if self.gpu_type else ""
        lines = [f"NodeName={name} Name=gpu{kind} File={device}\n" for name in self.hosts.names for device in devices]
        (self.directory / "gres.conf").write_text("".join(lines))
        for name in self.hosts.names:
            (self.directory / f"spool-{name}").mkdir()
            (self.directory / f"tmp-{name}").mkdir()

    def _start_munged(self) -> None:
        (self.directory / "munge.key").write_bytes(os.urandom(1024))
        (self.directory / "munge.key").chmod(0o600)
        files = {
            "socket": "munge.socket",
            "key-file": "munge.key",
            "pid-file": "munged.pid",
            "log-file": "munged.log",
        }
        files["seed-file"] = "munge.seed"
        options = [f"--{option}={self.directory / file}" for option, file in files.items()]
        # --force: it mistrusts root and folders in /tmp
        self._start_daemon("munged", ["munged", "--foreground", "--force", *options])
        self._wait_for(lambda: (self.directory / "munge.socket").exists(), "munged must answer")

    def _start_slurm(self) -> None:
        self._start_daemon("slurmctld", ["slurmctld", "-D", "-i"])
        for name in self.hosts.names:
            self.start_slurmd(name)
        self._wait_for(self._all_nodes_idle, "all nodes must become idle")

    def start_slurmd(self, name: str) -> None:
        """Start the daemon of a node, at first or after something ended it."""
        self._start_daemon(f"slurmd-{name}", ["slurmd", "-D", "-N", name], host=name)

    def _all_nodes_idle(self) -> bool:
        idle = self._ask("sinfo", "--noheader", "--Node", "--states=idle", "--format=%N").split()
        return set(idle) == set(self.hosts.names)

    def _start_daemon(self, name: str, command: list[str], host: str = "ctl") -> None:
        self.hosts.start_daemon(command, host=host, log=self.directory / f"{name}.log", env=self.environment)

    def _wait_for(self, condition: Callable[[], bool], what: str) -> None:
        if not poll(condition, 20.0, interval=0.05):
            logs = "\n".join(f"--- {log.name}\n{log.read_text()}" for log in sorted(self.directory.glob("*.log")))
            msg = f"{what} within 20 s, got this.\n{self._ask('sinfo', '--Node', '--long')}\n{logs}"
            raise RuntimeError(msg)


def _read_if_there(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""
