"""HAProxy's configuration for all Services of a gateway. Pure and deterministic.

In: what each Service should have. Out: text that HAProxy 2.6 and newer takes (`haproxy -c`), one
`listen` section a listener. Each section begins with a comment that holds what it was made from, so
that a successor reads from the file of a HAProxy that it finds running what that does;
`description` names the text, and the running process shows it. Follows HAProxy's configuration
manual, sections 4 (proxies) and 5 (bind and server options)."""

import hashlib
from collections.abc import Collection, Mapping, Sequence

import msgspec

from fairlead.drivers.proxy.spec import ProxyKey, ProxyListener, ProxySpec, Served, Server
from fairlead.model import ServiceKey
from fairlead.net.address import bracketed, is_ipv6, join_host_port

MARK = "    # fairlead "
_ID_SPACE = (1 << 31) - 1
ON_A_LINE = 40
"""Source ranges: a line has 64 words at most."""
MOST_IN_TEXT = 200
"""More source ranges than these are read from a file, as each line with some of them is looked
through by itself for each connection. Of each file, and of each list with a number of our own,
HAProxy compares the name with all others' at its start: that is too slow where thousands of
Services have one."""
_RANGES = "acl within src "
KEEPALIVE_MS = 7_200_000
"""net.ipv4.tcp_keepalive_time as the kernel has it. Each socket that is to be asked costs a call
and a timer."""


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
        """The list of a Service's source ranges. Where there are many it is the name by which
        HAProxy knows them, and where it reads them at its start."""
        return f"{self.folder}/{service.namespace}.{service.name}.ranges"


class Section(msgspec.Struct, frozen=True):
    """What the comment of a section says."""

    namespace: str
    name: str
    uid: str
    listener: ProxyListener


def section_name(service: ServiceKey, key: ProxyKey) -> str:
    """Of the letters that HAProxy takes; those of other Services differ, as names of namespaces
    have no dot."""
    return f"{service.namespace}.{service.name}.{key.port}.{key.address}"


def service_of(section: str) -> ServiceKey:
    """Whose a section of this name is, be it in the configuration of an old worker: neither name
    has a dot."""
    return ServiceKey(*section.split(".")[:2])


def render(specs: Mapping[ServiceKey, ProxySpec], paths: Paths) -> str:
    """The whole text."""
    sections = [
        _section(service, spec, served, paths)
        for service, spec in sorted(specs.items())
        for served in spec.listeners
    ]
    return with_global("\n".join([*_defaults(), *sections]), paths)


def with_global(text: str, paths: Paths) -> str:
    """A whole configuration: these sections, after the one that names them and says where HAProxy's
    socket is."""
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
    return next(
        (line.split()[1] for line in text.splitlines() if line.startswith("    description ")), ""
    )


def sections_of(text: str) -> list[Section]:
    """What a rendered text was made from, but for servers and source ranges. Lines that nobody can
    read are left out."""
    found = []
    for line in text.splitlines():
        if line.startswith(MARK):
            try:
                found.append(msgspec.json.decode(line.removeprefix(MARK), type=Section))
            except msgspec.DecodeError:  # of another version; that listener is set anew
                continue
    return found


def bind_words(key: ProxyKey) -> str:
    """What stands after `bind ADDRESS:PORT`."""
    # The address is the gateway's by a route alone, which does not suffice to bind to it over IPv6.
    # To the kernel a socket of an IPv6 address is `v6only` anyway: without this word HAProxy takes
    # the one that its predecessor hands on for another's, and opens its own beside it; what waits
    # in the one before is lost when that is closed.
    return "transparent v6only" if is_ipv6(key.address) else "transparent"


def server_words(listener: ProxyListener, server: Server, number: int) -> str:
    """What stands after `server NAME`, in a file or on the socket."""
    words = [join_host_port(server.address, server.port), f"weight {server.weight}", f"id {number}"]
    header = listener.settings.header
    words += [{"v1": "send-proxy", "v2": "send-proxy-v2"}[header]] if header else []
    if (checks := listener.settings.checks) is not None:
        words += [f"check inter {checks.interval_ms} rise {checks.rise} fall {checks.fall}"]
        words += [f"port {listener.check.port}"] if listener.check else []
    return " ".join(words)


def number_of(name: str, taken: Collection[int] = ()) -> int:
    """Of a server, the same on all gateways, whatever the order in which they came: by a server's
    number clients are spread over servers where that goes by the client's address."""
    number = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") % _ID_SPACE + 1
    while number in taken:
        number = number % _ID_SPACE + 1
    return number


def lists_of(text: str) -> dict[str, list[int]]:
    """By section, the lines of a rendered text, from 1 on, that source ranges stand in: for HAProxy
    each is a list."""
    found: dict[str, list[int]] = {}
    section = ""
    for number, line in enumerate(text.splitlines(), start=1):
        if line.startswith("listen "):
            section = line.removeprefix("listen ")
        elif line.lstrip().startswith(_RANGES) and " -f " not in line:
            found.setdefault(section, []).append(number)
    return found


def _defaults() -> list[str]:
    # A connection that a member does not take goes to another one at once: what probes have not
    # found yet costs nobody. Where there is something to send already, a header or what the client
    # said, it goes with the last packet of the handshake with the member and is no packet more.
    # Where there is nothing, as when the server speaks first, nothing is held back. Bytes are
    # counted as they come, not when a connection ends: some last for days.
    return [
        "defaults",
        "    option contstats",
        "    option dontlognull",
        "    option redispatch 1",
        "    option tcp-smart-connect",
        "    retries 3",
        "",
    ]


def _outlasts_keepalive(timeout_ms: int) -> bool:
    """Whether a silence may last longer than the kernel asks for a sign of life; 0: for ever."""
    return not 0 < timeout_ms <= KEEPALIVE_MS


def _section(service: ServiceKey, spec: ProxySpec, served: Served, paths: Paths) -> str:
    listener = served.listener
    settings = listener.settings
    name = section_name(service, listener.key)
    host = bracketed(listener.key.address)
    comment = msgspec.json.encode(
        Section(service.namespace, service.name, spec.uid, listener)
    ).decode()
    lines = [
        f"listen {name}",
        f"{MARK.strip()} {comment}",
        f"mode {'http' if settings.forwarded_for else 'tcp'}",
        f"bind {host}:{listener.key.port} {bind_words(listener.key)}",
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
        lines += [
            f"tcp-request inspect-delay {settings.inspect_ms}",
            "tcp-request content accept if WAIT_END",
        ]
    if listener.restricted:
        lines += [f"{_RANGES}{words}" for words in _range_words(service, spec.source_ranges, paths)]
        lines += ["tcp-request connection reject unless within"]
    if settings.checks is not None:
        lines += [
            f"timeout check {settings.checks.timeout_ms}",
            "load-server-state-from-file global",
        ]
        lines += (
            ["option httpchk", f"http-check send meth GET uri {listener.check.path}"]
            if listener.check
            else []
        )
    taken: set[int] = set()
    for server in served.servers:
        number = number_of(server.node, taken)
        taken.add(number)
        lines.append(f"server {server.node} {server_words(listener, server, number)}")
    return "\n    ".join(lines) + "\n"


def _range_words(service: ServiceKey, cidrs: Sequence[str], paths: Paths) -> list[str]:
    """A line each."""
    if not 0 < len(cidrs) <= MOST_IN_TEXT:
        return [f"-f {paths.ranges(service)}"]
    return [" ".join(cidrs[at : at + ON_A_LINE]) for at in range(0, len(cidrs), ON_A_LINE)]
