"""What the answers of an ingress mean: which set-up is wrong, how that is known, and what to do.

In: a `Case`: one port with the answers at its front (the load balancer's address) and behind it (a
pod, a node port: past the balancer), what the balancer is set to send, and the controller's
ConfigMap where it could be read. Out: `Finding`s. Pure.

What can be known from outside, and what not:
* Whether a header is expected shows in who is answered and who is turned away, with no help of the
  application.
* Whether a header is *believed* only shows where the application tells which client it saw: the
  request's path must lead to a
  page that says so (`echo`). Without one, a header that is taken is only a suspicion; the forged
  addresses may be looked for in the application's log.
* A header that is forged at the front of a balancer which writes its own is harmless: the receiver
  reads the balancer's, and
  takes the forged one for a broken request. It is those who reach the receiver past the balancer
  that must not be believed.
"""

from collections.abc import Iterator, Mapping

import msgspec

from fairlead.ingress.entrypoint import Answer, EntryPoint, Variant
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


class CheckedEntryPoint(msgspec.Struct, frozen=True):
    """A entry_point, what it is called, and what each variant of knocking came to."""

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
        """The versions of a header with which it answers."""
        return tuple(variant for variant in HEADERS if self.answered(variant))

    @property
    def responds(self) -> bool:
        return any(answer.outcome in ("answered", "rejected") for answer in self.answers.values())

    def trusts(self, variant: Variant) -> bool:
        """Whether the application says that it saw the address which was forged."""
        answer = self.answers[variant]
        return answer.outcome == "answered" and answer.claimed in answer.addresses


class Case(msgspec.Struct, frozen=True):
    """One port. `sends`: what the balancer is set to write before a connection; None: not known.
    `echo`: the path is promised to show the client's address. `client`: the address that we have
    outside; empty: what this machine says. `ready` False: there is no pod that could answer."""

    sends: Header | None
    front: CheckedEntryPoint
    behind: tuple[CheckedEntryPoint, ...] = ()
    echo: bool = False
    client: str = ""
    ready: bool = True


def findings(case: Case) -> list[Finding]:
    """Of one port, without repetition."""
    made = [*_front(case)] + [
        each for entry_point in case.behind for each in _behind(case, entry_point)
    ]
    return list(dict.fromkeys(made))


def config_findings(
    controller: Controller, config: Mapping[str, str], sends: Header
) -> Iterator[Finding]:
    """Of the controller's ConfigMap beside what the balancer sends. (Traefik has none.)"""
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
                        "use-forwarded-headers is on and proxy-real-ip-cidr holds everybody: "
                        "every client may claim any address by X-Forwarded-For"
                    ),
                    severity="security",
                    remedy=(
                        "take use-forwarded-headers out, or name the proxies before it in "
                        "proxy-real-ip-cidr"
                    ),
                )
        case "haproxy":
            expects = bool(config.get("proxy-protocol"))
            trusted = config.get("proxy-protocol", "").split(",")
            trust, on, off = (
                "proxy-protocol",
                "set proxy-protocol to the balancer's addresses",
                "take proxy-protocol out",
            )
        case "traefik":
            return
    if expects and include_every_address(trusted):
        yield Finding(
            "TrustsEverySource",
            (
                f"{trust} holds every address "
                f"({', '.join(trusted)}{'' if trust in config else ', its default'}): "
                "whoever reaches a pod or a node port may claim any client's address"
            ),
            severity="security",
            remedy=f"set {trust} to the addresses that the balancer's connections come from",
        )
    if expects != (sends != "none"):
        what = (
            "expects a PROXY header, and the balancer sends none"
            if expects
            else "expects no PROXY header, and one is sent"
        )
        code = "HeaderMissing" if expects else "HeaderNotExpected"
        yield Finding(
            code,
            f"the controller {what}",
            severity="error",
            evidence="by its ConfigMap",
            remedy=off if expects else on,
        )


def _front(case: Case) -> Iterator[Finding]:
    front = case.front
    if not case.ready and not any(map(front.answered, ("plain", *HEADERS))):
        # Nobody is there who could expect a header or not: how callers are turned away tells
        # nothing of it.
        yield Finding(
            "NoPod",
            "no pod behind it is ready",
            severity="error",
            subject=front.place,
            evidence=f"by the EndpointSlices; {front.answers['plain'].how}",
            remedy="see why by `kubectl get pods`, and check again when one is ready",
        )
        return
    match front.answers["plain"].outcome:
        case "silent" | "unreachable":
            fix = "see `fairlead status` on a gateway, and whether a pod is ready"
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
    """Who calls as clients do is turned away: whose fault is it?"""
    how = front.answers["plain"].how
    if front.headers:
        yield Finding(
            "HeaderMissing",
            "a PROXY header is expected and none is there",
            severity="error",
            evidence=f"without one {how}, with one that we wrote answered",
            subject=front.place,
            remedy=(
                "let the balancer send one (class proxy with fairlead.io/proxy-protocol), or take "
                f"out {EXPECTS}"
            ),
        )
        return
    beyond = [entry_point for entry_point in case.behind if entry_point.responds]
    unannounced = [entry_point for entry_point in beyond if entry_point.answered("plain")]
    if unannounced and case.sends != "none":
        yield Finding(
            "HeaderNotExpected",
            "the balancer sends a PROXY header, and none is expected",
            severity="error",
            evidence=(
                f"{how}, while {unannounced[0].place}, past the balancer, answers a caller "
                "without a PROXY header"
            ),
            subject=front.place,
            remedy=f"take fairlead.io/proxy-protocol off the Service, or set {EXPECTS}",
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
                f"the balancer sends PROXY {case.sends}, and {read[0].place} "
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
            f"{how}, and so is who comes with a PROXY header",
            severity="error",
            subject=front.place,
            remedy=_CHECK_APPLICATION,
        )
    else:
        sure = (
            "it is set to send one"
            if case.sends
            else "if it sends one: that cannot be seen from here"
        )
        yield Finding(
            "HeaderNotExpected",
            (
                f"{how}, with and without a header of ours: "
                f"probably the balancer's PROXY header is not expected ({sure})"
            ),
            severity="error",
            subject=front.place,
            remedy=(
                f"take fairlead.io/proxy-protocol off the Service, or set {EXPECTS}; "
                "name an entry_point past the balancer (--behind) to be sure"
            ),
        )


def _address_seen(case: Case, front: CheckedEntryPoint) -> Iterator[Finding]:
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
            f"{answer.how}, and the application saw our address, {own}",
            severity="ok",
            subject=front.place,
        )
    elif answer.addresses:
        seen = ", ".join(answer.addresses)
        cause = (
            f"if that is the balancer, its address is not in {TRUSTS}"
            if case.sends in HEADERS
            else (
                "set externalTrafficPolicy: Local; or if a NAT on our way gives us that "
                "address, say so (--client)"
            )
        )
        yield Finding(
            "AddressLost",
            f"the application saw {seen} and not us, {own}",
            severity="error",
            subject=front.place,
            remedy=cause,
        )
    else:
        yield Finding(
            "NoEcho",
            "it is not known which client the application saw",
            severity="warning",
            subject=front.place,
            evidence=f"{answer.how} without any address in it, at {front.entry_point.path}",
            remedy="name a path that shows the client's address",
        )


def _forgeries(case: Case, entry_point: CheckedEntryPoint) -> Iterator[Finding]:
    """What was claimed at an entry_point, and whether it was believed there."""
    own = case.client or next(
        (answer.own for answer in entry_point.answers.values() if answer.own), ""
    )
    if believed := [variant for variant in HEADERS if entry_point.trusts(variant)]:
        claimed = ", ".join(entry_point.answers[variant].claimed for variant in believed)
        yield Finding(
            "ClientMayForge",
            (
                f"a PROXY header from {own} that claims {claimed} is believed: "
                "whoever gets here may claim any address"
            ),
            severity="security",
            subject=entry_point.place,
            remedy=(
                f"narrow {TRUSTS} to the balancer's own addresses"
                + ("" if case.sends != "none" else "; or take it out: nobody sends a header here")
            ),
        )
    elif entry_point.headers and not case.echo:
        claimed = ", ".join(entry_point.answers[variant].claimed for variant in entry_point.headers)
        yield Finding(
            "HeaderAccepted",
            (
                f"a PROXY header from {own} is taken; whether it is believed, the "
                "answer does not tell"
            ),
            severity="warning",
            subject=entry_point.place,
            remedy=(
                f"name a path that shows the client's address (--echo), or look for {claimed} in "
                "the application's log"
            ),
        )
    if (
        entry_point.trusts("forwarded-for")
        and own not in entry_point.answers["forwarded-for"].addresses
    ):
        yield Finding(
            "ForwardedForTrusted",
            (
                f"X-Forwarded-For: {entry_point.answers['forwarded-for'].claimed} from {own} is believed"
            ),
            severity="security",
            subject=entry_point.place,
            remedy=(
                "take use-forwarded-headers (ingress-nginx), src-ip-header (HAProxy), "
                "forwardedHeaders (Traefik) out or narrow it"
            ),
        )


def _behind(case: Case, entry_point: CheckedEntryPoint) -> Iterator[Finding]:
    if not entry_point.responds:
        yield Finding(
            "OutOfReach",
            (
                f"{entry_point.answers['plain'].how}: who is where we are cannot forge an "
                "address there; "
                "run this in a pod as well, for pods may reach what clients cannot"
            ),
            severity="info",
            subject=entry_point.place,
        )
        return
    yield from _forgeries(case, entry_point)
    if case.echo and not any(entry_point.trusts(variant) for variant in HEADERS):
        variant = "is read and not believed" if entry_point.headers else "is turned away"
        yield Finding(
            "ForgeryWithoutEffect",
            f"a forged PROXY header {variant}",
            severity="ok",
            subject=entry_point.place,
        )
    elif not entry_point.headers:
        yield Finding(
            "ForgeryRejected",
            "a forged PROXY header is turned away",
            severity="ok",
            subject=entry_point.place,
        )


_CHECK_APPLICATION = (
    "look at the application itself: does it want another host name (--host), TLS, a "
    "client's certificate?"
)
