"""The bodies of common test servers show who answered, and which client they saw."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairlead.reach.identity import identity_of

WHOAMI = """Hostname: web-7d9f
IP: 127.0.0.1
IP: 10.244.1.5
RemoteAddr: 198.51.100.11:40312
GET / HTTP/1.1
Host: 203.0.113.10
User-Agent: curl
"""
"""The form of an answer of traefik/whoami."""


@pytest.mark.parametrize(
    ("body", "pod", "client"),
    [
        ('{"pod": "web-1", "node": "n1", "peer": "198.51.100.11"}', "web-1", "198.51.100.11"),
        (
            '{"pod": "web-1", "peer": "10.0.0.1", "proxy_peer": "198.51.100.11"}',
            "web-1",
            "198.51.100.11",
        ),
        ('{"hostname": "a", "clientIP": "::ffff:198.51.100.11"}', "a", "198.51.100.11"),
        ('{"origin": "198.51.100.11, 10.0.0.1"}', "", "198.51.100.11"),
        (WHOAMI, "web-7d9f", "198.51.100.11"),
        (WHOAMI + "X-Forwarded-For: 198.51.100.12\n", "web-7d9f", "198.51.100.12"),
        ("Hostname: b\n\nclient_address=2001:db8::9\n", "b", "2001:db8::9"),
        ("198.51.100.11:40312", "", "198.51.100.11"),
        ("[2001:db8::9]:40312\n", "", "2001:db8::9"),
        ("<html>Welcome to nginx!</html>", "", ""),
        ("", "", ""),
        ("{", "", ""),
        ("[" * 100_000, "", ""),
        (r'{"pod": "\u001b[2J", "hostname": "a", "peer": "192.0.2.1"}', "a", "192.0.2.1"),
        ("hostname: " + "a" * 254, "", ""),
        ('{"pod": 7, "peer": null}', "", ""),
        ('{"peer": "not an address"}', "", ""),
    ],
)
def test_bodies(body: str, pod: str, client: str) -> None:
    assert identity_of(body) == (pod, client)


@given(st.text(max_size=2000))
def test_any_body_is_read(body: str) -> None:
    identity_of(body)
