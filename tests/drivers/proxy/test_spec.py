"""The steps from the actual to the desired state of HAProxy."""

import msgspec
import pytest
from tests.drivers.proxy.site import VIP, WEB, balancer

from fairlead.drivers.proxy.spec import (
    ProxyKey,
    ProxySpec,
    RemoveListener,
    SetListener,
    SetRanges,
    SetServers,
    after,
    diff,
    needing_reload,
    rivals,
    specs_of,
    switches,
)
from fairlead.model import DirectSettings, LoadBalancer, ProxySettings, ServiceKey


def specs(*balancers: LoadBalancer) -> dict[ServiceKey, ProxySpec]:
    return specs_of({each.service: each for each in balancers})


PLAIN = specs(balancer({"node1": 2, "node2": 1}))


@pytest.mark.parametrize(
    ("wanted", "steps"),
    [
        (balancer({"node1": 2, "node2": 1}), []),
        (balancer({"node1": 1, "node3": 1}), [SetServers]),
        (balancer({"node1": 2, "node2": 1}, settings=ProxySettings(header="v1")), [SetListener]),
        (balancer({"node1": 2, "node2": 1}, ranges=("10.0.0.0/8",)), [SetListener]),
        (balancer({"node1": 2, "node2": 1}, port=81), [SetListener, RemoveListener]),
    ],
)
def test_only_changes_that_haproxy_cannot_make_at_run_time_need_a_reload(
    wanted: LoadBalancer, steps: list[type]
) -> None:
    changes = diff(specs(wanted), PLAIN)
    assert [type(change) for change in changes] == steps
    assert after(PLAIN, changes) == specs(wanted)


def test_a_removal_needs_a_reload_only_with_a_new_listener_of_its_service() -> None:
    other = ServiceKey("default", "other")
    before = specs(balancer({"node1": 1}), balancer({"node1": 1}, key=other, port=8080))
    removal = [RemoveListener(other, ProxyKey(VIP, 8080))]
    assert diff(specs(balancer({"node1": 1})), before) == tuple(removal)
    assert needing_reload(removal, before) == []
    added = diff(specs(balancer({"node1": 1}, port=81)), before)
    assert needing_reload(added, before) == [each for each in added if each.service == WEB]
    last = diff({}, PLAIN)
    assert needing_reload(last, PLAIN) == list(last)


def test_changed_source_ranges_need_no_reload() -> None:
    before = specs(balancer({"node1": 1}, ranges=("10.0.0.0/8",)))
    [change] = diff(specs(balancer({"node1": 1}, ranges=("10.0.0.0/9",))), before)
    assert change == SetRanges(WEB, ("10.0.0.0/9",))


def test_a_changed_header_is_reported_for_an_existing_listener() -> None:
    headed = specs(balancer({"node1": 2}, settings=ProxySettings(header="v1")))
    assert switches(PLAIN, headed) == {WEB: ("", "v1")}
    assert switches(headed, PLAIN) == {WEB: ("v1", "")}
    assert switches(PLAIN, specs(balancer({"node1": 1}, settings=ProxySettings(client_ms=1)))) == {}
    assert switches({}, headed) == switches(headed, {}) == {}
    assert (
        switches(PLAIN, specs(balancer({"node1": 1}, port=81, settings=ProxySettings(header="v1"))))
        == {}
    )
    another = {WEB: msgspec.structs.replace(headed[WEB], uid="another")}
    assert switches(PLAIN, another) == {}


def test_a_removed_service_leaves_nothing() -> None:
    changes = diff({}, PLAIN)
    assert changes == (RemoveListener(WEB, ProxyKey(VIP, 80)),)
    assert after(PLAIN, changes) == {}


def test_weights_are_pods_scaled_to_the_limit_of_haproxy() -> None:
    def weights(pods: dict[str, int], method: str = "roundrobin") -> list[int]:
        settings = ProxySettings(method=method)  # type: ignore[arg-type]
        made = specs(balancer(pods, settings=settings))[WEB]
        return [each.weight for each in made.listeners[0].servers]

    assert weights({"node1": 3, "node2": 1, "node3": 0}) == [3, 1, 0]
    assert weights({"node1": 512, "node2": 1}) == [256, 1]
    assert weights({"node1": 3, "node2": 1}, "source") == [48, 16]


def test_no_serving_member_is_removed_while_all_are_pending() -> None:
    pending = balancer({"node1": 2, "node2": 1}, states={"node1": "pending", "node2": "pending"})
    assert diff(specs(pending), PLAIN) == ()
    other = balancer({"node1": 2, "node4": 1}, states={"node1": "pending", "node4": "pending"})
    [change] = diff(specs(other), PLAIN)
    assert isinstance(change, SetServers)
    assert [(each.node, each.weight) for each in change.servers] == [
        ("node1", 2),
        ("node2", 1),
        ("node4", 0),
    ]
    down = balancer({"node1": 2, "node2": 1}, states={"node1": "down", "node2": "down"})
    [change] = diff(specs(down), PLAIN)
    assert isinstance(change, SetServers)
    assert [each.weight for each in change.servers] == [0, 0]


def test_draining_members_get_new_connections_only_if_no_other_serves() -> None:
    serving = specs(balancer({"node1": 2, "node3": 0}, states={"node3": "draining"}))
    edited = balancer({"node1": 2, "node3": 1}, states={"node1": "pending", "node3": "draining"})
    assert diff(specs(edited), serving) == ()
    replaced = balancer({"node2": 2, "node3": 1}, states={"node2": "pending", "node3": "draining"})
    [change] = diff(specs(replaced), serving)
    assert isinstance(change, SetServers)
    assert [(each.node, each.weight) for each in change.servers] == [("node2", 0), ("node3", 1)]


def test_a_service_keeps_the_listener_that_it_has() -> None:
    other = ServiceKey("a", "a")
    both = PLAIN | specs(balancer({"node1": 1}, key=other))
    assert rivals(both, PLAIN) == {other: WEB}
    assert rivals(both, {}) == {WEB: other}


def test_services_of_other_classes_are_not_rendered() -> None:
    direct = msgspec.structs.replace(balancer({"node1": 1}), settings=DirectSettings())
    assert specs(direct) == {}
