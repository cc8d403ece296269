"""A rank's side of generation against a real head: acknowledgements, failures, weights, closing."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
import torch
from peers import DEADLINE_S, head_and_peers, head_config, until

from services.errors import GenerationError
from services.pb import streamrl_pb2 as pb
from services.pb import streamrl_pb2_grpc as pb_grpc
from services.rpc import Credentials
from services.samples import Prompt, Sample, SampleId, SamplingParams
from services.sgs.server import HeadServer
from services.transport.grpc import TRANSPORT, GrpcReceiver, GrpcWeightServer
from services.transport.manifest import Source, TensorMeta, layout
from services.transport.packing import Packer
from trainer.publish import Publisher, Snapshotter
from trainer.rollout import RolloutClient, Stream, StreamRequest

PROMPTS = {"train/0": 3, "train/1": 4}
CONFIG = head_config()


def request(name: str = "train/0", n: int = 2, min_version: int = -1) -> StreamRequest:
    prompts = tuple(Prompt(prompt_id, (7,) * length) for prompt_id, length in PROMPTS.items())
    return StreamRequest(name, prompts, len(prompts), n, SamplingParams(max_tokens=8), min_version)


async def length(sample: Sample) -> float:
    return float(len(sample.token_ids))


async def no_announcement() -> None:
    return


@asynccontextmanager
async def rollouts(address: str, config: Any = CONFIG) -> AsyncIterator[RolloutClient]:
    async with grpc.aio.insecure_channel(address) as channel:
        client = RolloutClient(
            channel, config.sgs, run_id="run", session="s1", rank=0, seed=0, on_reconnect=no_announcement
        )
        try:
            yield client
        finally:
            await client.close()


def error_of(stream: Stream) -> Exception | None:
    try:
        stream.drain()
    except Exception as error:
        return error
    return None


def test_groups_come_and_the_head_keeps_nothing() -> None:
    async def scenario() -> None:
        async with head_and_peers() as (server, peers), rollouts(peers.address) as client:
            await peers.unit("u0", auto=True)
            stream = Stream(request())
            await asyncio.wait_for(client.run(stream, length), DEADLINE_S)
            groups = stream.drain()
            assert {group.prompt_id for group in groups} == set(PROMPTS)
            assert all(group.rewards == (2.0, 2.0) for group in groups) and stream.exhausted
            # Everything was acknowledged: the last ones too, whose call was cut off or not.
            assert not server.head.ledger.streams

    asyncio.run(scenario())


def test_an_acknowledgement_that_is_cut_off_is_made_again() -> None:
    class Refusing(pb_grpc.GenerationServicer):
        calls: list[int] = []  # noqa: RUF012

        async def Acknowledge(self, message: pb.AcknowledgeRequest, context: Any) -> pb.AcknowledgeReply:
            self.calls.append(len(message.ids))
            if len(self.calls) == 1:
                await context.abort(grpc.StatusCode.UNAVAILABLE, "going")
            return pb.AcknowledgeReply()

    async def scenario() -> None:
        server, refusing = grpc.aio.server(), Refusing()
        pb_grpc.add_GenerationServicer_to_server(refusing, server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        async with rollouts(f"127.0.0.1:{port}") as client:
            ids = [SampleId("train/0", 0), SampleId("train/0", 1)]
            await client._send_acknowledge("train/0", ids)
            assert len(ids) == 2
            await client._send_acknowledge("train/0", ids)
        await server.stop(None)
        assert ids == [] and refusing.calls == [2, 2]

    asyncio.run(scenario())


@pytest.mark.parametrize("broken", [{"logprobs": [-0.5, float("nan")]}, {"token_ids": [], "logprobs": [], "spans": []}])
def test_a_sample_no_engine_should_give_ends_the_stream_by_name(broken: dict[str, Any]) -> None:
    async def scenario() -> None:
        async with head_and_peers() as (_server, peers), rollouts(peers.address) as client:
            unit = await peers.unit("u0")
            stream = Stream(request(n=1))
            running = asyncio.create_task(client.run(stream, length))
            await until(lambda: len(unit.assigned) == 2)
            whole = {
                "id": pb.SampleId(prompt_id="train/1", k=0), "token_ids": [1, 2], "logprobs": [-0.5, -0.5],
                "finish_reason": pb.FINISH_REASON_STOP, "spans": [pb.VersionSpan(version=0, start=0, end=2)],
                "unit_id": "u0",
            }  # fmt: skip
            bad = pb.Sample(**{**whole, **broken})
            await unit.send(finished=pb.Finished(run_id="run", session="s1", samples=[bad]))
            await asyncio.wait_for(running, DEADLINE_S)
            assert isinstance(error_of(stream), GenerationError)
            assert "train/1#0 from unit u0" in str(error_of(stream))

    asyncio.run(scenario())


def test_a_score_that_fails_ends_the_stream_after_what_came_before() -> None:
    async def scenario() -> None:
        async def score(sample: Sample) -> float:
            if sample.id.prompt_id == "train/1":
                raise RuntimeError("no worker")
            return 1.0

        async with head_and_peers() as (_server, peers), rollouts(peers.address) as client:
            await peers.unit("u0", auto=True)
            stream = Stream(request())
            await asyncio.wait_for(client.run(stream, score), DEADLINE_S)
            assert [group.prompt_id for group in stream.drain()] == ["train/0"]
            assert str(error_of(stream)) == "no worker" and not stream.exhausted

    asyncio.run(scenario())


def test_what_is_broken_ends_open_and_later_streams() -> None:
    async def scenario() -> None:
        async with head_and_peers() as (_server, peers), rollouts(peers.address) as client:
            stream, later = Stream(request(min_version=1)), Stream(request("train/1", min_version=1))
            asyncio.get_running_loop().create_task(client.run(stream, length))
            await asyncio.sleep(0)
            client.fail(GenerationError("no weights"))
            asyncio.get_running_loop().create_task(client.run(later, length))
            await asyncio.sleep(0)
            assert str(error_of(stream)) == str(error_of(later)) == "no weights"

    asyncio.run(scenario())


def test_closing_with_open_streams_is_quiet(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        async with head_and_peers() as (server, peers), rollouts(peers.address) as client:
            unit = await peers.unit("u0")
            stream = Stream(request())
            running = asyncio.create_task(client.run(stream, length))
            await until(lambda: len(unit.assigned) == 4)
            await asyncio.wait_for(client.close(), DEADLINE_S)
            assert running.cancelled() and error_of(stream) is None
            [record] = server.head.ledger.streams["train/0"].ranks.values()
            await until(lambda: not record.connected)

    with caplog.at_level(logging.WARNING):
        asyncio.run(scenario())
    assert [record for record in caplog.records if record.exc_info] == []


def metas() -> list[TensorMeta]:
    return layout([("a", "float32", (2, 3), 24), ("empty", "float32", (0,), 0), ("b", "float32", (4,), 16)])


def packed(version: int, dtype: str = "model") -> Packer:
    values = {"a": torch.arange(6.0).reshape(2, 3), "empty": torch.empty(0), "b": torch.full((4,), float(version))}
    return Snapshotter(metas(), dtype).take(version, iter(values.items()))


@pytest.mark.parametrize("dtype", ["model", "bfloat16"])
def test_a_snapshot_is_a_copy_in_the_transfer_dtype(dtype: str) -> None:
    weight = torch.ones(4)
    values = [("a", torch.arange(6.0).reshape(3, 2).T), ("empty", torch.empty(0)), ("b", weight)]
    packer = Snapshotter(metas(), dtype).take(7, iter(values))
    weight.zero_()
    manifest = packer.finish()
    of = torch.float32 if dtype == "model" else torch.bfloat16
    got = torch.frombuffer(packer.body, dtype=of).float()
    assert manifest.version == 7 and {tensor.dtype for tensor in manifest.tensors} == {str(of).removeprefix("torch.")}
    assert got.tolist() == [0.0, 2.0, 4.0, 1.0, 3.0, 5.0, 1.0, 1.0, 1.0, 1.0]


@asynccontextmanager
async def publisher(address: str, units: list[tuple[int, str]]) -> AsyncIterator[Publisher]:
    server = GrpcWeightServer(Credentials.read(CONFIG.security))
    port = await server.start("127.0.0.1", 0)
    async with grpc.aio.insecure_channel(address) as channel:
        publishing = Publisher(
            channel,
            server,
            Source(TRANSPORT, f"127.0.0.1:{port}"),
            run_id="run",
            session="s1",
            config=CONFIG,
            on_unit=lambda version, unit: units.append((version, unit.unit_id)),
        )
        try:
            yield publishing
        finally:
            await publishing.close()
            await server.stop()


def test_versions_published_at_once_come_out_in_order_and_can_be_fetched() -> None:
    from services import wire
    from services.transport.base import fetch

    async def scenario() -> None:
        units: list[tuple[int, str]] = []
        async with head_and_peers() as (server, peers), publisher(peers.address, units) as publishing:
            await asyncio.gather(publishing.publish(packed(1)), publishing.publish(packed(2)))
            assert server.head.versions.version == 2
            unit = await peers.unit("u0")
            await until(lambda: bool(unit.staged))
            receivers = {TRANSPORT: GrpcReceiver(Credentials.read(CONFIG.security))}
            body = await fetch(wire.manifest(unit.staged[-1].manifest), receivers, DEADLINE_S)
            assert torch.frombuffer(body, dtype=torch.float32)[-1] == 2.0
            await unit.weights(2, pb.UnitWeights.STAGED)
            await until(lambda: unit.commits == [2])
            await unit.weights(2, pb.UnitWeights.COMMITTED)
            await until(lambda: units == [(2, "u0")])

    asyncio.run(scenario())


def test_a_replaced_head_is_told_though_no_stream_is_open() -> None:
    async def scenario() -> None:
        first, successor = HeadServer(CONFIG), HeadServer(CONFIG)
        port = await first.start("127.0.0.1", 0)
        async with publisher(f"127.0.0.1:{port}", []) as publishing:
            await publishing.publish(packed(3))
            await first.stop()
            await successor.start("127.0.0.1", port)
            try:
                await until(lambda: successor.head.versions.version == 3)
            finally:
                await successor.stop()

    asyncio.run(scenario())


def test_weights_that_no_head_takes_are_an_error_with_their_version() -> None:
    async def scenario() -> None:
        async with head_and_peers() as (_server, peers), publisher(peers.address, []) as publishing:
            await publishing.publish(packed(1))
            await peers.rank(session="s2").publish(1)
            with pytest.raises(GenerationError, match="weights v2: the head did not take them: FAILED_PRECONDITION"):
                await publishing.publish(packed(2))

    asyncio.run(scenario())
