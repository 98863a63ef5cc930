"""Read and write sysctl settings of the calling thread's network namespace.

In: names as in sysctl(8), with slashes ("net/ipv4/conf/eth0/rp_filter"), because names of
interfaces may contain dots. Out: values as text. A setting that this kernel does not have reads as
None. Follows proc_sys(5)."""

from pathlib import Path

from fairlead.errors import Conflict, Refused, Unavailable

ROOT = Path("/proc/sys")


def read(name: str) -> str | None:
    """Return the value, without the newline; None if there is no such setting or interface."""
    try:
        return (ROOT / name).read_text(encoding="ascii").strip()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise Unavailable(f"reading {ROOT / name}: {error.strerror}") from error


def write(name: str, value: str) -> None:
    """Set the value. Raise Conflict if the setting does not exist, Refused if it is read-only, as
    in most containers."""
    try:
        (ROOT / name).write_text(value, encoding="ascii")
    except FileNotFoundError as error:
        raise Conflict(f"the setting {ROOT / name} does not exist") from error
    except OSError as error:
        fix = f"set it on the host: {command(name, value)}"
        raise Refused(f"writing {value} to {ROOT / name}: {error.strerror}", fix=fix) from error


def command(name: str, value: str) -> str:
    """Return the shell command that sets the value."""
    return f"sysctl -w {name}={value}"
