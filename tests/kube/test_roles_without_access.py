"""Roles as processes at a real API server that rejects their credentials, or does not grant them
every permission: they log the error once, retry at growing intervals, and continue when access is
granted."""

import asyncio
import re
import secrets
import shutil
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.e2e.logs import entries_of
from tests.kube.recording_proxy import RecordingProxy

from fairlead.kube.client import Client
from fairlead.lab import namespace, process
from fairlead.lab.kubeapiserver import KubeApiServer

pytestmark = pytest.mark.root

DEADLINE_S = 60
DURATION_S = 2.0
"""The time for which the roles run with a wrong token."""
Object = dict[str, Any]
ROLES: dict[str, tuple[str, ...]] = {
    "controller": (),
    "gateway": ("--interface", "lo"),
    "node": (),
}


class Role:
    """One role's process, in a network namespace, with its own proxy to the server and its own
    token file."""

    def __init__(
        self, name: str, folder: Path, proxy: RecordingProxy, started: process.Process, log: Path
    ) -> None:
        self.name = name
        self.token = folder / "token"
        self.proxy = proxy
        self.process = started
        self._log = log

    @property
    def log_lines(self) -> list[Object]:
        """The log lines of the role."""
        return entries_of(self._log)

    @property
    def problems(self) -> list[Object]:
        return [
            line for line in self.log_lines if line["level"] in ("warning", "error", "critical")
        ]

    def served(self, path: str) -> bool:
        """Return whether a request of the role below this path was successful."""
        return any(
            request.code == 200 and request.path.startswith(path) for request in self.proxy.requests
        )


class Site:
    """A network namespace, and on the server a Node and a ServiceAccount of the same name."""

    def __init__(self, server: KubeApiServer, folder: Path) -> None:
        self.name = f"flt-in-{secrets.token_hex(3)}"
        self.server = server
        self._folder = folder
        self._stack = AsyncExitStack()
        self.pins = Path("/sys/fs/bpf") / self.name

    async def __aenter__(self) -> "Site":
        namespace.create(self.name)
        self._stack.callback(namespace.delete, self.name)
        self._stack.callback(shutil.rmtree, self.pins, ignore_errors=True)
        code, _, errors = await process.run(
            self.name, ["ip", "link", "set", "lo", "up"], lab=self.name
        )
        assert code == 0, errors
        await self.make("/api/v1/namespaces", {"metadata": {"name": self.name}})
        await self.make(
            f"/api/v1/namespaces/{self.name}/serviceaccounts", {"metadata": {"name": "me"}}
        )
        addresses = [{"type": "InternalIP", "address": "127.0.0.1"}]
        await self.make(
            "/api/v1/nodes",
            {"metadata": {"name": self.name}, "status": {"addresses": addresses}},
            delete=True,
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def make(self, path: str, body: Object, *, delete: bool = False) -> None:
        """Create an object; with `delete`, delete it at the end."""
        async with Client(self.server.access) as client:
            await client.request("POST", path, body=body)
        if delete:
            self._stack.push_async_callback(self._delete, f"{path}/{body['metadata']['name']}")

    async def _delete(self, path: str) -> None:
        async with Client(self.server.access) as client:
            await client.request("DELETE", path)

    async def start(self, name: str, token: str) -> Role:
        """Start a role with this token."""
        folder = self._folder / name
        folder.mkdir()
        (folder / "token").write_text(token)
        with namespace.inside(self.name):
            listener = socket.create_server(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        proxy = await self._stack.enter_async_context(
            RecordingProxy(self.server.access).listen(listener)
        )
        config = {
            "current-context": "here",
            "contexts": [{"name": "here", "context": {"cluster": "here", "user": "me"}}],
            "clusters": [{"name": "here", "cluster": {"server": url}}],
            "users": [{"name": "me", "user": {"tokenFile": "token"}}],
        }
        (folder / "kubeconfig").write_text(yaml.safe_dump(config))
        (folder / "fairlead.yaml").write_text(
            yaml.safe_dump({"controller": {"leaseNamespace": self.name}})
        )
        options = [
            "--kubeconfig",
            str(folder / "kubeconfig"),
            "--config",
            str(folder / "fairlead.yaml"),
            "--listen",
            "",
        ]
        if name != "controller":
            options += ["--node-name", self.name]
        if name == "gateway":
            options += ["--pin-path", str(self.pins)]
        argv = process.python("fairlead", name, *options, *ROLES[name])
        log = folder / "log"
        started = process.spawn(self.name, f"role/{name}", argv, log=log, inside=self.name)
        self._stack.push_async_callback(process.kill_all, [started])
        return Role(name, folder, proxy, started, log)


async def until(roles: list[Role], condition: Callable[[Role], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        for role in roles:
            while not condition(role):
                assert role.process.running, role.log_lines
                await asyncio.sleep(0.05)


@pytest.fixture
async def site(real_apiserver: KubeApiServer, tmp_path: Path) -> AsyncIterator[Site]:
    async with Site(real_apiserver, tmp_path) as site:
        yield site


async def test_a_wrong_token_is_logged_once_and_rarely_sent_until_it_is_replaced(
    site: Site,
) -> None:
    roles = [await site.start(name, "wrong") for name in ROLES]
    await until(roles, lambda role: bool(role.problems))
    before = {role.name: len(role.proxy.requests) for role in roles}
    await asyncio.sleep(DURATION_S)
    for role in roles:
        assert role.process.running
        [problem] = role.problems
        assert (problem["level"], problem["event"]) == (
            "error",
            "API server rejects the credentials, retrying",
        )
        assert (
            "renew the credentials: the token or certificate is missing, wrong or expired"
            in problem["problem"]
        )
        assert str(role.token.parent / "kubeconfig") in problem["identity"]
        assert {request.code for request in role.proxy.requests} == {401}
        # At the start several parts request at the same moment; then requests follow after 0.5 to 1
        # s, and after 1 to 2 s.
        assert before[role.name] <= 10
        assert len(role.proxy.requests) - before[role.name] <= 4
    for role in roles:
        role.token.write_text(site.server.access.token)
    await until(roles, lambda role: role.served("/api/v1/services"))
    for role in roles:
        assert any(
            line["event"] == "API server accepts the credentials again" for line in role.log_lines
        )
        rejected = "API server rejects the credentials, retrying"
        assert [line["event"] for line in role.problems].count(rejected) == 1


async def test_a_missing_permission_is_logged_once_until_it_is_granted(site: Site) -> None:
    kinds = [
        ("", "services"),
        ("", "services/status"),
        ("", "events"),
        ("coordination.k8s.io", "leases"),
    ]
    kinds += [("discovery.k8s.io", "endpointslices"), ("fairlead.io", "*")]
    rules = [
        {"apiGroups": [group], "resources": [resource], "verbs": ["*"]} for group, resource in kinds
    ]
    await grant(site, "all-but-nodes", rules)
    token = await site.server.service_account_token(f"{site.name}/me")
    roles = [await site.start(name, token) for name in ROLES]

    def about_nodes(role: Role) -> list[Object]:
        return [line for line in role.problems if '"nodes"' in str(line)]

    await until(roles, lambda role: bool(about_nodes(role)))
    await asyncio.sleep(DURATION_S / 2)
    account = f"system:serviceaccount:{site.name}:me"
    for role in roles:
        assert role.process.running
        [problem] = about_nodes(role)
        assert problem["level"] == "error"
        wanted = (
            rf'nodes.* is forbidden: User \\?"{account}\\?" cannot (get|list|watch) '
            r'resource \\?"nodes\\?" in API group'
        )
        assert re.search(wanted, problem["problem"]), problem
        assert "grant it by RBAC: apply deploy/manifests, or the chart" in problem["problem"]
        assert not role.served("/api/v1/nodes")
    await grant(
        site,
        "nodes",
        [{"apiGroups": [""], "resources": ["nodes"], "verbs": ["get", "list", "watch"]}],
    )
    await until(roles, lambda role: role.served("/api/v1/nodes"))
    assert all(len(about_nodes(role)) == 1 for role in roles)


async def grant(site: Site, what: str, rules: list[Object]) -> None:
    """Grant the account the permissions in the rules."""
    name, api = f"{site.name}-{what}", "/apis/rbac.authorization.k8s.io/v1"
    await site.make(
        f"{api}/clusterroles", {"metadata": {"name": name}, "rules": rules}, delete=True
    )
    role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": name}
    subject = {"kind": "ServiceAccount", "namespace": site.name, "name": "me"}
    binding = {"metadata": {"name": name}, "roleRef": role, "subjects": [subject]}
    await site.make(f"{api}/clusterrolebindings", binding, delete=True)


async def test_a_kubeconfig_that_cannot_be_read_ends_a_role_at_once(tmp_path: Path) -> None:
    async def run(name: str) -> tuple[str, int | None, str]:
        argv = process.python(
            "fairlead", name, "--kubeconfig", str(tmp_path / "none"), *ROLES[name]
        )
        pipe = asyncio.subprocess.PIPE
        started = await asyncio.create_subprocess_exec(
            *argv, stdout=pipe, stderr=asyncio.subprocess.STDOUT
        )
        async with asyncio.timeout(DEADLINE_S):
            output, _ = await started.communicate()
        return name, started.returncode, output.decode()

    for name, code, log_lines in await asyncio.gather(*map(run, ROLES)):
        assert code == 1, name
        assert log_lines == (
            f"fairlead: kubeconfig {tmp_path}/none cannot be read: No such file or directory; "
            "name another file with --kubeconfig\n"
        )
