"""The line by which a server reports that it is ready. It has a module of its own, because the
process that waits for it cannot import OpenStack."""

READY = "READY"
