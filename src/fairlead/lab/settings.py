"""The files that a lab writes for the programs that run in it: Fairlead's configuration and kubeconfigs. Pure.

In: a lab's name, the API server's addresses. Out: the files' contents. Formats: fairlead.yaml (`config`), kubeconfig v1.
"""

import yaml

from fairlead.lab.topology import PODS, POOL


def configuration(pin_path: str) -> str:
    """fairlead.yaml for every role of the lab. Gateways get their own pin path by option."""
    return _text(
        {
            "defaultClass": "fairlead.io/direct",
            "cluster": {"podCIDRs": [str(network) for network in PODS]},
            "pools": [{"name": "lab", "addresses": list(POOL)}],
            "controller": {"leaseDurationS": 3},
            "gateway": {"interfaces": ["eth0"], "pinPath": pin_path},
        }
    )


def kubeconfig(lab: str, url: str) -> str:
    """A kubeconfig with one context, named after the lab. The lab's API server asks for no credentials."""
    name = f"fairlead-{lab}"
    return _text(
        {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": name, "cluster": {"server": url}}],
            "users": [{"name": name, "user": {}}],
            "contexts": [{"name": name, "context": {"cluster": name, "user": name, "namespace": "default"}}],
            "current-context": name,
        }
    )


def _text(value: object) -> str:
    return str(yaml.safe_dump(value, sort_keys=False))
