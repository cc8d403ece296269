"""The engine that a configuration asks for; each is imported only when it is used."""

from __future__ import annotations

from services.config import Config
from services.unit.engines.base import Engine


def make_engine(config: Config) -> Engine:
    """An engine that is not started yet. Raises `ConfigError` for a configuration it cannot use."""
    if config.engine.kind == "emulated":
        from services.unit.engines.emulated import EmulatedEngine

        return EmulatedEngine(config)
    from services.unit.engines.embedded import EmbeddedEngine

    return EmbeddedEngine(config)
