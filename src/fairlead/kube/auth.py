"""Find the API server and an identity to it, where kubectl and client-go would look.

In: what the user named (a file, a context), the environment, the files that Kubernetes mounts into
a pod. Out: an `Access`. Invariant: what was named is used or refused; only without a word from the
user is there a search: $KUBECONFIG, then the pod's service account, then ~/.kube/config. Follows
"Accessing the Kubernetes API from a Pod" and "Organizing Cluster Access Using kubeconfig Files".
"""

import os
from collections.abc import Mapping
from pathlib import Path

from fairlead.errors import Refused
from fairlead.kube.access import Access, Credentials, ExecPlugin
from fairlead.kube.kubeconfig import read_kubeconfig
from fairlead.net.address import join_host_port

__all__ = ["Access", "Credentials", "ExecPlugin", "find_access", "in_cluster"]

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")


def find_access(
    kubeconfig: Path | None = None,
    context: str | None = None,
    environment: Mapping[str, str] = os.environ,
) -> Access:
    """The Access to use. Raises Refused, with the places that were looked at."""
    if kubeconfig is not None:
        return read_kubeconfig([kubeconfig], context)
    if named := environment.get("KUBECONFIG"):
        # kubectl passes over files of the list that are not there; if none is, that is a mistake to
        # tell.
        paths = [Path(name).expanduser() for name in named.split(os.pathsep) if name]
        return read_kubeconfig([path for path in paths if path.exists()] or paths[:1], context)
    if "KUBERNETES_SERVICE_HOST" in environment and context is None:
        return in_cluster(environment)
    home = Path(environment.get("HOME", "~")).expanduser() / ".kube" / "config"
    if home.exists():
        return read_kubeconfig([home], context)
    raise Refused(
        f"no way to an API server: $KUBECONFIG is not set, this is no pod, and there is no {home}",
        fix="give --kubeconfig",
    )


def in_cluster(environment: Mapping[str, str], folder: Path = SERVICE_ACCOUNT) -> Access:
    """The Access of a pod's service account. Raises Refused if it is not mounted."""
    host, port = (
        environment["KUBERNETES_SERVICE_HOST"],
        environment.get("KUBERNETES_SERVICE_PORT", "443"),
    )
    try:
        authority = (folder / "ca.crt").read_text()
        namespace = (folder / "namespace").read_text().strip()
    except OSError as problem:
        fix = "do not set automountServiceAccountToken: false, or give --kubeconfig"
        raise Refused(
            f"the service account is not mounted: {problem.filename}: {problem.strerror}", fix=fix
        ) from None
    return Access(
        f"https://{join_host_port(host, port)}",
        authority_pem=authority,
        token_file=str(folder / "token"),
        namespace=namespace or "default",
        source="the pod's service account",
    )
