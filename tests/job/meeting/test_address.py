"""Where the ranks meet, for environments that exist on paper only."""

import dataclasses
from urllib.parse import urlsplit

import pytest

from distman._job.meeting import mpi
from distman._job.meeting.address import derive_ports
from distman._job.meeting.announced import Announced
from distman._job.meeting.places import AtPorts, OnThisHost, find_meeting, url_of
from distman.environments import detect
from distman.errors import RendezvousError
from distman.testing import fake_environment


def points(launcher, nodes=1, tasks=2, **variables):
    environs = [{**environ, **variables} for environ in fake_environment(launcher, nodes=nodes, tasks=tasks)]
    return [find_meeting(detect(environ).environment, environ) for environ in environs]


def agreed(found):
    """Return what all ranks say alike: job, addresses and ports."""
    (same,) = {(point.job_id, point.addresses, point.ports) for point in found}
    return same


@pytest.mark.parametrize("launcher", ["openmpi", "hydra", "mvapich", "pals", "jsrun", "slurm"])
def test_on_one_node_the_ranks_meet_without_any_address(launcher):
    found = points(launcher, tasks=3)
    job_id, (address,), ports = agreed(found)
    assert address == ("n1" if launcher == "slurm" else "127.0.0.1")
    assert ports == derive_ports(job_id)
    assert [point.is_host for point in found] == [True, False, False]


@pytest.mark.parametrize("nodes", [1, 2])
def test_the_ranks_of_torchrun_meet_beside_its_agent(nodes):
    found = points("torchrun", nodes=nodes)
    assert {type(meeting) for meeting in found} == {AtPorts if nodes > 1 else OnThisHost}
    job_id, addresses, ports = agreed(found)
    assert (addresses, ports) == (("n1",), derive_ports(job_id))
    assert [meeting.is_host for meeting in found] == [True, False]


def test_two_agents_of_one_host_may_meet_at_its_loopback():
    found = points("torchrun", nodes=2, MASTER_ADDR="localhost")
    assert agreed(found)[1] == ("localhost",)


def test_each_restart_of_torchrun_is_a_job_of_its_own():
    assert agreed(points("torchrun")) != agreed(points("torchrun", TORCHELASTIC_RESTART_COUNT="1"))


def test_slurm_meets_on_the_first_node_of_the_step():
    found = points("slurm", nodes=2, tasks=4, SLURM_STEP_NODELIST="n[3-4]")
    assert agreed(found)[1] == ("n3",)
    assert "the first node of SLURM_STEP_NODELIST" in found[0].source


def test_slurm_hosts_where_the_first_task_of_the_first_node_is():
    environ = fake_environment("slurm", nodes=2, tasks=2)[1] | {"SLURM_PROCID": "0", "SLURM_NODEID": "1"}
    assert find_meeting(detect(environ).environment, environ).is_host is False
    environ |= {"SLURM_PROCID": "1", "SLURM_NODEID": "0"}
    point = find_meeting(detect(environ).environment, environ)
    assert (point.is_host, point.opener) == (True, "the first task of the first node")


@pytest.mark.parametrize("missing", [["SLURM_NODEID"], ["SLURM_LOCALID"], ["SLURM_NODEID", "SLURM_LOCALID"]], ids=str)
@pytest.mark.parametrize(("nodes", "tasks"), [(1, 3), (2, 4), (3, 3)])
def test_rank_zero_opens_the_store_where_slurm_does_not_say_which_task_is_the_first(nodes, tasks, missing):
    found = points("slurm", nodes, tasks, **dict.fromkeys(missing, ""))
    assert [point.is_host for point in found] == [True] + [False] * (tasks - 1)
    assert {point.opener for point in found} == {"rank 0"}


def test_two_steps_of_a_job_have_ports_of_their_own():
    assert agreed(points("slurm"))[2] != agreed(points("slurm", SLURM_STEP_ID="1"))[2]


@pytest.mark.parametrize("launcher", ["slurm", "openmpi", "flux", "env"])
def test_what_the_user_sets_goes_first(launcher):
    found = points(launcher, nodes=2, tasks=2, MASTER_ADDR="main", MASTER_PORT="4000")
    assert agreed(found)[1:] == (("main",), (4000,))
    assert found[0].source == "address from MASTER_ADDR, port 4000 from MASTER_PORT"
    assert [point.is_host for point in found] == [True, False]


@pytest.mark.parametrize("address", ["fd00::1", "2001:db8::a:1"])
@pytest.mark.parametrize("spelling", ["{}", "[{}]"])
@pytest.mark.parametrize("launcher", ["env", "flux", "openmpi", "slurm"])
def test_an_address_of_ipv6_may_have_brackets_and_has_them_in_urls_alone(launcher, address, spelling):
    (point, _) = points(launcher, nodes=2, tasks=2, MASTER_ADDR=spelling.format(address))
    assert point.addresses == (address,)
    assert urlsplit(point.url).hostname == address
    assert urlsplit(url_of((address, 4000))).hostname == address


@pytest.mark.parametrize("address", ["::1", "[::1]"])
def test_the_loopback_of_ipv6_means_one_host(address):
    assert all(isinstance(point, OnThisHost) for point in points("flux", nodes=1, tasks=2, MASTER_ADDR=address))


def test_an_address_alone_gets_a_derived_port():
    job_id, addresses, ports = agreed(points("openmpi", nodes=2, tasks=2, MASTER_ADDR="main"))
    assert (addresses, ports) == (("main",), derive_ports(job_id))


@pytest.mark.parametrize("launcher", ["openmpi", "hydra", "mvapich", "pals"])
def test_mpi_on_several_nodes_needs_a_broadcast(launcher):
    assert [type(meeting) for meeting in points(launcher, nodes=2, tasks=4)] == [Announced] * 4


def test_open_mpi_4_tells_the_node_of_mpirun_where_mpi4py_is_missing(monkeypatch):
    uri = {"OMPI_MCA_orte_hnp_uri": "7.0;tcp://10.0.0.9,192.168.0.9:3000"}
    monkeypatch.setattr(mpi, "is_installed", lambda: True)
    assert [type(meeting) for meeting in points("openmpi", nodes=2, **uri)] == [Announced] * 2
    monkeypatch.setattr(mpi, "is_installed", lambda: False)
    assert agreed(points("openmpi", nodes=2, **uri))[1] == ("10.0.0.9",)


def test_a_launcher_that_does_not_say_needs_an_address_on_several_nodes():
    with pytest.raises(RendezvousError, match="MASTER_ADDR must be set when flux does not say"):
        points("flux", nodes=2)
    with pytest.raises(RendezvousError, match="MASTER_ADDR must be set when jsrun does not say"):
        points("jsrun", nodes=2, LSB_MCPU_HOSTS="")


@pytest.mark.parametrize(
    ("hosts", "address"),
    [
        ("launch1 1 n1 42 n2 42", "n1"),
        ("n1 42 n2 42", "n1"),
        ("n1 1 n2 1", "n1"),
        ("n1 1", "n1"),
    ],
)
def test_ranks_of_jsrun_meet_on_the_first_host_after_the_launch_node(hosts, address):
    assert agreed(points("jsrun", nodes=2, LSB_MCPU_HOSTS=hosts))[1] == (address,)


@pytest.mark.parametrize("address", ["localhost", "127.0.0.1", "127.0.1.1", "::1"])
def test_localhost_is_no_address_for_several_nodes(address):
    with pytest.raises(RendezvousError, match="MASTER_ADDR must be an address that all nodes reach"):
        points("slurm", nodes=2, MASTER_ADDR=address)


@pytest.mark.parametrize("launcher", ["slurm", "env"])
@pytest.mark.parametrize(("port", "ports"), [("29500 ", (29500,)), ("\t4000\n", (4000,)), (" ", None)])
def test_blanks_around_a_port_mean_nothing(launcher, port, ports):
    job_id, _, found = agreed(points(launcher, MASTER_PORT=port))
    assert found == (ports or derive_ports(job_id))


@pytest.mark.parametrize("port", ["x", "0", "65536", "-1", "1.5"])
def test_a_port_that_is_none_names_its_variable(port):
    with pytest.raises(RendezvousError, match="MASTER_PORT must be a number between 1 and 65535"):
        points("slurm", MASTER_PORT=port)


def test_derived_ports_are_the_same_everywhere_and_below_those_of_outgoing_connections():
    ports = derive_ports("a job")
    assert ports == derive_ports("a job") != derive_ports("another")
    assert len(set(ports)) == len(ports) >= 4
    assert all(1024 < port < 32768 for port in ports)


def test_ports_that_are_derived_from_a_secret_are_for_those_who_know_it():
    ports = derive_ports("a job", b"secret")
    assert ports == derive_ports("a job", b"secret")
    assert not {ports, derive_ports("a job")} & {derive_ports("a job", b"another secret")}


def test_a_point_cannot_be_changed():
    point = points("slurm")[0]
    with pytest.raises(dataclasses.FrozenInstanceError):
        point.ports = ()
