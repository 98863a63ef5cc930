"""The rights of the roles in a lab with a real API server."""

from fairlead.kube.manifests import read_documents
from fairlead.lab import rights
from fairlead.lab.topology import Announcement


def verbs_on_presence(announce: Announcement) -> set[str]:
    """Return what a gateway may do with the Leases of other processes."""
    (role,) = (
        each.object
        for each in read_documents([rights.source(announce)])
        if each.object["metadata"]["name"] == "fairlead-gateway-presence"
        and each.object["kind"] == "Role"
    )
    (rule,) = role["rules"]
    return set(rule["verbs"])


def test_only_gateways_that_announce_addresses_see_the_other_gateways() -> None:
    assert verbs_on_presence("l2") - verbs_on_presence("none") == {"list", "watch"}
