"""What the next worker has to know of servers: which of them the present one's checks have found
not to serve.

In: `show servers state` of the worker that runs, and the configuration of the next one. Out: a
state file. A worker takes every server for one that serves until a first check has failed: without
this, each reload would have new connections go to servers that are known not to answer. Follows
HAProxy 2.6's configuration manual, `load-server-state-from-file`, and management manual, `show
servers state`."""

from collections.abc import Iterator

from fairlead.net.address import split_host_port

NOTHING = "1\n"
"""The version of the format, and no server."""
_GETS_NEW_ONES = ("1", "2")
"""Starting and running; a server that is stopped (0) or stopping (3) does not."""


def not_serving(shown: str, text: str) -> str:
    """The file: servers that get no new connections and that the next configuration has at the same
    address and port, as a row would bring its own port."""
    lines = [line for line in shown.splitlines() if line]
    names = next((line.removeprefix("# ").split() for line in lines if line.startswith("# ")), [])
    rows = [dict(zip(names, line.split(), strict=False)) for line in lines[2:]]
    if not (found := [row for row in rows if row["srv_op_state"] not in _GETS_NEW_ONES]):
        return NOTHING
    there = set(_servers(text))
    kept = [
        row
        for row in found
        if (row["be_name"], row["srv_name"], row["srv_addr"], row["srv_port"]) in there
    ]
    # Where it is asked is for the configuration to say, too.
    written = [" ".join((row | {"srv_check_port": "0"}).values()) for row in kept]
    return "\n".join([NOTHING.strip(), " ".join(["#", *names]), *written, ""])


def _servers(text: str) -> Iterator[tuple[str, str, str, str]]:
    """Section, name, address and port."""
    section = ""
    for line in text.splitlines():
        match line.split():
            case ["listen", name]:
                section = name
            case ["server", name, place, *_]:
                address, port = split_host_port(place)
                yield section, name, address, str(port)
