"""Rendering LoadBalancers, and the steps between what is and what should be."""

from hypothesis import given
from hypothesis import strategies as st

from fairlead.drivers.direct import spec
from fairlead.drivers.direct.spec import (
    ActualServer,
    DirectActual,
    DirectChange,
    HoldNodes,
    RemoveServer,
    ServerKey,
    SetNode,
    SetServer,
)
from fairlead.model import Listener, LoadBalancer, Member, MemberState, Protocol, ServiceKey
from fairlead.net.transition import Slots
from fairlead.plan.addresses import family_of

WEB, API = ServiceKey("default", "web"), ServiceKey("default", "api")
VIP = "203.0.113.10"


def load_balancer(
    *members: Member,
    service: ServiceKey = WEB,
    address: str = VIP,
    protocols: tuple[Protocol, ...] = ("TCP",),
    class_name: str = "fairlead.io/direct",
    affinity_timeout_s: int = 0,
) -> LoadBalancer:
    family = family_of(address)
    listeners = tuple(Listener(family, 80, protocol, "Local", 30080, members) for protocol in protocols)
    uid = f"uid-{service.name}"
    return LoadBalancer(service, uid, class_name, (address,), listeners, affinity_timeout_s=affinity_timeout_s)


def member(node: str, weight: int = 1, state: MemberState = "active") -> Member:
    return Member(node, f"192.0.2.{node[-1]}", weight, state)


def after(changes: tuple[DirectChange, ...], actual: dict[ServiceKey, DirectActual]) -> dict[ServiceKey, DirectActual]:
    """What would be read once the changes are applied."""
    servers = {each.key: (service, one.uid, each.slots) for service, one in actual.items() for each in one.servers}
    addresses = {pair for one in actual.values() for pair in one.addresses}
    held = {service: one.held for service, one in actual.items()}
    for change in changes:
        match change:
            case SetNode(node=node, address=address):
                addresses.add((node, address))
            case SetServer(service=service, uid=uid, server=server, slots=slots):
                servers[server.key] = (service, uid, slots)
            case HoldNodes(service=service, nodes=nodes):
                held[service] = nodes
            case RemoveServer(key=key):
                del servers[key]
    found = {}
    for service in {owner for owner, _, _ in servers.values()}:
        mine = tuple(ActualServer(key, slots) for key, (owner, _, slots) in sorted(servers.items()) if owner == service)
        named = {node for each in mine for node in each.slots.nodes}
        uid = next(uid for owner, uid, _ in servers.values() if owner == service)
        usable = tuple(sorted(pair for pair in addresses if pair[0] in named))
        found[service] = DirectActual(uid, mine, usable, held.get(service))
    return found


def steps(*intents: LoadBalancer, actual: dict[ServiceKey, DirectActual]) -> tuple[DirectChange, ...]:
    return spec.diff(spec.render({intent.service: intent for intent in intents}), actual)


def test_render_takes_its_own_class_and_passes_over_sctp() -> None:
    ours = load_balancer(member("node1"), protocols=("TCP", "SCTP", "UDP"))
    foreign = load_balancer(member("node1"), service=API, class_name="fairlead.io/proxy")
    rendered = spec.render({WEB: ours, API: foreign})
    assert rendered.keys() == {WEB}
    assert [str(server.key) for server in rendered[WEB].servers] == [f"{VIP}:80/TCP", f"{VIP}:80/UDP"]


def test_states_of_members_decide_who_gets_and_who_keeps() -> None:
    states: tuple[MemberState, ...] = ("active", "draining", "down", "pending")
    members = [member(f"node{i}", 2, state) for i, state in enumerate(states)]
    tcp, udp = spec.render({WEB: load_balancer(*members, protocols=("TCP", "UDP"))})[WEB].servers
    assert tcp.weights == udp.weights == (("node0", 2),)
    assert tcp.keepers == ("node0", "node1", "node2", "node3")
    assert udp.keepers == ("node0", "node1", "node3")


def test_spelling_of_addresses_makes_no_difference() -> None:
    one = spec.render({WEB: load_balancer(member("node1"), address="2001:DB8:0:0::1")})
    assert one[WEB].servers[0].key == ServerKey("2001:db8::1", 80, "TCP")


def test_changes_print_as_what_they_do() -> None:
    changes = steps(load_balancer(member("node1", 3), member("node2"), member("node3", 1, "draining")), actual={})
    assert [str(change) for change in changes] == [
        "set node node1 address 192.0.2.1",
        "set node node2 address 192.0.2.2",
        "set vip 203.0.113.10:80/TCP default/web weights node1=3,node2=1 slots 1021 keeping node3",
        "hold nodes node1,node2,node3 default/web",
    ]
    (removal,) = spec.diff({}, after(changes, {}))
    assert str(removal) == "remove vip 203.0.113.10:80/TCP default/web"


def test_a_listener_without_members_stays() -> None:
    changes = steps(load_balancer(), actual={})
    assert [str(change) for change in changes] == [
        "set vip 203.0.113.10:80/TCP default/web weights none slots 0",
        "hold nodes none default/web",
    ]
    there = after(changes, {})
    assert there[WEB].servers[0].slots == Slots()
    assert steps(load_balancer(), actual=there) == ()


def test_a_listener_that_passes_to_another_service_keeps_its_slots() -> None:
    actual = after(steps(load_balancer(member("node1"), member("node2")), actual={}), {})
    changes = steps(load_balancer(member("node1"), member("node2"), service=API), actual=actual)
    assert [type(change) for change in changes] == [SetServer, HoldNodes]
    assert after(changes, actual)[API].servers == actual[WEB].servers


def test_a_service_made_anew_under_its_name_is_marked_anew() -> None:
    actual = after(steps(load_balancer(member("node1")), actual={}), {})
    old = {WEB: DirectActual("uid-of-before", actual[WEB].servers, actual[WEB].addresses, actual[WEB].held)}
    (change,) = steps(load_balancer(member("node1")), actual=old)
    assert isinstance(change, SetServer)
    assert change.uid == "uid-web"


MEMBERS = st.lists(
    st.tuples(st.integers(1, 5), st.integers(0, 30), st.sampled_from(["active", "draining", "down", "pending"])),
    unique_by=lambda row: row[0],
    max_size=5,
)
INTENTS = st.builds(
    lambda rows, affinity, protocols: load_balancer(
        *sorted(member(f"node{number}", weight, state) for number, weight, state in rows),
        affinity_timeout_s=affinity,
        protocols=protocols,
    ),
    MEMBERS,
    st.sampled_from([0, 60]),
    st.sampled_from([("TCP",), ("UDP",), ("TCP", "UDP")]),
)


def test_after_a_start_the_plan_says_again_which_nodes_are_held() -> None:
    intent = load_balancer(member("node1"), member("node2", 0, "draining"))
    actual = after(steps(intent, actual={}), {})
    forgotten = {WEB: DirectActual(actual[WEB].uid, actual[WEB].servers, actual[WEB].addresses)}
    assert steps(intent, actual=forgotten) == (HoldNodes(WEB, ("node1", "node2")),)


@given(st.lists(INTENTS, min_size=1, max_size=5))
def test_applying_the_difference_leaves_none(intents: list[LoadBalancer]) -> None:
    actual: dict[ServiceKey, DirectActual] = {}
    for intent in intents:
        actual = after(steps(intent, actual=actual), actual)
        assert steps(intent, actual=actual) == ()
