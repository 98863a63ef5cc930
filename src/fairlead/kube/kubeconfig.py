"""Read kubeconfig files into an `Access`.

In: the files, merged as kubectl does (of two entries with one name the first applies). Out: the
Access of one context. Invariants: every setting that concerns identity or trust is applied or
rejected, never ignored; relative paths are relative to the file that contains them. Follows
"Organizing Cluster Access Using kubeconfig Files" and the kubeconfig (v1) reference."""

import base64
import binascii
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from fairlead.errors import Refused, plain
from fairlead.kube.access import Access, ExecPlugin, Impersonation
from fairlead.kube.documents import read_contents
from fairlead.kube.rules.types import without_nulls
from fairlead.mistakes import mistake


class Section(msgspec.Struct, frozen=True, rename="kebab"):
    """Base class: kebab-case field names in the file."""


class Cluster(Section, frozen=True):
    server: str
    certificate_authority: str = ""
    certificate_authority_data: str = ""
    insecure_skip_tls_verify: bool = False
    tls_server_name: str = ""
    proxy_url: str = ""


class EnvironmentEntry(msgspec.Struct, frozen=True):
    name: str
    value: str


class Exec(msgspec.Struct, frozen=True, rename="camel"):
    """The exec section, the only one with camelCase field names."""

    command: str
    api_version: str
    args: tuple[str, ...] | None = ()
    env: tuple[EnvironmentEntry, ...] | None = ()
    install_hint: str = ""
    provide_cluster_info: bool = False
    interactive_mode: str = "IfAvailable"


class User(Section, frozen=True):
    token: str = ""
    token_file: str = msgspec.field(default="", name="tokenFile")
    client_certificate: str = ""
    client_certificate_data: str = ""
    client_key: str = ""
    client_key_data: str = ""
    exec: Exec | None = None
    username: str = ""
    auth_provider: Mapping[str, object] | None = None
    as_: str = msgspec.field(default="", name="as")
    as_uid: str = ""
    as_groups: tuple[str, ...] = ()
    as_user_extra: Mapping[str, object] | None = None


class Context(Section, frozen=True):
    cluster: str
    user: str = ""
    namespace: str = "default"


class NamedCluster(msgspec.Struct, frozen=True):
    name: str
    cluster: Cluster


class NamedUser(msgspec.Struct, frozen=True):
    name: str
    user: User | None = None


class NamedContext(msgspec.Struct, frozen=True):
    name: str
    context: Context


class Kubeconfig(Section, frozen=True):
    current_context: str = ""
    clusters: tuple[NamedCluster, ...] | None = ()
    users: tuple[NamedUser, ...] | None = ()
    contexts: tuple[NamedContext, ...] | None = ()


def read_kubeconfig(paths: Sequence[Path], context: str | None = None) -> Access:
    """Return the Access of `context` (None: the current context) in these files. Raise Refused."""
    where = ":".join(map(str, paths))
    clusters: dict[str, tuple[Path, Cluster]] = {}
    users: dict[str, tuple[Path, User]] = {}
    contexts: dict[str, Context] = {}
    for path in paths:
        config = load(path)
        context = context or config.current_context
        for cluster in config.clusters or ():
            clusters.setdefault(cluster.name, (path, cluster.cluster))
        for user in config.users or ():
            users.setdefault(user.name, (path, user.user or User()))
        for entry in config.contexts or ():
            contexts.setdefault(entry.name, entry.context)
    if not contexts:
        raise Refused(
            f"{where} has no contexts: it is empty, or no kubeconfig",
            fix="name another file with --kubeconfig",
        )
    if not context:
        raise Refused(
            f"{where} has no current context",
            fix=f"choose one with --context: {names_of(contexts)}",
        )
    chosen = pick(contexts, context, "context", where)
    source = f"context {context} of {where}"
    user_entry = pick(users, chosen.user, "user", where) if chosen.user else (paths[0], User())
    return access_of(
        pick(clusters, chosen.cluster, "cluster", where), user_entry, chosen.namespace, source
    )


def load(path: Path) -> Kubeconfig:
    """Read one file, as kubectl does. Raise Refused with the path of the invalid field."""
    document: object = {}
    try:
        text = path.read_bytes().decode("utf-8", "surrogateescape")
        for content in read_contents(text):
            if content.problem:
                raise Refused(
                    f"kubeconfig {path}, line {content.line}: {content.problem}",
                    fix="correct it, or name another file with --kubeconfig",
                )
            document = without_nulls(content.value)
            break
        return msgspec.convert(document, Kubeconfig)
    except OSError as problem:
        raise Refused(
            f"kubeconfig {path} cannot be read: {plain(problem)}",
            fix="name another file with --kubeconfig",
        ) from None
    except msgspec.ValidationError as problem:
        message, fix = mistake(problem, Kubeconfig, document)
        raise Refused(f"kubeconfig {path}: {message}", fix=fix) from None


def pick(entries: Mapping[str, Any], name: str, kind: str, where: str) -> Any:
    if name not in entries:
        raise Refused(f"{where} has no {kind} {name!r}", fix=f"it has {names_of(entries)}")
    return entries[name]


def names_of(entries: Mapping[str, object]) -> str:
    return ", ".join(sorted(entries)) or "none"


def access_of(
    cluster_entry: tuple[Path, Cluster], user_entry: tuple[Path, User], namespace: str, source: str
) -> Access:
    """Return the Access of a cluster and a user. Raise Refused for unsupported settings."""
    (cluster_path, cluster), (user_path, user) = cluster_entry, user_entry
    if user.username or user.auth_provider:
        kind = "an auth-provider" if user.auth_provider else "a password"
        raise Refused(
            f"{source} uses {kind}, which Kubernetes no longer supports",
            fix="use a token, a certificate or an exec plugin",
        )
    if user.as_user_extra:
        raise Refused(
            f"{source} impersonates with as-user-extra, which is not supported", fix="remove it"
        )
    certificate = content(
        user_path,
        user.client_certificate_data,
        user.client_certificate,
        "client-certificate",
        source,
    )
    key = content(user_path, user.client_key_data, user.client_key, "client-key", source)
    if bool(certificate) != bool(key):
        raise Refused(f"{source} has only one of client-certificate and client-key", fix="set both")
    impersonation = Impersonation(user.as_, user.as_uid, user.as_groups) if user.as_ else None
    if not _is_url(cluster.server):
        raise Refused(
            f"the server {cluster.server!r} of {source} is not a URL",
            fix="write the address of the API server, such as https://192.0.2.10:6443",
        )
    return Access(
        cluster.server.rstrip("/"),
        authority_pem=content(
            cluster_path,
            cluster.certificate_authority_data,
            cluster.certificate_authority,
            "certificate-authority",
            source,
        ),
        insecure=cluster.insecure_skip_tls_verify,
        server_name=cluster.tls_server_name,
        proxy=proxy(cluster.proxy_url, source),
        # Like client-go, prefer the token file, which may be renewed, over the token beside it.
        token="" if user.token_file else user.token,
        token_file=str(user_path.parent / user.token_file) if user.token_file else "",
        certificate_pem=certificate,
        key_pem=key,
        exec_plugin=plugin(user_path, user.exec, source) if user.exec else None,
        impersonation=impersonation,
        namespace=namespace or "default",
        source=source,
    )


def content(beside: Path, data: str, file: str, what: str, source: str) -> str:
    """Return PEM text that is given as base64 (which takes precedence) or as a file name."""
    try:
        if data:
            return base64.b64decode(data, validate=True).decode()
        return (beside.parent / file).read_text() if file else ""
    except (binascii.Error, UnicodeDecodeError):
        raise Refused(
            f"{what} of {source} is not PEM in base64",
            fix=f"write {what}-data in base64, or name a PEM file in {what}",
        ) from None
    except OSError as problem:
        raise Refused(
            f"{what} of {source}: {beside.parent / file} cannot be read: {plain(problem)}",
            fix="name a file that exists and may be read; a relative path begins at the kubeconfig",
        ) from None


def proxy(url: str, source: str) -> str:
    if url and not _is_url(url):
        raise Refused(
            f"{source} goes through the proxy {url}",
            fix="only http and https proxies are supported: write http://192.0.2.10:3128",
        )
    return url


def _is_url(text: str) -> bool:
    """Return whether the text is an http or https URL with a host, and with a port or none."""
    try:
        parts = urlsplit(text)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


def plugin(beside: Path, section: Exec, source: str) -> ExecPlugin:
    """Return the exec plugin of a user. Raise Refused if it needs a terminal or another API
    version."""
    if section.interactive_mode == "Always":
        raise Refused(
            f"the exec plugin {section.command} of {source} needs a terminal",
            fix="use another kind of credentials",
        )
    if section.api_version not in (
        "client.authentication.k8s.io/v1",
        "client.authentication.k8s.io/v1beta1",
    ):
        fix = "use client.authentication.k8s.io/v1"
        raise Refused(
            f"the exec plugin {section.command} of {source} uses {section.api_version}", fix=fix
        )
    # A name without a slash is searched in PATH; any other name is relative to the file.
    command = str(beside.parent / section.command) if "/" in section.command else section.command
    return ExecPlugin(
        command,
        section.api_version,
        section.args or (),
        tuple((entry.name, entry.value) for entry in section.env or ()),
        section.provide_cluster_info,
        section.install_hint,
    )
