"""Authentication at a real API server with each kind of credentials."""

import asyncio
import base64
import json
import os
import secrets
import subprocess
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.kube.recording_proxy import connect_proxy

from fairlead.kube.access import Access
from fairlead.kube.answers import ServerUnavailable, Unauthenticated
from fairlead.kube.auth import find_access
from fairlead.kube.client import Client
from fairlead.kube.kubeconfig import read_kubeconfig
from fairlead.lab.kubeapiserver import KubeApiServer

DEADLINE_S = 60
GROUP = "authentication.k8s.io"
Object = dict[str, Any]


async def identity_of(access: Access) -> Object:
    """Return the identity of the credentials at the server: `username`, `groups`, `extra`."""
    async with Client(access) as client:
        return await identity(client)


async def identity(client: Client) -> Object:
    body = {"apiVersion": f"{GROUP}/v1", "kind": "SelfSubjectReview"}
    answer = await client.request("POST", f"/apis/{GROUP}/v1/selfsubjectreviews", body=body)
    found: Object = json.loads(answer)["status"]["userInfo"]
    return found


def encoded(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def write_config(path: Path, server: KubeApiServer, user: Object, **cluster: object) -> Path:
    """Write a kubeconfig with one context. None removes a field of the cluster."""
    access = server.access
    fields: Object = {
        "server": access.server,
        "certificate-authority-data": encoded(access.authority_pem),
        "tls-server-name": access.server_name,
    }
    named = {field.replace("_", "-"): value for field, value in cluster.items()}
    content = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "real",
        "contexts": [{"name": "real", "context": {"cluster": "real", "user": "me"}}],
        "clusters": [
            {
                "name": "real",
                "cluster": {
                    name: value for name, value in (fields | named).items() if value is not None
                },
            }
        ],
        "users": [{"name": "me", "user": user}],
    }
    path.write_text(yaml.safe_dump(content))
    return path


class Certificate:
    """A client certificate, signed by the server's own authority: `me.crt` and `me.key` in a
    folder."""

    def __init__(self, folder: Path, server: KubeApiServer, name: str, *, days: int = 1) -> None:
        self.certificate, self.key = folder / "me.crt", folder / "me.key"
        request = folder / "me.csr"
        new_key = [
            "-newkey",
            "ec",
            "-pkeyopt",
            "ec_paramgen_curve:prime256v1",
            "-nodes",
            "-keyout",
            str(self.key),
        ]
        _openssl("req", *new_key, "-subj", f"/O=system:masters/CN={name}", "-out", str(request))
        authority = [
            "-CA",
            str(server.directory / "ca.crt"),
            "-CAkey",
            str(server.directory / "ca.key"),
        ]
        serial = ["-set_serial", str(secrets.randbits(63))]
        _openssl(
            "x509",
            "-req",
            "-in",
            str(request),
            *authority,
            *serial,
            "-days",
            str(days),
            "-out",
            str(self.certificate),
        )

    @property
    def data(self) -> Object:
        return {
            "client-certificate-data": encoded(self.certificate.read_text()),
            "client-key-data": encoded(self.key.read_text()),
        }


def _openssl(*arguments: str) -> None:
    subprocess.run(["openssl", *arguments], check=True, capture_output=True, timeout=60)


async def test_a_client_certificate_is_accepted_as_data_and_as_files(
    real_apiserver: KubeApiServer, tmp_path: Path
) -> None:
    certificate = Certificate(tmp_path, real_apiserver, "anna")
    for user in (certificate.data, {"client-certificate": "me.crt", "client-key": "me.key"}):
        found = await identity_of(
            read_kubeconfig([write_config(tmp_path / "config", real_apiserver, user)])
        )
        assert found["username"] == "anna"
        assert "system:masters" in found["groups"]


async def test_a_certificate_of_another_authority_is_rejected(
    real_apiserver: KubeApiServer, tmp_path: Path
) -> None:
    new_key = [
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:prime256v1",
        "-nodes",
        "-keyout",
        str(tmp_path / "me.key"),
    ]
    _openssl(
        "req",
        "-x509",
        *new_key,
        "-subj",
        "/O=system:masters/CN=eve",
        "-days",
        "1",
        "-out",
        str(tmp_path / "me.crt"),
    )
    user = {"client-certificate": "me.crt", "client-key": "me.key"}
    with pytest.raises(Unauthenticated, match="renew the credentials"):
        await identity_of(
            read_kubeconfig([write_config(tmp_path / "config", real_apiserver, user)])
        )


async def make(server: KubeApiServer, path: str, body: Object) -> Object:
    async with Client(server.access) as client:
        answer: Object = json.loads(await client.request("POST", path, body=body))
    return answer


@pytest.fixture
async def space(real_apiserver: KubeApiServer) -> str:
    """Create a namespace with a ServiceAccount `me`."""
    name = f"access-{secrets.token_hex(4)}"
    await make(real_apiserver, "/api/v1/namespaces", {"metadata": {"name": name}})
    await make(
        real_apiserver, f"/api/v1/namespaces/{name}/serviceaccounts", {"metadata": {"name": "me"}}
    )
    return name


async def bound_token(server: KubeApiServer, space: str, secret: str) -> str:
    """Return a token that is valid while a Secret exists."""
    made = await make(server, f"/api/v1/namespaces/{space}/secrets", {"metadata": {"name": secret}})
    reference = {
        "kind": "Secret",
        "apiVersion": "v1",
        "name": secret,
        "uid": made["metadata"]["uid"],
    }
    body = {"spec": {"expirationSeconds": 600, "boundObjectRef": reference}}
    answer = await make(server, f"/api/v1/namespaces/{space}/serviceaccounts/me/token", body)
    return str(answer["status"]["token"])


async def test_a_rotated_token_is_read_from_its_file_again(
    real_apiserver: KubeApiServer, space: str, tmp_path: Path
) -> None:
    """The old token becomes invalid while it is in use, as when it expires: the next call uses the
    new one."""
    file = tmp_path / "token"
    file.write_text(await bound_token(real_apiserver, space, "old"))
    access = read_kubeconfig(
        [write_config(tmp_path / "config", real_apiserver, {"tokenFile": "token"})]
    )
    async with Client(access) as client:
        before = await identity(client)
        assert before["username"] == f"system:serviceaccount:{space}:me"
        file.write_text(await bound_token(real_apiserver, space, "new"))
        async with Client(real_apiserver.access) as admin:
            await admin.request("DELETE", f"/api/v1/namespaces/{space}/secrets/old")
        async with asyncio.timeout(DEADLINE_S):
            # The server caches a successful token review for 10 s.
            while (found := await identity(client))["extra"] == before["extra"]:
                await asyncio.sleep(0.2)
        assert found["username"] == before["username"]


@pytest.mark.parametrize("version", ["v1", "v1beta1"])
async def test_an_exec_plugin_runs_again_when_its_token_expires(
    real_apiserver: KubeApiServer, tmp_path: Path, version: str
) -> None:
    api_version = f"client.{GROUP}/{version}"
    # The token counts as expired 10 s before it expires. The three seconds until then are enough
    # for three calls on any machine.
    expires = (datetime.now(UTC) + timedelta(seconds=14)).replace(microsecond=0)
    status = {
        "token": real_apiserver.access.token,
        "expirationTimestamp": expires.strftime("%Y-%m-%dT%H:%M:%SZ"),
    }
    access = plugin_access(real_apiserver, tmp_path, api_version, status)
    async with Client(access) as client:
        for _ in range(3):
            assert (await identity(client))["username"] == "admin"
        assert plugin_runs(tmp_path) == 1
        await asyncio.sleep((expires - datetime.now(UTC)).total_seconds() - 10 + 0.1)
        await identity(client)
        assert plugin_runs(tmp_path) == 2


async def test_the_certificate_of_an_exec_plugin_is_accepted(
    real_apiserver: KubeApiServer, tmp_path: Path
) -> None:
    certificate = Certificate(tmp_path, real_apiserver, "otto")
    status = {
        "clientCertificateData": certificate.certificate.read_text(),
        "clientKeyData": certificate.key.read_text(),
    }
    access = plugin_access(real_apiserver, tmp_path, f"client.{GROUP}/v1", status)
    assert (await identity_of(access))["username"] == "otto"


def plugin_access(server: KubeApiServer, folder: Path, api_version: str, status: Object) -> Access:
    (folder / "answer").write_text(
        json.dumps({"apiVersion": api_version, "kind": "ExecCredential", "status": status})
    )
    plugin = folder / "plugin"
    plugin.write_text(f"#!/bin/sh\necho x >> {folder}/runs\ncat {folder}/answer\n")
    plugin.chmod(0o755)
    user = {"exec": {"apiVersion": api_version, "command": "./plugin", "interactiveMode": "Never"}}
    return read_kubeconfig([write_config(folder / "config", server, user)])


def plugin_runs(folder: Path) -> int:
    return len((folder / "runs").read_text().splitlines())


async def test_several_kubeconfigs_are_merged_and_a_context_is_selected(
    real_apiserver: KubeApiServer, space: str, tmp_path: Path
) -> None:
    first = write_config(tmp_path / "first", real_apiserver, {"token": real_apiserver.access.token})
    token = await real_apiserver.service_account_token(f"{space}/me")
    second = {
        "contexts": [
            {"name": "other", "context": {"cluster": "real", "user": "other", "namespace": space}}
        ],
        "users": [{"name": "other", "user": {"token": token}}],
    }
    (tmp_path / "second").write_text(yaml.safe_dump(second))
    environment = {
        "KUBECONFIG": os.pathsep.join(
            [str(first), str(tmp_path / "second"), str(tmp_path / "absent")]
        )
    }
    assert (await identity_of(find_access(environment=environment)))["username"] == "admin"
    other = find_access(context="other", environment=environment)
    assert (await identity_of(other))["username"] == f"system:serviceaccount:{space}:me"
    assert other.namespace == space


async def test_requests_use_the_proxy_of_the_kubeconfig(
    real_apiserver: KubeApiServer, tmp_path: Path
) -> None:
    async with connect_proxy() as (url, requested):
        config = write_config(
            tmp_path / "config",
            real_apiserver,
            {"token": real_apiserver.access.token},
            proxy_url=url,
        )
        assert (await identity_of(read_kubeconfig([config])))["username"] == "admin"
    assert requested == [f"CONNECT {real_apiserver.url.removeprefix('https://')}"]


async def test_an_untrusted_server_gets_no_credentials(
    real_apiserver: KubeApiServer, tmp_path: Path
) -> None:
    user = {"token": real_apiserver.access.token}
    # The authority for clients differs from the authority of the server's own certificate.
    wrong = encoded((real_apiserver.directory / "ca.crt").read_text())
    for authority in (wrong, None):
        config = write_config(
            tmp_path / "config", real_apiserver, user, certificate_authority_data=authority
        )
        with pytest.raises(
            ServerUnavailable, match="give the server's certificate authority in the kubeconfig"
        ) as refused:
            await identity_of(read_kubeconfig([config]))
        assert "the certificate is not trusted: self-signed certificate" in str(refused.value)
        assert "\n" not in str(refused.value)
    careless = write_config(
        tmp_path / "config",
        real_apiserver,
        user,
        certificate_authority_data=None,
        insecure_skip_tls_verify=True,
    )
    assert (await identity_of(read_kubeconfig([careless])))["username"] == "admin"
