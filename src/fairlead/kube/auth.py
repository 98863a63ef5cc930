"""Find the API server and an identity, in the same places as kubectl and client-go.

In: what the user named (a file, a context), the environment, the files that Kubernetes mounts into
a pod. Out: an `Access`. Invariant: a named file or context is used or rejected. Only without one
are these places searched, in this order: $KUBECONFIG, the pod's service account, ~/.kube/config.
Follows "Accessing the Kubernetes API from a Pod" and "Organizing Cluster Access Using kubeconfig
Files"."""

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
    """Return the Access to use. Raise Refused, with the places that were searched, if there is
    none."""
    if kubeconfig is not None:
        return read_kubeconfig([kubeconfig], context)
    if named := environment.get("KUBECONFIG"):
        # kubectl ignores missing files of the list. If all are missing, that is reported as an
        # error.
        paths = [Path(name).expanduser() for name in named.split(os.pathsep) if name]
        return read_kubeconfig([path for path in paths if path.exists()] or paths[:1], context)
    if "KUBERNETES_SERVICE_HOST" in environment and context is None:
        return in_cluster(environment)
    home = Path(environment.get("HOME", "~")).expanduser() / ".kube" / "config"
    if home.exists():
        return read_kubeconfig([home], context)
    raise Refused(
        "no API server is configured: $KUBECONFIG is not set, this is not a pod, "
        f"and {home} is missing",
        fix="set --kubeconfig",
    )


def in_cluster(environment: Mapping[str, str], folder: Path = SERVICE_ACCOUNT) -> Access:
    """Return the Access of a pod's service account. Raise Refused if the account is not mounted."""
    host, port = (
        environment["KUBERNETES_SERVICE_HOST"],
        environment.get("KUBERNETES_SERVICE_PORT", "443"),
    )
    try:
        authority = (folder / "ca.crt").read_text()
        namespace = (folder / "namespace").read_text().strip()
    except OSError as problem:
        fix = "do not set automountServiceAccountToken: false, or set --kubeconfig"
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
