"""Names for namespaces and labs that tests create on the machine."""

import itertools
import os
import signal
from collections.abc import Iterator

import pytest

from fairlead.lab import namespace, process

_numbers = itertools.count(1)


@pytest.fixture
def netns() -> Iterator[str]:
    """Create a network namespace for one test. It is removed afterwards, with all processes in
    it."""
    name = f"flt-{os.getpid()}-{next(_numbers)}"
    namespace.create(name)
    yield name
    for left in process.in_namespaces([name]):
        left.send(signal.SIGKILL)
    namespace.delete(name)


@pytest.fixture
def lab_name() -> str:
    """A lab name that no other test run uses."""
    return f"t{os.getpid()}x{next(_numbers)}"
