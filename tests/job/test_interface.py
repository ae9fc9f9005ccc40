"""Which interface gloo is given; that hosts meet by it, a test on several hosts shows."""

import os
import socket

import pytest

from distman._job.network import choose_interface, forget_interface, interface_of, stay_on_this_host

NAME = "GLOO_SOCKET_IFNAME"


@pytest.fixture(autouse=True)
def unset(monkeypatch):
    monkeypatch.setenv(NAME, "")  # what was there before is put back
    monkeypatch.delenv(NAME)
    yield
    forget_interface()


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_theinterface_of_an_address_is_found(address):
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((address, 0))
    except OSError:
        assert interface_of(address) is None
    else:
        assert interface_of(address) == "lo"


@pytest.mark.parametrize("address", ["192.0.2.1", "2001:db8::1"])
def test_an_address_of_another_host_has_none(address):
    assert interface_of(address) is None


@pytest.mark.parametrize("given", ["eth7", None])
def test_what_the_user_sets_stays_and_no_way_out_sets_nothing(monkeypatch, given):
    if given is not None:
        monkeypatch.setenv(NAME, given)
    choose_interface(["localhost", "no-such-host.invalid"])
    forget_interface()
    assert os.environ.get(NAME) == given


@pytest.mark.parametrize("given", ["eth7", None])
def test_on_one_host_gloo_stays_there_unless_the_user_says_otherwise(monkeypatch, given):
    if given is not None:
        monkeypatch.setenv(NAME, given)
    stay_on_this_host()
    assert os.environ.get(NAME) == (given or "lo")
    forget_interface()
    assert os.environ.get(NAME) == given
