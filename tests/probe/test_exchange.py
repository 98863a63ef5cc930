"""The answer of an echo server contains the client that the server saw, from its headers if there
are any."""

import pytest

from fairlead.probe.exchange import parse


@pytest.mark.parametrize(
    ("reply", "client"),
    [
        ("", "192.0.2.11"),
        (', "proxy": "v2", "proxy_peer": "198.51.100.11"', "198.51.100.11"),
        (', "forwarded_for": "198.51.100.12"', "198.51.100.12"),
        (
            ', "proxy": "v1", "proxy_peer": "198.51.100.11", "forwarded_for": "198.51.100.12"',
            "198.51.100.12",
        ),
    ],
)
def test_parse_returns_the_client_that_the_server_saw(reply: str, client: str) -> None:
    body = f'{{"pod": "p1", "node": "node1", "peer": "192.0.2.11"{reply}}}\n'.encode()
    answer = parse(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
    assert answer is not None
    assert answer.client == client
