"""Findings of the ingress check: which setting is wrong, the evidence, and the remedy.

In: a `Case`, which is one port with the answers of its front entry point (the load balancer's
address) and of the entry points behind it (a pod and a node port, which bypass the load balancer),
and the PROXY header that the load balancer is configured to send; and the controller's ConfigMap if
it can be read. Out: `Finding`s. Pure.

What the answers can prove:

* They show whether a header is expected: requests with a header are answered and requests without
  one are rejected, or the reverse. The application does not have to cooperate.
* They show whether a header is *trusted* only if the application reports the client's address: the
  request's path must lead to a page that contains it (`echo`). Without such a page, an accepted
  header is a warning, and the user can look for the forged addresses in the application's log.
* They show that a header is rejected only at an entry point that answers other requests. Where
  nothing is answered, nothing was tested, and a Finding says so.
* They show whether a port speaks HTTP. A port of which this is otherwise unknown, and that never
  answers with HTTP, is not tested.
* A forged header at the front of a load balancer that writes its own header is harmless: the
  receiver reads the load balancer's header and takes the forged one for the start of an invalid
  request. Only headers that reach the receiver past the load balancer must not be trusted.
"""

from collections.abc import Iterator, Mapping

import msgspec

from fairlead.ingress.entrypoint import NOT_HTTP, Answer, EntryPoint, Variant
from fairlead.ingress.settings import Controller, Header, include_every_address
from fairlead.model import Finding

EXPECTS = (
    "use-proxy-protocol (ingress-nginx), proxy-protocol (HAProxy), "
    "proxyProtocol.trustedIPs (Traefik)"
)
TRUSTS = (
    "proxy-real-ip-cidr (ingress-nginx), proxy-protocol (HAProxy), proxyProtocol.trustedIPs "
    "(Traefik)"
)
HEADERS: tuple[Variant, Variant] = ("v1", "v2")
NOT_TESTED = "NotTested"
"""Code of a Finding about what the check cannot test."""


class CheckedEntryPoint(msgspec.Struct, frozen=True):
    """An entry point, its name in the report, and the answer to each variant of the request."""

    name: str
    entry_point: EntryPoint
    answers: Mapping[Variant, Answer]

    @property
    def place(self) -> str:
        address = (
            f"[{self.entry_point.address}]"
            if ":" in self.entry_point.address
            else self.entry_point.address
        )
        return f"{self.name} {address}:{self.entry_point.port}"

    def answered(self, variant: Variant) -> bool:
        return self.answers[variant].outcome == "answered"

    @property
    def headers(self) -> tuple[Variant, ...]:
        """The versions of the PROXY header whose requests are answered."""
        return tuple(variant for variant in HEADERS if self.answered(variant))

    @property
    def speaks_http(self) -> bool:
        """Whether at least one answer is HTTP."""
        return any(answer.status for answer in self.answers.values())

    @property
    def responds(self) -> bool:
        """Whether the server sends anything, or at least closes connections itself."""
        return any(answer.outcome in ("answered", "rejected") for answer in self.answers.values())

    def trusts(self, variant: Variant) -> bool:
        """Whether the answer contains the forged address, as the address of the client."""
        answer = self.answers[variant]
        return answer.outcome == "answered" and answer.claimed in answer.addresses


class Case(msgspec.Struct, frozen=True):
    """One port of a load balancer, with the answers of its entry points.

    `sends` is the PROXY header that the load balancer is configured to send, or None if it is
    unknown. `echo` means that the requested path shows the client's address. `client` is the
    address of this host as servers see it; if it is empty, it is the local address of the
    connection. `ready` is False if no pod can answer. `is_web` is False if only an answer can show
    whether the port speaks HTTP."""

    sends: Header | None
    front: CheckedEntryPoint
    behind: tuple[CheckedEntryPoint, ...] = ()
    echo: bool = False
    client: str = ""
    ready: bool = True
    is_web: bool = True

    @property
    def is_tested(self) -> bool:
        """Whether the answers show anything about headers. It is so for a port of which it is
        unknown whether it speaks HTTP, if at least one answer is HTTP."""
        return self.is_web or any(each.speaks_http for each in (self.front, *self.behind))


def findings(case: Case) -> list[Finding]:
    """Return the findings of one port, each once."""
    plain = case.front.answers["plain"]
    if not case.is_tested and case.ready and plain.outcome != "unreachable":
        message = (
            f"{plain.how}: no answer of this port is HTTP, so PROXY headers were not tested; if it "
            "speaks HTTP, set appProtocol to http or https, or check with --tls always"
        )
        return [Finding(NOT_TESTED, message, severity="info", subject=case.front.place)]
    made = [*_front(case)] + [
        each for entry_point in case.behind for each in _behind(case, entry_point)
    ]
    return list(dict.fromkeys(made))


def config_findings(
    controller: Controller, config: Mapping[str, str], sends: Header
) -> Iterator[Finding]:
    """Return the findings that the controller's ConfigMap has in itself, or in combination with the
    PROXY header that the load balancer sends. Traefik has no ConfigMap, so it has no findings."""
    match controller:
        case "nginx":
            expects = config.get("use-proxy-protocol", "false") == "true"
            trusted = config.get("proxy-real-ip-cidr", "0.0.0.0/0").split(",")
            trust, on, off = (
                "proxy-real-ip-cidr",
                'set use-proxy-protocol: "true"',
                'set use-proxy-protocol: "false"',
            )
            if config.get("use-forwarded-headers") == "true" and include_every_address(trusted):
                yield Finding(
                    "ForwardedForFromEverySource",
                    (
                        "use-forwarded-headers is true and proxy-real-ip-cidr includes every "
                        "address: every client can claim any address with X-Forwarded-For"
                    ),
                    severity="security",
                    remedy=(
                        "remove use-forwarded-headers, or set proxy-real-ip-cidr to the addresses "
                        "of the proxies in front"
                    ),
                )
        case "haproxy":
            expects = bool(config.get("proxy-protocol"))
            trusted = config.get("proxy-protocol", "").split(",")
            trust, on, off = (
                "proxy-protocol",
                "set proxy-protocol to the load balancer's addresses",
                "remove proxy-protocol",
            )
        case "traefik":
            return
    if expects and include_every_address(trusted):
        yield Finding(
            "TrustsEverySource",
            (
                f"{trust} includes every address "
                f"({', '.join(trusted)}{'' if trust in config else ', its default'}): "
                "every host that reaches a pod or a node port can claim any client address"
            ),
            severity="security",
            remedy=f"set {trust} to the source addresses of the load balancer's connections",
        )
    if expects != (sends != "none"):
        what = (
            "expects a PROXY header, and the load balancer sends none"
            if expects
            else "expects no PROXY header, and the load balancer sends one"
        )
        code = "HeaderMissing" if expects else "HeaderNotExpected"
        yield Finding(
            code,
            f"the controller {what}",
            severity="error",
            evidence="according to its ConfigMap",
            remedy=off if expects else on,
        )


def _front(case: Case) -> Iterator[Finding]:
    front = case.front
    if not case.ready and not any(map(front.answered, ("plain", *HEADERS))):
        # Without a server, the way in which requests are rejected does not show whether a header is
        # expected. If a request is answered, a pod became ready after the EndpointSlices were read.
        yield Finding(
            "NoPod",
            "no pod behind the load balancer is ready",
            severity="error",
            subject=front.place,
            evidence=f"according to the EndpointSlices; {front.answers['plain'].how}",
            remedy="find the cause with `kubectl get pods`, and check again when a pod is ready",
        )
        return
    match front.answers["plain"].outcome:
        case "silent" | "unreachable":
            fix = "look at `fairlead status` on a gateway, and check that a pod is ready"
            yield Finding(
                "NoAnswer",
                front.answers["plain"].how,
                severity="error",
                subject=front.place,
                remedy=fix,
            )
        case "answered":
            yield from _address_seen(case, front)
            yield from _forgeries(case, front)
        case "rejected":
            yield from _rejected(case, front)
            yield from _forgeries(case, front)


def _rejected(case: Case, front: CheckedEntryPoint) -> Iterator[Finding]:
    """Return the finding for a front entry point that rejects a client's plain request.

    The cause is a header that only one side uses, a version that the receiver does not read, or the
    application itself. The entry points behind the load balancer tell these causes apart."""
    how = front.answers["plain"].how
    if front.headers:
        yield Finding(
            "HeaderMissing",
            "a PROXY header is expected, and the load balancer sends none",
            severity="error",
            evidence=f"without a header: {how}; with a header of this check: answered",
            subject=front.place,
            remedy=(
                "let the load balancer send a header (class proxy with "
                f"fairlead.io/proxy-protocol), or remove {EXPECTS}"
            ),
        )
        return
    if how == NOT_HTTP:
        yield Finding(
            "Rejected",
            how,
            severity="error",
            subject=front.place,
            remedy="check the port and its protocol (--tls always, if it is HTTPS)",
        )
        return
    beyond = [entry_point for entry_point in case.behind if entry_point.responds]
    without_header = [entry_point for entry_point in beyond if entry_point.answered("plain")]
    if without_header and case.sends != "none":
        yield Finding(
            "HeaderNotExpected",
            "the load balancer sends a PROXY header, and none is expected",
            severity="error",
            evidence=(
                f"{how}, while {without_header[0].place}, behind the load balancer, answers a "
                "request without a PROXY header"
            ),
            subject=front.place,
            remedy=f"remove fairlead.io/proxy-protocol from the Service, or set {EXPECTS}",
        )
    elif case.sends in HEADERS and (
        read := [
            entry_point
            for entry_point in beyond
            if entry_point.headers and case.sends not in entry_point.headers
        ]
    ):
        yield Finding(
            "HeaderVersionMismatch",
            (
                f"the load balancer sends PROXY {case.sends}, and {read[0].place} "
                f"reads {read[0].headers[0]} only"
            ),
            severity="error",
            evidence=how,
            subject=front.place,
            remedy=f"set fairlead.io/proxy-protocol: {read[0].headers[0]}",
        )
    elif beyond or case.sends == "none":
        yield Finding(
            "Rejected",
            f"{how}, and requests with a PROXY header are not answered either",
            severity="error",
            subject=front.place,
            remedy=_CHECK_APPLICATION,
        )
    else:
        sure = (
            "it is configured to send one"
            if case.sends
            else "if it sends one, which cannot be seen from here"
        )
        yield Finding(
            "HeaderNotExpected",
            (
                f"{how}, with and without a header of this check: "
                f"the load balancer's PROXY header is probably not expected ({sure})"
            ),
            severity="error",
            subject=front.place,
            remedy=(
                f"remove fairlead.io/proxy-protocol from the Service, or set {EXPECTS}; "
                "to be sure, name an entry point behind the load balancer (--behind)"
            ),
        )


def _address_seen(case: Case, front: CheckedEntryPoint) -> Iterator[Finding]:
    """Return the finding that tells whether the application saw the address of this host."""
    answer = front.answers["plain"]
    if not case.echo:
        yield Finding(
            "Answered",
            answer.how,
            severity="ok",
            subject=front.place,
        )
        return
    own = case.client or answer.own
    if own in answer.addresses:
        yield Finding(
            "AddressSeen",
            f"{answer.how}, and the application saw the address of this host, {own}",
            severity="ok",
            subject=front.place,
        )
    elif answer.addresses:
        seen = ", ".join(answer.addresses)
        cause = (
            f"if that is the load balancer, add its address to {TRUSTS}"
            if case.sends in HEADERS
            else (
                "set externalTrafficPolicy: Local; or, if a NAT on the path translates the address "
                "of this host to it, specify it with --client"
            )
        )
        yield Finding(
            "AddressLost",
            f"the application saw {seen} instead of the address of this host, {own}",
            severity="error",
            subject=front.place,
            remedy=cause,
        )
    else:
        yield Finding(
            "NoEcho",
            "it is unknown which client address the application saw",
            severity="warning",
            subject=front.place,
            evidence=(
                f"{answer.how}, without an IP address in the response, at {front.entry_point.path}"
            ),
            remedy="specify a path that shows the client's address",
        )


def _forgeries(case: Case, entry_point: CheckedEntryPoint) -> Iterator[Finding]:
    """Return the findings of forged headers: whether the entry point accepts and trusts them."""
    own = case.client or next(
        (answer.own for answer in entry_point.answers.values() if answer.own), ""
    )
    if trusted := [variant for variant in HEADERS if entry_point.trusts(variant)]:
        claimed = ", ".join(entry_point.answers[variant].claimed for variant in trusted)
        yield Finding(
            "ClientMayForge",
            (
                f"a PROXY header from {own} that claims {claimed} is trusted: "
                "every host that reaches this entry point can claim any address"
            ),
            severity="security",
            subject=entry_point.place,
            remedy=(
                f"narrow {TRUSTS} to the load balancer's addresses"
                + (
                    ""
                    if case.sends != "none"
                    else "; or remove it, because the load balancer sends no header"
                )
            ),
        )
    elif unshown := _unshown(case, entry_point):
        claimed = ", ".join(entry_point.answers[variant].claimed for variant in unshown)
        yield Finding(
            "HeaderAccepted",
            (
                f"a PROXY header from {own} is accepted; the answer does not show "
                "whether it is trusted"
            ),
            severity="warning",
            subject=entry_point.place,
            remedy=(
                f"specify a path that shows the client's address (--echo), or look for {claimed} "
                "in the application's log"
            ),
        )
    if (
        entry_point.trusts("forwarded-for")
        and own not in entry_point.answers["forwarded-for"].addresses
    ):
        yield Finding(
            "ForwardedForTrusted",
            (
                f"X-Forwarded-For: {entry_point.answers['forwarded-for'].claimed} from {own} is "
                "trusted"
            ),
            severity="security",
            subject=entry_point.place,
            remedy=(
                "remove or narrow use-forwarded-headers (ingress-nginx), src-ip-header (HAProxy), "
                "forwardedHeaders (Traefik)"
            ),
        )


def _unshown(case: Case, entry_point: CheckedEntryPoint) -> list[Variant]:
    """Return the versions of the header that are accepted, if the answer does not show whether they
    are trusted: it shows no address at all."""
    return [
        variant
        for variant in entry_point.headers
        if not (case.echo and entry_point.answers[variant].addresses)
    ]


def _behind(case: Case, entry_point: CheckedEntryPoint) -> Iterator[Finding]:
    """Return the findings of an entry point behind the load balancer, which clients can reach too
    unless the network prevents it: a forged header must not be trusted there."""
    if not entry_point.responds:
        yield Finding(
            "OutOfReach",
            (
                f"{entry_point.answers['plain'].how}: a forged header cannot be sent from this "
                "host; run the check in a pod too, because pods may reach this entry point"
            ),
            severity="info",
            subject=entry_point.place,
        )
        return
    yield from _forgeries(case, entry_point)
    if untested := _untested(entry_point):
        how = entry_point.answers[untested[0]].how
        yield Finding(
            NOT_TESTED,
            f"with a PROXY header {' or '.join(untested)}: {how}, so it was not tested whether a "
            "forged one is trusted",
            severity="info",
            subject=entry_point.place,
        )
    elif not entry_point.headers:
        yield Finding(
            "ForgeryWithoutEffect" if case.echo else "ForgeryRejected",
            "a forged PROXY header is rejected",
            severity="ok",
            subject=entry_point.place,
        )
    elif not _unshown(case, entry_point) and not any(map(entry_point.trusts, HEADERS)):
        yield Finding(
            "ForgeryWithoutEffect",
            "a forged PROXY header is accepted but not trusted",
            severity="ok",
            subject=entry_point.place,
        )


def _untested(entry_point: CheckedEntryPoint) -> list[Variant]:
    """Return the versions of the header without an answer that means anything. That a request is
    rejected means something only if the entry point answers other requests."""
    answers = entry_point.answers
    tells = any(map(entry_point.answered, answers))
    return [
        variant
        for variant in HEADERS
        if answers[variant].outcome in ("silent", "unreachable")
        or (answers[variant].outcome == "rejected" and not tells)
    ]


_CHECK_APPLICATION = (
    "check what the application requires: another host name (--host), TLS, or a client certificate"
)
