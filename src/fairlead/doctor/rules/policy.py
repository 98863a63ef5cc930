"""The rule about NetworkPolicies that drop clients from outside of the cluster. Pure.

In: a `Case` with policy Local, whose pods see the clients' own addresses. Out: a finding if no rule
of any NetworkPolicy of the pods admits an address outside of the cluster. Follows the API reference
of networking.k8s.io/v1: policies add up, and a pod that no policy selects admits everything."""

import ipaddress
from collections.abc import Mapping, Sequence

import msgspec

from fairlead.doctor.facts import Case
from fairlead.doctor.finding import Fact, RootCause
from fairlead.doctor.objects import IngressRule, NetworkPolicy, PolicyPeer, PolicyPort
from fairlead.doctor.rules.traffic import ready_pods
from fairlead.kube.objects import Pod, ServicePort
from fairlead.model import Family
from fairlead.plan.members import listed
from fairlead.plan.pools import matches

CLUSTER_LENGTH = {4: 16, 6: 48}
EVERYONE: Mapping[Family, str] = {"IPv4": "0.0.0.0/0", "IPv6": "::/0"}
Network = ipaddress.IPv4Network | ipaddress.IPv6Network


def policy_drops_clients(case: Case) -> RootCause | None:
    """Return the finding that the NetworkPolicies of all ready pods admit only the cluster. Classes
    whose connections come from a load balancer are left out: its address may be admitted."""
    facts = case.facts
    ingress = case.service.status.load_balancer.ingress
    if not case.local or not ingress or any(each.ip_mode == "Proxy" for each in ingress):
        return None
    if not facts.policies or facts.nodes is None:
        return None
    inside = _inside(case)
    pods = ready_pods(case)
    if not inside or not pods:
        return None
    for port in case.service.spec.ports:
        applied = [(pod, _applied(case, pod)) for pod in pods]
        if any(_admits(policies, pod, port, inside) for pod, policies in applied):
            continue
        names = sorted({each.metadata.name for _, policies in applied for each in policies})
        policy = names[0]
        number = port.target_port if port.target_port is not None else port.port
        has_rules = any(
            each.metadata.name == policy and each.spec.ingress for each in applied[0][1]
        )
        patch = _admit_everyone(case, number, port.protocol, has_rules=has_rules)
        return RootCause(
            code="NetworkPolicyDropsClients",
            severity="warning",
            subject=f"NetworkPolicy {case.namespace}/{policy}",
            message=(
                f"NetworkPolicy {listed(names)} of namespace {case.namespace} admits no address "
                f"outside of the cluster at port {port.port}/{port.protocol} of {case.subject}: "
                "with externalTrafficPolicy Local pods see the clients' own addresses, so a "
                "network plugin that enforces the policy drops all clients"
            ),
            known_by=(
                Fact("policies of the pods", listed(names), "NetworkPolicies spec.ingress"),
                Fact("addresses of the cluster", listed(sorted(map(str, inside))), "Nodes"),
                Fact("externalTrafficPolicy", "Local", f"{case.subject} spec"),
            ),
            remedy=(
                f"kubectl patch networkpolicy -n {case.namespace} {policy} --type=json -p '{patch}'"
                "  # or a narrower range"
            ),
            actor="Service owner",
            consequences=(f"{case.subject} answers no client outside of the cluster",),
        )
    return None


def _admit_everyone(case: Case, number: int | str, protocol: str, *, has_rules: bool) -> str:
    """Return the JSON patch that adds a rule for every client of the Service's families. A policy
    without rules has no list to which the rule could be added."""
    families = case.service.spec.ip_families or ("IPv4",)
    everyone = [{"ipBlock": {"cidr": EVERYONE[each]}} for each in families]
    rule = {"from": everyone, "ports": [{"port": number, "protocol": protocol}]}
    path, value = ("/spec/ingress/-", rule) if has_rules else ("/spec/ingress", [rule])
    return msgspec.json.encode([{"op": "add", "path": path, "value": value}]).decode()


def _applied(case: Case, pod: Pod) -> list[NetworkPolicy]:
    """Return the policies that isolate a pod for ingress. `policyTypes` has Ingress by default."""
    return [
        each
        for each in case.facts.policies or ()
        if each.metadata.namespace == case.namespace
        and "Ingress" in (each.spec.policy_types or ("Ingress",))
        and matches(each.spec.pod_selector, pod.metadata.labels)
    ]


def _admits(
    policies: Sequence[NetworkPolicy], pod: Pod, port: ServicePort, inside: Sequence[Network]
) -> bool:
    return not policies or any(
        _has_port(rule, pod, port) and _admits_outside(rule, inside)
        for policy in policies
        for rule in policy.spec.ingress or ()
    )


def _has_port(rule: IngressRule, pod: Pod, port: ServicePort) -> bool:
    return not rule.ports or any(_is_port(each, pod, port) for each in rule.ports)


def _is_port(each: PolicyPort, pod: Pod, port: ServicePort) -> bool:
    if each.protocol != port.protocol:
        return False
    if each.port is None:
        return True
    wanted = _number(pod, port.target_port if port.target_port is not None else port.port, port)
    first = _number(pod, each.port, port)
    if wanted is None or first is None:
        # A name that the pod lacks: another rule reports it, and this one stays silent.
        return True
    return first <= wanted <= (each.end_port or first)


def _number(pod: Pod, port: int | str, service_port: ServicePort) -> int | None:
    if isinstance(port, int):
        return port
    return next(
        (
            each.container_port
            for container in pod.spec.containers
            for each in container.ports
            if each.name == port and each.protocol == service_port.protocol
        ),
        None,
    )


def _admits_outside(rule: IngressRule, inside: Sequence[Network]) -> bool:
    return not rule.from_ or any(_is_outside(each, inside) for each in rule.from_)


def _is_outside(peer: PolicyPeer, inside: Sequence[Network]) -> bool:
    if peer.ip_block is None:
        return False
    try:
        network = ipaddress.ip_network(peer.ip_block.cidr, strict=False)
    except ValueError:
        return True
    return not any(
        int(each.network_address) <= int(network.network_address)
        and int(network.broadcast_address) <= int(each.broadcast_address)
        for each in inside
        if each.version == network.version
    )


def _inside(case: Case) -> list[Network]:
    """Return the addresses of pods and nodes. Without pod CIDRs it is not known what is outside.

    Nodes have parts of the cluster's pod CIDR, which the API does not show, and which policies
    name: usually a /16, or a /48 of IPv6."""
    nodes, config = case.facts.nodes or (), case.facts.config
    pods = [cidr for each in nodes for cidr in each.spec.pod_cidrs]
    pods += config.cluster.pod_cidrs if config is not None else ()
    addresses = [
        one.address
        for each in nodes
        for one in each.status.addresses
        if one.type in ("InternalIP", "ExternalIP")
    ]
    networks = [ipaddress.ip_network(each) for each in pods]
    wider = [
        each.supernet(new_prefix=min(each.prefixlen, CLUSTER_LENGTH[each.version]))
        for each in networks
    ]
    return [*wider, *map(ipaddress.ip_network, addresses)] if pods else []
