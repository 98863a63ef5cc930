"""Rendering LoadBalancers, and the changes from the installed to the desired state."""

from array import array

from hypothesis import given
from hypothesis import strategies as st

from fairlead.drivers.direct import spec
from fairlead.drivers.direct.spec import (
    ActualListener,
    DirectActual,
    DirectChange,
    ListenerKey,
    RemoveListener,
    SetListener,
    SetNode,
)
from fairlead.model import (
    DirectSettings,
    HealthMonitor,
    Listener,
    LoadBalancer,
    Member,
    MemberState,
    Protocol,
    ProxySettings,
    ServiceKey,
    Settings,
    TrafficPolicy,
    Verdict,
)
from fairlead.net.address import family_of
from fairlead.net.transition import Slots
from fairlead.plan.members import UnconfirmedMembers, VerdictOf, confirm

WEB, API = ServiceKey("default", "web"), ServiceKey("default", "api")
VIP = "203.0.113.10"


def load_balancer(
    *members: Member,
    service: ServiceKey = WEB,
    address: str = VIP,
    protocols: tuple[Protocol, ...] = ("TCP",),
    settings: Settings | None = None,
    affinity_timeout_s: int = 0,
) -> LoadBalancer:
    family = family_of(address)
    listeners = tuple(
        Listener(family, 80, protocol, "Local", 30080, members) for protocol in protocols
    )
    uid = f"uid-{service.name}"
    return LoadBalancer(
        service,
        uid,
        "fairlead.io/direct",
        (address,),
        listeners,
        affinity_timeout_s=affinity_timeout_s,
        settings=settings or DirectSettings(),
    )


def member(node: str, weight: int = 1, state: MemberState = "active") -> Member:
    return Member(node, f"192.0.2.{node[-1]}", weight, state)


def after(
    changes: tuple[DirectChange, ...], actual: dict[ServiceKey, DirectActual]
) -> dict[ServiceKey, DirectActual]:
    """Return the state that would be read after these changes were applied."""
    listeners = {
        each.key: (service, one.uid, each)
        for service, one in actual.items()
        for each in one.listeners
    }
    addresses = {pair for one in actual.values() for pair in one.addresses}
    for change in changes:
        match change:
            case SetNode(node=node, address=address):
                addresses.add((node, address))
            case SetListener(service=service, uid=uid, listener=listener, slots=slots):
                retained = tuple(sorted({*listener.retained_nodes, *listener.departed}))
                listeners[listener.key] = (
                    service,
                    uid,
                    ActualListener(listener.key, slots, listener, retained),
                )
            case RemoveListener(key=key):
                del listeners[key]
    found = {}
    for service in {owner for owner, _, _ in listeners.values()}:
        mine = tuple(each for _, (owner, _, each) in sorted(listeners.items()) if owner == service)
        named = {node for each in mine for node in each.slots.nodes}
        uid = next(uid for owner, uid, _ in listeners.values() if owner == service)
        found[service] = DirectActual(
            uid, mine, tuple(sorted(pair for pair in addresses if pair[0] in named))
        )
    return found


def steps(
    *intents: LoadBalancer, actual: dict[ServiceKey, DirectActual]
) -> tuple[DirectChange, ...]:
    return spec.diff(spec.render({intent.service: intent for intent in intents}), actual)


def test_render_selects_its_own_class_and_all_protocols() -> None:
    ours = load_balancer(member("node1"), protocols=("TCP", "SCTP", "UDP"))
    foreign = load_balancer(member("node1"), service=API, settings=ProxySettings())
    rendered = spec.render({WEB: ours, API: foreign})
    assert rendered.keys() == {WEB}
    assert [str(each.key) for each in rendered[WEB].listeners] == [
        f"{VIP}:80/{each}" for each in ("SCTP", "TCP", "UDP")
    ]


def test_states_of_members_decide_which_nodes_get_and_which_keep_connections() -> None:
    states: tuple[MemberState, ...] = ("active", "draining", "down", "pending")
    members = [member(f"node{i}", 2, state) for i, state in enumerate(states)]
    sctp, tcp, udp = spec.render({WEB: load_balancer(*members, protocols=("SCTP", "TCP", "UDP"))})[
        WEB
    ].listeners
    assert sctp.weights == tcp.weights == udp.weights == (("node0", 2),)
    assert sctp.retained_nodes == tcp.retained_nodes == ("node0", "node1", "node2", "node3")
    assert udp.retained_nodes == ("node0", "node1", "node3")


def test_spelling_of_addresses_makes_no_difference() -> None:
    one = spec.render({WEB: load_balancer(member("node1"), address="2001:DB8:0:0::1")})
    assert one[WEB].listeners[0].key == ListenerKey("2001:db8::1", 80, "TCP")


def test_the_text_of_a_change_is_its_command() -> None:
    changes = steps(
        load_balancer(member("node1", 3), member("node2"), member("node3", 1, "draining")),
        actual={},
    )
    assert [str(change) for change in changes] == [
        "set node node1 address 192.0.2.1",
        "set node node2 address 192.0.2.2",
        "set listener 203.0.113.10:80/TCP default/web weights node1=3,node2=1 slots 1021 retained "
        "node3",
    ]
    (removal,) = spec.diff({}, after(changes, {}))
    assert str(removal) == "remove listener 203.0.113.10:80/TCP default/web"


def test_a_listener_without_members_stays() -> None:
    changes = steps(load_balancer(), actual={})
    assert [str(change) for change in changes] == [
        "set listener 203.0.113.10:80/TCP default/web weights none slots 0"
    ]
    there = after(changes, {})
    assert there[WEB].listeners[0].slots == Slots()
    assert steps(load_balancer(), actual=there) == ()


def slots_of(actual: dict[ServiceKey, DirectActual], service: ServiceKey = WEB) -> Slots:
    (listener,) = actual[service].listeners
    return listener.slots


def test_a_listener_that_passes_to_another_service_keeps_its_slots() -> None:
    actual = after(steps(load_balancer(member("node1"), member("node2")), actual={}), {})
    (change,) = steps(load_balancer(member("node1"), member("node2"), service=API), actual=actual)
    assert isinstance(change, SetListener)
    assert change.taken_from == WEB
    assert slots_of(after((change,), actual), API) == slots_of(actual)


def test_a_listener_that_its_service_still_asks_for_is_not_taken_from_it() -> None:
    mine = load_balancer(member("node1"))
    actual = after(steps(mine, actual={}), {})
    (change,) = steps(mine, load_balancer(member("node2"), service=API), actual=actual)[1:]
    assert isinstance(change, SetListener)
    assert (change.service, change.taken_from) == (API, None)


def test_a_recreated_service_updates_the_owner_of_its_listeners() -> None:
    actual = after(steps(load_balancer(member("node1")), actual={}), {})
    old = {WEB: DirectActual("previous-uid", actual[WEB].listeners, actual[WEB].addresses)}
    (change,) = steps(load_balancer(member("node1")), actual=old)
    assert isinstance(change, SetListener)
    assert change.uid == "uid-web"


def forgotten(actual: dict[ServiceKey, DirectActual]) -> dict[ServiceKey, DirectActual]:
    """Return the state as it is read after a start: the content of the maps, and the nodes that
    slots or flow entries name."""
    listeners = tuple(
        ActualListener(each.key, each.slots, None, each.retained_nodes)
        for each in actual[WEB].listeners
    )
    return {WEB: DirectActual(actual[WEB].uid, listeners, actual[WEB].addresses)}


def test_after_a_start_the_spec_of_a_listener_is_recorded_again() -> None:
    intent = load_balancer(member("node1"), member("node2", 0, "draining"))
    actual = after(steps(intent, actual={}), {})
    (change,) = steps(intent, actual=forgotten(actual))
    assert isinstance(change, SetListener)
    assert change.listener.retained_nodes == ("node1", "node2")
    assert change.slots == slots_of(actual)


def test_a_listener_with_an_unreachable_node_is_set_again_each_time() -> None:
    intent = load_balancer(member("node1"), member("node2"))
    actual = after(steps(intent, actual={}), {})
    doubted = {WEB: DirectActual(actual[WEB].uid, actual[WEB].listeners, (("node1", "192.0.2.1"),))}
    assert [str(change) for change in steps(intent, actual=doubted)] == [
        "set node node2 address 192.0.2.2",
        "set listener 203.0.113.10:80/TCP default/web weights node1=1,node2=1 slots 1021",
    ]
    change = steps(intent, actual=doubted)[1]
    assert isinstance(change, SetListener)
    reduced = spec.without_nodes(change, frozenset({"node2"}), slots_of(actual))
    assert {reduced.slots.nodes[i] for i in array("H", reduced.slots.current)} == {"node1"}
    assert "node2" in reduced.slots.nodes  # it keeps its open connections
    assert [type(each) for each in steps(intent, actual=after((reduced,), actual))] == [SetListener]


def test_if_no_node_can_be_reached_the_slots_stay_as_planned() -> None:
    intent = load_balancer(member("node1"), member("node2"))
    (change,) = (each for each in steps(intent, actual={}) if isinstance(each, SetListener))
    assert spec.without_nodes(change, frozenset({"node1", "node2"}), Slots()).slots == change.slots


def cluster(
    *members: Member, policy: TrafficPolicy = "Cluster", protocol: Protocol = "TCP"
) -> LoadBalancer:
    listeners = (Listener("IPv4", 80, protocol, policy, 30080, members),)
    return LoadBalancer(WEB, "uid-web", "fairlead.io/direct", (VIP,), listeners)


def retained(changes: tuple[DirectChange, ...]) -> set[str]:
    """Return the nodes that keep their connections after the one change of a listener."""
    (change,) = (each for each in changes if isinstance(each, SetListener))
    return {*change.listener.retained_nodes, *change.listener.departed}


def test_with_policy_cluster_a_node_without_pods_keeps_its_connections() -> None:
    both, one, none = cluster(member("node1"), member("node2")), cluster(member("node1")), cluster()
    actual = after(steps(both, actual={}), {})
    for restart in (False, True):
        before = forgotten(actual) if restart else actual
        assert retained(steps(one, actual=before)) == {"node1", "node2"}
    actual = after(steps(one, actual=actual), actual)
    assert "node2" in slots_of(actual).nodes
    assert steps(one, actual=actual) == ()
    assert retained(steps(none, actual=actual)) == {"node1", "node2"}
    # A change of the policy must not end open connections either.
    assert retained(steps(cluster(member("node1"), policy="Local"), actual=actual)) == {
        "node1",
        "node2",
    }


def test_a_departed_node_that_the_driver_no_longer_names_is_removed() -> None:
    one = cluster(member("node1"), member("node3"))
    actual = after(steps(cluster(member("node1"), member("node2"), member("node3")), actual={}), {})
    actual = after(steps(one, actual=actual), actual)
    (listener,) = actual[WEB].listeners
    aged = ActualListener(listener.key, listener.slots, listener.spec, ("node1", "node3"))
    late = {WEB: DirectActual("uid-web", (aged,), actual[WEB].addresses)}
    assert retained(steps(one, actual=late)) == {"node1", "node3"}
    assert "node2" not in slots_of(after(steps(one, actual=late), late)).nodes


def test_with_policy_local_and_for_udp_a_departed_node_keeps_no_connections() -> None:
    cases: tuple[tuple[TrafficPolicy, Protocol], ...] = (("Local", "TCP"), ("Cluster", "UDP"))
    for policy, protocol in cases:
        both = cluster(member("node1"), member("node2"), policy=policy, protocol=protocol)
        actual = after(steps(both, actual={}), {})
        assert retained(
            steps(cluster(member("node1"), policy=policy, protocol=protocol), actual=actual)
        ) == {"node1"}


MEMBERS = st.lists(
    st.tuples(
        st.integers(1, 5),
        st.integers(0, 30),
        st.sampled_from(["active", "draining", "down", "pending"]),
    ),
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


@given(st.lists(INTENTS, min_size=1, max_size=5))
def test_applying_the_changes_leaves_no_difference(intents: list[LoadBalancer]) -> None:
    actual: dict[ServiceKey, DirectActual] = {}
    for intent in intents:
        actual = after(steps(intent, actual=actual), actual)
        assert steps(intent, actual=actual) == ()


def test_a_listener_stays_as_it_is_until_a_node_is_confirmed() -> None:
    actual = after(
        spec.diff(spec.render({WEB: load_balancer(member("node1"), member("node2"))}), {}), {}
    )
    pending = spec.render(
        {WEB: load_balancer(member("node1", 1, "pending"), member("node2", 1, "pending"))}
    )
    assert spec.diff(pending, actual) == ()
    assert len(spec.diff(pending, {})) == 1, "a new listener is created, and serves no client yet"
    decided = spec.render({WEB: load_balancer(member("node1"), member("node2", 1, "pending"))})
    assert len(spec.diff(decided, actual)) == 1
    nobody = spec.render({WEB: load_balancer(member("node1", 0, "draining"))})
    assert len(spec.diff(nobody, actual)) == 1


def test_draining_nodes_get_new_connections_only_if_no_other_node_serves() -> None:
    leaving = member("node3", 1, "draining")
    serving = load_balancer(member("node1"), member("node2"), member("node3", 0, "draining"))
    actual = after(spec.diff(spec.render({WEB: serving}), {}), {})
    # After an edit another health port is probed. It makes no difference whether the draining node
    # answers first or not at all.
    by_the_api = UnconfirmedMembers(
        (member("node1"), member("node2"), member("node3", 0, "draining")),
        {"node3": 1},
        any_ready=True,
        any_usable=True,
    )

    def only(verdict: Verdict | None) -> VerdictOf:
        return lambda address, _: verdict if address == leaving.address else None

    verdicts: tuple[Verdict | None, ...] = (None, "up", "unready")
    for verdict in verdicts:
        members, _ = confirm(by_the_api, HealthMonitor(10256, "/healthz"), only(verdict))
        assert {each.node: each.weight for each in members if each.state == "draining"} == {
            "node3": 1
        }
        assert steps(load_balancer(*members), actual=actual) == ()
    replaced = spec.render({WEB: load_balancer(member("node4", 1, "pending"), leaving)})
    [change] = [each for each in spec.diff(replaced, actual) if isinstance(each, spec.SetListener)]
    assert change.listener.weights == (("node3", 1),)
