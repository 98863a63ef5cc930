"""What may be written into a lock, and what Conflict says that we know too little."""

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
        "port taken",
        "port taken, though shown",
        "not shared",
        "another key",
        "another namespace",
        "kept",
        "we are behind",
    ],
)
def test_conflicts(spec: AddressGrantSpec, grant: Grant, at: PublishedVersion) -> None:
    with pytest.raises(Conflict):
        with_holder(spec, B, grant, at)
    assert not settled(spec, B, "uid-b", grant, at)


def test_a_port_that_is_not_shown_is_granted_for_one_version_only() -> None:
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
        "the Service changed before it was published"
    )
    assert settled(spec, A, "uid-a", grant, published(A, 6, WEB)), "it is shown"


def test_what_is_taken_back_must_be_out_of_sight_for_good() -> None:
    mine = holder(A, WEB, TLS, version="5")
    assert not releasable(published(A, 5), mine, ADDRESS, None), "it may yet be published"
    assert not releasable(published(A, 6, WEB), mine, ADDRESS, None), "it is shown"
    assert releasable(published(A, 6), mine, ADDRESS, None)
    leave = Grant(ADDRESS, (WEB,), "main")
    assert releasable(published(A, 6, WEB), mine, ADDRESS, leave)
    assert not releasable(published(A, 6, WEB, TLS), mine, ADDRESS, leave)


def test_kept_and_reused() -> None:
    spec = without_holder(lock(holder(A, WEB), sharing_key="k"), A, None, keep=True)
    assert spec == lock(Holder("default", "a"), sharing_key="k", keep=True)
    assert with_holder(spec, A, Grant(ADDRESS, (WEB,), "main"), published(A, 7)).holders == (
        holder(A, WEB, version="7"),
    )
    shared = with_holder(spec, B, Grant(ADDRESS, (TLS,), "main", "k"), published(B, 7))
    assert shared.holders == (holder(B, TLS, version="7"),), "who shares the key takes it over"
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
