"""HAProxy's configuration for all Services of a gateway. Pure and deterministic.

In: what each Service should have. Out: text that HAProxy 2.6 and newer takes (`haproxy -c`), one `listen` section a listener.
Each section begins with a comment that holds what it was made from, so that a successor reads from the file of a HAProxy that
it finds running what that does; `description` names the text, and the running process shows it.
Follows HAProxy's configuration manual, sections 4 (proxies) and 5 (bind and server options).
"""

import hashlib
from collections.abc import Collection, Mapping

import msgspec

from fairlead.drivers.proxy.spec import ProxyKey, ProxyListener, ProxySpec, Served, Server
from fairlead.model import ServiceKey

MARK = "    # fairlead "
_ID_SPACE = (1 << 31) - 1
MOST_IN_TEXT = 40
"""More source ranges than these are read from a file: a line has 64 words and 2,048 characters at most. Of each file HAProxy
compares the name with all others' at its start, which is too slow where thousands of Services have one."""
KEEPALIVE_MS = 7_200_000
"""net.ipv4.tcp_keepalive_time as the kernel has it. Each socket that is to be asked costs a call and a timer."""


class Paths(msgspec.Struct, frozen=True):
    """Where files and sockets are. `user`: whom workers run as; empty: who started them."""

    folder: str
    user: str = ""

    @property
    def worker_socket(self) -> str:
        return f"{self.folder}/worker.sock"

    @property
    def states(self) -> str:
        """What a new worker is told of servers (`states`)."""
        return f"{self.folder}/servers.state"

    def ranges(self, service: ServiceKey) -> str:
        """The list of a Service's source ranges. Where there are many it is the name by which HAProxy knows them, and where it
        reads them at its start."""
        return f"{self.folder}/{service.namespace}.{service.name}.ranges"


class Section(msgspec.Struct, frozen=True):
    """What the comment of a section says."""

    namespace: str
    name: str
    uid: str
    listener: ProxyListener


def section_name(service: ServiceKey, key: ProxyKey) -> str:
    """Of the letters that HAProxy takes; those of other Services differ, as names of namespaces have no dot."""
    return f"{service.namespace}.{service.name}.{key.port}.{key.address}"


def render(specs: Mapping[ServiceKey, ProxySpec], paths: Paths) -> str:
    """The whole text."""
    numbers = list_numbers(specs)
    sections = [
        _section(service, spec, served, numbers, paths) for service, spec in sorted(specs.items()) for served in spec.listeners
    ]
    return with_global("\n".join([*_defaults(), *sections]), paths)


def with_global(text: str, paths: Paths) -> str:
    """A whole configuration: these sections, after the one that names them and says where HAProxy's socket is."""
    user = [f"    user {paths.user}", f"    group {paths.user}"] if paths.user else []
    start = [
        "global",
        f"    description {digest(text)}",
        f"    stats socket {paths.worker_socket} mode 600 level admin expose-fd listeners",
        "    fd-hard-limit 262144",
        f"    server-state-file {paths.states}",
        *user,
    ]
    return "\n".join([*start, text])


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def description_of(text: str) -> str:
    """The digest that a rendered text bears."""
    return next((line.split()[1] for line in text.splitlines() if line.startswith("    description ")), "")


def sections_of(text: str) -> list[Section]:
    """What a rendered text was made from, but for servers and source ranges. Lines that nobody can read are left out."""
    found = []
    for line in text.splitlines():
        if line.startswith(MARK):
            try:
                found.append(msgspec.json.decode(line.removeprefix(MARK), type=Section))
            except msgspec.DecodeError:  # of another version; that listener is set anew
                continue
    return found


def server_words(listener: ProxyListener, server: Server, number: int) -> str:
    """What stands after `server NAME`, in a file or on the socket."""
    host = f"[{server.address}]" if ":" in server.address else server.address
    words = [f"{host}:{server.port}", f"weight {server.weight}", f"id {number}"]
    header = listener.settings.header
    words += [{"v1": "send-proxy", "v2": "send-proxy-v2"}[header]] if header else []
    if (checks := listener.settings.checks) is not None:
        words += [f"check inter {checks.interval_ms} rise {checks.rise} fall {checks.fall}"]
        words += [f"port {listener.check.port}"] if listener.check else []
    return " ".join(words)


def number_of(name: str, taken: Collection[int] = ()) -> int:
    """Of a server or a list, the same on all gateways, whatever the order in which they came: by a server's number clients are
    spread over servers where that goes by the client's address."""
    number = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") % _ID_SPACE + 1
    while number in taken:
        number = number % _ID_SPACE + 1
    return number


def list_numbers(specs: Mapping[ServiceKey, ProxySpec]) -> dict[str, int]:
    """By section, the number by which HAProxy knows a list of source ranges that stands in the text."""
    numbers: dict[str, int] = {}
    taken: set[int] = set()
    for service, spec in sorted(specs.items()):
        for each in spec.listeners:
            if each.listener.restricted:
                name = section_name(service, each.listener.key)
                numbers[name] = number_of(name, taken)
                taken.add(numbers[name])
    return numbers


def _defaults() -> list[str]:
    # A connection that a member does not take goes to another one at once: what probes have not found yet costs nobody.
    return [
        "defaults",
        "    option dontlognull",
        "    option redispatch 1",
        "    retries 3",
        "",
    ]


def _outlasts_keepalive(timeout_ms: int) -> bool:
    """Whether a silence may last longer than the kernel asks for a sign of life; 0: for ever."""
    return not 0 < timeout_ms <= KEEPALIVE_MS


def _section(service: ServiceKey, spec: ProxySpec, served: Served, numbers: Mapping[str, int], paths: Paths) -> str:
    listener = served.listener
    settings = listener.settings
    name = section_name(service, listener.key)
    host = f"[{listener.key.address}]" if ":" in listener.key.address else listener.key.address
    comment = msgspec.json.encode(Section(service.namespace, service.name, spec.uid, listener)).decode()
    lines = [
        f"listen {name}",
        f"{MARK.strip()} {comment}",
        f"mode {'http' if settings.forwarded_for else 'tcp'}",
        # The address is the gateway's by a route alone, which does not suffice to bind to it over IPv6.
        f"bind {host}:{listener.key.port} transparent",
        f"timeout client {settings.client_ms}",
        f"timeout connect {settings.connect_ms}",
        f"timeout server {settings.member_ms}",
        f"balance {settings.method}",
    ]
    # Who is gone without a word is found so, where no time-out ends the connection before.
    lines += ["option clitcpka"] * _outlasts_keepalive(settings.client_ms)
    lines += ["option srvtcpka"] * _outlasts_keepalive(settings.member_ms)
    lines += ["hash-type consistent"] * (settings.method == "source")
    lines += [f"maxconn {settings.connection_limit}"] * bool(settings.connection_limit)
    lines += ["option forwardfor"] * settings.forwarded_for
    if settings.inspect_ms:
        lines += [f"tcp-request inspect-delay {settings.inspect_ms}", "tcp-request content accept if WAIT_END"]
    if listener.restricted:
        few = 0 < len(spec.source_ranges) <= MOST_IN_TEXT
        listed = f"-u {numbers[name]} {' '.join(spec.source_ranges)}" if few else f"-f {paths.ranges(service)}"
        lines += [f"acl within src {listed}", "tcp-request connection reject unless within"]
    if settings.checks is not None:
        lines += [f"timeout check {settings.checks.timeout_ms}", "load-server-state-from-file global"]
        lines += ["option httpchk", f"http-check send meth GET uri {listener.check.path}"] if listener.check else []
    taken: set[int] = set()
    for server in served.servers:
        number = number_of(server.node, taken)
        taken.add(number)
        lines.append(f"server {server.node} {server_words(listener, server, number)}")
    return "\n    ".join(lines) + "\n"
