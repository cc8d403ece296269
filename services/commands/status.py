"""`streamrl status`: what a head says about itself."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence

import grpc
import typer
from google.protobuf.json_format import MessageToDict
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from services.config import SecurityConfig
from services.errors import GenerationError
from services.pb import streamrl_pb2 as pb
from services.pb.streamrl_pb2_grpc import GenerationStub
from services.rpc import Credentials, open_channel

_DEADLINE_S = 5.0
_REFRESH_S = 1.0
_WEIGHT_STATES = {number: name.lower() for name, number in pb.UnitWeights.State.items()}


def show_status(address: str, watch: bool, as_json: bool, security: SecurityConfig) -> None:
    """Print it once, or again and again with `watch`. Raises `GenerationError` when the head does not answer."""
    asyncio.run(_show(address, watch, as_json, Credentials.read(security)))


async def _show(address: str, watch: bool, as_json: bool, credentials: Credentials) -> None:
    async with open_channel(address, credentials) as channel:
        stub = GenerationStub(channel)
        if not watch:
            reply = await _ask(stub, address)
            if as_json:
                typer.echo(_json(reply))
            else:
                Console().print(render(reply, address, time.time()))
            return
        with Live(console=Console(), auto_refresh=False) as live:
            while True:
                reply = await _ask(stub, address)
                shown = Text(_json(reply)) if as_json else render(reply, address, time.time())
                live.update(shown, refresh=True)
                await asyncio.sleep(_REFRESH_S)


async def _ask(stub: GenerationStub, address: str) -> pb.StatusReply:
    try:
        return await stub.Status(pb.StatusRequest(), timeout=_DEADLINE_S)
    except grpc.aio.AioRpcError as error:
        raise GenerationError(f"head at {address}: {error.code().name}: {error.details()}") from None


def _json(reply: pb.StatusReply) -> str:
    return json.dumps(
        MessageToDict(reply, preserving_proto_field_name=True, always_print_fields_with_no_presence=True), indent=2
    )


def render(reply: pb.StatusReply, address: str, now: float) -> RenderableType:
    """Tables of units and streams; `now` in Unix seconds."""
    version = str(reply.version) if reply.version >= 0 else "none yet"
    head = Text(
        f"head {address}, up {max(0.0, now - reply.started_at):.0f} s; newest weights: {version}; "
        f"samples in flight: {sum(unit.assigned for unit in reply.units)}; dispatch: {reply.dispatch}\n"
    )
    return Group(head, _units(reply), _streams(reply))


def _units(reply: pb.StatusReply) -> RenderableType:
    if not reply.units:
        return Text("no unit is attached", style="yellow")
    table = _table(
        "DP units", ("unit", "engine", "host", "weights"), ("running", "waiting", "tokens/s", "finished", "silent")
    )
    for unit in reply.units:
        beat = unit.heartbeat
        state = f"{_version(unit.version)} {_WEIGHT_STATES.get(unit.weights.state, '?')}"
        if unit.weights.error:
            state += f": {unit.weights.error}"
        table.add_row(
            *(unit.unit_id, unit.engine, unit.host, state, f"{beat.running} of {unit.slots}", str(beat.waiting)),
            *(f"{beat.tokens_per_s:.0f}", str(unit.finished), f"{unit.heartbeat_age_s:.1f} s"),
        )
    return table


def _version(number: int) -> str:
    return f"v{number}" if number >= 0 else "-"


def _table(title: str, left: Sequence[str], right: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, header_style="dim", pad_edge=False)
    for name in left:
        table.add_column(name)
    for name in right:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _streams(reply: pb.StatusReply) -> RenderableType:
    if not reply.streams:
        return Text("no samples are asked for")
    columns = ("queued", "running", "delivered", "acknowledged", "failed", "needs")
    table = _table("Streams", ("run", "stream", "trainer"), columns)
    for stream in reply.streams:
        counts = (
            stream.queued,
            stream.running,
            stream.delivered,
            stream.acknowledged,
            stream.failed,
            stream.min_version,
        )
        trainer = "connected" if stream.connected else "away"
        table.add_row(stream.run_id, stream.stream, trainer, *map(str, counts), _version(stream.min_version))
    return table
