"""Weight bodies over real gRPC: whole, resumed, from a second source, and refused."""

from __future__ import annotations

import asyncio
import dataclasses
import multiprocessing
import os
import signal

import grpc
import numpy as np
import pytest

from services.errors import WeightsError
from services.pb import streamrl_pb2 as pb
from services.rpc import Credentials, Server
from services.transport import grpc as weights_grpc
from services.transport.base import fetch
from services.transport.chunks import Chunk
from services.transport.grpc import GrpcReceiver, GrpcWeightServer
from services.transport.manifest import Source
from services.transport.packing import pack

PLAIN = Credentials(None, None, None, 4 << 20)
CHUNK = 1 << 12


def weights(version=1, nbytes=200_000, seed=0):
    data = np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)
    half = nbytes // 2
    return pack(version, f"t{version}", [("a", "uint8", (half,), data[:half]), ("b", "uint8", (half,), data[half:])])


def at(manifest, *ports, transport="grpc"):
    return dataclasses.replace(manifest, sources=tuple(Source(transport, f"127.0.0.1:{port}") for port in ports))


def receivers(credentials=PLAIN, stall_s=15.0):
    return {"grpc": GrpcReceiver(credentials, stall_s)}


async def serving(manifest, body, credentials=PLAIN):
    server = GrpcWeightServer(credentials, CHUNK)
    server.put(manifest, body)
    return server, await server.start("127.0.0.1", 0)


class Scripted:
    """A weight server that sends what it is told to."""

    def __init__(self, chunks_from):
        self.requests = []
        self._chunks_from = chunks_from

    async def fetch(self, request, context):
        self.requests.append(request)
        async for chunk in self._chunks_from(request, context):
            yield chunk

    async def start(self):
        self._server = Server(PLAIN, "scripted")
        self._server.add(weights_grpc._register, self, "streamrl.v1.Weights")
        return await self._server.start("127.0.0.1", 0)

    async def stop(self):
        await self._server.stop(0)


def run(work):
    return asyncio.run(asyncio.wait_for(work, 60))


@pytest.mark.parametrize("token", [None, "secret"])
def test_a_body_arrives_whole_and_writable(token):
    async def work():
        credentials = dataclasses.replace(PLAIN, token=token)
        manifest, body = weights()
        server, port = await serving(manifest, body, credentials)
        got = await fetch(at(manifest, port), receivers(credentials), 30)
        assert got == body
        got[0] = got[0]
        await server.stop()

    run(work())


def test_an_empty_body_is_a_body():
    async def work():
        manifest, body = pack(1, "t1", [("a", "float32", (0, 4), b"")])
        server, port = await serving(manifest, body)
        assert len(await fetch(at(manifest, port), receivers(), 30)) == 0
        await server.stop()

    run(work())


def test_a_broken_stream_goes_on_at_its_offset_from_the_next_source():
    async def work():
        manifest, body = weights()

        async def half(request, context):
            yield Chunk(0, body[:100_000])
            await context.abort(grpc.StatusCode.UNAVAILABLE, "going down")

        rest = []

        async def remainder(request, context):
            rest.append(request.offset)
            yield Chunk(request.offset, body[request.offset :])

        first, second = Scripted(half), Scripted(remainder)
        ports = [await first.start(), await second.start()]
        assert await fetch(at(manifest, *ports), receivers(), 30) == body
        assert rest == [100_000]
        await first.stop()
        await second.stop()

    run(work())


def serve_slowly(pipe, nbytes):
    """A server process that stalls in the middle of a body, to be killed there."""
    _, body = weights(nbytes=nbytes)

    async def work():
        async def chunks(request, context):
            for offset in range(request.offset, nbytes // 2, CHUNK):
                yield Chunk(offset, body[offset : min(offset + CHUNK, nbytes // 2)])
            pipe.send("half sent")
            await asyncio.sleep(600)

        server = Scripted(chunks)
        pipe.send(await server.start())
        await asyncio.sleep(600)

    asyncio.run(work())


def test_a_server_killed_in_between_is_replaced_by_the_second_source():
    nbytes = 400_000
    manifest, body = weights(nbytes=nbytes)
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(target=serve_slowly, args=(theirs, nbytes), daemon=True)
    process.start()

    async def work():
        doomed_port = await asyncio.to_thread(ours.recv)
        server, port = await serving(manifest, body)
        fetching = asyncio.create_task(fetch(at(manifest, doomed_port, port), receivers(), 50))
        assert await asyncio.to_thread(ours.recv) == "half sent"
        os.kill(process.pid, signal.SIGKILL)
        assert await fetching == body
        await server.stop()

    run(work())
    process.join(10)


def test_a_source_that_stalls_is_left_for_the_next():
    async def work():
        manifest, body = weights()

        async def stalls(request, context):
            yield Chunk(0, body[:1000])
            await asyncio.sleep(60)

        first = Scripted(stalls)
        server, port = await serving(manifest, body)
        assert await fetch(at(manifest, await first.start(), port), receivers(stall_s=0.2), 30) == body
        await first.stop()
        await server.stop()

    run(work())


def test_a_source_that_comes_back_is_asked_again():
    async def work():
        manifest, body = weights()
        calls = []

        async def flaky(request, context):
            calls.append(request.offset)
            end = min(request.offset + 70_000, len(body))
            yield Chunk(request.offset, body[request.offset : end])
            if end < len(body):
                await context.abort(grpc.StatusCode.UNAVAILABLE, "blip")

        server = Scripted(flaky)
        assert await fetch(at(manifest, await server.start()), receivers(), 30) == body
        assert calls == [0, 70_000, 140_000]
        await server.stop()

    run(work())


@pytest.mark.parametrize(
    ("offsets", "says"),
    [
        ([0, 0], r"v1 from 127.0.0.1:\d+: at byte 1000 of 200000 \(`a`\): .*duplicated"),
        ([0, 2000, 1000], "too early"),
        ([1000], "at byte 0 .*missing or reordered"),
    ],
)
def test_a_stream_out_of_order_is_refused(offsets, says):
    async def work():
        manifest, body = weights()

        async def disorderly(request, context):
            for offset in offsets:
                yield Chunk(offset, body[offset : offset + 1000])

        server = Scripted(disorderly)
        port = await server.start()
        with pytest.raises(WeightsError, match=says):
            await fetch(at(manifest, port), receivers(), 30)
        await server.stop()

    run(work())


def test_too_many_bytes_are_refused_and_too_few_time_out_with_the_reason():
    async def work():
        manifest, body = weights()

        async def longer(request, context):
            yield Chunk(0, body)
            yield Chunk(len(body), memoryview(b"more"))

        async def shorter(request, context):
            if request.offset == 0:
                yield Chunk(0, body[:1000])

        for chunks, says in ((longer, "oversize"), (shorter, r"1000 of 200000 bytes.*truncated")):
            server = Scripted(chunks)
            port = await server.start()
            with pytest.raises(WeightsError, match=says):
                await fetch(at(manifest, port), receivers(), 1.5)
            await server.stop()

    run(work())


def test_corrupt_bytes_are_named_and_a_sound_source_still_serves():
    async def work():
        manifest, body = weights()
        corrupt = memoryview(bytearray(body))
        corrupt[150_000] ^= 1
        bad, bad_port = await serving(manifest, corrupt)
        with pytest.raises(WeightsError, match=r"v1: digest of `b` does not match \(received from 127"):
            await fetch(at(manifest, bad_port), receivers(), 30)
        good, good_port = await serving(manifest, body)
        assert await fetch(at(manifest, bad_port, good_port), receivers(), 30) == body
        await bad.stop()
        await good.stop()

    run(work())


def test_what_is_not_held_is_not_found_in_clear_words():
    async def work():
        manifest, body = weights(version=2)
        server, port = await serving(manifest, body)
        older, _ = weights(version=1)
        with pytest.raises(WeightsError, match=r"NOT_FOUND: weights v1 \(transfer t1\) are not held here; v2"):
            await fetch(at(older, port), receivers(), 30)
        with pytest.raises(WeightsError, match="transport `ucx` is not supported here"):
            await fetch(at(manifest, port, transport="ucx"), receivers(), 30)
        with pytest.raises(WeightsError, match="no source could give them"):
            await fetch(manifest, receivers(), 30)
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            call = channel.unary_stream(
                "/streamrl.v1.Weights/Fetch",
                request_serializer=pb.FetchRequest.SerializeToString,
                response_deserializer=pb.WeightChunk.FromString,
            )
            parts = [c async for c in call(pb.FetchRequest(transfer_id="t2", version=2, offset=199_000))]
            assert b"".join(part.data for part in parts) == body[199_000:]
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await call(pb.FetchRequest(transfer_id="t2", version=2, offset=200_001)).read()
            assert refused.value.code() == grpc.StatusCode.OUT_OF_RANGE
        await server.stop()

    run(work())


def test_a_fetch_that_began_before_a_newer_version_ends_with_the_older_body():
    async def work():
        manifest, body = weights(nbytes=30_000_000)  # more than the flow-control windows hold
        server = GrpcWeightServer(PLAIN, 1 << 20)
        server.put(manifest, body)
        port = await server.start("127.0.0.1", 0)
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            call = channel.unary_stream(
                "/streamrl.v1.Weights/Fetch",
                request_serializer=pb.FetchRequest.SerializeToString,
                response_deserializer=pb.WeightChunk.FromString,
            )(pb.FetchRequest(transfer_id="t1", version=1))
            stream = call.__aiter__()
            parts = [(await stream.__anext__()).data]
            newer, newer_body = weights(version=2)
            server.put(newer, newer_body)
            assert await fetch(at(newer, port), receivers(), 30) == newer_body
            parts += [chunk.data async for chunk in stream]
        assert b"".join(parts) == body
        await server.stop()

    run(work())
