"""The pages of findings: docs/doctor.md has all of them as `doctor explain` prints them, and the
rights that the command needs."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from fairlead.cli.doctor import doctor
from fairlead.doctor.objects import (
    ACCESS_REVIEWS,
    EVENTS,
    NETWORK_POLICIES,
    OWNED_SERVICES,
    SERVICE_ACCOUNTS,
    WORKLOADS,
)
from fairlead.doctor.pages import PAGES
from fairlead.doctor.rights import RIGHTS, Right, needed
from fairlead.kube.crds import ADDRESS_GRANTS, ADDRESS_POOLS
from fairlead.kube.lease_object import LEASES
from fairlead.kube.objects import (
    CONFIG_MAPS,
    ENDPOINT_SLICES,
    NAMESPACES,
    NODES,
    PODS,
    Resource,
)

ROOT = Path(__file__).parents[2]
DOCUMENT = (ROOT / "docs" / "doctor.md").read_text()
USED: Sequence[Resource[Any]] = [
    OWNED_SERVICES,
    EVENTS,
    PODS,
    NODES,
    NAMESPACES,
    ENDPOINT_SLICES,
    NETWORK_POLICIES,
    *WORKLOADS,
    ADDRESS_POOLS,
    ADDRESS_GRANTS,
    LEASES,
    CONFIG_MAPS,
    SERVICE_ACCOUNTS,
    ACCESS_REVIEWS,
]


def test_the_documentation_has_the_pages_that_explain_prints() -> None:
    """Replace the section by the output of `fairlead doctor explain` if this fails."""
    answer = CliRunner().invoke(doctor, ["explain"])
    assert answer.exit_code == 0
    assert DOCUMENT.partition("\n## Findings\n\n")[2] == answer.output


def test_explain_prints_one_page() -> None:
    answer = CliRunner().invoke(doctor, ["explain", "PodsNotReady"])
    assert answer.output == PAGES["PodsNotReady"].render()
    assert CliRunner().invoke(doctor, ["explain", "podsnotready"]).output == answer.output


def test_explain_names_the_findings_that_exist() -> None:
    answer = CliRunner().invoke(doctor, ["explain", "NoSuchFinding"])
    assert answer.exit_code == 2
    assert "there is no finding NoSuchFinding; findings: AddressElsewhere" in answer.output


def test_explain_names_a_finding_that_is_spelled_similarly() -> None:
    answer = CliRunner().invoke(doctor, ["explain", "PodNotReady"])
    assert "there is no finding PodNotReady; did you mean PodsNotReady?" in answer.output


def test_the_documented_role_allows_everything_that_is_used() -> None:
    text = DOCUMENT.partition("```yaml\n")[2].partition("```")[0]
    allowed = {
        (group, resource)
        for rule in yaml.safe_load(text)["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
    }
    assert allowed == {(each.group_version.rpartition("/")[0], each.plural) for each in USED}


def test_only_a_service_proxy_needs_to_read_endpoints() -> None:
    left_out = set(needed("node", service_proxy=True)) - set(needed("node", service_proxy=False))
    assert {each.resource for each in left_out} == {"endpointslices"}


@pytest.mark.parametrize("role", RIGHTS)
def test_the_rights_of_a_role_are_those_of_the_manifests(role: str) -> None:
    documents = [
        document
        for path in (ROOT / "deploy" / "manifests").glob("*.yaml")
        for document in yaml.safe_load_all(path.read_text())
        if document
        and document["kind"] == "ClusterRole"
        and document["metadata"]["name"] == f"fairlead-{role}"
    ]
    granted = {
        Right(group, resource, verb)
        for document in documents
        for rule in document["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }
    assert granted == set(RIGHTS[role])
