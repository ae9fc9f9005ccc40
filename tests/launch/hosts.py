"""Several hosts on one machine: network namespaces on a bridge of their own, with nothing else in reach.

A host is nothing but a process that holds its namespaces open. So no name, interface, route or line in
``/etc/hosts`` of the machine is touched, any number of test sessions can have a host ``n1``, and all of it
ends with the processes.
"""

import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

from .processes import Finished, Process, Running, kill_all, launch, launch_environment, processes, start

NETWORK = "10.77.0"
SSH = Path(__file__).parent / "ssh"

BECOME_HOST = """
set -e
echo "$1" > /proc/sys/kernel/hostname
mount --bind "$2/hosts of $1" /etc/hosts
mount -t tmpfs tmpfs /dev/shm
ip link set lo up
echo ready
exec sleep infinity
"""


class NamespaceHosts:
    """Hosts ``n1``, ``n2``, ... and ``ctl``, from which one launches; a context manager.

    Each has its own host name, network with ``lo`` and one more interface, ``/etc/hosts`` and ``/dev/shm``.
    All other files are the machine's.

    Args:
        num_hosts: Number of hosts beside ``ctl``.
        own_address: What each host's own name resolves to on it; None is its address, ``127.0.1.1`` Debian's default.
    """

    def __init__(self, num_hosts: int = 2, *, own_address: str | None = None) -> None:
        self.names = tuple(f"n{index}" for index in range(1, num_hosts + 1))
        self.addresses = {"ctl": f"{NETWORK}.1"}
        self.addresses |= {name: f"{NETWORK}.{10 + index}" for index, name in enumerate(self.names, start=1)}
        self._own_address = own_address
        self._pids: dict[str, int] = {}
        self._networks: set[str] = set()
        self._started: list[subprocess.Popen[str]] = []

    def __enter__(self) -> "NamespaceHosts":
        with ExitStack() as undo:
            self.directory = Path(tempfile.mkdtemp(prefix="distman-hosts-"))
            undo.callback(shutil.rmtree, self.directory, ignore_errors=True)
            undo.callback(self._kill_everything)
            for name in self.addresses:
                self._write_hosts_file(name)
                self._add(name)
            self._connect()
            self._undo = undo.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._undo.close()

    @property
    def environment(self) -> dict[str, str]:
        """What the stand-in for ssh needs to know."""
        return {"TEST_DISTMAN_HOSTS": str(self.directory)}

    def enter(self, host: str = "ctl", cwd: Path | None = None) -> list[str]:
        """Return the beginning of a command line that runs the rest of it on a host."""
        pid = str(self.pid_of(host))
        return ["nsenter", "--target", pid, "--net", "--uts", "--mount", f"--wdns={cwd or Path.cwd()}", "--"]

    def pid_of(self, host: str) -> int:
        """Return the process that holds a host's namespaces."""
        return self._pids[host]

    def run(
        self,
        command: Sequence[str | Path],
        *,
        host: str = "ctl",
        env: Mapping[str, str | None] | None = None,
        timeout: float = 30.0,
        cwd: Path | None = None,
    ) -> Finished:
        """Launch a command on a host."""
        __tracebackhide__ = True
        return launch(
            [*self.enter(host, cwd), *command],
            env={**self.environment, **(env or {})},
            timeout=timeout,
            cwd=cwd,
        )

    def start(
        self,
        command: Sequence[str | Path],
        *,
        host: str = "ctl",
        env: Mapping[str, str | None] | None = None,
        cwd: Path | None = None,
    ) -> AbstractContextManager[Running]:
        """Start a command on a host for the length of a ``with`` block."""
        return start([*self.enter(host, cwd), *command], env={**self.environment, **(env or {})}, cwd=cwd)

    def start_daemon(self, command: Sequence[str], *, host: str, log: Path, env: Mapping[str, str]) -> None:
        """Start a process that lives as long as the hosts do."""
        with log.open("ab") as output:
            self._start([*self.enter(host, cwd=Path("/")), *command], env=env, stdout=output, stderr=output)

    def processes(self) -> list[Process]:
        """Return everything that runs on the hosts."""
        return processes(lambda folder: _network(folder) in self._networks)

    def _write_hosts_file(self, host: str) -> None:
        names = {"localhost": "127.0.0.1", **self.addresses}
        names[host] = self._own_address or names[host]
        lines = [f"{address} {name}\n" for name, address in names.items()]
        # The name of a client whose IPv4 address is seen through an IPv6 socket, which torch looks up.
        lines += [f"::ffff:{address} {name}-through-ipv6\n" for name, address in names.items()]
        (self.directory / f"hosts of {host}").write_text("".join(lines))

    def _add(self, name: str) -> None:
        unshare = ["unshare", "--net", "--uts", "--mount"]
        holder = self._start(
            [*unshare, "sh", "-c", BECOME_HOST, "sh", name, str(self.directory)], stdout=subprocess.PIPE
        )
        assert holder.stdout is not None
        with holder.stdout as output:
            if output.readline() != "ready\n":
                msg = f"Host {name} must come up, got exit code {holder.wait()}. See standard error."
                raise RuntimeError(msg)
        self._pids[name] = holder.pid
        self._networks.add(_network(Path(f"/proc/{holder.pid}")))  # ready: no longer that of the machine
        (self.directory / name).write_text(str(holder.pid))

    def _connect(self) -> None:
        """Put a bridge into ``ctl`` and a cable from it to every host."""
        lines = [
            "link add bridge type bridge",
            f"addr add {self.addresses['ctl']}/24 dev bridge",
            "link set bridge up",
        ]
        for name in self.names:
            lines.append(f"link add to-{name} type veth peer name eth0 netns {self._pids[name]}")
            lines.append(f"link set to-{name} master bridge up")
        self._ip("ctl", lines)
        for name in self.names:
            self._ip(name, [f"addr add {self.addresses[name]}/24 dev eth0", "link set eth0 up"])

    def _ip(self, host: str, lines: list[str]) -> None:
        subprocess.run(
            [*self.enter(host), "ip", "-batch", "-"],
            input="\n".join(lines),
            text=True,
            check=True,
            timeout=10,
        )

    def _start(
        self, command: list[str], *, env: Mapping[str, str] | None = None, **streams: Any
    ) -> "subprocess.Popen[str]":
        """Start a process that dies with this one, however this one dies."""
        process = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", *command],
            stdin=subprocess.DEVNULL,
            env=launch_environment(env or {}),
            text=True,
            start_new_session=True,
            **streams,
        )
        self._started.append(process)
        return process

    def _kill_everything(self) -> None:
        for process in self._started:
            process.kill()
        kill_all(self.processes)
        for process in self._started:
            process.wait()


def _network(folder: Path) -> str:
    return str((folder / "ns/net").readlink())
