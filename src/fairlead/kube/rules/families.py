"""Determine the address families of a Service from the request, the previous state and the cluster.

In: the Service to write, the Service that it replaces, and the cluster's families, the default
first. Out: `ipFamilyPolicy` and `ipFamilies` are filled in, or Rejected if they contradict each
other or the cluster. Follows the Service storage of the API server
(registry/core/service/storage/alloc.go, KEP-563).
"""

from collections.abc import Iterable, Sequence

from fairlead.kube.rules.causes import Cause, Object, Rejected, invalid
from fairlead.kube.rules.names import family_of
from fairlead.kube.rules.service import check_cluster_addresses

_POLICY = "spec.ipFamilyPolicy"


def set_families(service: Object, old: Object | None, families: Sequence[str]) -> None:
    """Set the families in place. Raise Rejected."""
    spec, before = service["spec"], old["spec"] if old else {}
    if old is None and spec.get("clusterIP") and "clusterIPs" not in spec:
        spec["clusterIPs"] = [spec["clusterIP"]]
    if spec.get("type") == "ExternalName" or _settled(spec, before):
        return
    alone = headless(spec) and not spec.get("selector")
    if "ipFamilyPolicy" not in spec:
        spec["ipFamilyPolicy"] = before.get("ipFamilyPolicy") or (
            "RequireDualStack" if alone else "SingleStack"
        )
    _refuse(check_cluster_addresses(service, old))
    if before and spec["ipFamilyPolicy"] == "SingleStack":
        # The policy changed and the lists did not: the client wants to release the second family.
        for field in ("clusterIPs", "ipFamilies"):
            if field in spec and spec[field] == before.get(field):
                spec[field] = spec[field][:1]
    _refuse([*_check_counts(spec, before), *_infer(spec, families)])
    if not alone:
        _refuse(_check_cluster(spec, families))
    wanted = spec.setdefault("ipFamilies", [families[0]])
    if (
        spec["ipFamilyPolicy"] != "SingleStack"
        and len(wanted) == 1
        and (alone or len(families) == 2)
    ):
        spec["ipFamilies"] = [*wanted, "IPv6" if wanted[0] == "IPv4" else "IPv4"]


def headless(spec: Object) -> bool:
    return spec.get("clusterIP") == "None"


def _settled(spec: Object, before: Object) -> bool:
    """Return whether an update keeps PreferDualStack and all lists: then the families stay, even if
    the cluster has become dual-stack or single-stack since."""
    same = ("type", "ipFamilyPolicy", "ipFamilies", "clusterIPs")
    return spec.get("ipFamilyPolicy") == "PreferDualStack" and all(
        spec.get(name) == before.get(name) for name in same
    )


def _check_counts(spec: Object, before: Object) -> Iterable[Cause]:
    """Check that the number of families fits the policy, and that a family is released only
    explicitly."""
    policy = spec["ipFamilyPolicy"]
    rules = (
        ("clusterIPs", "cluster IPs", "cluster IP"),
        ("ipFamilies", "IP families", "IP family"),
    )
    for field, several, one in rules:
        count = len(spec.get(field) or [])
        if policy != "SingleStack" and 0 < count < len(before.get(field) or []):
            yield invalid(_POLICY, policy, f"must be 'SingleStack' to release the secondary {one}")
        if policy == "SingleStack" and count == 2:
            detail = (
                f"must be 'RequireDualStack' or 'PreferDualStack' when multiple {several} are "
                "specified"
            )
            yield invalid(_POLICY, policy, detail)


def _infer(spec: Object, families: Sequence[str]) -> Iterable[Cause]:
    """Add the families of the addresses for which `ipFamilies` has no entry."""
    addresses, wanted = spec.get("clusterIPs") or [], list(spec.get("ipFamilies") or [])
    for index, address in enumerate(addresses):
        if address == "None":
            break
        if index < len(wanted):
            continue
        if (family := family_of(address)) in families:
            wanted.append(family)
        else:
            yield invalid(
                f"spec.clusterIPs[{index}]",
                addresses,
                f"{family} is not configured on this cluster",
            )
    if wanted:
        spec["ipFamilies"] = wanted


def _check_cluster(spec: Object, families: Sequence[str]) -> Iterable[Cause]:
    if spec["ipFamilyPolicy"] == "RequireDualStack" and len(families) < 2:
        yield invalid(
            _POLICY, "RequireDualStack", "this cluster is not configured for dual-stack services"
        )
    for index, family in enumerate(spec.get("ipFamilies") or []):
        if family not in families:
            yield invalid(f"spec.ipFamilies[{index}]", family, "not configured on this cluster")


def _refuse(causes: Iterable[Cause]) -> None:
    if found := list(causes):
        raise Rejected(found)
