"""The findings that the ingress check derives from responses, in the cases that the lab with real
servers (tests/e2e/test_ingress.py) does not produce."""

import asyncio
from collections.abc import Mapping

import msgspec
import pytest

from fairlead.ingress.call import FORGED, call, forged_address, read_answer, shown_addresses
from fairlead.ingress.entrypoint import Answer, EntryPoint, Variant
from fairlead.ingress.findings import HEADERS, Case, CheckedEntryPoint, config_findings, findings
from fairlead.ingress.header import version_1, version_2
from fairlead.ingress.settings import Controller, Header, config
from fairlead.model import Finding

TIMEOUT_S = 10
CHECKER, BALANCER = "198.51.100.11", "192.0.2.11"
OK = Answer("answered", "answered 200", 200, own=CHECKER)
REJECTED = Answer("rejected", "answered 400 Bad Request", 400, own=CHECKER)
UNREACHABLE = Answer("unreachable", "no connection in time")


def echoing(*addresses: str) -> Answer:
    return Answer("answered", "answered 200", 200, addresses, CHECKER)


def checked(
    name: str, plain: Answer, v1: Answer, v2: Answer, forwarded: Answer | None = None
) -> CheckedEntryPoint:
    answers: Mapping[Variant, Answer] = {
        "plain": plain,
        "v1": v1,
        "v2": v2,
        "forwarded-for": forwarded or plain,
    }
    claimed = {
        variant: msgspec.structs.replace(answer, claimed=forged_address(variant, BALANCER))
        for variant, answer in answers.items()
    }
    return CheckedEntryPoint(name, EntryPoint("192.0.2.80", 443, tls=True), claimed)


SILENT = Answer("silent", "connected, but no answer in time", own=CHECKER)
CLOSED = Answer("rejected", "closed without an answer", own=CHECKER)
GREETING = read_answer(b"SSH-2.0-OpenSSH_9.6\r\n", CHECKER)
SSH = checked("ssh", GREETING, GREETING, GREETING)
CLOSING = checked("closing", CLOSED, CLOSED, CLOSED)


def codes(case: Case) -> list[tuple[str, str]]:
    return [(each.severity, each.code) for each in findings(case)]


def forged(variant: Variant) -> Answer:
    return echoing(FORGED[variant][0])


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        (
            Case("none", checked("front", UNREACHABLE, UNREACHABLE, UNREACHABLE)),
            [("error", "NoAnswer")],
        ),
        (Case("none", checked("front", REJECTED, REJECTED, REJECTED)), [("error", "Rejected")]),
        (
            Case("none", checked("front", UNREACHABLE, UNREACHABLE, UNREACHABLE), ready=False),
            [("error", "NoPod")],
        ),
        (
            Case("v2", checked("front", REJECTED, REJECTED, REJECTED), ready=False),
            [("error", "NoPod")],
        ),
        # A pod became ready after the EndpointSlices were read.
        (Case("v2", checked("front", OK, REJECTED, REJECTED), ready=False), [("ok", "Answered")]),
        (
            Case("none", checked("front", REJECTED, REJECTED, OK)),
            [("error", "HeaderMissing"), ("warning", "HeaderAccepted")],
        ),
        (
            Case(None, checked("front", REJECTED, REJECTED, REJECTED)),
            [("error", "HeaderNotExpected")],
        ),
        (
            Case(
                "v2",
                checked("front", REJECTED, REJECTED, REJECTED),
                (checked("pod", UNREACHABLE, UNREACHABLE, UNREACHABLE),),
            ),
            [("error", "HeaderNotExpected"), ("info", "OutOfReach")],
        ),
        (
            Case(
                "v2",
                checked("front", REJECTED, REJECTED, REJECTED),
                (checked("pod", REJECTED, OK, REJECTED),),
            ),
            [("error", "HeaderVersionMismatch"), ("warning", "HeaderAccepted")],
        ),
        (
            Case(
                "v2",
                checked("front", REJECTED, REJECTED, REJECTED),
                (checked("pod", REJECTED, REJECTED, REJECTED),),
            ),
            [("error", "Rejected"), ("info", "NotTested")],
        ),
        # A header is rejected by a server that answers other requests.
        (
            Case(
                "none",
                checked("front", OK, REJECTED, REJECTED),
                (checked("pod", OK, REJECTED, REJECTED),),
            ),
            [("ok", "Answered"), ("ok", "ForgeryRejected")],
        ),
        (
            Case(
                "none",
                checked("front", OK, REJECTED, REJECTED),
                (checked("pod", OK, REJECTED, SILENT),),
            ),
            [("ok", "Answered"), ("info", "NotTested")],
        ),
        # The page shows no address, so it does not show that a header is not trusted.
        (
            Case(
                "v2",
                checked("front", echoing(CHECKER), REJECTED, REJECTED),
                (checked("pod", REJECTED, OK, OK),),
                echo=True,
            ),
            [("ok", "AddressSeen"), ("warning", "HeaderAccepted")],
        ),
        # A port that speaks another protocol, as far as known and as it is known.
        (Case("none", SSH, (SSH,), is_web=False), [("info", "NotTested")]),
        (Case("v2", CLOSING, (CLOSING,), is_web=False), [("info", "NotTested")]),
        (Case("none", SSH, (SSH,)), [("error", "Rejected"), ("info", "NotTested")]),
        (Case(None, SSH), [("error", "Rejected")]),
        # An answer shows that it speaks HTTP.
        (
            Case("v2", CLOSING, (checked("pod", OK, REJECTED, REJECTED),), is_web=False),
            [("error", "HeaderNotExpected"), ("ok", "ForgeryRejected")],
        ),
        # Whatever it speaks, somebody should listen.
        (
            Case("none", checked("front", UNREACHABLE, UNREACHABLE, UNREACHABLE), is_web=False),
            [("error", "NoAnswer")],
        ),
        (
            Case("none", CLOSING, ready=False, is_web=False),
            [("error", "NoPod")],
        ),
        (Case("none", checked("front", OK, REJECTED, REJECTED)), [("ok", "Answered")]),
        (
            Case("none", checked("front", OK, OK, OK)),
            [("ok", "Answered"), ("warning", "HeaderAccepted")],
        ),
        (
            Case("none", checked("front", OK, REJECTED, REJECTED), echo=True),
            [("warning", "NoEcho")],
        ),
        (
            Case("v2", checked("front", echoing(BALANCER), REJECTED, REJECTED), echo=True),
            [("error", "AddressLost")],
        ),
        (
            Case(
                "v2",
                checked("front", echoing(BALANCER), REJECTED, REJECTED),
                echo=True,
                client=BALANCER,
            ),
            [("ok", "AddressSeen")],
        ),
        (
            Case(
                "v2",
                checked("front", echoing(CHECKER), REJECTED, REJECTED, forged("forwarded-for")),
                echo=True,
            ),
            [("ok", "AddressSeen"), ("security", "ForwardedForTrusted")],
        ),
        (
            Case(
                "v2",
                checked(
                    "front",
                    echoing(CHECKER),
                    REJECTED,
                    REJECTED,
                    echoing(FORGED["forwarded-for"][0], CHECKER),
                ),
                echo=True,
            ),
            [("ok", "AddressSeen")],
        ),
        (
            Case(
                "v2",
                checked("front", OK, REJECTED, REJECTED),
                (checked("pod", REJECTED, forged("v1"), REJECTED),),
            ),
            [("ok", "Answered"), ("security", "ClientMayForge")],
        ),
        (
            Case(
                "v2",
                checked("front", echoing(CHECKER), REJECTED, REJECTED),
                (checked("pod", REJECTED, echoing(CHECKER), echoing(CHECKER)),),
                echo=True,
            ),
            [("ok", "AddressSeen"), ("ok", "ForgeryWithoutEffect")],
        ),
    ],
)
def test_findings_about_responses(case: Case, expected: list[tuple[str, str]]) -> None:
    assert codes(case) == expected
    for each in findings(case):
        assert (each.remedy != "") == (each.severity in ("security", "error", "warning")), each


def test_a_controller_may_accept_headers_that_it_does_not_trust() -> None:
    """Traefik reads a header from every source, and uses it only from trusted sources."""
    both = echoing(CHECKER)
    case = Case("none", checked("front", both, both, both), echo=True)
    assert codes(case) == [("ok", "AddressSeen")]


async def test_a_response_contains_the_claimed_address() -> None:
    """The claimed address has the family of the connection, which a DNS name does not determine."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Respond with the source address of a header of version 1."""
        request = await reader.readuntil(b"\r\n\r\n")
        writer.write(
            b"HTTP/1.0 200 OK\r\n\r\n"
            + (request.split()[2] if request.startswith(b"PROXY ") else b"no header")
        )
        writer.close()

    for name, family in (("localhost", 0), ("::1", 1)):
        async with await asyncio.start_server(serve, "::1" if family else "127.0.0.1", 0) as server:
            entry_point = EntryPoint(name, server.sockets[0].getsockname()[1], tls=False)
            answers: dict[Variant, Answer] = {
                variant: await call(entry_point, variant, TIMEOUT_S) for variant in ("plain", "v1")
            }
        assert [answers[variant].claimed for variant in answers] == ["", FORGED["v1"][family]]
        assert [
            CheckedEntryPoint("front", entry_point, answers).trusts(variant) for variant in answers
        ] == [False, True]


async def test_a_length_that_is_not_a_number_of_bytes_is_ignored() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.0 200 OK\r\nContent-Length: " + b"9" * 5000 + b"\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        entry_point = EntryPoint("127.0.0.1", server.sockets[0].getsockname()[1], tls=False)
        answer = await call(entry_point, "plain", TIMEOUT_S)
    assert (answer.outcome, answer.status) == ("answered", 200)


async def test_an_invalid_dns_name_is_unreachable() -> None:
    """The API server accepts such a name in a status: it limits the length of the name, but not of
    each label as DNS does."""
    answer = await call(EntryPoint(f"{'a' * 64}.example.com", 80, tls=False), "plain", TIMEOUT_S)
    assert answer == Answer("unreachable", "not a valid DNS name")


def test_a_forged_address_is_recognized_behind_a_hostname() -> None:
    """The hostname resolves to an IPv6 address, so the claimed address is IPv6 too."""
    answers: dict[Variant, Answer] = {"plain": REJECTED, "forwarded-for": REJECTED}
    for variant in HEADERS:
        answers[variant] = msgspec.structs.replace(
            echoing(FORGED[variant][1]), claimed=FORGED[variant][1]
        )
    front = CheckedEntryPoint("front", EntryPoint("2001-db8--7.nip.io", 80, tls=False), answers)
    found = findings(Case("none", front, echo=True))
    assert [each.code for each in found] == ["HeaderMissing", "ClientMayForge"]
    assert "claims 2001:2:0:fe::1, 2001:2:0:fe::2 is trusted" in found[1].message


@pytest.mark.parametrize(
    ("controller", "data", "sends", "expected"),
    [
        ("nginx", {}, "none", []),
        ("nginx", {}, "v2", [("error", "HeaderNotExpected")]),
        ("nginx", config("nginx", ["192.0.2.11/32"]), "v2", []),
        ("nginx", config("nginx", ["192.0.2.11/32"]), "none", [("error", "HeaderMissing")]),
        ("nginx", {"use-proxy-protocol": "true"}, "v1", [("security", "TrustsEverySource")]),
        (
            "nginx",
            {"use-forwarded-headers": "true"},
            "none",
            [("security", "ForwardedForFromEverySource")],
        ),
        (
            "nginx",
            {"use-forwarded-headers": "true", "proxy-real-ip-cidr": "192.0.2.0/24"},
            "none",
            [],
        ),
        ("haproxy", {}, "none", []),
        ("haproxy", {}, "v1", [("error", "HeaderNotExpected")]),
        ("haproxy", config("haproxy", ["192.0.2.11/32", "2001:db8::/64"]), "v1", []),
        (
            "haproxy",
            {"proxy-protocol": "10.0.0.0/8, ::/0"},
            "v1",
            [("security", "TrustsEverySource")],
        ),
        (
            "haproxy",
            {"proxy-protocol": "0.0.0.0/1, 128.0.0.0/1"},
            "v1",
            [("security", "TrustsEverySource")],
        ),
        (
            "nginx",
            {"use-forwarded-headers": "true", "proxy-real-ip-cidr": "::/1,8000::/1"},
            "none",
            [("security", "ForwardedForFromEverySource")],
        ),
        ("haproxy", {"proxy-protocol": "10.0.0.0/8"}, "none", [("error", "HeaderMissing")]),
        ("traefik", {}, "v1", []),
    ],
)
def test_findings_of_a_config_map(
    controller: Controller, data: dict[str, str], sends: Header, expected: list[tuple[str, str]]
) -> None:
    found: list[Finding] = list(config_findings(controller, data, sends))
    assert [(each.severity, each.code) for each in found] == expected
    assert all(each.remedy for each in found)


@pytest.mark.parametrize(
    ("received", "outcome", "how"),
    [
        (b"", "rejected", "closed without an answer"),
        (b"HTTP/1.1 400 Bad request\r\n\r\n", "rejected", "answered 400 Bad Request"),
        (b"HTTP/1.0 503 No\r\n\r\n", "answered", "answered 503"),
        (b"220 mail ESMTP\r\n", "rejected", "answered, but not with HTTP"),
    ],
)
def test_received_bytes_are_classified(received: bytes, outcome: str, how: str) -> None:
    answer = read_answer(received)
    assert (answer.outcome, answer.how) == (outcome, how)


def test_all_addresses_in_a_text_are_found() -> None:
    text = (
        '{"a": "::ffff:198.51.100.11", "b": ["2001:DB8:0::1"], "c": "10.0.0.1:8080"} '
        "[2001:db8::2]:80 at 12:30:45, 192.0.2.1."
    )
    assert shown_addresses(text) == (
        "198.51.100.11",
        "2001:db8::1",
        "10.0.0.1",
        "2001:db8::2",
        "192.0.2.1",
    )
    assert shown_addresses("version 1.2.3.4.5, std::string, ::, x1.2.3.4, 1.2.3") == ()


def test_proxy_headers_follow_the_specification() -> None:
    """HAProxy's doc/proxy-protocol.txt, sections 2.1 and 2.2."""
    assert (
        version_1("192.0.2.1", 56324, "192.0.2.2", 443)
        == b"PROXY TCP4 192.0.2.1 192.0.2.2 56324 443\r\n"
    )
    assert (
        version_1("2001:db8::1", 1, "2001:db8::2", 2)
        == b"PROXY TCP6 2001:db8::1 2001:db8::2 1 2\r\n"
    )
    ipv4 = version_2("192.0.2.1", 56324, "192.0.2.2", 443)
    assert ipv4 == bytes.fromhex("0d0a0d0a000d0a515549540a 21 11 000c c0000201 c0000202 dc04 01bb")
    ipv6 = version_2("2001:db8::1", 1, "2001:db8::2", 2)
    assert ipv6[12:16] == bytes.fromhex("21 21 0024")
    assert len(ipv6) == 52
