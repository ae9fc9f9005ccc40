import subprocess
from pathlib import Path

import pytest

from .hosts import SSH, NamespaceHosts


def test_hosts_have_names_and_reach_each_other(namespace_hosts):
    says = "import socket; print(socket.gethostname(), socket.gethostbyname('n1'), socket.gethostbyname('n2'))"
    finished = namespace_hosts.run(["python", "-c", says], host="n2")
    assert finished.stdout == "n2 10.77.0.11 10.77.0.12\n"
    greet = "import socket; s = socket.create_server(('n2', 0)); print(s.getsockname()[0])"
    assert namespace_hosts.run(["python", "-c", greet], host="n2").stdout == "10.77.0.12\n"


def test_hosts_reach_nothing_else(namespace_hosts):
    routes = namespace_hosts.run(["ip", "-brief", "route"], host="n1").stdout
    assert [line.split()[0] for line in routes.splitlines()] == ["10.77.0.0/24"]


def test_stand_in_for_ssh_hands_over_no_variables(namespace_hosts):
    command = [
        SSH,
        "-o",
        "BatchMode=yes",
        "-x",
        "root@n1",
        'echo "$(hostname) ${SECRET-unset}"',
        "two",
        "words",
    ]
    assert namespace_hosts.run(command, env={"SECRET": "told"}).stdout == "n1 unset two words\n"


@pytest.mark.usefixtures("namespace_hosts")
def test_machine_is_untouched():
    assert "n1" not in Path("/etc/hosts").read_text()
    links = subprocess.run(["ip", "-brief", "link"], capture_output=True, text=True, check=True, timeout=10).stdout
    assert "to-n1" not in links
    assert "bridge" not in links


@pytest.mark.usefixtures("namespace_hosts")
def test_hosts_that_come_up_half_way_are_taken_down(monkeypatch):
    def fail(_self):
        msg = "no cable"
        raise OSError(msg)

    monkeypatch.setattr(NamespaceHosts, "_connect", fail)
    hosts = NamespaceHosts(2)
    with pytest.raises(OSError, match="no cable"):
        hosts.__enter__()
    assert not hosts.processes()
    assert not hosts.directory.exists()
