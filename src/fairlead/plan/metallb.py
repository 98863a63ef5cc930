"""The pools of MetalLB as AddressPools.

In: MetalLB's objects as decoded JSON: IPAddressPools, and what older versions have instead
(AddressPools of `metallb.io`, the ConfigMap `metallb-system/config`). Out: AddressPools, the
reasons why a pool is not translated, and remarks about the rest. Pure. Names and meaning of the
fields follow MetalLB 0.16, 0.12 for the ConfigMap. A CIDR may have host bits, which MetalLB ignores
(Go's net.ParseCIDR)."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from fairlead.errors import Refused
from fairlead.kube.crds import GROUP_VERSION, AddressPool
from fairlead.kube.documents import read_contents
from fairlead.kube.networks import read_network
from fairlead.kube.objects import ObjectKey
from fairlead.kube.rules import names
from fairlead.mistakes import explain

GROUP = "metallb.io/"
IP_ADDRESS_POOL = "IPAddressPool"
OLD_POOL = "AddressPool"
CONFIG_MAP = ObjectKey("metallb-system", "config")
"""The configuration of MetalLB before version 0.13."""
RESOURCES = (
    ("v1beta1", "ipaddresspools", IP_ADDRESS_POOL),
    ("v1beta1", "addresspools", OLD_POOL),
    ("v1beta1", "l2advertisements", "L2Advertisement"),
    ("v1beta1", "bgpadvertisements", "BGPAdvertisement"),
    ("v1beta2", "bgppeers", "BGPPeer"),
)
"""Version, resource and kind of the objects of MetalLB in a cluster: its pools, and how their
addresses are announced."""
OTHER_POOLS = frozenset(
    (("cilium.io", "CiliumLoadBalancerIPPool"), ("purelb.io", "ServiceGroup"), ("", "kubevip"))
)
"""Group and kind of the pools of other systems, which are named and not translated. kube-vip has
them in a ConfigMap of this name."""

FIELDS = frozenset(("addresses", "autoAssign", "avoidBuggyIPs", "serviceAllocation"))
"""The fields of an IPAddressPool's spec that an AddressPool has too: all fields of MetalLB 0.16."""
OF_ANNOUNCEMENTS = frozenset(("protocol", "bgpAdvertisements", "bgp-advertisements"))
"""Fields of older pools about the announcement of addresses, not about their assignment."""
OLD_FIELDS = {"auto-assign": "autoAssign", "avoid-buggy-ips": "avoidBuggyIPs"}
"""The fields of a pool in the ConfigMap that have another name."""
BY_HAND = "write an AddressPool for it by hand (docs/addresses.md)"


class TranslatedPool(NamedTuple):
    """An AddressPool, the pool of MetalLB that it is made of (`IPAddressPool public`), and remarks
    about differences."""

    source: str
    body: dict[str, Any]
    remarks: Sequence[str] = ()

    @property
    def name(self) -> str:
        return str(self.body["metadata"]["name"])


class _Pool(NamedTuple):
    source: str
    name: str
    spec: Mapping[str, Any]


def concerns_pools(object_: Mapping[str, Any]) -> bool:
    """Return whether the object is one of MetalLB, or a pool of another system: `translations`
    reads it."""
    if (object_.get("apiVersion"), object_.get("kind")) == ("v1", "ConfigMap"):
        data = _mapping(object_.get("data"))
        return "address-pools" in str(data.get("config", "")) or _is_other_pool(object_)
    return str(object_.get("apiVersion", "")).startswith(GROUP) or _is_other_pool(object_)


def _is_other_pool(object_: Mapping[str, Any]) -> bool:
    group, kind = str(object_.get("apiVersion", "")).rpartition("/")[0], object_.get("kind")
    name = _mapping(object_.get("metadata")).get("name")
    return (group, name if kind == "ConfigMap" else kind) in OTHER_POOLS


def translations(
    objects: Iterable[Mapping[str, Any]],
) -> tuple[list[TranslatedPool], list[Refused], list[str]]:
    """Return the pools among these objects of MetalLB as AddressPools, the reasons why others are
    not translated, and a remark about objects that have no counterpart."""
    made: dict[str, TranslatedPool] = {}
    refused: list[Refused] = []
    announced: dict[str, int] = {}
    remarks: list[str] = []
    for object_ in objects:
        kind = str(object_.get("kind"))
        if _is_other_pool(object_):
            name = _mapping(object_.get("metadata")).get("name") or ""
            remarks.append(f"{kind} {name} is not translated: {BY_HAND}")
            continue
        if kind not in (IP_ADDRESS_POOL, OLD_POOL, "ConfigMap"):
            if "pool" in kind.lower():
                fix = f"write {IP_ADDRESS_POOL}"
                refused.append(Refused(f"there is no kind {kind} of MetalLB", fix=fix))
                continue
            announced[kind] = announced.get(kind, 0) + 1
        try:
            pools = list(_pools_in(object_))
        except Refused as problem:
            refused.append(problem)
            continue
        for pool in pools:
            try:
                each = translated(pool.source, pool.name, pool.spec)
                if (other := made.setdefault(each.name, each)) is not each:
                    raise Refused(
                        f"{pool.source} has the name of {other.source}: an AddressPool has no "
                        "namespace",
                        fix=BY_HAND,
                    )
            except Refused as problem:
                refused.append(problem)
    remarks += [
        f"{count} {kind}{'s' * (count > 1)} not translated: how addresses are announced is a "
        "setting of Fairlead's gateways or of your routers (docs/announce.md)"
        for kind, count in sorted(announced.items())
    ]
    return list(made.values()), refused, remarks


def translated(source: str, name: str, spec: Mapping[str, Any]) -> TranslatedPool:
    """Return a pool of MetalLB as an AddressPool: the fields have the same names and meaning. Raise
    Refused if it has an unknown field, because that may be a restriction."""
    spec = _without_null(spec)
    if not name:
        raise Refused(f"{source} has no name that is a text", fix="correct the pool in MetalLB")
    if names.dns_subdomain(name):
        raise Refused(
            f"{source}: an AddressPool cannot have this name",
            fix="write an AddressPool for it with a name of lower-case letters, digits, - and .",
        )
    if not spec.get("addresses"):
        raise Refused(f"{source} has no spec.addresses", fix="correct the pool in MetalLB")
    if unknown := sorted(str(key) for key in spec.keys() - FIELDS):
        raise Refused(f"{source}: spec.{unknown[0]} is not known", fix=BY_HAND)
    body: dict[str, Any] = {
        "apiVersion": GROUP_VERSION,
        "kind": "AddressPool",
        "metadata": {"name": name},
        "spec": dict(spec),
    }
    try:
        pool = msgspec.convert(body, AddressPool)
    except msgspec.ValidationError as problem:
        raise Refused(f"{source}: {explain(problem, AddressPool)}", fix=BY_HAND) from None
    remarks = []
    addresses = []
    for text in pool.spec.addresses:
        network = read_network(text) if "/" in text else None
        addresses.append(network or "-".join(part.strip() for part in text.split("-")))
        if network is not None and network != text.strip():
            remarks.append(f"{source}: {text} is written as {network}, which MetalLB makes of it")
    body["spec"] = {**spec, "addresses": addresses}
    return TranslatedPool(source, body, remarks)


def _pools_in(object_: Mapping[str, Any]) -> Iterator[_Pool]:
    """Yield the pools that the object is or contains."""
    kind, metadata = object_.get("kind"), _mapping(object_.get("metadata"))
    if kind == "ConfigMap":
        yield from _pools_of_config(
            f"ConfigMap {_text(metadata.get('name'))}".strip(),
            str(_mapping(object_.get("data")).get("config", "")),
        )
    elif kind in (IP_ADDRESS_POOL, OLD_POOL):
        spec, name = _mapping(object_.get("spec")), _text(metadata.get("name"))
        if kind == OLD_POOL:
            spec = {key: value for key, value in spec.items() if key not in OF_ANNOUNCEMENTS}
        yield _Pool(f"{kind} {name}".strip(), name, spec)


def _pools_of_config(source: str, text: str) -> Iterator[_Pool]:
    """Yield the pools in the configuration file of MetalLB 0.12. Raise Refused if it has none that
    can be read."""
    content = next(read_contents(text), None)
    if content is not None and content.problem:
        raise Refused(f"{source}, line {content.line}: {content.problem}", fix=BY_HAND)
    pools = _mapping(content.value if content is not None else None).get("address-pools")
    if not isinstance(pools, list):
        raise Refused(f"{source}: address-pools is not a list", fix=BY_HAND)
    for each in map(_mapping, pools):
        spec = {
            OLD_FIELDS.get(str(key), str(key)): value
            for key, value in each.items()
            if key != "name" and key not in OF_ANNOUNCEMENTS
        }
        name = _text(each.get("name"))
        yield _Pool(f"pool {name} of {source}" if name else f"a pool of {source}", name, spec)


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""


def _without_null(value: Any) -> Any:
    """Return the value without fields that are null: for an API server they are absent."""
    if isinstance(value, Mapping):
        return {key: _without_null(each) for key, each in value.items() if each is not None}
    return [_without_null(each) for each in value] if isinstance(value, list) else value
