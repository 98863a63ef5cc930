"""CustomResourceDefinitions: kinds that are added to the API server at run time.

In: stored CustomResourceDefinitions. Out: the kinds that are served now, each with its definition,
and the errors of an invalid CRD. Invariant: the Kind object stays the same for as long as its CRD
exists, also when the schema changes. A CRD has one version; conversion is unsupported. Follows
apiextensions.k8s.io/v1.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from fairlead.kube.rules.causes import Cause, Object, invalid, required
from fairlead.lab.apiserver.kinds import KINDS, Column, Definition, Kind
from fairlead.lab.apiserver.structural import RULES, shape


class Kinds:
    """All kinds that one server serves."""

    def __init__(self) -> None:
        self._custom: dict[str, Kind] = {}

    @property
    def served(self) -> tuple[Kind, ...]:
        return (*KINDS, *self._custom.values())

    def find(self, group_version: str, plural: str) -> Kind | None:
        """Return the kind that is served under these URL parts, or None."""
        return next(
            (
                kind
                for kind in self.served
                if (kind.group_version, kind.plural) == (group_version, plural)
            ),
            None,
        )

    def defined_by(self, crd: Object) -> Kind | None:
        """Return the kind of this CRD once it is served, else None."""
        return self._custom.get(crd["metadata"]["name"])

    def define(self, crd: Object) -> None:
        """Serve the kind of a stored CRD, or update it."""
        spec = crd["spec"]
        [version] = [each for each in spec["versions"] if each.get("served")]
        schema = version["schema"]["openAPIV3Schema"]
        columns = tuple(
            Column(each["name"], each["type"], each["jsonPath"], each.get("priority", 0))
            for each in version.get("additionalPrinterColumns", [])
        )
        definition = Definition(
            schema,
            shape(schema),
            columns or (Column("Age", "date", ".metadata.creationTimestamp"),),
        )
        if (known := self.defined_by(crd)) is not None and known.custom is not None:
            known.custom.schema, known.custom.shape, known.custom.columns = (
                schema,
                definition.shape,
                definition.columns,
            )
            return
        names = spec["names"]
        self._custom[crd["metadata"]["name"]] = Kind(
            spec["group"],
            version["name"],
            names["kind"],
            names["plural"],
            names.get("singular") or names["kind"].lower(),
            namespaced=spec["scope"] == "Namespaced",
            short_names=tuple(names.get("shortNames", ())),
            has_status="status" in version.get("subresources", {}),
            categories=tuple(names.get("categories", ())),
            custom=definition,
        )

    def forget(self, crd: Object) -> None:
        """Stop serving the kind of a CRD."""
        self._custom.pop(crd["metadata"]["name"], None)


def established(crd: Object, time: str) -> Object:
    """Return the status of a CRD whose kind is served."""
    conditions = [
        {"type": "NamesAccepted", "reason": "NoConflicts", "message": "no conflicts found"},
        {
            "type": "Established",
            "reason": "InitialNamesAccepted",
            "message": "the initial names have been accepted",
        },
    ]
    return {
        "conditions": [
            each | {"status": "True", "lastTransitionTime": time} for each in conditions
        ],
        "acceptedNames": crd["spec"]["names"],
        "storedVersions": [
            version["name"] for version in crd["spec"]["versions"] if version.get("storage")
        ],
    }


def check(crd: Object) -> Iterator[Cause]:
    """Yield the reasons why a CRD cannot be served."""
    spec: Mapping[str, Any] = crd.get("spec") or {}
    names = spec.get("names") or {}
    for field in ("group", "scope", "versions"):
        if not spec.get(field):
            yield required(f"spec.{field}")
    for field in ("plural", "kind"):
        if not names.get(field):
            yield required(f"spec.names.{field}")
    if crd["metadata"].get("name") != f"{names.get('plural', '')}.{spec.get('group', '')}":
        yield invalid(
            "metadata.name", crd["metadata"].get("name"), 'must be spec.names.plural+"."+spec.group'
        )
    if spec.get("scope") not in (None, "Cluster", "Namespaced"):
        yield invalid("spec.scope", spec["scope"], "must be Cluster or Namespaced")
    versions = [version for version in spec.get("versions") or [] if version.get("served")]
    if spec.get("versions") and len(versions) != 1:
        yield invalid(
            "spec.versions",
            len(versions),
            "this server supports no conversion: exactly one version must be served",
        )
    for version in versions:
        schema = (version.get("schema") or {}).get("openAPIV3Schema")
        if not isinstance(schema, dict):
            yield required("spec.versions[0].schema.openAPIV3Schema", "schemas are required")
            continue
        for rule in _rules(schema):
            if rule not in RULES:
                known = " and ".join(map(repr, RULES))
                yield invalid(
                    "x-kubernetes-validations",
                    rule,
                    f"this server supports only the rules {known}",
                )


def _rules(schema: Any) -> Iterator[str]:
    if isinstance(schema, dict):
        for rule in schema.get("x-kubernetes-validations", ()):
            yield rule.get("rule", "")
        for below in schema.values():
            yield from _rules(below)
    elif isinstance(schema, list):
        for below in schema:
            yield from _rules(below)
