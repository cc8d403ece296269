"""One DP unit as a process of its own."""

from __future__ import annotations

import asyncio
import os
import signal
import socket

from services import metrics
from services.config import Config
from services.processes import die_with_parent, why_ended
from services.rpc import Credentials, join_address
from services.unit.agent import UnitAgent
from services.unit.engines.factory import make_engine


def default_unit_id() -> str:
    """Host and process: no two living units share it."""
    return f"{socket.gethostname()}-{os.getpid()}"


def run_unit(config: Config, head_address: str, unit_id: str | None = None) -> None:
    """Serve generation for the head at `head_address` until SIGTERM, SIGINT or the parent's end.

    Raises what `UnitAgent.run` raises, and `ConfigError` or `PortBusyError` before anything starts.
    """
    die_with_parent()
    credentials = Credentials.read(config.security)
    port = metrics.serve_metrics(config.metrics.host, 0, "unit")
    agent = UnitAgent(
        config,
        make_engine(config),
        head_address,
        unit_id or default_unit_id(),
        credentials,
        join_address(config.metrics.host, port),
    )
    asyncio.run(_until_signalled(agent))


async def _until_signalled(agent: UnitAgent) -> None:
    stop = asyncio.Event()
    received: list[signal.Signals] = []

    def on_signal(sig: signal.Signals) -> None:
        received.append(sig)
        stop.set()

    for sig in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(sig, on_signal, sig)
    await agent.run(stop, lambda: why_ended(received[0] if received else None))
