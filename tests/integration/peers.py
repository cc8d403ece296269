"""Scripted units and ranks that speak the wire protocol to a real head."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Any

import grpc

from services.config import Config
from services.pb import streamrl_pb2 as pb
from services.pb import streamrl_pb2_grpc as pb_grpc
from services.samples import SampleId
from services.sgs.server import HeadServer

DEADLINE_S = 30.0


def head_config(**sgs: Any) -> Config:
    """Fast timeouts; `security` may be given among the keywords."""
    security = sgs.pop("security", {"token_env": None})
    defaults: dict[str, Any] = {"window_s": 0.05, "lookahead": 0, "reconnect_s": 20.0}
    return Config.model_validate(
        {
            "model": {"path": "unused"},
            "data": {"train": {"kind": "jsonl", "path": "unused"}},
            "reward": {"fn": "unused:unused"},
            "sgs": {**defaults, **sgs},
            "security": security,
        }
    )


@asynccontextmanager
async def running_head(config: Config) -> AsyncIterator[tuple[HeadServer, str]]:
    server = HeadServer(config)
    port = await server.start("127.0.0.1", 0)
    try:
        yield server, f"127.0.0.1:{port}"
    finally:
        await server.stop()


async def until(condition: Callable[[], bool]) -> None:
    """Wait for what another process or task brings about; fails when it does not."""
    end = asyncio.get_running_loop().time() + DEADLINE_S
    while not condition():
        assert asyncio.get_running_loop().time() < end, "it did not come about"
        await asyncio.sleep(0.005)


def sample_pb(sample_id: SampleId, unit_id: str, version: int = 0) -> pb.Sample:
    return pb.Sample(
        id=pb.SampleId(prompt_id=sample_id.prompt_id, k=sample_id.k),
        token_ids=[1, 2],
        logprobs=[-0.5, -0.25],
        finish_reason=pb.FINISH_REASON_STOP,
        spans=[pb.VersionSpan(version=version, start=0, end=2)],
        unit_id=unit_id,
    )


class ScriptedUnit:
    """Collects commands; answers only as the test says. `auto` finishes every sample at once."""

    def __init__(self, address: str, unit_id: str, *, slots: int = 8, auto: bool = False, **register: Any) -> None:
        self.unit_id = unit_id
        self.auto = auto
        self.assigned: list[SampleId] = []
        self.cancelled: list[SampleId] = []
        self.forgotten: list[SampleId] = []
        self.staged: list[pb.Stage] = []
        self.commits: list[int] = []
        self.welcomed = asyncio.Event()
        self.refused = ""
        self.session = ("run", "s1")
        self._register = pb.Register(
            **{
                "unit_id": unit_id, "engine": "scripted", "slots": slots, "kv_tokens": 1 << 20, "max_sequence": 4096,
                "version": -1, "run_id": "", "session": "", **register,
            }
        )  # fmt: skip
        self._channel = grpc.aio.insecure_channel(address)
        self._call = pb_grpc.UnitsStub(self._channel).Attach()
        self._reading = asyncio.create_task(self._read())

    async def attach(self) -> ScriptedUnit:
        await self._call.write(pb.UnitEvent(register=self._register))
        await asyncio.wait_for(self.welcomed.wait(), DEADLINE_S)
        return self

    async def _read(self) -> None:
        try:
            while (command := await self._call.read()) is not grpc.aio.EOF:
                await self._take(command)
        except (grpc.aio.AioRpcError, asyncio.CancelledError):
            return

    async def _take(self, command: pb.HeadCommand) -> None:
        kind = command.WhichOneof("command")
        if kind == "assign":
            self.session = (command.assign.run_id, command.assign.session)
            ids = [SampleId(g.prompt.prompt_id, k) for g in command.assign.groups for k in g.ks]
            self.assigned += ids
            if self.auto:
                await self.finish(ids)
        elif kind in ("cancel", "forget"):
            ids = [SampleId(i.prompt_id, i.k) for i in getattr(command, kind).ids]
            (self.cancelled if kind == "cancel" else self.forgotten).extend(ids)
        elif kind == "stage":
            self.staged.append(command.stage)
        elif kind == "commit":
            self.commits.append(command.commit.version)
        elif kind == "refuse":
            self.refused = command.refuse.reason
            self.welcomed.set()
        else:
            self.welcomed.set()

    async def send(self, **event: Any) -> None:
        await self._call.write(pb.UnitEvent(**event))

    async def finish(self, ids: Iterable[SampleId]) -> None:
        samples = [sample_pb(sample_id, self.unit_id) for sample_id in ids]
        run_id, session = self.session
        await self.send(finished=pb.Finished(run_id=run_id, session=session, samples=samples))

    async def fail(self, ids: Iterable[SampleId]) -> None:
        run_id, session = self.session
        failures = [
            pb.Failure(
                id=pb.SampleId(prompt_id=i.prompt_id, k=i.k),
                code=pb.Failure.ENGINE,
                message="boom",
                unit_id=self.unit_id,
            )
            for i in ids
        ]
        await self.send(finished=pb.Finished(run_id=run_id, session=session, failures=failures))

    async def weights(self, version: int, state: pb.UnitWeights.State, error: str = "") -> None:
        """About the newest transfer of `version` that this unit was told to stage."""
        transfer_id = next((s.manifest.transfer_id for s in reversed(self.staged) if s.manifest.version == version), "")
        await self.send(weights=pb.UnitWeights(version=version, transfer_id=transfer_id, state=state, error=error))

    async def close(self) -> None:
        """Break the stream, as a killed process would."""
        self._call.cancel()
        self._reading.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)
        await self._channel.close()


class ScriptedRank:
    """Requests one stream and records every event. `received` counts deliveries of each id."""

    def __init__(self, address: str, *, session: str = "s1", rank: int = 0, run_id: str = "run") -> None:
        self.session = session
        self.run_id = run_id
        self.rank = rank
        self.samples: list[SampleId] = []
        self.failures: list[pb.Failure] = []
        self.overdue: list[pb.Overdue] = []
        self.code: grpc.StatusCode | None = None
        self.details = ""
        self.ended = asyncio.Event()
        self._channel = grpc.aio.insecure_channel(address)
        self.stub: Any = pb_grpc.GenerationStub(self._channel)

    def request(
        self,
        prompts: dict[str, int],
        *,
        n: int = 1,
        total: int | None = None,
        have: Iterable[SampleId] = (),
        min_version: int = -1,
        max_tokens: int = 16,
        deadline_s: float = 60.0,
        stream: str = "train/0",
    ) -> None:
        """`prompts` maps ids to lengths."""
        message = pb.GenerateRequest(
            run_id=self.run_id,
            session=self.session,
            stream=stream,
            rank=self.rank,
            total_prompts=len(prompts) if total is None else total,
            prompts=[pb.Prompt(prompt_id=name, token_ids=[7] * length) for name, length in prompts.items()],
            n=n,
            sampling=pb.Sampling(temperature=1.0, top_p=1.0, max_tokens=max_tokens),
            seed=3,
            min_version=min_version,
            deadline_s=deadline_s,
            have=[pb.SampleId(prompt_id=i.prompt_id, k=i.k) for i in have],
        )
        self.ended.clear()
        self._call = self.stub.Generate(message)
        self._reading = asyncio.create_task(self._read(self._call))

    async def _read(self, call: Any) -> None:
        try:
            while (event := await call.read()) is not grpc.aio.EOF:
                self.samples += [SampleId(s.id.prompt_id, s.id.k) for s in event.samples]
                self.failures += event.failures
                self.overdue += event.overdue
            self.code = await call.code()
        except grpc.aio.AioRpcError as error:
            self.code, self.details = error.code(), error.details()
        except asyncio.CancelledError:
            return
        self.ended.set()

    async def finished(self) -> None:
        await asyncio.wait_for(self.ended.wait(), DEADLINE_S)

    async def acknowledge(self, ids: Iterable[SampleId], stream: str = "train/0") -> None:
        await self.stub.Acknowledge(
            pb.AcknowledgeRequest(
                run_id=self.run_id,
                session=self.session,
                stream=stream,
                ids=[pb.SampleId(prompt_id=i.prompt_id, k=i.k) for i in ids],
            ),
            timeout=DEADLINE_S,
        )

    async def publish(self, version: int, commit: pb.CommitPolicy = pb.COMMIT_POLICY_BOUNDARY) -> int:
        manifest = pb.WeightManifest(version=version, transfer_id=f"t{self.session}-{version}", total_bytes=4)
        reply = await self.stub.PublishWeights(
            pb.PublishRequest(
                run_id=self.run_id, session=self.session, manifest=manifest, commit=commit, deadline_s=DEADLINE_S
            ),
            timeout=DEADLINE_S,
        )
        return int(reply.units)

    async def break_stream(self) -> None:
        self._call.cancel()
        self._reading.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)

    async def close(self) -> None:
        await self._channel.close()


class Peers:
    """Makes units and ranks of one test and closes them at its end."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._all: list[ScriptedUnit | ScriptedRank] = []

    async def unit(self, unit_id: str, **options: Any) -> ScriptedUnit:
        unit = ScriptedUnit(options.pop("address", self.address), unit_id, **options)
        self._all.append(unit)
        return await unit.attach()

    def rank(self, **options: Any) -> ScriptedRank:
        rank = ScriptedRank(options.pop("address", self.address), **options)
        self._all.append(rank)
        return rank

    async def close(self) -> None:
        for peer in self._all:
            await peer.close()


@asynccontextmanager
async def head_and_peers(**sgs: Any) -> AsyncIterator[tuple[HeadServer, Peers]]:
    async with running_head(head_config(**sgs)) as (server, address):
        peers = Peers(address)
        try:
            yield server, peers
        finally:
            await peers.close()
