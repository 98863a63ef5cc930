"""Decide whether a load balancer of OpenStack gets a floating IP, and which one.

In: the annotations of a Service (of Fairlead, or of cloud-provider-openstack with the same short
names), the configuration, the requested address. Out: a FloatingWish, or None for a load balancer
that is reachable only at its own address; and Findings about annotations without effect. Pure. The
meaning of the annotations follows cloud-provider-openstack 1.34. Floating IPs are IPv4 only, so an
IPv6 load balancer has none."""

from collections.abc import Mapping

from fairlead.model import Family, Finding, FloatingIpRequest
from fairlead.plan.addresses import KEEP
from fairlead.plan.annotation_reader import AnnotationReader, switch
from fairlead.plan.annotations import INTERNAL, KEEP_ADDRESS, REPORT, WITHOUT_EFFECT, found
from fairlead.sections import OctaviaConfig

SUBNET_ANNOTATIONS = ("floating-subnet-id", "floating-subnet", "floating-subnet-tags")
IS_INTERNAL = switch(INTERNAL)
FLOATING_ANNOTATIONS = ("floating-network-id", *SUBNET_ANNOTATIONS)


def floating_of(
    reader: AnnotationReader,
    annotations: Mapping[str, str],
    config: OctaviaConfig,
    family: Family,
    address: str,
) -> FloatingIpRequest | None:
    """Return the request for a floating IP; None if the load balancer gets none. Findings about
    annotations without effect are added to `reader.notes`. `family`: the family of the load
    balancer. `address`: the address that the Service requests; it becomes the floating IP."""
    given = [name for short in FLOATING_ANNOTATIONS if (name := reader.given(short))]
    given += [name for name in [found(annotations, KEEP_ADDRESS)[0]] if name]
    internal = reader.get(IS_INTERNAL, config.internal)
    keep = reader.get(KEEP, False)
    if not config.floating_network_id:
        outside = found(annotations, INTERNAL)[0] if not internal else ""
        _without_effect(
            reader,
            [*given, *([outside] if outside else [])],
            "no floating IPs are configured (octavia.floatingNetworkId)",
        )
        return None
    if internal:
        _without_effect(reader, given, "an internal load balancer has no floating IP")
        return None
    if family == "IPv6":
        _without_effect(reader, given, "there are no IPv6 floating IPs")
        return None
    subnet = {short: reader.text(short) for short in SUBNET_ANNOTATIONS}
    # The configured subnet belongs to the configured network, so it does not apply if the Service
    # names a network or a subnet.
    if not any(subnet.values()) and not reader.given("floating-network-id"):
        subnet = dict(
            zip(
                SUBNET_ANNOTATIONS,
                (config.floating_subnet_id, config.floating_subnet, config.floating_subnet_tags),
                strict=True,
            )
        )
    return FloatingIpRequest(
        network_id=reader.text("floating-network-id", config.floating_network_id),
        address=address,
        reuse_address=annotations.get(REPORT, "").strip(),
        keep=keep,
        subnet_id=subnet["floating-subnet-id"],
        subnet=subnet["floating-subnet"],
        subnet_tags=subnet["floating-subnet-tags"],
    )


def _without_effect(reader: AnnotationReader, names: list[str], why: str) -> None:
    if names:
        message = f"{', '.join(names)} {'have' if len(names) > 1 else 'has'} no effect: {why}"
        reader.notes.append(Finding(WITHOUT_EFFECT, message))
