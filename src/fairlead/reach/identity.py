"""Who answered, and which client address it saw, from the body of an answer.

In: the text of a body. Out: the pod, and the client's address, as far as the text says so. Pure.
Understood are the servers that people use for such tests: JSON objects, such as those of the pods
of `fairlead lab`, and lines `Name: value` or `name=value`, such as those of traefik/whoami and
echoserver; and a body that is nothing but an address with or without a port (agnhost's /clientip).
If proxies on the way added their word, the address nearest to the client counts: X-Forwarded-For,
then a PROXY header, then the connection."""

import json
import re
from ipaddress import IPv6Address, ip_address

POD = ("pod", "hostname", "podname", "pod_name")
CLIENT = (
    "forwarded_for",
    "x-forwarded-for",
    "proxy_peer",
    "peer",
    "remoteaddr",
    "remote_addr",
    "client_address",
    "clientip",
    "client_ip",
    "origin",
    "ip",
)
"""The names under which servers report the address of their client, the most telling first."""

_NAME = re.compile(r"[\w.:/ -]{1,253}", re.ASCII)
"""What is taken for the name of a pod. It is shown on terminals."""
_LINE = re.compile(r'^[ \t]*"?([\w-]+)"?[ \t]*[:=][ \t]*"?([^"\r\n]*?)"?,?[ \t\r]*$', re.MULTILINE)


def identity_of(body: str) -> tuple[str, str]:
    """Return the pod and the client's address; empty texts for what the body does not say."""
    if address := _address(body.strip()):
        return "", address
    named = _fields(body)
    pod = next((named[name] for name in POD if _NAME.fullmatch(named.get(name, ""))), "")
    client = next((found for name in CLIENT if (found := _address(named.get(name, "")))), "")
    return pod, client


def _fields(body: str) -> dict[str, str]:
    """Return the values of the body by their names in lower case; the first of each name counts."""
    if body.lstrip().startswith("{"):
        try:
            found = json.loads(body)
        except (ValueError, RecursionError):
            found = {}
        return {name.lower(): value for name, value in found.items() if isinstance(value, str)}
    named: dict[str, str] = {}
    for name, value in _LINE.findall(body):
        named.setdefault(name.lower(), value.strip())
    return named


def _address(text: str) -> str:
    """Return the address in `ADDRESS`, `ADDRESS:PORT`, `[ADDRESS]:PORT`, or the first of a list
    with commas; empty if there is none."""
    first = text.partition(",")[0].strip()
    if len(first) > 60:
        return ""
    for candidate in (first, first.rpartition(":")[0]):
        try:
            address = ip_address(candidate.strip("[]"))
        except ValueError:
            continue
        if isinstance(address, IPv6Address) and address.ipv4_mapped:
            address = address.ipv4_mapped
        return str(address)
    return ""
