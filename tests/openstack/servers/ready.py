"""The word between a server and who started it. Apart, for one of them has no OpenStack."""

READY = "READY"
