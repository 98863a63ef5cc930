"""Which changes of an AddressGrant are allowed. Conflict means that the data of the caller is
outdated."""

import pytest

from fairlead.errors import Conflict
from fairlead.kube.crds import AddressGrantSpec, Holder
from fairlead.model import Grant, ServiceKey
from fairlead.plan.locks import (
    PublishedVersion,
    publishable_ports,
    releasable,
    settled,
    with_holder,
    without_holder,
)

ADDRESS = "203.0.113.1"
A, B = ServiceKey("default", "a"), ServiceKey("default", "b")
WEB, TLS = "TCP/80", "TCP/443"


def lock(*holders: Holder, sharing_key: str = "", keep: bool = False) -> AddressGrantSpec:
    return AddressGrantSpec(ADDRESS, "main", sharing_key, keep, holders)


def holder(key: ServiceKey, *ports: str, uid: str = "", version: str = "") -> Holder:
    return Holder(key.namespace, key.name, uid or f"uid-{key.name}", ports, version)


def published(key: ServiceKey, version: int, *shown: str) -> PublishedVersion:
    return PublishedVersion(
        f"uid-{key.name}", version, {ADDRESS: frozenset(shown)} if shown else {}
    )


@pytest.mark.parametrize(
    ("spec", "grant", "at"),
    [
        (lock(holder(A, WEB)), Grant(ADDRESS, (WEB,), "main"), published(B, 5)),
        (lock(holder(A, WEB)), Grant(ADDRESS, (WEB,), "main"), published(B, 5, WEB)),
        (lock(holder(A, WEB)), Grant(ADDRESS, (TLS,), "main"), published(B, 5)),
        (
            lock(holder(A, WEB), sharing_key="k"),
            Grant(ADDRESS, (TLS,), "main", "l"),
            published(B, 5),
        ),
        (
            lock(Holder("other", "a"), sharing_key="k", keep=True),
            Grant(ADDRESS, (TLS,), "main", "k"),
            published(B, 5),
        ),
        (lock(Holder("default", "a"), keep=True), Grant(ADDRESS, (TLS,), "main"), published(B, 5)),
        (lock(holder(B, WEB, version="9")), Grant(ADDRESS, (TLS,), "main"), published(B, 5)),
    ],
    ids=[
        "another holder has the port",
        "another holder has the port, although the Service shows it",
        "the address has a holder and no sharing key",
        "another sharing key",
        "kept for a Service of another namespace",
        "kept for another Service",
        "the lock has a newer version of the Service",
    ],
)
def test_a_grant_that_the_lock_does_not_allow_raises_conflict(
    spec: AddressGrantSpec, grant: Grant, at: PublishedVersion
) -> None:
    with pytest.raises(Conflict):
        with_holder(spec, B, grant, at)
    assert not settled(spec, B, "uid-b", grant, at)


def test_a_port_that_is_not_shown_is_granted_for_one_version_of_the_service_only() -> None:
    grant = Grant(ADDRESS, (WEB,), "main")
    spec = with_holder(AddressGrantSpec(ADDRESS), A, grant, published(A, 5))
    assert publishable_ports(spec, A, "uid-a", "5") == {WEB}
    assert (
        publishable_ports(spec, A, "uid-a", "6")
        == publishable_ports(spec, A, "another", "5")
        == publishable_ports(spec, B, "uid-b", "5")
        == set()
    )
    assert settled(spec, A, "uid-a", grant, published(A, 5))
    assert not settled(spec, A, "uid-a", grant, published(A, 6)), (
        "the Service has changed before the port was published"
    )
    assert settled(spec, A, "uid-a", grant, published(A, 6, WEB)), "the status shows the port"


def test_a_port_is_released_only_when_it_is_not_shown_and_can_no_longer_be_published() -> None:
    mine = holder(A, WEB, TLS, version="5")
    assert not releasable(published(A, 5), mine, ADDRESS, None), "the port may still be published"
    assert not releasable(published(A, 6, WEB), mine, ADDRESS, None), "the status shows the port"
    assert releasable(published(A, 6), mine, ADDRESS, None)
    remaining = Grant(ADDRESS, (WEB,), "main")
    assert releasable(published(A, 6, WEB), mine, ADDRESS, remaining)
    assert not releasable(published(A, 6, WEB, TLS), mine, ADDRESS, remaining)


def test_a_kept_address_is_given_only_to_its_service_or_to_a_service_with_its_sharing_key() -> None:
    spec = without_holder(lock(holder(A, WEB), sharing_key="k"), A, None, keep=True)
    assert spec == lock(Holder("default", "a"), sharing_key="k", keep=True)
    assert with_holder(spec, A, Grant(ADDRESS, (WEB,), "main"), published(A, 7)).holders == (
        holder(A, WEB, version="7"),
    )
    shared = with_holder(spec, B, Grant(ADDRESS, (TLS,), "main", "k"), published(B, 7))
    assert shared.holders == (holder(B, TLS, version="7"),), (
        "a Service with the sharing key takes the address over"
    )
    assert not shared.keep
    assert without_holder(lock(holder(A, WEB)), A, None, keep=False).holders == ()


def test_two_holders_do_not_undo_each_other() -> None:
    grants = {
        A: Grant(ADDRESS, (WEB,), "main", "k", keep=True),
        B: Grant(ADDRESS, (TLS,), "main", "k"),
    }
    spec = AddressGrantSpec(ADDRESS)
    for key, grant in grants.items():
        spec = with_holder(spec, key, grant, published(key, 5))
    for key, grant in grants.items():
        assert with_holder(spec, key, grant, published(key, 5)) == spec
    assert spec.keep
    assert (spec.sharing_key, [each.key for each in spec.holders]) == ("k", [A, B])
