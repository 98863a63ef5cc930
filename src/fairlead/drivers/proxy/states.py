"""The server states that the next worker inherits: which servers have failed the checks of the
current worker.

In: `show servers state` of the current worker, and the configuration of the next one. Out: a state
file. A new worker assumes that every server serves until a check fails. Without the file, each
reload would send new connections to servers that are known not to answer. Follows HAProxy 2.6's
configuration manual, `load-server-state-from-file`, and management manual, `show servers state`."""

from collections.abc import Iterator

from fairlead.net.address import split_host_port

NOTHING = "1\n"
"""A file without servers: the version of the format."""
_GETS_NEW_ONES = ("1", "2")
"""The values of `srv_op_state` for starting and running. A server that is stopped (0) or stopping
(3) gets no new connections."""


def not_serving(shown: str, text: str) -> str:
    """Return the content of the state file: the servers that get no new connections. Servers whose
    address or port differs in the next configuration are left out, because a row would restore the
    old port."""
    lines = [line for line in shown.splitlines() if line]
    names = next((line.removeprefix("# ").split() for line in lines if line.startswith("# ")), [])
    rows = [dict(zip(names, line.split(), strict=False)) for line in lines[2:]]
    if not (found := [row for row in rows if row["srv_op_state"] not in _GETS_NEW_ONES]):
        return NOTHING
    present = set(_servers(text))
    kept = [
        row
        for row in found
        if (row["be_name"], row["srv_name"], row["srv_addr"], row["srv_port"]) in present
    ]
    # The port of the checks comes from the configuration, too: 0 means "not set here".
    written = [" ".join((row | {"srv_check_port": "0"}).values()) for row in kept]
    return "\n".join([NOTHING.strip(), " ".join(["#", *names]), *written, ""])


def _servers(text: str) -> Iterator[tuple[str, str, str, str]]:
    """Return the section, name, address and port of each server in a configuration."""
    section = ""
    for line in text.splitlines():
        match line.split():
            case ["listen", name]:
                section = name
            case ["server", name, place, *_]:
                address, port = split_host_port(place)
                yield section, name, address, str(port)
