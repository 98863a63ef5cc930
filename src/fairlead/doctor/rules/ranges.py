"""Rules about loadBalancerSourceRanges. Pure.

In: a `Case`. Out: findings about clients that the ranges exclude unintentionally."""

import ipaddress
from collections.abc import Iterable

from fairlead.doctor.facts import Case
from fairlead.doctor.finding import Actor, Fact, RootCause
from fairlead.errors import Refused
from fairlead.net.address import family_of
from fairlead.plan.members import listed
from fairlead.plan.service import source_ranges

OWNER: Actor = "Service owner"

Network = ipaddress.IPv4Network | ipaddress.IPv6Network


def ranges_forget_pods(case: Case) -> RootCause | None:
    """Return the finding that source ranges exclude pods. The node's service proxy answers for an
    address with ipMode VIP, and applies the ranges to callers inside too."""
    ingress = case.service.status.load_balancer.ingress
    ranges = _ranges(case)
    if (
        not ranges
        or case.facts.nodes is None
        or not any(each.ip and each.ip_mode != "Proxy" for each in ingress)
    ):
        return None
    config = case.facts.config
    cidrs = {cidr for each in case.facts.nodes for cidr in each.spec.pod_cidrs}
    cidrs = cidrs or set(config.cluster.pod_cidrs if config is not None else ())
    families = {each.version for each in ranges}
    outside = sorted(
        str(network)
        for network in map(ipaddress.ip_network, cidrs)
        if network.version in families and not _covered(network, ranges)
    )
    if not outside:
        return None
    return RootCause(
        code="SourceRangeForgetsPods",
        severity="warning",
        subject=case.subject,
        message=(
            f"The source ranges of {case.subject} do not include the pods ({listed(outside)}): a "
            "pod that calls the load-balancer address is dropped by the service proxy of its node"
        ),
        known_by=(
            Fact("source ranges", _texts(ranges), f"{case.subject} spec"),
            Fact("pod CIDRs", listed(outside), "Nodes spec.podCIDRs"),
            Fact("ipMode", "VIP", f"{case.subject} status.loadBalancer"),
        ),
        remedy=_set_ranges(case, [*map(str, ranges), *outside]),
        actor=OWNER,
    )


def ranges_forget_family(case: Case) -> RootCause | None:
    """Return the finding that source ranges have no entry of a family that the Service serves."""
    ranges = _ranges(case)
    served = {
        family_of(each.ip) for each in case.service.status.load_balancer.ingress if each.ip
    } or set(case.service.spec.ip_families)
    have = {f"IPv{each.version}" for each in ranges}
    missing = sorted(served - have)
    if not ranges or not missing or len(served) < 2:
        return None
    everyone = "::/0" if missing == ["IPv6"] else "0.0.0.0/0"
    return RootCause(
        code="SourceRangeForgetsFamily",
        severity="warning",
        subject=case.subject,
        message=(
            f"{case.subject} has {missing[0]} addresses and no {missing[0]} source range, so all "
            f"{missing[0]} clients are dropped"
        ),
        known_by=(
            Fact("source ranges", _texts(ranges), f"{case.subject} spec"),
            Fact("addresses", ", ".join(case.addresses), f"{case.subject} status"),
        ),
        remedy=f"{_set_ranges(case, [*map(str, ranges), everyone])}  # or narrower ranges",
        actor=OWNER,
    )


def _ranges(case: Case) -> list[Network]:
    try:
        read = [ipaddress.ip_network(each, strict=False) for each in source_ranges(case.service)]
    except Refused:
        return []
    # Two ranges may cover a pod CIDR together.
    ipv4 = [each for each in read if isinstance(each, ipaddress.IPv4Network)]
    ipv6 = [each for each in read if isinstance(each, ipaddress.IPv6Network)]
    return [*ipaddress.collapse_addresses(ipv4), *ipaddress.collapse_addresses(ipv6)]


def _covered(
    network: Network,
    ranges: Iterable[Network],
) -> bool:
    return any(
        int(each.network_address) <= int(network.network_address)
        and int(network.broadcast_address) <= int(each.broadcast_address)
        for each in ranges
        if each.version == network.version
    )


def _texts(ranges: Iterable[object]) -> str:
    return ", ".join(map(str, ranges))


def _set_ranges(case: Case, ranges: Iterable[str]) -> str:
    written = ",".join(f'"{each}"' for each in ranges)
    return (
        f"kubectl patch service -n {case.namespace} {case.name} --type=merge "
        f'-p \'{{"spec":{{"loadBalancerSourceRanges":[{written}]}}}}\''
    )
