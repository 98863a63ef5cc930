"""Renders HAProxy's configuration for all Services of a gateway. Pure and deterministic.

In: the specs of the Services. Out: a text that HAProxy 2.6 and newer accepts (`haproxy -c`), with
one `listen` section per listener. Each section begins with a comment that holds the values from
which it was made. So a new process that finds a running HAProxy reads from its file what it serves.
`description` identifies the text, and the running HAProxy shows it. Follows HAProxy's configuration
manual, sections 4 (proxies) and 5 (bind and server options)."""

import hashlib
from collections.abc import Collection, Mapping, Sequence

import msgspec

from fairlead.drivers.proxy.shares import NO_SHARES, Shares
from fairlead.drivers.proxy.spec import ProxyKey, ProxyListener, ProxySpec, Served, Server
from fairlead.model import ServiceKey
from fairlead.net.address import bracketed, is_ipv6, join_host_port

MARK = "    # fairlead "
_ID_SPACE = (1 << 31) - 1
RANGES_PER_LINE = 40
"""Maximum number of source ranges on a line. HAProxy takes 64 words."""
MAX_INLINE_RANGES = 200
"""Maximum number of source ranges that are written into the configuration; more are read from a
file. HAProxy searches each line of ranges separately for every connection, so many lines are slow.
Files are not used for all Services, because at its start HAProxy compares the name of each file
(and of each list with a number of our own) with all others, which is too slow for thousands of
Services."""
_RANGES = "acl within src "
MAX_FILES = 262_144
"""The maximum of HAProxy's limit of open files: HAProxy allocates memory for each of them."""
KEEPALIVE_MS = 7_200_000
"""The kernel's default of net.ipv4.tcp_keepalive_time. Keepalives are used only where a time-out is
longer, because they cost a system call and a timer per socket."""


class Paths(msgspec.Struct, frozen=True):
    """The paths of files and sockets. `user`: the user that workers switch to; empty for no
    switch."""

    folder: str
    user: str = ""

    @property
    def worker_socket(self) -> str:
        return f"{self.folder}/worker.sock"

    @property
    def states(self) -> str:
        """The file with server states for a new worker (see `states`)."""
        return f"{self.folder}/servers.state"

    def ranges(self, service: ServiceKey) -> str:
        """Return the file with the source ranges of a Service. If they are many, HAProxy reads this
        file at its start, and its path is the name of the ACL list."""
        return f"{self.folder}/{service.namespace}.{service.name}.ranges"


class Section(msgspec.Struct, frozen=True):
    """The content of the comment in a section."""

    namespace: str
    name: str
    uid: str
    listener: ProxyListener


def section_name(service: ServiceKey, key: ProxyKey) -> str:
    """Return the name of a listener's section. It is unique, because names of namespaces and
    Services have no dot, and it has only characters that HAProxy accepts."""
    return f"{service.namespace}.{service.name}.{key.port}.{key.address}"


def service_of(section: str) -> ServiceKey:
    """Return the Service of a section, from its name alone: the section may be in the configuration
    of an old worker. Neither the namespace nor the name of a Service has a dot."""
    return ServiceKey(*section.split(".")[:2])


def render(specs: Mapping[ServiceKey, ProxySpec], paths: Paths, shares: Shares = NO_SHARES) -> str:
    """Return the whole configuration."""
    sections = [
        _section(service, spec, served, paths, shares)
        for service, spec in sorted(specs.items())
        for served in spec.listeners
    ]
    text = "\n".join([*_defaults(), *shares.table_lines(), *sections])
    return with_global(text, paths, shares.global_lines(len(sections)))


def with_global(text: str, paths: Paths, more: Sequence[str] = ()) -> str:
    """Return the configuration with these sections after the `global` section, which holds their
    digest and the path of HAProxy's socket."""
    user = [f"    user {paths.user}", f"    group {paths.user}"] if paths.user else []
    start = [
        "global",
        f"    description {digest(text)}",
        f"    stats socket {paths.worker_socket} mode 600 level admin expose-fd listeners",
        f"    fd-hard-limit {MAX_FILES}",
        f"    server-state-file {paths.states}",
        *user,
        *(f"    {line}" for line in more),
    ]
    return "\n".join([*start, text])


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def description_of(text: str) -> str:
    """Return the digest that is written in a rendered configuration."""
    return next(
        (line.split()[1] for line in text.splitlines() if line.startswith("    description ")), ""
    )


def sections_of(text: str) -> list[Section]:
    """Return the values from which a configuration was rendered, without servers and source ranges.
    Comments that cannot be decoded are left out."""
    found = []
    for line in text.splitlines():
        if line.startswith(MARK):
            try:
                found.append(msgspec.json.decode(line.removeprefix(MARK), type=Section))
            except msgspec.DecodeError:  # written by another version: the listener is set again
                continue
    return found


def bind_options(key: ProxyKey) -> str:
    """Return the options after `bind ADDRESS:PORT`."""
    # - `transparent`: the address is local through a route only, which over IPv6 does not suffice
    #   for bind(2).
    # - `v6only`: the kernel treats a socket with an IPv6 address as `v6only` anyway. Without this
    #   option HAProxy does not recognize the socket that the previous worker hands over, and opens
    #   a second one; connections that wait in the first are lost when it is closed.
    return "transparent v6only" if is_ipv6(key.address) else "transparent"


def server_options(listener: ProxyListener, server: Server, number: int) -> str:
    """Return the options after `server NAME`, for the configuration or for `add server`."""
    words = [join_host_port(server.address, server.port), f"weight {server.weight}", f"id {number}"]
    header = listener.settings.header
    words += [{"v1": "send-proxy", "v2": "send-proxy-v2"}[header]] if header else []
    if (checks := listener.settings.checks) is not None:
        words += [f"check inter {checks.interval_ms} rise {checks.rise} fall {checks.fall}"]
        words += [f"port {listener.check.port}"] if listener.check else []
    return " ".join(words)


def server_id(name: str, taken: Collection[int] = ()) -> int:
    """Return the id of a server. It is the same on all gateways, in whatever order the servers were
    added (unless two names collide), because `balance source` spreads clients by the ids of
    servers."""
    number = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") % _ID_SPACE + 1
    while number in taken:
        number = number % _ID_SPACE + 1
    return number


def acl_lines(text: str) -> dict[str, list[int]]:
    """Return the line numbers, from 1, of the source ranges in a configuration, by section. HAProxy
    makes each line an ACL list."""
    found: dict[str, list[int]] = {}
    section = ""
    for number, line in enumerate(text.splitlines(), start=1):
        if line.startswith("listen "):
            section = line.removeprefix("listen ")
        elif line.lstrip().startswith(_RANGES) and " -f " not in line:
            found.setdefault(section, []).append(number)
    return found


def _defaults() -> list[str]:
    # - `contstats`: bytes are counted as they arrive, not when a connection ends: some last for
    #   days.
    # - `redispatch 1`: a connection that a member does not accept goes to another member at once,
    #   so that clients do not notice members that the probes have not found dead yet.
    # - `tcp-smart-connect`: if there is data to send already (a header, or the client's first
    #   bytes), it is sent with the last packet of the handshake with the member, and saves a
    #   packet. If there is none, because the server speaks first, nothing is delayed.
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
    """Whether a connection may be idle for longer than the kernel's keepalive time. 0 stands for no
    time-out."""
    return not 0 < timeout_ms <= KEEPALIVE_MS


def _section(
    service: ServiceKey, spec: ProxySpec, served: Served, paths: Paths, shares: Shares
) -> str:
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
        f"bind {host}:{listener.key.port} {bind_options(listener.key)}",
        f"timeout client {settings.client_ms}",
        f"timeout connect {settings.connect_ms}",
        f"timeout server {settings.member_ms}",
        f"balance {settings.method}",
    ]
    # Keepalives detect a peer that disappeared, where no time-out ends the connection earlier.
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
    lines += shares.rule_lines(service)
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
        number = server_id(server.node, taken)
        taken.add(number)
        lines.append(f"server {server.node} {server_options(listener, server, number)}")
    return "\n    ".join(lines) + "\n"


def _range_words(service: ServiceKey, cidrs: Sequence[str], paths: Paths) -> list[str]:
    """Return the words of the ACL that holds the source ranges, for one line each."""
    if not 0 < len(cidrs) <= MAX_INLINE_RANGES:
        return [f"-f {paths.ranges(service)}"]
    return [
        " ".join(cidrs[at : at + RANGES_PER_LINE]) for at in range(0, len(cidrs), RANGES_PER_LINE)
    ]
