"""Whether a load balancer of OpenStack has a floating IP, and which.

In: annotations of a Service (ours, or OCCM's of the same name), the configuration, the addresses
that it asks for. Out: a FloatingWish, or None for a load balancer that is reached from inside
alone; and Findings on what has no effect. Pure. Meanings: cloud-provider-openstack 1.34. A floating
IP is IPv4, so load balancers of IPv6 have none."""

from collections.abc import Mapping

from fairlead.model import Family, Finding, FloatingWish
from fairlead.plan.annotation_reader import AnnotationReader
from fairlead.plan.annotations import INTERNAL, KEEP_ADDRESS, WITHOUT_EFFECT, found
from fairlead.sections import OctaviaConfig

SUBNET_WISHES = ("floating-subnet-id", "floating-subnet", "floating-subnet-tags")
FLOATING_WISHES = ("floating-network-id", *SUBNET_WISHES)
REPORT = "loadbalancer.openstack.org/load-balancer-address"
"""Written by OCCM: the address that a Service had there."""


def floating_of(
    wishes: AnnotationReader,
    annotations: Mapping[str, str],
    config: OctaviaConfig,
    family: Family,
    address: str,
) -> FloatingWish | None:
    """`address`: what the Service asks for; with a floating IP, it is that one."""
    given = [name for wish in FLOATING_WISHES if (name := wishes.given(wish))]
    given += [name for name in [found(annotations, KEEP_ADDRESS)[0]] if name]
    internal = wishes.switch(INTERNAL, config.internal)
    keep = wishes.switch(KEEP_ADDRESS, False)
    if not config.floating_network_id:
        outside = found(annotations, INTERNAL)[0] if not internal else ""
        _without_effect(
            wishes,
            [*given, *([outside] if outside else [])],
            "no floating IPs are configured (octavia.floatingNetworkId)",
        )
        return None
    if internal:
        _without_effect(wishes, given, "an internal load balancer has no floating IP")
        return None
    if family == "IPv6":
        _without_effect(wishes, given, "there are no floating IPs of IPv6")
        return None
    subnet = {wish: wishes.read(wish, lambda text: text, "", "") for wish in SUBNET_WISHES}
    if not any(subnet.values()) and not wishes.given("floating-network-id"):
        subnet = dict(
            zip(
                SUBNET_WISHES,
                (config.floating_subnet_id, config.floating_subnet, config.floating_subnet_tags),
                strict=True,
            )
        )
    return FloatingWish(
        network_id=wishes.read(
            "floating-network-id", lambda text: text, "", config.floating_network_id
        ),
        address=address,
        again=annotations.get(REPORT, "").strip(),
        keep=keep,
        subnet_id=subnet["floating-subnet-id"],
        subnet=subnet["floating-subnet"],
        subnet_tags=subnet["floating-subnet-tags"],
    )


def _without_effect(wishes: AnnotationReader, names: list[str], why: str) -> None:
    if names:
        message = f"{', '.join(names)} {'have' if len(names) > 1 else 'has'} no effect: {why}"
        wishes.notes.append(Finding(WITHOUT_EFFECT, message))
