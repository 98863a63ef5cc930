"""The pages of findings: docs/doctor.md contains each of them, and `doctor explain` prints the same
text."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from fairlead.cli.doctor import doctor
from fairlead.doctor.objects import EVENTS, NETWORK_POLICIES, OWNED_SERVICES, WORKLOADS
from fairlead.doctor.pages import PAGES
from fairlead.kube.announcers import ANNOUNCERS
from fairlead.kube.crds import ADDRESS_GRANTS, ADDRESS_POOLS
from fairlead.kube.lease_object import LEASES
from fairlead.kube.objects import CONFIG_MAPS, ENDPOINT_SLICES, NODES, PODS, Resource

DOCUMENT = (Path(__file__).parents[2] / "docs" / "doctor.md").read_text()
READ: Sequence[Resource[Any]] = [
    OWNED_SERVICES,
    EVENTS,
    PODS,
    NODES,
    ENDPOINT_SLICES,
    NETWORK_POLICIES,
    *WORKLOADS,
    ADDRESS_POOLS,
    ADDRESS_GRANTS,
    ANNOUNCERS,
    LEASES,
    CONFIG_MAPS,
]


@pytest.mark.parametrize("name", PAGES)
def test_the_documentation_has_the_page(name: str) -> None:
    assert PAGES[name].render() in DOCUMENT


def test_the_documentation_has_no_other_page() -> None:
    assert re.findall(r"^### (\S+)$", DOCUMENT, re.MULTILINE) == list(PAGES)


def test_explain_prints_the_page() -> None:
    answer = CliRunner().invoke(doctor, ["explain", "pods-not-ready"])
    assert answer.exit_code == 0
    assert answer.output == PAGES["pods-not-ready"].render()


def test_explain_names_the_findings_that_exist() -> None:
    answer = CliRunner().invoke(doctor, ["explain", "no-such-finding"])
    assert "there is no finding no-such-finding; name one of" in str(answer.exception)


def test_the_documented_role_allows_everything_that_is_read() -> None:
    text = DOCUMENT.partition("```yaml\n")[2].partition("```")[0]
    allowed = {
        (group, resource)
        for rule in yaml.safe_load(text)["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
    }
    assert allowed == {(each.group_version.rpartition("/")[0], each.plural) for each in READ}
