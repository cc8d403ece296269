"""The DP unit: one engine, attached to the head by one stream that it opens, keeps and, when it breaks, opens again."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import replace
from functools import partial
from typing import Any

from services import metrics, wire
from services.config import Config
from services.errors import EngineError, GenerationError
from services.pb import streamrl_pb2 as pb
from services.rpc import Credentials, open_channel
from services.samples import FailureCode, Sample, SampleFailure, SampleId, sample_seed
from services.transport.grpc import TRANSPORT, GrpcReceiver
from services.unit.engines.base import Capacity, Engine, SampleRequest
from services.unit.link import HeadLink, HeadLostError
from services.unit.outbox import Outbox
from services.unit.weights import WeightFollower

log = logging.getLogger(__name__)

_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 2.0
_GOODBYE_S = 1.0
_ENVELOPE_BYTES = 4096  # of a Finished message beside its samples


class UnitAgent:
    """Runs one engine for the head at `head_address` (host:port) until it is told to stop.

    While the head is away the engine goes on; what it finishes is kept and delivered to the next head.
    """

    def __init__(
        self,
        config: Config,
        engine: Engine,
        head_address: str,
        unit_id: str,
        credentials: Credentials,
        metrics_address: str = "",
    ) -> None:
        self._config = config
        self._engine = engine
        self._address = head_address
        self._unit_id = unit_id
        self._credentials = credentials
        self._metrics_address = metrics_address
        self._owner = ("", "")  # run id and session of what is running and kept
        self._running: dict[SampleId, asyncio.Future[Sample]] = {}
        self._outbox = Outbox(credentials.max_message_bytes - _ENVELOPE_BYTES)
        self._reports: deque[pb.UnitWeights] = deque()
        self._wake = asyncio.Event()
        self._leaving = ""
        self._welcomed = False
        self._known = False
        self._weights = WeightFollower(
            engine,
            {TRANSPORT: GrpcReceiver(credentials)},
            self._report,
            config.weights.deadline_s,
            config.weights.max_bytes,
        )

    async def run(
        self,
        stop: asyncio.Event,
        why: Callable[[], str] = lambda: "told to stop",
        started: Callable[[], None] = lambda: None,
    ) -> None:
        """Serve until `stop` is set; `why` is then asked for the reason that the head is told.

        `started` is called once the engine can work.

        Raises `GenerationError` when the head turns this unit away or cannot be reached for `sgs.reconnect_s` seconds,
        `EngineError` when the engine died, and whatever `Engine.start` raises.
        """
        self._why = why
        capacity = await self._engine.start()
        started()
        self._engine.failed.add_done_callback(lambda _failed: self._wake.set())
        try:
            await self._keep_attached(capacity, stop)
        finally:
            await self._weights.close()
            await self._engine.close()

    async def _keep_attached(self, capacity: Capacity, stop: asyncio.Event) -> None:
        loop = asyncio.get_running_loop()
        lost_at, pause_s = loop.time(), _FIRST_PAUSE_S
        while not stop.is_set():
            self._welcomed = False
            try:
                await self._attach(capacity, stop)
                return
            except HeadLostError as error:
                reason = str(error)
            if self._engine.failed.done():
                raise self._engine.failed.result()
            if self._welcomed:
                log.warning("head %s lost (%s); the engine goes on", self._address, reason)
                lost_at, pause_s = loop.time(), _FIRST_PAUSE_S
            if loop.time() - lost_at > self._config.sgs.reconnect_s:
                raise GenerationError(
                    f"unit {self._unit_id}: no head at {self._address} for {self._config.sgs.reconnect_s:g} s "
                    f"(sgs.reconnect_s); last: {reason}"
                )
            await _unless(stop, asyncio.sleep(pause_s))
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    async def _attach(self, capacity: Capacity, stop: asyncio.Event) -> None:
        """One stream, from registration to its end. Returns after a stop."""
        async with open_channel(self._address, self._credentials) as channel:
            link = HeadLink(channel, self._address, self._config.sgs.unit_timeout_s)
            try:
                heartbeat_s = await _unless(stop, self._register(link, capacity))
                if heartbeat_s is None:
                    return
                await self._converse(link, heartbeat_s, stop)
            finally:
                link.cancel()

    async def _register(self, link: HeadLink, capacity: Capacity) -> float:
        """Returns the seconds between heartbeats that the head wants."""
        await link.send(
            pb.UnitEvent(
                register=pb.Register(
                    unit_id=self._unit_id,
                    engine=self._engine.name,
                    slots=capacity.slots,
                    kv_tokens=capacity.kv_tokens,
                    max_sequence=capacity.max_sequence,
                    host=socket.gethostname(),
                    datacenter=self._config.engine.datacenter,
                    version=self._weights.committed.version,
                    transfer_id=self._weights.committed.transfer_id,
                    run_id=self._owner[0],
                    session=self._owner[1],
                    running=[wire.sample_id_pb(sample_id) for sample_id in self._running],
                    metrics_address=self._metrics_address,
                )
            )
        )
        first = await link.receive(self._config.sgs.unit_timeout_s)
        kind = first.WhichOneof("command")
        if kind == "refuse" and self._known:  # it may still hold this unit's broken stream
            raise HeadLostError(f"it refused: {first.refuse.reason}")
        if kind == "refuse":
            raise GenerationError(f"head {self._address} refused unit {self._unit_id}: {first.refuse.reason}")
        if kind != "welcome":
            raise HeadLostError(f"it answered a registration with `{kind}`")
        log.info("attached to head %s as %s", self._address, self._unit_id)
        self._welcomed = self._known = True
        self._outbox.resend_all()
        self._reports.clear()  # the head says again what it wants staged
        return first.welcome.heartbeat_s or self._config.sgs.heartbeat_s

    async def _converse(self, link: HeadLink, heartbeat_s: float, stop: asyncio.Event) -> None:
        reader = asyncio.create_task(self._read(link))
        writer = asyncio.create_task(self._write(link, heartbeat_s))
        stopper = asyncio.create_task(self._leave_on(stop))
        try:
            done, _ = await asyncio.wait({reader, writer}, return_when=asyncio.FIRST_COMPLETED)
            if writer in done and writer.exception() is None:  # it said goodbye
                await link.close()
                await asyncio.wait({reader}, timeout=_GOODBYE_S)
                return
            for task in (writer, reader):  # the writer's word first: it knows about the engine
                if task in done:
                    task.result()
        finally:
            for task in (reader, writer, stopper):
                task.cancel()
            await asyncio.gather(reader, writer, stopper, return_exceptions=True)

    async def _leave_on(self, stop: asyncio.Event) -> None:
        await stop.wait()
        self._leaving = self._why() or "told to stop"
        self._wake.set()

    async def _read(self, link: HeadLink) -> None:
        while True:
            await self._obey(await link.receive())

    async def _write(self, link: HeadLink, heartbeat_s: float) -> None:
        """Send whatever is ready, one message at a time, until this unit leaves."""
        loop = asyncio.get_running_loop()
        heartbeat_due = loop.time()
        while not self._leaving:
            self._wake.clear()
            if self._engine.failed.done():  # before any failure it caused: the head then gives all to other units
                died = self._engine.failed.result()
                await link.send(pb.UnitEvent(leaving=pb.Leaving(reason=str(died))))
                raise died
            if loop.time() >= heartbeat_due:
                heartbeat_due = loop.time() + heartbeat_s
                await link.send(pb.UnitEvent(heartbeat=self._heartbeat()))
            elif self._reports:
                await link.send(pb.UnitEvent(weights=self._reports.popleft()))
            elif self._outbox.has_unsent:
                await link.send(pb.UnitEvent(finished=self._finished()))
            else:
                await _until(self._wake, heartbeat_due - loop.time())
        await link.send(pb.UnitEvent(leaving=pb.Leaving(reason=self._leaving)))

    def _heartbeat(self) -> pb.Heartbeat:
        stats = self._engine.stats()
        metrics.UNIT_RUNNING.set(stats.running)
        metrics.UNIT_WAITING.set(stats.waiting)
        return pb.Heartbeat(
            running=stats.running,
            waiting=stats.waiting,
            kv_tokens_used=stats.kv_tokens_used,
            tokens_per_s=stats.tokens_per_s,
        )

    def _finished(self) -> pb.Finished:
        samples, failures = self._outbox.take()
        run_id, session = self._owner
        return pb.Finished(run_id=run_id, session=session, samples=samples, failures=failures)

    async def _obey(self, command: pb.HeadCommand) -> None:
        kind = command.WhichOneof("command")
        if kind == "assign":
            self._assign(command.assign)
        elif kind == "cancel":
            self._cancel([wire.sample_id(message) for message in command.cancel.ids])
        elif kind == "forget":
            self._outbox.forget(wire.sample_id(message) for message in command.forget.ids)
        elif kind == "stage":
            self._weights.stage(command.stage)
        elif kind == "commit":
            await self._weights.commit(command.commit)
        elif kind == "refuse":
            raise GenerationError(f"head {self._address} sent unit {self._unit_id} away: {command.refuse.reason}")
        else:
            log.warning("head %s sent a command this version does not know (%s)", self._address, kind)

    def _assign(self, assign: pb.Assign) -> None:
        owner = (assign.run_id, assign.session)
        if owner != self._owner:
            self._cancel(list(self._running))
            self._outbox.clear()
            self._owner = owner
        params = wire.sampling(assign.sampling)
        for group in assign.groups:
            prompt = wire.prompt(group.prompt)
            for k in group.ks:
                sample_id = SampleId(prompt.prompt_id, k)
                if sample_id in self._outbox:  # a new head does not know yet that it is done
                    self._outbox.resend(sample_id)
                elif sample_id not in self._running:
                    seed = sample_seed(assign.seed, sample_id)
                    self._submit(SampleRequest(sample_id, prompt.token_ids, params, seed, group.queued_at))
        self._wake.set()

    def _submit(self, request: SampleRequest) -> None:
        try:
            future = self._engine.submit(request)
        except EngineError as error:
            self._fail(request.id, error)
            return
        self._running[request.id] = future
        future.add_done_callback(partial(self._on_done, request.id))

    def _cancel(self, ids: list[SampleId]) -> None:
        for sample_id in ids:
            self._running.pop(sample_id, None)
            self._engine.cancel(sample_id)
        self._outbox.forget(ids)

    def _on_done(self, sample_id: SampleId, future: asyncio.Future[Sample]) -> None:
        error = None if future.cancelled() else future.exception()
        if self._running.get(sample_id) is not future:  # cancelled, or of an older session
            return
        del self._running[sample_id]
        if future.cancelled():
            return
        if error is not None:
            self._fail(sample_id, error)
            return
        sample = replace(future.result(), unit_id=self._unit_id)
        metrics.UNIT_FINISHED.inc()
        metrics.UNIT_TOKENS.inc(len(sample.token_ids))
        self._outbox.put(sample)
        self._wake.set()

    def _fail(self, sample_id: SampleId, error: BaseException) -> None:
        what = str(error) if isinstance(error, EngineError) else f"sample {sample_id}: {type(error).__name__}: {error}"
        log.error("%s", what)
        message = f"{what} (unit {self._unit_id})"
        self._outbox.put_failure(SampleFailure(sample_id, FailureCode.ENGINE, message, self._unit_id))
        self._wake.set()

    def _report(self, state: pb.UnitWeights) -> None:
        self._reports.append(state)
        self._wake.set()


async def _until(event: asyncio.Event, timeout_s: float) -> None:
    try:
        await asyncio.wait_for(event.wait(), max(timeout_s, 0))
    except asyncio.TimeoutError:
        return


async def _unless(stop: asyncio.Event, work: Coroutine[Any, Any, Any]) -> Any:
    """The result of `work`, or None when `stop` is set before it ends; `work` is then cancelled."""
    task = asyncio.ensure_future(work)
    stopped = asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait({task, stopped}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        for pending in (task, stopped):
            pending.cancel()
        await asyncio.gather(task, stopped, return_exceptions=True)
