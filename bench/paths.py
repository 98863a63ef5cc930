"""A lab with one server in a pod, and the paths by which a client can reach it: directly, through
Fairlead, through other programs.

In: a name. Out: `Paths`, the address and port of the server on each path. The lab is Fairlead's
own, with its roles as separate processes. The server is nginx with two workers, each of which may
use one core.

  path            hops                                          load balancer
  direct          client - router - node1 - pod                 none; the pod's own address
  tc, xdp ...     client - router - gw - node1 - pod,           a Service of class
                  back from node1                               fairlead.io/direct, policy Local
  routed          as before, by way of control                  the same Service; a plain router in
                                                                the gateway's place
  node            client - router - node1 - pod                 the same Service; no gateway
  cluster         client - router - node2 - node1 - pod,        DNAT and masquerade on node2, as
                  and back                                      with policy Cluster
  haproxy         client - router - control - node1 - pod,      HAProxy in TCP mode, PROXY protocol
                  and back                                      version 2
  proxy           client - router - gw1 - node1 - pod,          a Service of class
                  and back                                      fairlead.io/proxy, policy Local
  by hand         client - router - control - node1 - pod,      HAProxy in TCP mode to the same node
                  and back                                      port
  on the gateway  client - router - gw1 - node1 - pod,          the same HAProxy, next to that of
                  and back                                      class proxy
"""

import asyncio
import shutil
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from bench.subject import ROOT
from hatch_build import bpf_compiler

from fairlead.errors import Refused, Unavailable
from fairlead.kube.objects import SERVICES
from fairlead.lab import namespace, process
from fairlead.lab.site import Site
from fairlead.lab.topology import ROUTER
from fairlead.plan.classes import DIRECT, PROXY

PROGRAMS = ("wrk", "nginx", "haproxy", "iperf3", "ethtool")
PLAIN, PROXIED, BULK = 8081, 8082, 5201
"""The pod's ports: nginx; nginx that expects the PROXY protocol; iperf3."""
VIP_PORT = 80
CLUSTER_VIP = "203.0.113.5"
GATEWAYS: Mapping[str, str] = {"tc": "gw1", "xdp-generic": "gw2", "xdp": "gw3"}
"""The gateway of the lab with each value of gateway.attach."""
ROUTED = "routed"
ROUTES: Mapping[str, str] = {**GATEWAYS, "proxy": "gw1", "node": "node1", ROUTED: "control"}
"""The host to which the router sends the Service's address, by path."""
WITHOUT_NODE_PORTS = ("direct", "node", ROUTED, *GATEWAYS, "cluster", "haproxy")
THROUGH_HAPROXY = ("tc", "proxy", "on the gateway", "by hand")
BY_HAND, BULK_BY_HAND = 8083, 5203
NODE_PORTS = {VIP_PORT: 30080, BULK: 30201}
"""The node ports of the Service of class proxy."""
POD = "default/web-1"
SERVED_WITHIN_S = 20.0

NGINX = """daemon off; worker_processes 2; pid nginx.pid; error_log nginx.err; user root;
events { worker_connections 8192; }
http {
  access_log off; keepalive_requests 100000000; keepalive_timeout 600; default_type text/plain;
  server { listen 8081 backlog=8192; return 200 "$remote_addr"; }
  server { listen 8082 proxy_protocol backlog=8192; return 200 "$proxy_protocol_addr"; }
}
"""
_HAPROXY_DEFAULTS = """global
  nbthread 2
  maxconn 8000
defaults
  mode tcp
  timeout connect 5s
  timeout client 60s
  timeout server 60s
"""
HAPROXY = (
    _HAPROXY_DEFAULTS
    + """listen web
  bind :{plain} backlog 8192
  server pod {pod}:{proxied} send-proxy-v2
listen bulk
  bind :{bulk}
  server pod {pod}:{bulk}
"""
)
HAPROXY_BY_HAND = (
    _HAPROXY_DEFAULTS
    + """listen by-hand
  bind :{by_hand}
  server node1 {node}:{node_port}
listen bulk-by-hand
  bind :{bulk_by_hand}
  server node1 {node}:{bulk_node_port}
"""
)
CLUSTER = """table ip bench {{
  chain before {{
    type nat hook prerouting priority dstnat - 20;
    ip daddr {vip} tcp dport {port} dnat to {pod}:{plain}
    ip daddr {vip} tcp dport {bulk} dnat to {pod}:{bulk}
  }}
  chain after {{
    type nat hook postrouting priority srcnat - 20;
    ct status dnat ip daddr {pod} masquerade
  }}
}}
"""
NGINX_SYSCTLS = {
    # By default a closed connection holds its port for a minute, and a client that has opened many
    # spends its time searching for a free port.
    "net/ipv4/tcp_max_tw_buckets": 1024,
    "net/core/somaxconn": 8192,
    "net/ipv4/tcp_max_syn_backlog": 8192,
    "net/ipv4/ip_local_port_range": "1024 65535",
}
"""Settings of the client and the server."""
WITHOUT_LIMITS = {
    "net/netfilter/nf_conntrack_tcp_timeout_time_wait": 1,
    "net/netfilter/nf_conntrack_tcp_timeout_close": 1,
}
"""Shorter timeouts of the conntrack table. By default the entry of a closed connection stays for
two minutes: with 20,000 connections a second the table would be full."""


class End(NamedTuple):
    """Address and ports of the servers on one path."""

    address: str
    port: int
    bulk: int = BULK


class Paths:
    """The paths of a lab, created by `paths`."""

    def __init__(self, site: Site, ends: Mapping[str, End]) -> None:
        self.site = site
        self.ends = ends

    async def take(self, name: str) -> End:
        """Route the Service's address through the gateway of this path. Return the address and port
        to connect to."""
        if name in ROUTES:
            await self.site.route_vips([ROUTES[name]])
        return self.ends[name]


def check() -> None:
    """Raise Refused if a program is missing."""
    missing = [each for each in PROGRAMS if shutil.which(each) is None]
    if missing:
        raise Refused(f"not installed: {', '.join(missing)}", fix="run: sh tools/bench.sh")


@asynccontextmanager
async def paths(name: str, folder: Path) -> AsyncIterator[Paths]:
    """Build the lab and all servers in it. Remove everything at the end."""
    check()
    async with Site.create(name, nodes=2, gateways=len(GATEWAYS), clients=1) as site:
        await _set_attachments(site, folder)
        await site.apply(
            [_pod(), _service("web", DIRECT.name, {}), _service("proxied", PROXY.name, NODE_PORTS)]
        )
        await site.await_pods()
        address = site.topology.host("node1").pod_cidrs[0].replace(".0/24", ".2")
        await _serve(site, folder, address)
        vip = await _vip(site, "web")
        await must(
            site,
            ROUTES[ROUTED],
            f"ip route add {vip} via {site.topology.host('node1').addresses[0]}",
        )
        namespace.set_sysctls(site.namespace(ROUTES[ROUTED]), {"net/ipv4/ip_forward": 1})
        ends = {name: End(vip, VIP_PORT) for name in ROUTES} | {
            "proxy": End(await _vip(site, "proxied"), VIP_PORT)
        }
        control, gateway = (
            site.topology.host(host).addresses[0] for host in ("control", ROUTES["proxy"])
        )
        others = {
            "cluster": End(CLUSTER_VIP, VIP_PORT),
            "haproxy": End(control, PLAIN),
            "by hand": End(control, BY_HAND, BULK_BY_HAND),
            "on the gateway": End(gateway, BY_HAND, BULK_BY_HAND),
        }
        yield Paths(site, {"direct": End(address, PLAIN), **ends, **others})


async def _set_attachments(site: Site, folder: Path) -> None:
    """Give each gateway its own gateway.attach. For XDP in a veth, the far end of the veth needs to
    be prepared: see drivers/direct/host_network/attach.py."""
    far_end, target = GATEWAYS["xdp"], folder / "pass.o"
    await must(
        site,
        ROUTER,
        " ".join([*bpf_compiler(), "-c", str(ROOT / "bench" / "pass.bpf.c"), "-o", str(target)]),
    )
    await must(site, ROUTER, f"ip link set dev {far_end} xdpdrv obj {target} sec xdp")
    await must(site, ROUTER, f"ethtool -K {far_end} gro on tx off")
    common = site.directory.config.read_text()
    for attach, gateway in GATEWAYS.items():
        settings: dict[str, Any] = yaml.safe_load(common)
        settings["gateway"]["attach"] = attach
        site.directory.config.write_text(yaml.safe_dump(settings))
        await site.stop_role(gateway)
        await site.start_role(gateway)
    site.directory.config.write_text(common)


async def _serve(site: Site, folder: Path, pod: str) -> None:
    """Start nginx and iperf3 in the pod and HAProxy on its hosts, and load the rules of policy
    Cluster on node2."""
    for host in ("node1", "node2"):
        namespace.set_sysctls(site.namespace(host), WITHOUT_LIMITS)
    for host in ("client1", POD, "control", ROUTES["proxy"]):
        namespace.set_sysctls(site.namespace(host), NGINX_SYSCTLS)
    nginx, haproxy, by_hand = folder / "nginx.conf", folder / "haproxy.cfg", folder / "by-hand.cfg"
    nginx.write_text(NGINX)
    node = site.topology.host("node1").addresses[0]
    own = {
        "by_hand": BY_HAND,
        "bulk_by_hand": BULK_BY_HAND,
        "node_port": NODE_PORTS[VIP_PORT],
        "bulk_node_port": NODE_PORTS[BULK],
    }
    haproxy.write_text(HAPROXY.format(pod=pod, plain=PLAIN, proxied=PROXIED, bulk=BULK))
    by_hand.write_text(HAPROXY_BY_HAND.format(node=node, **own))
    rules = CLUSTER.format(vip=CLUSTER_VIP, port=VIP_PORT, pod=pod, plain=PLAIN, bulk=BULK)
    (folder / "cluster.nft").write_text(rules)
    site.spawn(POD, ["nginx", "-p", str(folder), "-c", str(nginx)], label="bench/nginx")
    site.spawn(POD, ["iperf3", "--server"], label="bench/iperf3")
    site.spawn("control", ["haproxy", "-db", "-f", str(haproxy)], label="bench/haproxy")
    for host in ("control", ROUTES["proxy"]):
        site.spawn(host, ["haproxy", "-db", "-f", str(by_hand)], label=f"bench/by-hand-{host}")
    await must(site, "node2", f"nft -f {folder / 'cluster.nft'}")
    await must(
        site, ROUTER, f"ip route add {CLUSTER_VIP} via {site.topology.host('node2').addresses[0]}"
    )


async def must(site: Site, host: str, command: str) -> str:
    """Run a command on a host and return its output. Raise Unavailable if it fails."""
    code, output, errors = await site.exec(host, command.split(), timeout_s=120)
    if code:
        raise Unavailable(f"{command} on {host} ended with {code}: {(errors or output).strip()}")
    return output


async def _vip(site: Site, name: str) -> str:
    """Return the Service's address, once it has one."""
    async with asyncio.timeout(SERVED_WITHIN_S), site.client() as client:
        while True:
            for service in await client.list(SERVICES):
                if service.metadata.name == name and service.status.load_balancer.ingress:
                    return service.status.load_balancer.ingress[0].ip
            await asyncio.sleep(process.POLL_S)


def _pod() -> Mapping[str, Any]:
    """Return the pod. The lab creates its namespace and reports it as ready; the measured servers
    run next to the lab's own server."""
    container = {"name": "web", "image": "echo", "ports": [{"name": "http", "containerPort": 8080}]}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "web-1", "namespace": "default", "labels": {"app": "web"}},
        "spec": {"nodeName": "node1", "containers": [container]},
    }


def _service(name: str, class_name: str, node_ports: Mapping[int, int]) -> Mapping[str, Any]:
    ports: list[dict[str, Any]] = [
        {"name": "http", "port": VIP_PORT, "targetPort": PLAIN},
        {"name": "bulk", "port": BULK, "targetPort": BULK},
    ]
    for port in ports:
        port |= {"nodePort": node_ports[port["port"]]} if node_ports else {}
    spec = {
        "type": "LoadBalancer",
        "externalTrafficPolicy": "Local",
        "selector": {"app": "web"},
        "ports": ports,
    }
    meta = {"name": name, "namespace": "default"}
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": meta,
        "spec": {**spec, "loadBalancerClass": class_name},
    }
