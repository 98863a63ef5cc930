"""What a role shows over HTTP: health, metrics, state."""

from fairlead.web.server import View, serve

__all__ = ["View", "serve"]
