"""The roles of a lab with a real API server have the rights that the shipped manifests give them,
and no more.

In: a client of an administrator. Out: the ServiceAccounts and (Cluster)Roles of `deploy/manifests`
are there; a token for each account (TokenRequest API). What runs in pods on a cluster is left out:
the lab runs it as processes."""

from collections.abc import Collection
from pathlib import Path

import fairlead
from fairlead.kube.client import Client
from fairlead.kube.manifests import read_documents
from fairlead.lab import manifests
from fairlead.lab.kubeapiserver import service_account_token

NAMESPACE = "fairlead-system"
KINDS = ("Namespace", "ServiceAccount", "ClusterRole", "ClusterRoleBinding", "Role", "RoleBinding")
HOLDS_S = 7 * 24 * 3600
"""Longer than any lab lives; nobody renews its tokens."""


def source() -> Path:
    """The manifests for clusters in which every role runs."""
    return Path(fairlead.__file__).parents[2] / "deploy" / "manifests" / "no-kube-proxy.yaml"


async def install(client: Client, kinds: Collection[str] = KINDS) -> None:
    """Give the rights, or of what is needed for them only these kinds."""
    documents = read_documents([source()])
    await manifests.apply(
        client, [each.object for each in documents if each.object["kind"] in kinds]
    )


async def token(client: Client, role: str) -> str:
    """A token for the account of a role (`controller`, `gateway`, `node`)."""
    return await service_account_token(client, f"{NAMESPACE}/fairlead-{role}", holds_s=HOLDS_S)
