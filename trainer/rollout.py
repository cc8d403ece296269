"""A trainer rank's side of generation: opens streams at the head, scores what arrives, hands out complete groups."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import grpc

from services import wire
from services.config import SGSConfig
from services.errors import GenerationError
from services.pb import streamrl_pb2 as pb
from services.pb import streamrl_pb2_grpc as pb_grpc
from services.rpc import TRANSIENT
from services.samples import Prompt, Sample, SampleFailure, SampleId, SamplingParams
from trainer.pipeline.groups import GroupAssembler, ScoredGroup, require_whole

logger = logging.getLogger(__name__)

_ACKNOWLEDGE_EVERY_S = 0.1
_ACKNOWLEDGE_TIMEOUT_S = 10.0
_BACKOFF_S = (0.05, 1.0)

Score = Callable[[Sample], Awaitable["float | None"]]


@dataclass(frozen=True)
class StreamRequest:
    """This rank's share of one iteration or evaluation; `total_prompts` counts those of all ranks."""

    name: str
    prompts: tuple[Prompt, ...]
    total_prompts: int
    n: int
    sampling: SamplingParams
    min_version: int


class Stream:
    """Complete groups of one request, as they come. The training thread reads, the service loop fills."""

    def __init__(self, request: StreamRequest) -> None:
        self.request = request
        self.assembler = GroupAssembler([prompt.prompt_id for prompt in request.prompts], request.n)
        self._ready: deque[ScoredGroup] = deque()
        self._changed = threading.Condition()
        self._finished = not request.prompts
        self._error: Exception | None = None

    def drain(self) -> list[ScoredGroup]:
        """What is complete now. Raises the stream's error, once everything before it was taken."""
        with self._changed:
            groups = list(self._ready)
            self._ready.clear()
            if not groups and self._error is not None:
                raise self._error
            return groups

    def wait(self, timeout_s: float) -> None:
        """Until a group is complete, the stream ended, or `timeout_s` passed."""
        with self._changed:
            self._changed.wait_for(lambda: self._ready or self._finished or self._error, timeout_s)

    @property
    def exhausted(self) -> bool:
        """Whether every group was drained."""
        with self._changed:
            return self._finished and not self._ready

    def put(self, group: ScoredGroup | None) -> None:
        if group is None:
            return
        with self._changed:
            self._ready.append(group)
            self._finished = self.assembler.complete
            self._changed.notify_all()

    def fail(self, error: Exception) -> None:
        """The first error stays: it is the cause of what follows it."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()


class RolloutClient:
    """Opens `Generate` streams and keeps them alive over a lost head. Lives on the service loop."""

    def __init__(
        self,
        channel: grpc.aio.Channel,
        config: SGSConfig,
        *,
        run_id: str,
        session: str,
        rank: int,
        seed: int,
        on_reconnect: Callable[[], Awaitable[None]],
    ) -> None:
        self._stub: Any = pb_grpc.GenerationStub(channel)
        self._config = config
        self._run_id = run_id
        self._session = session
        self._rank = rank
        self._seed = seed
        self._on_reconnect = on_reconnect
        self._open: dict[Stream, asyncio.Task[Any] | None] = {}
        self._broken: Exception | None = None

    async def run(self, stream: Stream, score: Score) -> None:
        """Feed `stream` until all of its samples are settled; any error ends up in the stream."""
        scoring: set[asyncio.Task[None]] = set()
        self._open[stream] = asyncio.current_task()
        if self._broken is not None:
            stream.fail(self._broken)
        try:
            await self._receive_all(stream, score, scoring)
            await asyncio.gather(*scoring)
        except asyncio.CancelledError:
            for task in scoring:
                task.cancel()
            raise
        except Exception as error:
            stream.fail(error)
        finally:
            del self._open[stream]

    def fail(self, error: Exception) -> None:
        """What streams depend on is broken: every open one, and each that is opened later, ends with `error`."""
        self._broken = error
        for stream in self._open:
            stream.fail(error)

    async def close(self) -> None:
        """Let go of the streams that are still open."""
        tasks = [task for task in self._open.values() if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _receive_all(self, stream: Stream, score: Score, scoring: set[asyncio.Task[None]]) -> None:
        name = stream.request.name
        lost_since: float | None = None
        backoff = _BACKOFF_S[0]
        while stream.assembler.missing:
            try:
                before = len(stream.assembler.missing)
                await self._receive(stream, score, scoring)
                if not stream.assembler.missing:
                    return
                if len(stream.assembler.missing) == before:
                    raise GenerationError(
                        f"{name}: the head ended the stream without {_some(stream.assembler.missing)}"
                    )
                lost_since, backoff = None, _BACKOFF_S[0]
            except grpc.aio.AioRpcError as error:
                if error.code() not in TRANSIENT:
                    raise GenerationError(f"{name}: the head refused: {error.details()}") from None
                now = time.monotonic()
                lost_since = lost_since or now
                if now - lost_since > self._config.reconnect_s:
                    raise GenerationError(
                        f"{name}: no head for {self._config.reconnect_s:.0f} s, waiting for "
                        f"{_some(stream.assembler.missing)}: {error.details()}"
                    ) from None
                logger.warning("%s: lost the head (%s), reconnecting", name, error.code().name)
            await asyncio.sleep(backoff)
            backoff = min(2 * backoff, _BACKOFF_S[1])
            await self._reconnected(name)

    async def _reconnected(self, name: str) -> None:
        try:
            await self._on_reconnect()
        except (grpc.aio.AioRpcError, asyncio.TimeoutError) as error:
            logger.debug("%s: the head is not back yet: %s", name, error)

    async def _receive(self, stream: Stream, score: Score, scoring: set[asyncio.Task[None]]) -> None:
        """One connection: read events until the head closes the stream."""
        call = self._stub.Generate(self._request(stream))
        acknowledge: list[SampleId] = []
        acknowledging = asyncio.create_task(self._acknowledge(stream.request.name, acknowledge))
        try:
            while True:
                event = await self._next_event(call, stream)
                if event is grpc.aio.EOF:
                    break
                self._take(event, stream, score, scoring, acknowledge)
        finally:
            call.cancel()
            acknowledging.cancel()
            await asyncio.gather(acknowledging, return_exceptions=True)
        # After a broken connection the next request names them in `have` instead.
        await self._send_acknowledge(stream.request.name, acknowledge)

    async def _next_event(self, call: Any, stream: Stream) -> Any:
        """The head reports every overdue sample, so silence this long means that it is frozen."""
        config = self._config
        limit = config.sample_deadline_s * config.max_attempts + config.no_unit_timeout_s + config.reconnect_s
        try:
            return await asyncio.wait_for(call.read(), limit)
        except asyncio.TimeoutError:
            raise GenerationError(
                f"{stream.request.name}: the head was silent for {limit:.0f} s, waiting for "
                f"{_some(stream.assembler.missing)}"
            ) from None

    def _take(
        self,
        event: pb.SampleEvent,
        stream: Stream,
        score: Score,
        scoring: set[asyncio.Task[None]],
        acknowledge: list[SampleId],
    ) -> None:
        for overdue in event.overdue:
            logger.warning(
                "%s: %s#%d is overdue on %s (attempt %d), dispatched again",
                stream.request.name, overdue.id.prompt_id, overdue.id.k, overdue.unit_id, overdue.attempt,
            )  # fmt: skip
        for message in event.samples:
            sample = wire.sample(message)
            require_whole(sample)
            acknowledge.append(sample.id)
            if stream.assembler.receive(sample.id):
                task = asyncio.create_task(_settle(stream, sample, score))
                scoring.add(task)
                task.add_done_callback(scoring.discard)
        for failed in event.failures:
            failure: SampleFailure = wire.failure(failed)
            acknowledge.append(failure.id)
            if stream.assembler.receive(failure.id):
                logger.warning("%s: %s", stream.request.name, failure.message)
                stream.put(stream.assembler.settle_failure(failure))

    async def _acknowledge(self, name: str, ids: list[SampleId]) -> None:
        while True:
            await asyncio.sleep(_ACKNOWLEDGE_EVERY_S)
            await self._send_acknowledge(name, ids)

    async def _send_acknowledge(self, name: str, ids: list[SampleId]) -> None:
        """Empties `ids` once the head has them: a call that is cut off is made again."""
        batch = [wire.sample_id_pb(sample_id) for sample_id in ids]
        if not batch:
            return
        request = pb.AcknowledgeRequest(run_id=self._run_id, session=self._session, stream=name, ids=batch)
        try:
            await self._stub.Acknowledge(request, timeout=_ACKNOWLEDGE_TIMEOUT_S)
            del ids[: len(batch)]
        except grpc.aio.AioRpcError as error:
            logger.debug("%s: acknowledging failed: %s", name, error.code())

    def _request(self, stream: Stream) -> pb.GenerateRequest:
        request = stream.request
        return pb.GenerateRequest(
            run_id=self._run_id,
            session=self._session,
            stream=request.name,
            rank=self._rank,
            total_prompts=request.total_prompts,
            prompts=[wire.prompt_pb(prompt) for prompt in request.prompts],
            n=request.n,
            sampling=wire.sampling_pb(request.sampling),
            seed=self._seed,
            min_version=request.min_version,
            deadline_s=self._config.sample_deadline_s,
            have=[wire.sample_id_pb(sample_id) for sample_id in stream.assembler.received],
        )


async def _settle(stream: Stream, sample: Sample, score: Score) -> None:
    try:
        reward = await score(sample)
    except Exception as error:
        stream.fail(error)
        return
    stream.put(stream.assembler.settle_sample(sample, reward))


def _some(ids: Sequence[SampleId]) -> str:
    """The first few ids, and how many there are."""
    named = ", ".join(str(sample_id) for sample_id in ids[:5])
    return f"{len(ids)} samples ({named}{', ...' if len(ids) > 5 else ''})"
