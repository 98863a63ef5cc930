"""The HTTP server of a role: health, metrics and state."""

from fairlead.web.server import View, serve

__all__ = ["View", "serve"]
