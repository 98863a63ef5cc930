"""Addresses and CIDRs as they are written in objects."""

import pytest

from fairlead.kube.networks import read_address, read_network


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("203.0.113.7", "203.0.113.7"),
        (" 203.0.113.007 ", "203.0.113.7"),
        ("010.000.0.1", "10.0.0.1"),
        ("2001:DB8:0::1", "2001:db8::1"),
        ("::ffff:203.0.113.7", "203.0.113.7"),
        ("2001:db8:f::10%eth0", None),
        ("256.0.0.1", None),
        ("lb.example.com", None),
        ("٣.0.0.1", None),
        ("", None),
        ("0" * 60 + "1.1.1.1", None),
    ],
)
def test_addresses_are_normalized_and_other_texts_are_rejected(
    text: str, address: str | None
) -> None:
    assert read_address(text) == address


@pytest.mark.parametrize(
    ("text", "network"),
    [
        ("203.0.113.0/24", "203.0.113.0/24"),
        ("010.0.0.0/8", "10.0.0.0/8"),
        (" 203.0.113.77/24", "203.0.113.0/24"),
        ("2001:DB8::1/64", "2001:db8::/64"),
        ("203.0.113.0", None),
        ("203.0.113.0/255.255.255.0", None),
        ("203.0.113.0/33", None),
        ("/8", None),
        ("everybody", None),
        ("10.0.0.0/" + "9" * 5000, None),
    ],
)
def test_networks_are_normalized_and_other_texts_are_rejected(
    text: str, network: str | None
) -> None:
    assert read_network(text) == network
