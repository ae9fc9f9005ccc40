"""Where a host listens, and which names mean it."""

import ipaddress
import socket

import pytest

from distman._job.meeting.address import (
    address_towards,
    addresses_of,
    bind_listener,
    is_own,
    means_loopback,
)


@pytest.mark.parametrize("address", ["localhost", "127.0.0.1", "127.0.1.1"])
def test_loopback_listens_to_this_host_only(address):
    with bind_listener(address, 0) as listener:
        assert listener.family == socket.AF_INET
        assert listener.getsockname()[0].startswith("127.")


def test_a_name_that_is_the_loopback_on_this_host_alone_is_open_to_the_others(monkeypatch):
    """As 127.0.1.1 of Debian; the look-up is the one thing that a test cannot have."""
    look_up = socket.getaddrinfo
    monkeypatch.setattr(socket, "getaddrinfo", lambda _, *more, **named: look_up("127.0.1.1", *more, **named))
    with bind_listener("n1", 0) as listener:
        assert listener.getsockname()[0] == str(ipaddress.IPv4Address(0))


def test_a_host_knows_its_own_addresses():
    assert all(map(is_own, addresses_of("localhost")))
    assert not is_own("192.0.2.1")
    assert not is_own("2001:db8::1")


@pytest.mark.parametrize("name", ["", "a" * 64 + ".b", "no-such-host.invalid"])
def test_a_name_that_is_none_is_an_error_of_the_system(name):
    with pytest.raises(OSError):
        addresses_of(name or "." * 300)


def test_the_loopback_is_no_way_to_another_host():
    assert address_towards("localhost") is None
    assert address_towards("no-such-host.invalid") is None


def test_the_way_to_an_address_of_this_host_is_that_address():
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # sends nothing: it asks which address the way out has
        own = probe.getsockname()[0]
    assert address_towards(own) == own


def test_a_name_may_begin_like_that_of_the_loopback():
    assert means_loopback("localhost")
    assert not means_loopback("localhost-7")
