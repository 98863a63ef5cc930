"""The address of an API server and the identity of this process to it.

In: an `Access`, a plain value, written by hand (`Access("http://127.0.0.1:8001")`) or found by
`kube/auth.py`. Out: `Credentials`, with the time for which they may be used. The kubelet replaces a
projected service account token on disk before its hour ends, so the file is read again every
minute; an exec plugin is run again when its credentials expire. Invariants: security is never
weaker than the Access specifies, and certificates are verified unless the Access disables
verification; private keys are never written to a disk. Follows KEP-1205 (bound service account
tokens) and KEP-541 (exec plugins, client.authentication.k8s.io v1 and v1beta1)."""

import asyncio
import os
import ssl
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from fairlead.errors import Refused, Unavailable, plain
from fairlead.mistakes import explain

TOKEN_REREAD_S = 60.0
PLUGIN_TIMEOUT_S = 60.0
EXPIRY_MARGIN_S = 10.0


class ExecPlugin(msgspec.Struct, frozen=True):
    """A program that prints an ExecCredential.

    `environment` is added to the environment of this process. `install_hint` is shown if the
    program is missing."""

    command: str
    api_version: str
    arguments: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()
    provide_cluster_info: bool = False
    install_hint: str = ""


class Impersonation(msgspec.Struct, frozen=True):
    """Another identity to act as, if RBAC allows this account to impersonate it."""

    user: str
    uid: str = ""
    groups: tuple[str, ...] = ()


class Credentials(msgspec.Struct, frozen=True):
    """The credentials of this process: a token, a client certificate with its key, or both.

    `holds_s` is the number of seconds for which they may be used (None: without limit)."""

    token: str = ""
    certificate_pem: str = ""
    key_pem: str = ""
    holds_s: float | None = None


class Access(msgspec.Struct, frozen=True):
    """One API server and one identity. `source` names where they were read from, for messages."""

    server: str
    authority_pem: str = ""
    """Certificates of the trusted authorities, in PEM; empty: the authorities that the system
    trusts."""
    insecure: bool = False
    server_name: str = ""
    """The name to expect in the server's certificate, if it differs from the host of the URL."""
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
        """Return the credentials to use now. Raise Refused if a user must act before there are
        any."""
        if self.exec_plugin is not None:
            return await run_plugin(self.exec_plugin, self)
        if self.token_file:
            token = await asyncio.to_thread(read_token, self.token_file, self.source)
            return Credentials(token, self.certificate_pem, self.key_pem, TOKEN_REREAD_S)
        return Credentials(self.token, self.certificate_pem, self.key_pem)


def read_token(path: str, source: str) -> str:
    """Return the token in a file. Raise Refused if the file is unreadable or empty."""
    try:
        token = Path(path).read_text().strip()
    except OSError as problem:
        raise Refused(
            f"the token file {path}, named by {source}, cannot be read: {problem.strerror}",
            fix="mount the file",
        ) from None
    if not token:
        raise Refused(
            f"the token file {path}, named by {source}, is empty",
            fix="mount a service account token there",
        )
    return token


def tls_context(access: Access, credentials: Credentials) -> ssl.SSLContext:
    """Return the TLS settings for an Access. Raise Refused if a certificate or key is invalid."""
    try:
        context = ssl.create_default_context(cadata=access.authority_pem or None)
    except ssl.SSLError as problem:
        raise Refused(
            f"the certificate authority of {access.source} is not a PEM certificate: "
            f"{plain(problem)}",
            fix="write a certificate in PEM there",
        ) from None
    if access.insecure:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    if credentials.certificate_pem:
        try:
            load_certificate(context, credentials.certificate_pem, credentials.key_pem)
        except ssl.SSLError as problem:
            fix = "the key must be the certificate's own, in PEM, without a passphrase"
            raise Refused(
                f"the client certificate of {access.source} cannot be used: {plain(problem)}",
                fix=fix,
            ) from None
    return context


def load_certificate(context: ssl.SSLContext, certificate_pem: str, key_pem: str) -> None:
    """Load a client certificate into `context`.

    OpenSSL reads it from a file only, so it is passed in an anonymous file in memory (memfd)."""
    descriptor = os.memfd_create("client-certificate")
    try:
        os.write(descriptor, f"{certificate_pem}\n{key_pem}\n".encode())
        # With an encrypted key OpenSSL would prompt for a passphrase on the terminal and block; an
        # empty password makes it fail at once.
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
    """Run an exec plugin and return its credentials.

    Raise Refused if the plugin is missing or fails, Unavailable if it does not end within
    PLUGIN_TIMEOUT_S."""
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
        output_text = complaint.decode(errors="replace").strip()[-500:]
        raise Refused(
            f"{what} ended with {process.returncode}: {output_text}",
            fix="run it by hand; it may need a login",
        )
    return read_exec_credential(output, plugin, what, datetime.now(UTC))


def exec_info(plugin: ExecPlugin, access: Access) -> str:
    """Return the value of KUBERNETES_EXEC_INFO. It tells the plugin that there is no terminal, and
    describes the cluster if the plugin requests that."""
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
    """Return the credentials in a plugin's output. Raise Refused if it has none."""
    try:
        answer = msgspec.json.decode(output, type=ExecCredential)
    except msgspec.DecodeError as problem:
        raise Refused(
            f"{what} did not print an ExecCredential: {explain(problem, ExecCredential)}",
            fix="run it by hand and inspect its output",
        ) from None
    if answer.api_version != plugin.api_version:
        raise Refused(
            f"{what} answered in {answer.api_version}; the kubeconfig sets {plugin.api_version}",
            fix="use the same apiVersion in both",
        )
    status = answer.status
    if status is None or not (
        status.token or (status.client_certificate_data and status.client_key_data)
    ):
        raise Refused(
            f"{what} returned neither a token nor a client certificate with its key",
            fix="run it by hand; it may need a login",
        )
    holds_s = None
    if status.expiration_timestamp is not None:
        holds_s = max(0.0, (status.expiration_timestamp - now).total_seconds() - EXPIRY_MARGIN_S)
    return Credentials(
        status.token, status.client_certificate_data, status.client_key_data, holds_s
    )
