"""The head's gRPC face: the `Generation` and `Units` services over one `Head`."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import NoReturn

import grpc

from services import wire
from services.config import Config
from services.pb import streamrl_pb2 as pb
from services.pb import streamrl_pb2_grpc as pb_grpc
from services.rpc import Credentials, Server
from services.sgs.head import Head, UnitRefusedError
from services.sgs.records import Delivery, InvalidRequestError, PromptInfo, Request, RequestRefusedError, SessionKey
from services.sgs.status import status_pb, unit_weights_pb
from services.sgs.unit_link import UnitLink
from services.sgs.versions import CommitPolicy, WeightState

log = logging.getLogger(__name__)

_FASTEST_TICK_S = 0.02
_SLOWEST_TICK_S = 0.25
_LONGEST_POLL_S = 300.0
_POLICIES = {
    pb.COMMIT_POLICY_UNSPECIFIED: CommitPolicy.BOUNDARY,
    pb.COMMIT_POLICY_BOUNDARY: CommitPolicy.BOUNDARY,
    pb.COMMIT_POLICY_IMMEDIATE: CommitPolicy.IMMEDIATE,
}


async def serve(
    config: Config, host: str, port: int, announce: Callable[[int], None] | None, stop: asyncio.Event
) -> None:
    """Serve until `stop` is set. `announce` is called with the bound port, once calls are answered.

    Raises `PortBusyError`, `InsecureAddressError` or `ConfigError`.
    """
    server = HeadServer(config)
    bound = await server.start(host, port)
    try:
        if announce is not None:
            announce(bound)
        stopping = asyncio.ensure_future(stop.wait())
        await asyncio.wait({stopping, server.ticking}, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if server.ticking.done():
            server.ticking.result()
    finally:
        await server.stop()


class HeadServer:
    """One head and its gRPC server."""

    def __init__(self, config: Config) -> None:
        """Raises `ConfigError` for security files that cannot be read."""
        self.head = Head(config)
        self._server = Server(Credentials.read(config.security), "head")
        self._server.add(
            pb_grpc.add_GenerationServicer_to_server, GenerationService(self.head), "streamrl.v1.Generation"
        )
        self._server.add(pb_grpc.add_UnitsServicer_to_server, UnitsService(self.head), "streamrl.v1.Units")

    async def start(self, host: str, port: int) -> int:
        """Bind and answer; returns the bound port. Raises `PortBusyError` or `InsecureAddressError`."""
        bound = await self._server.start(host, port)
        self.ticking = asyncio.create_task(self._tick())
        log.info("head listens on %s:%d", host, bound)
        return bound

    async def stop(self) -> None:
        self.ticking.cancel()
        await asyncio.gather(self.ticking, return_exceptions=True)
        await self._server.stop()

    async def _tick(self) -> None:
        sgs = self.head.config
        shortest = min(sgs.unit_timeout_s, sgs.reconnect_s, sgs.sample_deadline_s, sgs.no_unit_timeout_s)
        every = min(max(shortest / 8, _FASTEST_TICK_S), _SLOWEST_TICK_S)
        while True:
            await asyncio.sleep(every)
            self.head.tick()


class GenerationService(pb_grpc.GenerationServicer):
    def __init__(self, head: Head) -> None:
        self._head = head

    async def Generate(self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext) -> None:
        try:
            rank, signal = self._head.open(_request(request, self._head.config.sample_deadline_s))
        except InvalidRequestError as error:
            await _abort(context, grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except RequestRefusedError as error:
            await _abort(context, grpc.StatusCode.FAILED_PRECONDITION, str(error))
        connection, complete = rank.connection, False
        try:
            while not complete:
                signal.clear()
                if rank.connection != connection:
                    await _abort(context, grpc.StatusCode.ABORTED, "replaced by a newer request of the same rank")
                if rank.dropped:
                    await _abort(context, grpc.StatusCode.FAILED_PRECONDITION, rank.dropped)
                delivery = self._head.deliver(rank)
                if delivery:
                    await context.write(_event(delivery))
                elif rank.all_sent:
                    complete = True
                else:
                    await signal.wait()
        finally:
            self._head.close(rank, connection, complete)

    async def Acknowledge(
        self, request: pb.AcknowledgeRequest, context: grpc.aio.ServicerContext
    ) -> pb.AcknowledgeReply:
        self._head.acknowledge(SessionKey(request.run_id, request.session), map(wire.sample_id, request.ids))
        return pb.AcknowledgeReply()

    async def PublishWeights(self, request: pb.PublishRequest, context: grpc.aio.ServicerContext) -> pb.PublishReply:
        session = SessionKey(request.run_id, request.session)
        if not all(session) or request.manifest.version < 0 or request.deadline_s <= 0:
            wrong = "run_id and session are needed, manifest.version is >= 0 and deadline_s > 0"
            await _abort(context, grpc.StatusCode.INVALID_ARGUMENT, f"PublishWeights: {wrong}")
        try:
            units = self._head.publish(session, request.manifest, _POLICIES[request.commit], request.deadline_s)
        except RequestRefusedError as error:
            await _abort(context, grpc.StatusCode.FAILED_PRECONDITION, str(error))
        return pb.PublishReply(units=units)

    async def WeightStatus(
        self, request: pb.WeightStatusRequest, context: grpc.aio.ServicerContext
    ) -> pb.WeightStatusReply:
        head, until = self._head, WeightState(request.until)
        end = head.clock() + min(request.wait_s, _LONGEST_POLL_S)
        while not head.versions.reached(request.version, until):
            left = end - head.clock()
            if left <= 0:
                break
            try:
                await asyncio.wait_for(head.weights_changed.wait(), left)
            except asyncio.TimeoutError:
                break
        units = [unit_weights_pb(head, unit_id) for unit_id in head.units]
        return pb.WeightStatusReply(version=head.versions.version, units=units)

    async def Status(self, request: pb.StatusRequest, context: grpc.aio.ServicerContext) -> pb.StatusReply:
        return status_pb(self._head)


class UnitsService(pb_grpc.UnitsServicer):
    def __init__(self, head: Head) -> None:
        self._head = head

    async def Attach(self, request_iterator: object, context: grpc.aio.ServicerContext) -> None:
        head = self._head
        first = await _first_event(context, head.config.unit_timeout_s)
        try:
            if first.WhichOneof("event") != "register":
                raise UnitRefusedError("the first message of a unit must be Register")
            link = head.attach(first.register)
        except UnitRefusedError as error:
            await context.write(pb.HeadCommand(refuse=pb.Refuse(reason=str(error))))
            return
        reading = asyncio.create_task(self._read(link, context))
        try:
            await self._write(link, context)
        finally:
            head.lose(link, "its stream broke")
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)

    async def _read(self, link: UnitLink, context: grpc.aio.ServicerContext) -> None:
        try:
            while not link.lost:
                event = await context.read()
                if event is grpc.aio.EOF:
                    break
                self._head.receive(link, event)
        finally:
            self._head.lose(link, "it closed its stream")

    async def _write(self, link: UnitLink, context: grpc.aio.ServicerContext) -> None:
        while not link.lost:
            link.wake.clear()
            while link.commands and not link.lost:
                await context.write(link.commands.popleft())
            if not link.lost:
                await link.wake.wait()
        if link.lost.startswith("silent"):
            await _abort(context, grpc.StatusCode.UNAVAILABLE, f"unit {link.unit_id}: {link.lost}; register again")


async def _first_event(context: grpc.aio.ServicerContext, timeout_s: float) -> pb.UnitEvent:
    try:
        event = await asyncio.wait_for(context.read(), timeout_s)
    except asyncio.TimeoutError:
        await _abort(context, grpc.StatusCode.DEADLINE_EXCEEDED, f"no Register within {timeout_s:g} s")
    return pb.UnitEvent() if event is grpc.aio.EOF else event


async def _abort(context: grpc.aio.ServicerContext, code: grpc.StatusCode, message: str) -> NoReturn:
    await context.abort(code, message)
    raise AssertionError("abort returned")


def _request(message: pb.GenerateRequest, default_deadline_s: float) -> Request:
    """Raises `InvalidRequestError` naming the field."""
    session = SessionKey(message.run_id, message.session)
    if not all(session) or not message.stream:
        raise InvalidRequestError("Generate: run_id, session and stream are needed")
    if message.n <= 0 or message.sampling.max_tokens <= 0:
        raise InvalidRequestError(f"stream {message.stream}: n and sampling.max_tokens must be positive")
    for prompt in message.prompts:
        if not prompt.prompt_id or not prompt.token_ids:
            raise InvalidRequestError(f"stream {message.stream}: prompt {prompt.prompt_id!r} has no id or no tokens")
    max_tokens = message.sampling.max_tokens
    return Request(
        session=session,
        stream=message.stream,
        rank=message.rank,
        total_prompts=message.total_prompts,
        prompts=tuple(
            PromptInfo(prompt.prompt_id, len(prompt.token_ids), float(len(prompt.token_ids) + max_tokens), prompt)
            for prompt in message.prompts
        ),
        n=message.n,
        max_tokens=max_tokens,
        min_version=message.min_version,
        deadline_s=message.deadline_s or default_deadline_s,
        have=tuple(map(wire.sample_id, message.have)),
        body=pb.Assign(run_id=message.run_id, session=message.session, seed=message.seed, sampling=message.sampling),
    )


def _event(delivery: Delivery[pb.Sample]) -> pb.SampleEvent:
    return pb.SampleEvent(
        samples=delivery.results,
        failures=map(wire.failure_pb, delivery.failures),
        overdue=[
            pb.Overdue(id=wire.sample_id_pb(notice.id), unit_id=notice.unit_id, attempt=notice.attempt)
            for notice in delivery.overdue
        ],
    )
