"""IP addresses, and `address:port`, as text."""

import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairlead.net.address import (
    canonical,
    family_of,
    join_host_port,
    numeric_host,
    pack_address,
    socket_family,
    split_host_port,
    unpack_address,
)

ADDRESSES = st.ip_addresses().map(str)


@given(ADDRESSES, st.integers(1, 65535))
def test_a_joined_host_and_port_is_split_again(address: str, port: int) -> None:
    joined = join_host_port(address, port)
    assert split_host_port(joined) == (address, port)
    assert numeric_host(joined) == address


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("192.0.2.1:80", ("192.0.2.1", 80)),
        ("[2001:db8::1]:65535", ("2001:db8::1", 65535)),
        ("*:9444", ("*", 9444)),
        ("gateway.example:1", ("gateway.example", 1)),
    ],
)
def test_a_host_and_port_is_split(text: str, parts: tuple[str, int]) -> None:
    assert split_host_port(text) == parts


@pytest.mark.parametrize("text", ["", "80", ":80", "host:", "host:0", "host:65536", "host:-1"])
def test_an_invalid_host_and_port_is_rejected(text: str) -> None:
    with pytest.raises(ValueError, match="is not address:port"):
        split_host_port(text)


@pytest.mark.parametrize(
    "text", ["gateway.example:80", "2001:db8::1:80", "[192.0.2.1]:80", "192.0.2.1"]
)
def test_a_name_and_an_ipv6_address_without_brackets_are_not_numeric_hosts(text: str) -> None:
    assert numeric_host(text) is None


@given(ADDRESSES)
def test_bytes_of_an_address_are_its_canonical_form_again(address: str) -> None:
    assert unpack_address(pack_address(address)) == canonical(address)
    assert canonical(canonical(address)) == canonical(address)


def test_spellings_and_families_of_addresses() -> None:
    assert canonical("2001:DB8:0:0::1") == "2001:db8::1"
    assert canonical("::ffff:192.0.2.1") == "192.0.2.1"
    for text in ("192.0.2", "192.0.2.01", "2001::db8::1", "host"):
        with pytest.raises((ValueError, OSError)):
            canonical(text)
    assert (family_of("192.0.2.1"), socket_family("192.0.2.1")) == ("IPv4", socket.AF_INET)
    assert (family_of("2001:db8::1"), socket_family("2001:db8::1")) == ("IPv6", socket.AF_INET6)
