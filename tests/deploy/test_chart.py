"""The Helm chart: helm accepts it with every set of values and rejects mistakes with a message; the
plain manifests are rendered from it."""

import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml
from tests.deploy.chart import (
    CHART,
    DEPLOY,
    EVERYTHING,
    NAMESPACE,
    VALUES,
    Manifest,
    capabilities,
    find,
    pod_spec,
    render,
    run,
)
from tools.schema import with_config

from fairlead.config import Config, parse
from fairlead.lab.settings import L2_SIZES
from fairlead.net.selection import DEFAULT_ROUTE
from fairlead.plan.classes import CLASSES


def values_of(path: Path | None) -> Sequence[str | Path]:
    return ("--values", path) if path else ()


@pytest.mark.parametrize(
    "values", [None, *VALUES], ids=lambda each: each.stem if each else "default"
)
def test_helm_lint(helm: Path, values: Path | None) -> None:
    done = run(helm, "lint", "--strict", CHART, "--kube-version", "1.36.0", *values_of(values))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("controler.replicas=3", "'controler' not allowed"),
        ("controller.replicas=0", "minimum"),
        ("announce=l3", "'/announce': value must be one of 'none', 'l2'"),
        ("gateway.enabled=true", "gateway.enabled needs config.gateway.interfaces"),
        ("node.enabled=true", "node.enabled needs node.apiServer.host"),
        ("config.controller.leaseNamespace=kube-system", "/config/controller/leaseNamespace"),
        ("gateway.listen=192.0.2.1", "/gateway/listen"),
        ("config.defaultClas=x", "'/config': additional properties 'defaultClas' not allowed"),
        ("config.defaultClass=metallb", "does not match pattern '^(fairlead"),
        ("config.gateway.interface=eth0", "'/config/gateway': additional properties 'interface'"),
        ("config.gateway.attach=native", "'auto', 'tc', 'xdp', 'xdp-generic'"),
        ("config.gateway.connectionEntries=7", "minimum: got 7, want 1,024"),
        ("config.cluster.podCIDRs={10.244.0.0}", "'/config/cluster/podCIDRs/0': '10.244.0.0'"),
        ("config.cluster.podCIDRs={foo/8}", "'/config/cluster/podCIDRs/0': 'foo/8' does not match"),
        (
            "config.cluster.podCIDRs={10.0.0.0/8,10.244.1.0/16}",
            "config.cluster.podCIDRs[1] is 10.244.1.0/16, which has host bits set: only its first "
            "16 bits may be other than 0",
        ),
        ("config.cluster.serviceCIDRs={2001:db8:c000::/33}", "2001:db8:c000::/33, which has host"),
        ("config.web.metricsFrom={10.0.0.0/33}", "[0] is 10.0.0.0/33, whose prefix length must be"),
        (
            "config.web.metricsFrom={10.0.0.256/32}",
            "config.web.metricsFrom[0] is 10.0.0.256/32, whi",
        ),
        ("config.web.metricsFrom={1::2::3/64}", "1::2::3/64, which is no network: write one such"),
        ("config.tunnel.gateways={::ffff:192.0.2.0/120}", "an IPv4-mapped IPv6 address: write it"),
        ("config.tunnel.gateways={:::/64}", "gateways[0] is :::/64, which is no network: write"),
        ("config.node.interfaces={10.0.0.1}", "interfaces[0] is 10.0.0.1, an address: to choose"),
        ("pool={192.0.2.9-192.0.2.1}", "pool[0] is 192.0.2.9-192.0.2.1, which is no range from a"),
        ("pool={203.0.113.9/24}", "pool[0] is 203.0.113.9/24, which has host bits set"),
        ("config.tunnel.kind=ipip", "config.tunnel.kind needs config.tunnel.gateways"),
        ("config.web.listen=foo", "'/config/web/listen': 'foo' does not match"),
        ("config.octavia=x", "'/config/octavia': got string, want null or object"),
        ("config.octavia.members=x", "'/config/octavia/members': value must be one of 'all', 're"),
        (
            "config.presence.namespace=default",
            "config.presence.namespace is default, the namespace of the release: name another one",
        ),
        ("config.octavia.lbMethod=RR", "'LEAST_CONNECTIONS', 'ROUND_ROBIN'"),
        ("config.pools[0].name=a", "'/config/pools/0': missing property 'addresses'"),
        ("pool={foo}", "'/pool/0': 'foo' does not match pattern"),
        ("config=null", "missing property 'config'"),
        ("gateway=null", "missing property 'gateway'"),
        ("node.resources=null", "'/node': missing property 'resources'"),
        ("controller.port=null", "'/controller': missing property 'port'"),
        ("networkPolicy.apiServerPorts=null", "missing property 'apiServerPorts'"),
        (
            "metrics.podMonitor.enabled=true,config.web.metricsFrom={192.0.2.0/24},"
            "controller.enabled=false",
            "metrics.podMonitor.enabled has no target",
        ),
    ],
)
def test_the_message_about_a_wrong_value_names_it(helm: Path, setting: str, words: str) -> None:
    done = run(helm, "template", "fairlead", CHART, "--kube-version", "1.36.0", "--set", setting)
    assert done.returncode != 0
    assert words in done.stderr


def test_the_schema_knows_every_option_of_the_configuration() -> None:
    text = (CHART / "values.schema.json").read_text()
    assert with_config(text) == text, "run `make manifests`"


def test_gateways_may_have_interfaces_only_per_node(helm: Path) -> None:
    settings = "gateway.enabled=true,config.gateway.interfacesByNode.edge-*={bond0}"
    config = parse(
        find(render(helm, "--set", settings), "ConfigMap", "fairlead")["data"]["fairlead.yaml"],
        "the chart",
        CLASSES,
    )
    assert config.gateway.interfaces_by_node == {"edge-*": ("bond0",)}


def test_pins_must_be_on_the_bpffs_of_the_host(helm: Path) -> None:
    settings = (
        "gateway.enabled=true,config.gateway.interfaces={eth0},config.gateway.pinPath=/tmp/pins"
    )
    done = run(helm, "template", "fairlead", CHART, "--kube-version", "1.36.0", "--set", settings)
    assert "/tmp/pins: it must be below /sys/fs/bpf" in done.stderr


def test_the_haproxy_directory_is_writable_for_the_gateway(helm: Path) -> None:
    settings = "gateway.enabled=true,config.gateway.interfaces={eth0}"
    spec = pod_spec(render(helm, "--set", settings), "gateway")
    (container,) = spec["containers"]
    folders = {
        each["mountPath"]: each["name"]
        for each in container["volumeMounts"]
        if not each.get("readOnly")
    }
    assert Path(Config().gateway.proxy_path).parent == Path("/run/fairlead")
    assert {"name": folders["/run/fairlead"], "emptyDir": {}} in spec["volumes"]
    settings += ",config.gateway.proxyPath=/tmp/haproxy"
    elsewhere = run(
        helm, "template", "fairlead", CHART, "--kube-version", "1.36.0", "--set", settings
    )
    assert "/tmp/haproxy: it must be below /run/fairlead" in elsewhere.stderr


def test_the_chart_refuses_bgp_because_it_runs_no_bird(helm: Path) -> None:
    router = "config.announce.bgp.routers[0]"
    values = {
        "gateway.enabled": "true",
        "config.gateway.interfaces[0]": "eth0",
        "config.announce.bgp.asn": "64513",
        f"{router}.name": "tor1",
        f"{router}.address": "192.0.2.1",
        f"{router}.asn": "64512",
    }
    given = ",".join(f"{name}={value}" for name, value in values.items())
    refused = run(helm, "template", "fairlead", CHART, "--kube-version", "1.36.0", "--set", given)
    assert "config.announce.bgp needs a BIRD" in refused.stderr


@pytest.mark.parametrize(
    "values", [None, *VALUES], ids=lambda each: each.stem if each else "default"
)
def test_roles_accept_the_configuration(helm: Path, values: Path | None) -> None:
    objects = render(helm, *values_of(values))
    text = find(objects, "ConfigMap", "fairlead")["data"]["fairlead.yaml"]
    config = parse(text, "the chart", CLASSES)
    assert isinstance(config, Config)
    assert config.controller.lease_namespace == NAMESPACE
    whole = yaml.safe_load(values.read_text()) if values else {}
    given, announces = whole.get("config", {}), whole.get("announce") == "l2"
    pools = [pool["name"] for pool in given.get("pools", [])]
    assert [pool.name for pool in config.pools] == ["main"] * ("pool" in whole) + pools
    default = [DEFAULT_ROUTE] if announces else []
    assert list(config.gateway.interfaces) == given.get("gateway", {}).get("interfaces", default)
    assert (config.announce.l2 is not None) == announces


def test_gateways_that_announce_run_on_all_nodes(helm: Path) -> None:
    pool = ("192.0.2.224-192.0.2.250", "2001:db8:1::f00-2001:db8:1::fff")
    objects = render(helm, "--set", f"announce=l2,pool={{{','.join(pool)}}}")
    assert "nodeSelector" not in pod_spec(objects, "gateway")
    assert "NET_RAW" in capabilities(objects, "gateway")
    config = configuration(objects)
    assert config.default_class == "fairlead.io/direct"
    assert config.gateway.interfaces == (DEFAULT_ROUTE,)
    assert config.gateway.peers == "auto"
    assert [(each.name, each.addresses) for each in config.pools] == [("main", pool)]
    enabled = render(helm, "--set", "gateway.enabled=true,config.gateway.interfaces={eth0}")
    assert pod_spec(enabled, "gateway")["nodeSelector"] == {"fairlead.io/gateway": ""}
    assert "NET_RAW" not in capabilities(enabled, "gateway")
    assert configuration(enabled).announce.l2 is None
    assert configuration(enabled).gateway.peers == ()
    outside = (
        "gateway.enabled=true,config.gateway.interfaces={eth0},"
        "config.announce.l2.networks={203.0.113.0/24}"
    )
    assert "NET_RAW" in capabilities(render(helm, "--set", outside), "gateway")


def test_gateways_that_announce_nothing_have_no_rights_for_it(helm: Path) -> None:
    """`l2: null` in the configuration switches it off."""
    for announce, announces in (("{}", False), ('{"l2":null}', False), ('{"l2":{}}', True)):
        objects = render(
            helm,
            *("--set", "gateway.enabled=true,config.gateway.interfaces={eth0}"),
            *("--set-json", f"config.announce={announce}"),
        )
        assert ("NET_RAW" in capabilities(objects, "gateway")) == announces
        (rule,) = find(objects, "Role", "fairlead-gateway-presence")["rules"]
        assert {"list", "watch"}.issubset(rule["verbs"]) == announces
        assert (configuration(objects).announce.l2 is not None) == announces


def test_gateways_that_find_each_other_may_read_the_leases_of_all(helm: Path) -> None:
    for peers, finds in (('"auto"', True), ('["192.0.2.11:9445"]', False)):
        objects = render(
            helm,
            *("--set", "gateway.enabled=true,config.gateway.interfaces={eth0}"),
            *("--set-json", f"config.gateway.peers={peers}"),
        )
        (rule,) = find(objects, "Role", "fairlead-gateway-presence")["rules"]
        assert {"list", "watch"}.issubset(rule["verbs"]) == finds


def test_gateways_on_all_nodes_have_small_tables(helm: Path) -> None:
    """They are those of the lab, and of docs/announce.md. Other gateways have the default sizes."""
    announces = "announce=l2,pool={192.0.2.224-192.0.2.250}"
    assert sizes(configuration(render(helm, "--set", announces))) == L2_SIZES
    text = (CHART.parents[2] / "docs/announce.md").read_text()
    assert all(f"| `{name}` | {size} |" in text for name, size in L2_SIZES.items())
    given = f"{announces},config.gateway.tableMemoryMiB=64"
    assert sizes(configuration(render(helm, "--set", given))) == {**L2_SIZES, "tableMemoryMiB": 64}
    enabled = render(helm, "--set", "gateway.enabled=true,config.gateway.interfaces={eth0}")
    assert sizes(configuration(enabled)) == sizes(Config())


def sizes(config: Config) -> dict[str, int]:
    gateway = config.gateway
    return {
        "tableMemoryMiB": gateway.table_memory_mib,
        "connectionEntries": gateway.connection_entries,
        "datagramEntries": gateway.datagram_entries,
    }


def test_values_take_precedence_over_the_defaults_of_announcement(helm: Path) -> None:
    settings = (
        "announce=l2,pool={192.0.2.224-192.0.2.250},gateway.nodeSelector.edge=yes,"
        "config.defaultClass=fairlead.io/proxy,config.gateway.interfacesByNode.edge-*={bond0},"
        "config.gateway.peers={192.0.2.11:9445},"
        "config.pools[0].name=other,config.pools[0].addresses={203.0.113.0/24}"
    )
    objects = render(helm, "--set", settings)
    config = configuration(objects)
    assert pod_spec(objects, "gateway")["nodeSelector"] == {"edge": "yes"}
    assert config.default_class == "fairlead.io/proxy"
    assert config.gateway.interfaces == ()
    assert config.gateway.peers == ("192.0.2.11:9445",)
    assert [pool.name for pool in config.pools] == ["main", "other"]


def configuration(objects: Sequence[Manifest]) -> Config:
    """Return the configuration of all roles."""
    text = find(objects, "ConfigMap", "fairlead")["data"]["fairlead.yaml"]
    return parse(text, "the chart", CLASSES)


def test_a_node_that_only_decapsulates_has_no_right_to_endpoints(helm: Path) -> None:
    """It needs no address of the API server either, because kube-proxy serves the ClusterIP. The
    program for IPIP needs more capabilities than VXLAN."""
    node = "node.enabled=true,config.node.serviceProxy=false"
    ipip, vxlan = (
        render(
            helm,
            "--set",
            f"{node},config.tunnel.kind={kind},config.tunnel.gateways={{192.0.2.0/28}}",
        )
        for kind in ("ipip", "vxlan")
    )
    read = {
        resource
        for rule in find(ipip, "ClusterRole", "fairlead-node")["rules"]
        for resource in rule["resources"]
    }
    assert read == {"services", "nodes", "events"}
    assert capabilities(ipip, "node") == ["NET_ADMIN", "BPF", "PERFMON"]
    assert capabilities(vxlan, "node") == ["NET_ADMIN"]
    (container,) = pod_spec(ipip, "node")["containers"]
    assert [each["name"] for each in container["env"]] == ["NODE_NAME"]


def test_the_default_values_install_only_the_controller_and_accounts(helm: Path) -> None:
    """By default there is a controller, and accounts for gateways and nodes that may run
    elsewhere."""
    objects = render(helm)
    kinds = sorted(each["kind"] for each in objects)
    assert "Deployment" in kinds
    assert not {"DaemonSet", "PodMonitor", "Service"} & set(kinds)
    assert [each["metadata"]["name"] for each in objects if each["kind"] == "Namespace"] == [
        Config().presence.namespace
    ]
    assert kinds.count("ServiceAccount") == 3


def test_a_changed_configuration_starts_new_pods(helm: Path) -> None:
    stamps = {
        find(
            render(helm, "--set", f"config.controller.leaseDurationS={seconds}"),
            "Deployment",
            "fairlead-controller",
        )["spec"]["template"]["metadata"]["annotations"]["fairlead.io/configuration"]
        for seconds in (10, 10, 12)
    }
    assert len(stamps) == 2


def test_every_container_is_confined(helm: Path) -> None:
    objects = render(helm, "--values", EVERYTHING)
    for role in ("controller", "gateway", "node"):
        spec = pod_spec(objects, role)
        (container,) = spec["containers"]
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert container["securityContext"]["readOnlyRootFilesystem"]
        assert not container["securityContext"]["allowPrivilegeEscalation"]
        assert "privileged" not in container["securityContext"]
        assert container["resources"]["requests"].keys() == {"cpu", "memory"}
        assert container["livenessProbe"]["httpGet"]["path"] == "/healthz"
        assert container["readinessProbe"]["httpGet"]["path"] == "/readyz"
    assert capabilities(objects, "controller") == []


def test_credentials_of_a_cloud_are_mounted_only_if_a_secret_is_named(helm: Path) -> None:
    objects = render(helm, "--values", EVERYTHING)
    spec = pod_spec(objects, "controller")
    assert {"name": "clouds", "mountPath": "/etc/openstack", "readOnly": True} in spec[
        "containers"
    ][0]["volumeMounts"]
    (volume,) = (each for each in spec["volumes"] if each["name"] == "clouds")
    assert volume["secret"] == {
        "secretName": "openstack",
        "items": [{"key": "clouds.yaml", "path": "clouds.yaml"}],
    }
    without = render(helm)
    assert [each["name"] for each in pod_spec(without, "controller")["volumes"]] == [
        "configuration"
    ]
    ports = [
        sorted(
            {
                port["port"]
                for rule in find(each, "NetworkPolicy", "fairlead-controller")["spec"]["egress"]
                for port in rule["ports"]
            }
        )
        for each in (objects, without)
    ]
    assert ports == [[53, 443, 8443], [443, 6443]]


def test_metrics_are_not_reachable_until_the_values_name_their_readers(helm: Path) -> None:
    """Two limits: the configuration, which is effective with every network plug-in, and the
    NetworkPolicy."""

    def controller(*options: str | Path) -> tuple[tuple[str, ...], object]:
        objects = render(helm, *options)
        config = parse(
            find(objects, "ConfigMap", "fairlead")["data"]["fairlead.yaml"], "the chart", CLASSES
        )
        return config.web.metrics_from, find(objects, "NetworkPolicy", "fairlead-controller")[
            "spec"
        ]["ingress"]

    port = [{"port": "web", "protocol": "TCP"}]
    assert controller() == ((), [])
    opened = ("--set", "config.web.metricsFrom={10.244.0.0/16}")
    assert controller(*opened) == (("10.244.0.0/16",), [{"ports": port}])
    everything = yaml.safe_load(EVERYTHING.read_text())
    peers = everything["networkPolicy"]["metricsFrom"]
    assert controller("--values", EVERYTHING) == (
        ("10.244.0.0/16",),
        [{"ports": port, "from": peers}],
    )


@pytest.mark.parametrize(
    "setting", ["metrics.podMonitor.enabled=true", "networkPolicy.metricsFrom[0].podSelector.a=b"]
)
def test_a_monitor_without_permitted_sources_is_refused(helm: Path, setting: str) -> None:
    done = run(helm, "template", "fairlead", CHART, "--kube-version", "1.36.0", "--set", setting)
    assert done.returncode
    assert (
        f"{setting.partition('[')[0].partition('=')[0]} needs config.web.metricsFrom" in done.stderr
    )


def test_certificates_of_gateways_are_mounted_at_the_configured_path(helm: Path) -> None:
    objects = render(helm, "--values", EVERYTHING)
    spec = pod_spec(objects, "gateway")
    (mount,) = (each for each in spec["containers"][0]["volumeMounts"] if each["name"] == "peers")
    (volume,) = (each for each in spec["volumes"] if each["name"] == "peers")
    assert volume["secret"]["secretName"] == "peers"
    files = parse(
        find(objects, "ConfigMap", "fairlead")["data"]["fairlead.yaml"], "the chart", CLASSES
    ).gateway.peer_tls
    assert files is not None
    assert [files.certificate, files.key, files.ca] == [
        f"{mount['mountPath']}/{name}" for name in ("tls.crt", "tls.key", "ca.crt")
    ]
    without = pod_spec(
        render(helm, "--set", "gateway.enabled=true,config.gateway.interfaces={eth0}"), "gateway"
    )
    assert "peers" not in [each["name"] for each in without["volumes"]]


def test_the_configured_lease_is_the_one_that_the_role_permits(helm: Path) -> None:
    for options in ((), ("--values", EVERYTHING)):
        objects = render(helm, *options)
        config = parse(
            find(objects, "ConfigMap", "fairlead")["data"]["fairlead.yaml"], "the chart", CLASSES
        )
        rules = find(objects, "Role", "fairlead-controller")["rules"]
        assert [config.controller.lease_name] in [rule.get("resourceNames") for rule in rules]


def test_no_role_may_write_other_leases_in_the_namespace_of_the_leader(helm: Path) -> None:
    objects = render(helm, "--values", EVERYTHING)
    roles = [each for each in objects if each["kind"] == "Role"]
    inside = [
        each["metadata"]["name"] for each in roles if each["metadata"]["namespace"] == NAMESPACE
    ]
    assert inside == ["fairlead-controller"]
    elsewhere = {
        each["metadata"]["namespace"] for each in objects if each["kind"] in ("Role", "RoleBinding")
    } - {NAMESPACE}
    assert elsewhere == {Config().presence.namespace}
    moved = render(helm, "--set", "config.presence.namespace=signs")
    assert [each["metadata"]["name"] for each in moved if each["kind"] == "Namespace"] == ["signs"]
    assert {
        each["metadata"]["namespace"]
        for each in moved
        if each["metadata"]["name"].endswith("-presence")
    } == {"signs"}


def test_plain_manifests_are_the_rendered_chart(helm: Path, tmp_path: Path) -> None:
    subprocess.run(["sh", DEPLOY / "render.sh", tmp_path], check=True, timeout=60)
    rendered = {file.name: file.read_text() for file in tmp_path.iterdir()}
    committed = {file.name: file.read_text() for file in (DEPLOY / "manifests").iterdir()}
    assert rendered == committed, "run `make manifests`"
