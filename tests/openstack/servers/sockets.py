"""The sockets at which a provider finds the driver agent. They are in the directory of its Octavia,
instead of the directory that is fixed in upstream's code."""

from pathlib import Path

from octavia_lib.api.drivers import driver_lib


def place_in(directory: Path) -> None:
    names = ("status", "stats", "get")
    driver_lib.DriverLibrary.__init__.__defaults__ = tuple(
        str(directory / f"{name}.sock") for name in names
    )
