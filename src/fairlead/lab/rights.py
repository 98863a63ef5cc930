"""Give the roles of a lab with a real API server the rights of the shipped manifests, and no
others.

In: a client with an administrator's rights. Out: the ServiceAccounts and (Cluster)Roles of
`deploy/manifests` exist, and a token for each account (TokenRequest API). Workloads are left out:
the lab runs the roles as processes.
"""

from collections.abc import Collection
from pathlib import Path

import fairlead
from fairlead.kube.client import Client
from fairlead.kube.manifests import read_documents
from fairlead.lab import manifests
from fairlead.lab.kubeapiserver import service_account_token
from fairlead.lab.topology import Announcement

NAMESPACE = "fairlead-system"
KINDS = ("Namespace", "ServiceAccount", "ClusterRole", "ClusterRoleBinding", "Role", "RoleBinding")
VALID_S = 7 * 24 * 3600
"""Validity of the tokens: longer than any lab lives, because nothing renews them."""


def source(announce: Announcement) -> Path:
    """Return the path of the manifests with the rights of every role. Gateways that announce
    addresses have more rights."""
    name = "l2" if announce == "l2" else "no-kube-proxy"
    return Path(fairlead.__file__).parents[2] / "deploy" / "manifests" / f"{name}.yaml"


async def install(
    client: Client, kinds: Collection[str] = KINDS, *, announce: Announcement = "none"
) -> None:
    """Apply the objects that grant the rights; with `kinds`, only those of these kinds."""
    documents = read_documents([source(announce)])
    await manifests.apply(
        client, [each.object for each in documents if each.object["kind"] in kinds]
    )


async def token(client: Client, role: str) -> str:
    """Return a token for the account of a role (`controller`, `gateway`, `node`)."""
    return await service_account_token(client, f"{NAMESPACE}/fairlead-{role}", valid_s=VALID_S)
