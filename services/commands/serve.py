"""`streamrl sgs` and `streamrl unit`: bind, announce, serve until told to stop, and say why it ended."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import socket
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path

import typer

from services import logs, processes
from services.config import Config
from services.errors import EXIT_FAILED, ConfigError
from services.metrics import serve_metrics
from services.rpc import Credentials, join_address

logger = logging.getLogger(__name__)
_STOP_WITHIN_S = 8.0


def serve_head(config: Config, host: str, port: int, ready_file: Path | None) -> None:
    """Serve the head on `host`:`port` (0: a free one). Raises what binding raises."""
    from services.sgs.server import serve

    _begin("head")
    metrics_port = serve_metrics(config.metrics.host, config.metrics.port, "head metrics", config.security.tls)

    def announce(bound: int) -> None:
        _announce(
            ready_file,
            address=join_address(host, bound),
            port=bound,
            metrics=join_address(config.metrics.host, metrics_port),
        )

    _serve("head", lambda stop, _why: serve(config, host, port, announce, stop))


def serve_unit(config: Config, head_address: str, unit_id: str | None, ready_file: Path | None) -> None:
    """Serve one unit for the head at `head_address`. Raises `ModelError` for a model that cannot be loaded."""
    from services.unit.agent import UnitAgent
    from services.unit.engines.factory import make_engine

    if config.engine.kind != "emulated" and config.model.path is None:
        raise ConfigError("model.path: a unit loads a model; make one with `streamrl prepare` and give it with --model")
    unit_id = unit_id or f"{socket.gethostname()}-{os.getpid()}"
    _begin(unit_id)
    credentials = Credentials.read(config.security)
    metrics = join_address(
        config.metrics.host, serve_metrics(config.metrics.host, 0, f"{unit_id} metrics", config.security.tls)
    )
    agent = UnitAgent(config, make_engine(config), head_address, unit_id, credentials, metrics)

    def announce() -> None:
        _announce(ready_file, address=unit_id, port=0, metrics=metrics)

    _serve(unit_id, lambda stop, why: agent.run(stop, why, announce))


def _begin(role: str) -> None:
    logs.set_up(role)
    if processes.PARENT_ENV in os.environ:
        processes.die_with_parent()


def _announce(ready_file: Path | None, *, address: str, port: int, metrics: str) -> None:
    line = json.dumps({"address": address, "port": port, "metrics": metrics, "pid": os.getpid()})
    if ready_file is not None:
        partial = ready_file.with_name(f"{ready_file.name}.partial")
        partial.write_text(line + "\n")
        partial.replace(ready_file)
    typer.echo(line)


def _serve(role: str, work: Callable[[asyncio.Event, Callable[[], str]], Awaitable[None]]) -> None:
    """Run `work` until a signal sets its event; the second argument tells it why it ended."""
    received: list[signal.Signals] = []

    async def until_stopped() -> None:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()

        def on_signal(sig: signal.Signals) -> None:
            if not received:
                logger.info("ended: %s", processes.why_ended(sig))
                _exit_late(role)
            received.append(sig)
            stop.set()

        for sig in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(sig, on_signal, sig)
        await work(stop, lambda: processes.why_ended(received[0] if received else None))

    asyncio.run(until_stopped())
    if not received:
        logger.info("ended: %s", processes.why_ended(None))


def _exit_late(role: str) -> None:
    """A stop that hangs must not leave a process behind."""

    def give_up() -> None:
        logger.error("%s did not stop within %.0f s; leaving at once", role, _STOP_WITHIN_S)
        os._exit(EXIT_FAILED)

    timer = threading.Timer(_STOP_WITHIN_S, give_up)
    timer.daemon = True
    timer.start()
