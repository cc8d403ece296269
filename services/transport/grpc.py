"""Weights over gRPC, in band: one long stream of chunks, needing nothing but what the services already use."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc

from services.errors import WeightsError
from services.pb import streamrl_pb2 as pb
from services.rpc import Credentials, Server, open_channel
from services.transport import chunks
from services.transport.base import Incoming, SourceBrokenError, WeightStore
from services.transport.manifest import Manifest, Source

TRANSPORT = "grpc"
_SERVICE = "streamrl.v1.Weights"
_HEADER_BYTES = 64
_STALL_S = 15.0
_PERMANENT = {
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.OUT_OF_RANGE,
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.UNIMPLEMENTED,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
}


class GrpcWeightServer:
    """Serves the newest version that was `put`."""

    def __init__(self, credentials: Credentials, chunk_bytes: int = 1 << 20) -> None:
        self._credentials = credentials
        self._chunk_bytes = min(chunk_bytes, credentials.max_message_bytes - _HEADER_BYTES)
        self._store = WeightStore()
        self._server: Server | None = None

    async def start(self, host: str, port: int) -> int:
        """Serve on the running loop; returns the bound port. Raises `InsecureAddressError` or `PortBusyError`."""
        server = Server(self._credentials, "weights")
        server.add(_register, self, _SERVICE)
        bound = await server.start(host, port)
        self._server = server
        return bound

    def put(self, manifest: Manifest, body: memoryview) -> None:
        """Offer a version instead of the one before; fetches of that one which already run go on to their end.

        `body` must not change any more. Raises `WeightsError` when its size is not the manifest's.
        """
        self._store.put(manifest, body)

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop()
            self._server = None

    async def fetch(self, request: pb.FetchRequest, context: grpc.aio.ServicerContext) -> AsyncIterator[chunks.Chunk]:
        try:
            manifest, body = self._store.get(request.transfer_id, request.version)
        except WeightsError as error:
            await context.abort(grpc.StatusCode.NOT_FOUND, str(error))
        if not 0 <= request.offset <= len(body):
            await context.abort(
                grpc.StatusCode.OUT_OF_RANGE,
                f"weights v{manifest.version}: byte {request.offset} is not in 0..{len(body)}",
            )
        for offset in range(request.offset, len(body), self._chunk_bytes):
            yield chunks.Chunk(offset, body[offset : offset + self._chunk_bytes])


class GrpcReceiver:
    """Fetches from a `GrpcWeightServer`."""

    def __init__(self, credentials: Credentials, stall_s: float = _STALL_S) -> None:
        """`stall_s`: seconds without a byte after which a source counts as broken."""
        self._credentials = credentials
        self._stall_s = stall_s

    async def receive(self, source: Source, incoming: Incoming) -> None:
        """See `Receiver.receive`."""
        manifest = incoming.manifest
        request = pb.FetchRequest(transfer_id=manifest.transfer_id, version=manifest.version, offset=incoming.received)
        async with open_channel(source.address, self._credentials) as channel:
            call = channel.unary_stream(
                f"/{_SERVICE}/Fetch",
                request_serializer=pb.FetchRequest.SerializeToString,
                response_deserializer=chunks.decode,
            )(request)
            try:
                await self._drain(call, incoming, source.address)
            except grpc.aio.AioRpcError as error:
                kind = WeightsError if error.code() in _PERMANENT else SourceBrokenError
                raise kind(
                    f"weights v{manifest.version} from {source.address}, byte {incoming.received}: "
                    f"{error.code().name}: {error.details()}"
                ) from None
            finally:
                call.cancel()
        incoming.require_complete(source.address)

    async def _drain(self, call: Any, incoming: Incoming, peer: str) -> None:
        stream = call.__aiter__()
        while True:
            try:
                chunk = await asyncio.wait_for(stream.__anext__(), self._stall_s)
            except StopAsyncIteration:
                return
            except asyncio.TimeoutError:
                raise SourceBrokenError(
                    f"weights v{incoming.manifest.version} from {peer}: nothing came for {self._stall_s:g} s "
                    f"at byte {incoming.received}"
                ) from None
            incoming.write(chunk.offset, chunk.data, peer)


def _register(servicer: GrpcWeightServer, server: grpc.aio.Server) -> None:
    """Like the generated registration, but with chunks that are serialised without protobuf's copies."""
    handler = grpc.unary_stream_rpc_method_handler(
        servicer.fetch, request_deserializer=pb.FetchRequest.FromString, response_serializer=chunks.encode
    )
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE, {"Fetch": handler}),))
