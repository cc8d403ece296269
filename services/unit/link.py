"""One stream to the head: every send and the welcome have a deadline, and every way to lose it is one error."""

from __future__ import annotations

import asyncio

import grpc

from services.errors import GenerationError
from services.pb import streamrl_pb2 as pb
from services.pb import streamrl_pb2_grpc

_FINAL = {
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.UNIMPLEMENTED,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.FAILED_PRECONDITION,
}


class HeadLostError(Exception):
    """The stream broke, or the head is silent; another attempt may succeed."""


class HeadLink:
    """Wraps `Units.Attach`. A cancelled or timed out read or write ends the stream: do not go on after one."""

    def __init__(self, channel: grpc.aio.Channel, address: str, deadline_s: float) -> None:
        self._call = streamrl_pb2_grpc.UnitsStub(channel).Attach()
        self._address = address
        self._deadline_s = deadline_s

    async def send(self, event: pb.UnitEvent) -> None:
        """Raises `HeadLostError`, or `GenerationError` when the head turns this unit away."""
        try:
            await asyncio.wait_for(self._call.write(event), self._deadline_s)
        except asyncio.TimeoutError:
            raise HeadLostError(f"nothing could be sent for {self._deadline_s:g} s") from None
        except grpc.aio.AioRpcError as error:
            raise self._explain(error) from None
        except asyncio.InvalidStateError:
            raise await self._end() from None

    async def receive(self, deadline_s: float | None = None) -> pb.HeadCommand:
        """The next command. Raises like `send`; a head that ends the stream counts as lost."""
        try:
            command = await asyncio.wait_for(self._call.read(), deadline_s)
        except asyncio.TimeoutError:
            raise HeadLostError(f"no answer for {deadline_s:g} s") from None
        except grpc.aio.AioRpcError as error:
            raise self._explain(error) from None
        if command is grpc.aio.EOF:
            raise await self._end()
        return command

    async def close(self) -> None:
        """Say that nothing follows; the head's end of the stream is still to be read."""
        try:
            await self._call.done_writing()
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            return  # it ended by itself

    def cancel(self) -> None:
        self._call.cancel()

    async def _end(self) -> Exception:
        try:
            code = await asyncio.wait_for(self._call.code(), self._deadline_s)
        except asyncio.TimeoutError:
            return HeadLostError(f"its stream broke, and it gave no status for {self._deadline_s:g} s")
        details = await self._call.details()
        if code in _FINAL:
            return GenerationError(f"head {self._address} turned this unit away: {code.name}: {details}")
        return HeadLostError("it ended the stream" if code == grpc.StatusCode.OK else f"{code.name}: {details}")

    def _explain(self, error: grpc.aio.AioRpcError) -> Exception:
        if error.code() in _FINAL:
            return GenerationError(
                f"head {self._address} turned this unit away: {error.code().name}: {error.details()}"
            )
        return HeadLostError(f"{error.code().name}: {error.details()}")
