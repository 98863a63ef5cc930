"""Real nginx and real HAProxy as ingress controllers in pods of a lab, behind Services of classes
direct and proxy.

In: a running lab. Out: `Ingresses`: two applications with host names, over HTTP and TLS, behind
both controllers, in all set-ups of TRUST_SETTINGS at once, each on its own ports; and Services for
them, as `fairlead ingress` prints them: of class direct, and of class proxy without a PROXY header,
with version 1 and with version 2. The controllers themselves (the programs that write these files)
need images and a whole cluster. The replacements here translate their settings into the servers'
own, as their templates do: ingress-nginx's rootfs/etc/nginx/template/nginx.tmpl, and
kubernetes-ingress's pkg/handler/proxy-protocol.go."""

import itertools
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tests.e2e.load import addresses_of, until

from fairlead.ingress.manifests import objects
from fairlead.ingress.settings import Class, Controller, Header, Options, config, settings
from fairlead.lab.objects import PODS
from fairlead.lab.site import Site

HOSTS = ("a.example.com", "b.example.com")
CONTROLLERS: tuple[Controller, ...] = ("nginx", "haproxy")
NODES: Mapping[str, str] = {
    "nginx": "node1",
    "haproxy": "node2",
    "app-a": "node2",
    "app-b": "node1",
}
TRUST_SETTINGS = ("off", "narrow", "wide")
"""`off`: no PROXY header is expected. `narrow`: a header is expected, and trusted from the load
balancer. `wide`: a header is expected, and trusted from every source."""
HEADERS: tuple[Header, ...] = ("none", "v1", "v2")
GATEWAY = "gw1"
APPLICATION_PORT = 8080
EITHER_PORT = 8000
"""The port of the HAProxy that accepts connections with and without a header, as in docs/proxy.md.
"""

DOCUMENT = Path(__file__).parents[2] / "docs" / "proxy.md"
TRUSTED = "192.0.2.8/29"
"""The gateways in the example of docs/proxy.md."""


class Entry(NamedTuple):
    """A Service: its controller, set-up, class and header."""

    controller: Controller
    trust: str
    by: Class
    sends: Header = "none"

    @property
    def name(self) -> str:
        return f"{self.controller}-{self.trust}-{self.by}-{self.sends}"


ENTRIES = (
    *itertools.starmap(Entry, itertools.product(CONTROLLERS, TRUST_SETTINGS, ("direct",))),
    *itertools.starmap(Entry, itertools.product(CONTROLLERS, TRUST_SETTINGS, ("proxy",), HEADERS)),
)


class Ingresses:
    """The controllers, applications and Services, usable after `start`. `pods`, `services`: (IPv4,
    IPv6) of each."""

    def __init__(self, site: Site, folder: Path) -> None:
        self.site = site
        self.folder = folder
        self.pods: dict[str, tuple[str, str]] = {}
        self.services: dict[Entry, tuple[str, ...]] = {}
        self.gateway = site.topology.host(GATEWAY).addresses

    async def start(self) -> None:
        """Start the controllers. All of them answer when this returns."""
        await self.site.apply([_pod(name, node) for name, node in NODES.items()])
        await self.site.await_pods()
        async with self.site.client() as client:
            for pod in await client.list(PODS):
                four, six = (each.ip for each in pod.status.pod_ips)
                self.pods[pod.metadata.name] = (four, six)
        certificate = _certificate(self.folder)
        applications = {
            host: self.pods[name][0] for host, name in zip(HOSTS, ("app-a", "app-b"), strict=True)
        }
        for controller, text in (
            ("nginx", _nginx(self._settings("nginx"), applications, self.folder, certificate)),
            (
                "haproxy",
                _haproxy(self._settings("haproxy"), applications, certificate)
                + _either(self.gateway[0], applications),
            ),
        ):
            self._run(controller, f"default/{controller}", text)
        await self.site.apply([self._service(entry) for entry in ENTRIES])
        self.services = {entry: await addresses_of(self.site, entry.name) for entry in ENTRIES}
        await until(self._all_answer, "answers of the Services")

    def port(self, trust: str, *, tls: bool) -> int:
        """A controller's port for this set-up, in its pod."""
        return (443 if tls else 80) + TRUST_SETTINGS.index(trust)

    def _settings(self, controller: Controller) -> dict[str, Mapping[str, str]]:
        four, six = self.gateway
        trusted: dict[str, Sequence[str]] = {
            "off": (),
            "narrow": (f"{four}/32", f"{six}/128"),
            "wide": ("0.0.0.0/0", "::/0"),
        }
        return {trust: config(controller, trusted[trust]) for trust in TRUST_SETTINGS}

    def _service(self, entry: Entry) -> dict[str, Any]:
        """Return the Service as `fairlead ingress` prints it, with another name, and with the
        selector and ports of the lab's pods."""
        header = None if entry.sends == "none" else entry.sends
        trusted = self.gateway if entry.by == "proxy" else ()
        options = Options(
            entry.controller, entry.by, namespace="default", header=header, trusted=trusted
        )
        service = objects(options, settings(options))[0]
        service["metadata"]["name"] = entry.name
        # `fairlead ingress` does not print such a Service.
        if entry.sends == "none":
            service["metadata"].pop("annotations", None)
        ports = [
            port | {"targetPort": port["port"] + TRUST_SETTINGS.index(entry.trust)}
            for port in service["spec"]["ports"]
        ]
        service["spec"] |= {
            "selector": {"app": entry.controller},
            "ipFamilyPolicy": "RequireDualStack",
            "ports": ports,
        }
        return service

    def _run(self, program: str, place: str, text: str) -> None:
        name = place.replace("/", ".")
        path = self.folder / f"{name}.conf"
        path.write_text(text)
        argv = {
            "nginx": ["nginx", "-p", str(self.folder), "-c", str(path)],
            "haproxy": ["haproxy", "-q", "-db", "-f", str(path)],
        }
        self.site.spawn(place, argv[program], label=f"ingress/{name}")

    async def _all_answer(self) -> bool:
        """Return whether the correct set-ups answer at every address."""
        correct = {
            ("off", "direct", "none"),
            ("off", "proxy", "none"),
            ("narrow", "proxy", "v1"),
            ("narrow", "proxy", "v2"),
        }
        for entry, addresses in self.services.items():
            if entry[1:] not in correct:
                continue
            for address in addresses:
                where = f"[{address}]" if ":" in address else address
                argv = [
                    "curl",
                    "-sf",
                    "--max-time",
                    "1",
                    "-o",
                    "/dev/null",
                    "-H",
                    f"Host: {HOSTS[0]}",
                    f"http://{where}/",
                ]
                code, _, _ = await self.site.exec("client1", argv)
                if code:
                    return False
        return True


def _nginx(
    settings: Mapping[str, Mapping[str, str]],
    applications: Mapping[str, str],
    folder: Path,
    certificate: tuple[Path, Path],
) -> str:
    """Return the configuration of nginx.tmpl: with use-proxy-protocol every listener requires a
    header, and real_ip takes the address from it if the peer is in proxy-real-ip-cidr;
    X-Forwarded-For is replaced."""
    servers = []
    for number, data in enumerate(settings.values()):
        header, trust = "", ""
        if data.get("use-proxy-protocol") == "true":
            header = " proxy_protocol"
            trust = "real_ip_header proxy_protocol; real_ip_recursive on; " + "".join(
                f"set_real_ip_from {network}; " for network in data["proxy-real-ip-cidr"].split(",")
            )
        listen = " ".join(
            f"listen {family}{port + number}{tls}{header};"
            for family in ("", "[::]:")
            for port, tls in ((80, ""), (443, " ssl"))
        )
        servers += [
            f"server {{ {listen} server_name {host}; {trust}location / {{ proxy_pass "
            f"http://{address}:{APPLICATION_PORT}; "
            "proxy_set_header Host $host; proxy_set_header X-Forwarded-For $remote_addr; } }\n"
            for host, address in applications.items()
        ]
    whole, key = certificate
    return (
        "daemon off; worker_processes 1; pid nginx.pid; error_log nginx.err; user root;\nevents "
        "{ worker_connections 512; }\n"
        f"http {{ access_log off; ssl_certificate {whole}; ssl_certificate_key {key};\n"
        f"proxy_temp_path {folder}/proxy; client_body_temp_path "
        f"{folder}/body;\n{''.join(servers)}}}\n"
    )


def _haproxy(
    settings: Mapping[str, Mapping[str, str]],
    applications: Mapping[str, str],
    certificate: tuple[Path, Path],
) -> str:
    """Return the configuration of the controller: `expect-proxy layer4` for the sources in
    proxy-protocol, and option forwardfor."""
    whole, _ = certificate
    text = _HAPROXY_HEAD.format(mode="http")
    for number, data in enumerate(settings.values()):
        text += f"frontend web-{number}\n"
        for port, tls in ((80 + number, ""), (443 + number, f" ssl crt {whole}")):
            text += f"  bind :{port}{tls}\n  bind :::{port} v6only{tls}\n"
        if ranges := data.get("proxy-protocol"):
            text += (
                f"  tcp-request connection expect-proxy layer4 if {{ src "
                f"{ranges.replace(',', ' ')} }}\n"
            )
        text += "  option forwardfor\n"
        text += "".join(
            f"  use_backend {host} if {{ req.hdr(host),field(1,:) -i {host} }}\n"
            for host in applications
        )
    return text + "".join(
        f"backend {host}\n  server application {address}:{APPLICATION_PORT}\n"
        for host, address in applications.items()
    )


def _either(gateway: str, applications: Mapping[str, str]) -> str:
    """Return the HAProxy configuration of docs/proxy.md, with the address of this gateway and the
    first application."""
    _, _, text = DOCUMENT.read_text().partition("```\nfrontend either\n")
    text, documented, _ = text.partition("```")
    assert documented
    assert TRUSTED in text
    server = (
        f"backend application\n  server application {applications[HOSTS[0]]}:{APPLICATION_PORT}\n"
    )
    return f"frontend either\n{text.replace(TRUSTED, gateway)}{server}"


_HAPROXY_HEAD = """global
  maxconn 500
  nbthread 1
defaults
  mode {mode}
  timeout connect 5s
  timeout client 20s
  timeout server 20s
"""


def _certificate(folder: Path) -> tuple[Path, Path]:
    """Return (certificate and key in one file, the key) for both applications, from an untrusted
    issuer."""
    key, whole = folder / "key.pem", folder / "tls.pem"
    subject = [
        "-subj",
        "/CN=lab",
        "-addext",
        "subjectAltName=" + ",".join(f"DNS:{host}" for host in HOSTS),
    ]
    new = [
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:prime256v1",
        "-nodes",
        "-days",
        "2",
        "-keyout",
        str(key),
    ]
    subprocess.run(
        ["openssl", "req", *new, *subject, "-out", str(whole)],
        check=True,
        capture_output=True,
        timeout=60,
    )
    whole.write_text(whole.read_text() + key.read_text())
    return whole, key


def _pod(name: str, node: str) -> dict[str, Any]:
    port = {"name": "own", "containerPort": APPLICATION_PORT}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": "default", "labels": {"app": name}},
        "spec": {
            "nodeName": node,
            "containers": [{"name": name, "image": "echo", "ports": [port]}],
        },
    }
