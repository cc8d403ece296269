"""The embedded engine."""

from services.unit.engines.embedded.engine import EmbeddedEngine

__all__ = ["EmbeddedEngine"]
