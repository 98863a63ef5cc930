"""How an Access is found, and how kubeconfigs are read."""

import base64
from pathlib import Path
from typing import Any

import pytest
import yaml

from fairlead.errors import Refused
from fairlead.kube.access import ExecPlugin, Impersonation
from fairlead.kube.auth import find_access, in_cluster
from fairlead.kube.kubeconfig import read_kubeconfig


def config(
    user: dict[str, Any] | None = None, cluster: dict[str, Any] | None = None, **top: Any
) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "here",
        "contexts": [
            {"name": "here", "context": {"cluster": "c", "user": "u", "namespace": "shop"}},
            {"name": "there", "context": {"cluster": "d", "user": "u"}},
        ],
        "clusters": [
            {"name": "c", "cluster": {"server": "https://one.example:6443/", **(cluster or {})}},
            {"name": "d", "cluster": {"server": "https://two.example"}},
        ],
        "users": [{"name": "u", "user": user or {}}],
        **top,
    }


def write(path: Path, content: object) -> Path:
    path.write_text(yaml.safe_dump(content))
    return path


def encoded(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def test_the_current_context_is_used_unless_another_one_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "config", config({"token": "t"}))
    here = read_kubeconfig([path])
    assert (here.server, here.token, here.namespace) == ("https://one.example:6443", "t", "shop")
    assert here.source == f"context here of {path}"
    assert not here.insecure
    there = read_kubeconfig([path], "there")
    assert (there.server, there.namespace) == ("https://two.example", "default")


def test_paths_are_relative_to_the_kubeconfig_and_data_takes_precedence_over_files(
    tmp_path: Path,
) -> None:
    for name in ("ca.crt", "me.crt", "me.key"):
        (tmp_path / name).write_text(f"file {name}")
    user = {
        "client-certificate": "me.crt",
        "client-key": "me.key",
        "client-key-data": encoded("data key"),
        "tokenFile": "token",
    }
    access = read_kubeconfig(
        [write(tmp_path / "config", config(user, {"certificate-authority": "ca.crt"}))]
    )
    assert access.authority_pem == "file ca.crt"
    assert (access.certificate_pem, access.key_pem) == ("file me.crt", "data key")
    assert access.token_file == str(tmp_path / "token")


def test_tls_proxy_and_impersonation_options_are_read(tmp_path: Path) -> None:
    cluster = {
        "insecure-skip-tls-verify": True,
        "tls-server-name": "api",
        "proxy-url": "http://proxy:3128",
    }
    access = read_kubeconfig(
        [write(tmp_path / "config", config({"as": "jane", "as-groups": ["g"]}, cluster))]
    )
    assert (access.insecure, access.server_name, access.proxy) == (True, "api", "http://proxy:3128")
    assert access.impersonation == Impersonation("jane", groups=("g",))


def test_an_exec_plugin_is_read(tmp_path: Path) -> None:
    section = {
        "apiVersion": "client.authentication.k8s.io/v1beta1",
        "command": "./login",
        "args": ["--quiet"],
        "env": [{"name": "A", "value": "b"}],
        "provideClusterInfo": True,
        "installHint": "install it",
    }
    path = write(tmp_path / "config", config({"exec": section}))
    assert read_kubeconfig([path]).exec_plugin == ExecPlugin(
        str(tmp_path / "login"),
        "client.authentication.k8s.io/v1beta1",
        ("--quiet",),
        (("A", "b"),),
        True,
        "install it",
    )
    path = write(
        tmp_path / "config",
        config({"exec": {**section, "command": "login", "env": None, "args": None}}),
    )
    plugin = read_kubeconfig([path]).exec_plugin
    assert plugin is not None
    assert (plugin.command, plugin.arguments, plugin.environment) == ("login", (), ())


def test_several_files_are_merged_and_the_first_value_takes_precedence(tmp_path: Path) -> None:
    first = write(tmp_path / "first", {"users": [{"name": "u", "user": {"token": "first"}}]})
    second = write(tmp_path / "second", config({"token": "second"}))
    access = read_kubeconfig([first, second])
    assert (access.server, access.token) == ("https://one.example:6443", "first")


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (config({"username": "u", "password": "p"}), "uses a password"),
        (config({"auth-provider": {"name": "gcp"}}), "auth-provider"),
        (config({"as": "jane", "as-user-extra": {"a": ["b"]}}), "as-user-extra"),
        (
            config({"client-certificate-data": encoded("x")}),
            "only one of client-certificate and client-key",
        ),
        (config({"client-key-data": "%%%"}), "not PEM in base64"),
        (config({}, {"certificate-authority": "missing.crt"}), "missing.crt cannot be read"),
        (config({}, {"proxy-url": "socks5://proxy"}), "socks5://proxy"),
        (
            config(
                {"exec": {"apiVersion": "client.authentication.k8s.io/v1alpha1", "command": "x"}}
            ),
            "v1alpha1",
        ),
        (
            config(
                {
                    "exec": {
                        "apiVersion": "client.authentication.k8s.io/v1",
                        "command": "x",
                        "interactiveMode": "Always",
                    }
                }
            ),
            "terminal",
        ),
        (config() | {"current-context": ""}, "--context: here, there"),
        (config() | {"current-context": "nowhere"}, "no context 'nowhere'; it has here, there"),
        (config(users=[]), "no user 'u'; it has none"),
        (config(contexts=[]), "has no contexts: it is empty, or no kubeconfig; name another file"),
        ({"apiVersion": "v1", "kind": "Service"}, "has no contexts"),
        ([[]] * 2, "this is a list, not a mapping"),
        (
            config(clusters=[{"name": "c", "cluster": {"server": 3}}]),
            r"3 is not a text - at \$\.clusters\[0\]\.cluster\.server; write it in quotes",
        ),
        *(
            (
                config(clusters=[{"name": "c", "cluster": {"server": server}}]),
                "is not a URL; write the address of the API server",
            )
            for server in ("", "not a url", "ftp://a", "https://[::1", "https://a:99999", "https:")
        ),
        ("nonsense", "'nonsense' is not a mapping of names to values"),
    ],
)
def test_an_invalid_kubeconfig_is_refused(content: object, complaint: str, tmp_path: Path) -> None:
    path = write(tmp_path / "config", content)
    with pytest.raises(Refused, match=complaint) as refused:
        read_kubeconfig([path])
    assert str(path) in str(refused.value) or str(tmp_path) in str(refused.value)


def test_an_unreadable_kubeconfig_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="--kubeconfig"):
        find_access(tmp_path / "none")
    (tmp_path / "bad").write_text("a: [")
    with pytest.raises(Refused, match=r"bad, line 2: this is not valid YAML: .*; correct it, or"):
        find_access(tmp_path / "bad")
    (tmp_path / "bad").write_bytes(b"a: \xff")
    with pytest.raises(Refused, match="bad, line 1: this is not valid YAML: "):
        find_access(tmp_path / "bad")


def test_a_kubeconfig_is_read_as_kubectl_reads_it(tmp_path: Path) -> None:
    path = tmp_path / "config"
    path.write_text(
        "preferences:\nusers: [{name: u, user: {token: 2026-01-01, client-key-data: null}}]\n"
        "clusters: [{name: c, cluster: {server: 'https://192.0.2.1'}}]\n"
        "contexts: [{name: 22:30, context: {cluster: c, user: u, namespace: }}]\n"
        "current-context: 22:30\n"
    )
    access = read_kubeconfig([path])
    assert (access.token, access.namespace) == ("2026-01-01", "default")
    for text in ("[" * 100_000, "a: " + "[" * 3000 + "]" * 3000):
        path.write_text(text)
        with pytest.raises(Refused, match="nested deeper than 200 levels"):
            read_kubeconfig([path])


def test_the_named_file_precedes_the_environment_and_the_home_directory(tmp_path: Path) -> None:
    (tmp_path / ".kube").mkdir()
    write(tmp_path / ".kube" / "config", config({"token": "home"}))
    named = write(tmp_path / "named", config({"token": "named"}))
    given = write(tmp_path / "given", config({"token": "given"}))
    environment = {"HOME": str(tmp_path), "KUBECONFIG": f"{tmp_path}/absent:{named}"}
    assert find_access(given, environment=environment).token == "given"
    assert find_access(environment=environment).token == "named"
    assert find_access(environment={"HOME": str(tmp_path)}).token == "home"
    with pytest.raises(Refused, match="this is not a pod"):
        find_access(environment={"HOME": str(tmp_path / "elsewhere")})
    with pytest.raises(Refused, match="absent"):
        find_access(environment={"HOME": str(tmp_path), "KUBECONFIG": f"{tmp_path}/absent"})


@pytest.mark.parametrize(
    ("host", "url"), [("10.96.0.1", "https://10.96.0.1:443"), ("fd00::1", "https://[fd00::1]:443")]
)
def test_the_access_of_a_pod_is_that_of_its_service_account(
    host: str, url: str, tmp_path: Path
) -> None:
    for name, text in (("token", "t"), ("ca.crt", "authority"), ("namespace", "fairlead")):
        (tmp_path / name).write_text(text)
    access = in_cluster(
        {"KUBERNETES_SERVICE_HOST": host, "KUBERNETES_SERVICE_PORT": "443"}, tmp_path
    )
    assert (access.server, access.authority_pem, access.namespace) == (url, "authority", "fairlead")
    assert access.token_file == str(tmp_path / "token")


def test_a_pod_without_a_service_account_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="automountServiceAccountToken"):
        in_cluster({"KUBERNETES_SERVICE_HOST": "10.96.0.1"}, tmp_path)
