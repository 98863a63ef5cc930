"""The roles as processes with the rights of the manifests: a lab with a real API server, and tokens
of the roles' ServiceAccounts (TokenRequest API) instead of the administrator's.

In: a lab without roles, and the rendered manifests. Out: running roles, and each role's requests
according to the audit log.
"""

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import yaml
from tests.deploy.chart import DEPLOY, NAMESPACE, Manifest

from fairlead.kube.access import Access
from fairlead.lab import process
from fairlead.lab.process import Process
from fairlead.lab.site import Site

ROLES = ("controller", "gateway", "node")
DEADLINE_S = 60.0
ACCOUNT = f"system:serviceaccount:{NAMESPACE}:fairlead-"
POD = {
    "apiVersion": "v1",
    "kind": "Pod",
    "metadata": {"name": "web", "labels": {"app": "web"}},
    "spec": {
        "nodeName": "node1",
        "containers": [
            {"name": "web", "image": "echo", "ports": [{"name": "web", "containerPort": 8080}]}
        ],
    },
}


class Use(NamedTuple):
    """A request of a role to the API server. `resource` is `plural.group`, with its subresource
    after a slash."""

    role: str
    verb: str
    resource: str
    namespace: str
    name: str
    code: int


def service(
    name: str, *ports: int, annotations: dict[str, str] | None = None, **spec: object
) -> Manifest:
    """Return a Service of the pod with these ports."""
    fields = {
        "type": "LoadBalancer",
        "externalTrafficPolicy": "Local",
        "selector": {"app": "web"},
        "ports": [{"name": f"port-{port}", "port": port, "targetPort": "web"} for port in ports],
    }
    metadata = {"name": name, "annotations": annotations or {}}
    return {"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": fields | spec}


async def until(what: str, holds: Callable[[], Awaitable[bool]]) -> None:
    try:
        async with asyncio.timeout(DEADLINE_S):
            while not await holds():
                await asyncio.sleep(0.2)
    except TimeoutError:
        raise AssertionError(f"waited {DEADLINE_S:.0f} s without success until {what}") from None


class Life:
    """The cluster, and the roles that run in it."""

    def __init__(self, site: Site, folder: Path) -> None:
        self.site = site
        self._folder = folder

    async def kubectl(self, *arguments: str, objects: object = None) -> str:
        """Run kubectl as the administrator."""
        command = ("kubectl", "--kubeconfig", str(self.site.directory.kubeconfig), *arguments)
        pipe = asyncio.subprocess.PIPE
        environment = process.environment(self.site.name, "kubectl")
        child = await asyncio.create_subprocess_exec(
            *command, stdin=pipe, stdout=pipe, stderr=pipe, env=environment
        )
        text = yaml.safe_dump_all(objects) if isinstance(objects, list) else yaml.safe_dump(objects)
        async with asyncio.timeout(60):
            output, errors = await child.communicate(text.encode())
        assert child.returncode == 0, f"kubectl {' '.join(arguments)}: {errors.decode()}"
        return output.decode()

    async def install(self, manifests: list[Manifest]) -> None:
        """Apply the manifests; write a kubeconfig for each role's account, and the configuration
        from the ConfigMap."""
        await self.kubectl("apply", "--server-side", "-f", str(DEPLOY / "crds"))
        await self.kubectl(
            "wait", "--for=condition=Established", "--timeout=60s", "-f", str(DEPLOY / "crds")
        )
        await self.kubectl(
            "apply", "--server-side", "--force-conflicts", "-f", "-", objects=manifests
        )
        shown = await self.kubectl("get", "configmap", "fairlead", "-n", NAMESPACE, "-o", "json")
        self.configuration.write_text(json.loads(shown)["data"]["fairlead.yaml"])
        for role in ROLES:
            kubeconfig = yaml.safe_load(self.site.directory.kubeconfig_inside.read_text())
            kubeconfig["users"][0]["user"] = {"token": await self.token(role)}
            self.kubeconfig(role).write_text(yaml.safe_dump(kubeconfig))

    async def token(self, role: str) -> str:
        return (await self.kubectl("create", "token", f"fairlead-{role}", "-n", NAMESPACE)).strip()

    @property
    def configuration(self) -> Path:
        return self._folder / "fairlead.yaml"

    def kubeconfig(self, role: str) -> Path:
        """Return a role's kubeconfig for use inside the lab."""
        return self._folder / f"kubeconfig-{role}"

    async def access(self, role: str) -> Access:
        """Return a role's access for use on this machine."""
        admin = yaml.safe_load(self.site.directory.kubeconfig.read_text())["clusters"][0]["cluster"]
        return Access(
            admin["server"],
            server_name=admin["tls-server-name"],
            insecure=True,
            token=await self.token(role),
            source=role,
        )

    def start(self, role: str, host: str, port: int, *options: str) -> Process:
        """Start a role on a host of the lab, with its HTTP endpoints at the port."""
        program = str(Path(sys.executable).with_name("fairlead"))
        files = ("--config", str(self.configuration), "--kubeconfig", str(self.kubeconfig(role)))
        where = ("--listen", f"127.0.0.1:{port}", *options)
        return self.site.spawn(host, [program, role, *files, *where], label=f"{host}/{role}-{port}")

    async def ready(self, host: str, port: int) -> None:
        async def answers() -> bool:
            code, _, _ = await self.site.exec(
                host, ["curl", "-sf", f"http://127.0.0.1:{port}/readyz"]
            )
            return code == 0

        await until(f"the role on {host} is ready", answers)

    async def works(self, host: str, port: int) -> bool:
        """Return whether the role on this host does its work; of several controllers only the
        leader does."""
        _, metrics, _ = await self.site.exec(
            host, ["curl", "-sf", f"http://127.0.0.1:{port}/metrics"]
        )
        return "fairlead_working 1.0" in metrics

    async def served(self, port: int) -> None:
        """Wait until the Service `web` answers the client at this port."""

        async def answers() -> bool:
            addresses = await self.addresses("web")
            where = f"http://{addresses[0]}:{port}/" if addresses else ""
            return (
                bool(where) and (await self.site.exec("client1", ["curl", "-sfm1", where]))[0] == 0
            )

        await until(f"port {port} of Service web answers", answers)

    async def addresses(self, service: str) -> list[str]:
        shown = json.loads(await self.kubectl("get", "service", service, "-o", "json"))
        return [entry["ip"] for entry in shown["status"]["loadBalancer"].get("ingress", [])]

    async def warned(self, component: str, service: str) -> None:
        """Wait for a Warning from this component about the Service."""

        async def is_there() -> bool:
            fields = f"involvedObject.name={service},type=Warning,source={component}"
            return bool(
                json.loads(
                    await self.kubectl("get", "events", "--field-selector", fields, "-o", "json")
                )["items"]
            )

        await until(f"{component} warns about Service {service}", is_there)

    async def holder(self) -> str:
        """Return the holder of the Lease."""
        shown = await self.kubectl(
            "get", "lease", "fairlead-controller", "-n", NAMESPACE, "-o", "json"
        )
        return str(json.loads(shown)["spec"].get("holderIdentity", ""))

    def uses(self) -> list[Use]:
        """Return all requests of the roles, from the audit log."""
        log = self.site.directory.path / "kube-apiserver" / "audit.log"
        records = (msgspec.json.decode(line) for line in log.read_bytes().splitlines())
        return [
            use
            for record in records
            if record["user"]["username"].startswith(ACCOUNT)
            for use in uses_of(record)
        ]


def uses_of(record: Mapping[str, Any]) -> list[Use]:
    """Return the uses of a request. A streamed list counts as a watch and as a list, because the
    client lists if the server does not stream. A patch that created its object (server-side apply)
    counts as a patch and as a creation, because the server authorizes both."""
    use = use_of(record)
    if "sendInitialEvents=true" in record["requestURI"]:
        return [use, use._replace(verb="list")]
    if use.verb == "patch" and use.code == HTTPStatus.CREATED:
        return [use, use._replace(verb="create")]
    return [use]


def use_of(record: Mapping[str, Any]) -> Use:
    """Parse one line of the audit log (audit.k8s.io/v1)."""
    asked = record.get("objectRef")
    assert asked is not None, (
        f"a role requested {record['requestURI']}, which no rule of the manifests covers"
    )
    return Use(
        record["user"]["username"].removeprefix(ACCOUNT),
        record["verb"],
        resource(asked.get("apiGroup", ""), asked["resource"], asked.get("subresource", "")),
        asked.get("namespace", ""),
        asked.get("name", ""),
        record.get("responseStatus", {}).get("code", 0),
    )


def resource(group: str, plural: str, subresource: str = "") -> str:
    return ".".join(filter(None, (plural, group))) + (f"/{subresource}" if subresource else "")


def allowed(rules: Sequence[Mapping[str, Any]]) -> set[tuple[str, str]]:
    """Return (verb, resource) of a Role's rules."""
    return {
        (verb, resource(group, *plural.split("/")))
        for rule in rules
        for verb in rule["verbs"]
        for group in rule["apiGroups"]
        for plural in rule["resources"]
    }
