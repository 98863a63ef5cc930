"""Where the API server is and who we are to it.

In: an `Access`, a plain value, written by hand (`Access("http://127.0.0.1:8001")`) or found by
`kube/auth.py`. Out: from it, when needed, `Credentials` that say how long they hold: a projected
service account token is replaced on disk within its hour, so it is read again each minute; an exec
plugin is asked again at its expiry. Invariant: nothing is weaker than the Access says; certificates
are checked unless it says not to. Keys never touch a disk. Follows KEP-1205 (bound service account
tokens) and KEP-541 (exec plugins, client.authentication.k8s.io v1 and v1beta1)."""

import asyncio
import os
import ssl
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from fairlead.errors import Refused, Unavailable

TOKEN_REREAD_S = 60.0
PLUGIN_TIMEOUT_S = 60.0
EXPIRY_MARGIN_S = 10.0


class ExecPlugin(msgspec.Struct, frozen=True):
    """A program that prints an ExecCredential. `environment` is added to ours; `install_hint` is
    shown if it is missing."""

    command: str
    api_version: str
    arguments: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()
    provide_cluster_info: bool = False
    install_hint: str = ""


class Impersonation(msgspec.Struct, frozen=True):
    """Act as somebody else, if our own account may."""

    user: str
    uid: str = ""
    groups: tuple[str, ...] = ()


class Credentials(msgspec.Struct, frozen=True):
    """What proves who we are, and for how many seconds it may be taken as still right (None: for
    ever)."""

    token: str = ""
    certificate_pem: str = ""
    key_pem: str = ""
    holds_s: float | None = None


class Access(msgspec.Struct, frozen=True):
    """One API server, and one identity to it. `source` says where this was read, for messages."""

    server: str
    authority_pem: str = ""
    """Certificates of the authorities to trust; empty: those of the system."""
    insecure: bool = False
    server_name: str = ""
    """The name to expect in the server's certificate, if it is not the one in the URL."""
    proxy: str = ""
    token: str = ""
    token_file: str = ""
    certificate_pem: str = ""
    key_pem: str = ""
    exec_plugin: ExecPlugin | None = None
    impersonation: Impersonation | None = None
    namespace: str = "default"
    source: str = "the given address"

    async def credentials(self) -> Credentials:
        """What to show the server now. Raises Refused if it cannot be had without somebody's
        help."""
        if self.exec_plugin is not None:
            return await run_plugin(self.exec_plugin, self)
        if self.token_file:
            token = await asyncio.to_thread(read_token, self.token_file, self.source)
            return Credentials(token, self.certificate_pem, self.key_pem, TOKEN_REREAD_S)
        return Credentials(self.token, self.certificate_pem, self.key_pem)


def read_token(path: str, source: str) -> str:
    """The token in a file. Raises Refused."""
    try:
        token = Path(path).read_text().strip()
    except OSError as problem:
        raise Refused(
            f"the token file {path}, named by {source}, cannot be read: {problem.strerror}",
            fix="mount it",
        ) from None
    if not token:
        raise Refused(
            f"the token file {path}, named by {source}, is empty",
            fix="mount a service account token there",
        )
    return token


def tls_context(access: Access, credentials: Credentials) -> ssl.SSLContext:
    """The TLS settings for an Access. Raises Refused if a certificate or key in it is none."""
    try:
        context = ssl.create_default_context(cadata=access.authority_pem or None)
    except ssl.SSLError as problem:
        raise Refused(
            f"the certificate authority of {access.source} is no PEM certificate: {problem}"
        ) from None
    if access.insecure:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    if credentials.certificate_pem:
        try:
            load_certificate(context, credentials.certificate_pem, credentials.key_pem)
        except ssl.SSLError as problem:
            fix = "the key must be the certificate's own, in PEM, without a passphrase"
            raise Refused(
                f"the client certificate of {access.source} cannot be used: {problem}", fix=fix
            ) from None
    return context


def load_certificate(context: ssl.SSLContext, certificate_pem: str, key_pem: str) -> None:
    """Give `context` a client certificate. OpenSSL takes it from a file only: it gets one in
    memory."""
    descriptor = os.memfd_create("client-certificate")
    try:
        os.write(descriptor, f"{certificate_pem}\n{key_pem}\n".encode())
        # An encrypted key would make OpenSSL ask on the terminal and hang us; an empty password
        # fails at once.
        context.load_cert_chain(f"/proc/self/fd/{descriptor}", password="")
    finally:
        os.close(descriptor)


class ExecStatus(msgspec.Struct, frozen=True, rename="camel"):
    token: str = ""
    client_certificate_data: str = ""
    client_key_data: str = ""
    expiration_timestamp: datetime | None = None


class ExecCredential(msgspec.Struct, frozen=True, rename="camel"):
    api_version: str
    status: ExecStatus | None = None


async def run_plugin(plugin: ExecPlugin, access: Access) -> Credentials:
    """Ask an exec plugin. Raises Refused if it is missing or fails, Unavailable if it does not end
    in time."""
    what = f"the exec plugin {plugin.command} of {access.source}"
    environment = {
        **os.environ,
        **dict(plugin.environment),
        "KUBERNETES_EXEC_INFO": exec_info(plugin, access),
    }
    pipe = asyncio.subprocess.PIPE
    try:
        process = await asyncio.create_subprocess_exec(
            plugin.command,
            *plugin.arguments,
            env=environment,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=pipe,
            stderr=pipe,
        )
    except OSError as problem:
        raise Refused(
            f"{what} cannot be run: {problem.strerror}", fix=plugin.install_hint or "install it"
        ) from None
    try:
        async with asyncio.timeout(PLUGIN_TIMEOUT_S):
            output, complaint = await process.communicate()
    except TimeoutError:
        raise Unavailable(f"{what} did not end within {PLUGIN_TIMEOUT_S:.0f} s") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        told = complaint.decode(errors="replace").strip()[-500:]
        raise Refused(
            f"{what} ended with {process.returncode}: {told}",
            fix="run it by hand; perhaps it wants a login",
        )
    return read_exec_credential(output, plugin, what, datetime.now(UTC))


def exec_info(plugin: ExecPlugin, access: Access) -> str:
    """The KUBERNETES_EXEC_INFO for a plugin: that nobody sits at a terminal, and the cluster if it
    asks for it."""
    spec: dict[str, object] = {"interactive": False}
    if plugin.provide_cluster_info:
        cluster: dict[str, object] = {
            "server": access.server,
            "insecure-skip-tls-verify": access.insecure,
        }
        if access.authority_pem:
            cluster["certificate-authority-data"] = access.authority_pem.encode()
        if access.server_name:
            cluster["tls-server-name"] = access.server_name
        spec["cluster"] = cluster
    return msgspec.json.encode(
        {"apiVersion": plugin.api_version, "kind": "ExecCredential", "spec": spec}
    ).decode()


def read_exec_credential(
    output: bytes, plugin: ExecPlugin, what: str, now: datetime
) -> Credentials:
    """The Credentials in a plugin's output. Raises Refused."""
    try:
        answer = msgspec.json.decode(output, type=ExecCredential)
    except msgspec.DecodeError as problem:
        raise Refused(
            f"{what} printed no ExecCredential: {problem}", fix="run it by hand and look"
        ) from None
    if answer.api_version != plugin.api_version:
        raise Refused(
            f"{what} answered in {answer.api_version}, the kubeconfig says {plugin.api_version}",
            fix="make the two the same",
        )
    status = answer.status
    if status is None or not (
        status.token or (status.client_certificate_data and status.client_key_data)
    ):
        raise Refused(f"{what} gave neither a token nor a client certificate with its key")
    holds_s = None
    if status.expiration_timestamp is not None:
        holds_s = max(0.0, (status.expiration_timestamp - now).total_seconds() - EXPIRY_MARGIN_S)
    return Credentials(
        status.token, status.client_certificate_data, status.client_key_data, holds_s
    )
