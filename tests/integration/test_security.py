"""Who may call and who may listen: tokens, TLS, loopback, message bounds; on real servers."""

from __future__ import annotations

import asyncio
import socket
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from services.config import SecurityConfig, TLSConfig
from services.errors import ConfigError, InsecureAddressError, PortBusyError
from services.metrics import serve_metrics
from services.rpc import Credentials, Server, open_channel, require_safe_address

DEADLINE_S = 20.0
SHAPES = ["unary_unary", "unary_stream", "stream_unary", "stream_stream"]


class Echo:
    """One method of each call shape; each answers with what it was sent."""

    async def unary_unary(self, request: bytes, _context: Any) -> bytes:
        return request

    async def unary_stream(self, request: bytes, _context: Any) -> AsyncIterator[bytes]:
        yield request

    async def stream_unary(self, requests: AsyncIterator[bytes], _context: Any) -> bytes:
        return b"".join([request async for request in requests])

    async def stream_stream(self, requests: AsyncIterator[bytes], _context: Any) -> AsyncIterator[bytes]:
        async for request in requests:
            yield request


def register(servicer: Echo, server: Any) -> None:
    handlers = {shape: getattr(grpc, f"{shape}_rpc_method_handler")(getattr(servicer, shape)) for shape in SHAPES}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Echo", handlers),))


async def call(channel: grpc.aio.Channel, shape: str, body: bytes = b"hello") -> bytes:
    method = getattr(channel, shape)(f"/test.Echo/{shape}")

    async def requests() -> AsyncIterator[bytes]:
        yield body

    answer = method(requests() if shape.startswith("stream") else body, timeout=DEADLINE_S)
    if shape.endswith("stream"):
        return b"".join([part async for part in answer])
    return bytes(await answer)


@asynccontextmanager
async def echo_server(security: SecurityConfig, host: str = "127.0.0.1") -> AsyncIterator[int]:
    server = Server(Credentials.read(security), "echo")
    server.add(register, Echo(), "test.Echo")
    port = await server.start(host, 0)
    try:
        yield port
    finally:
        await server.stop()


def within(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 60))


def plain(**values: Any) -> SecurityConfig:
    return SecurityConfig(token_env=None, **values)


@pytest.fixture
def with_token(tmp_path: Path) -> SecurityConfig:
    (tmp_path / "token").write_text("right\n")
    return plain(token_file=tmp_path / "token")


@pytest.mark.parametrize("shape", SHAPES)
def test_a_call_with_the_token_is_answered(with_token: SecurityConfig, shape: str) -> None:
    async def check() -> None:
        async with (
            echo_server(with_token) as port,
            open_channel(f"127.0.0.1:{port}", Credentials.read(with_token)) as channel,
        ):
            assert await call(channel, shape) == b"hello"

    within(check())


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("token", [None, "wrong"])
def test_a_call_without_the_token_is_refused(
    with_token: SecurityConfig, tmp_path: Path, shape: str, token: str | None
) -> None:
    caller = plain()
    if token:
        (tmp_path / "other").write_text(token)
        caller = plain(token_file=tmp_path / "other")

    async def check() -> None:
        async with (
            echo_server(with_token) as port,
            open_channel(f"127.0.0.1:{port}", Credentials.read(caller)) as channel,
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call(channel, shape)
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
            assert "bearer token" in (caught.value.details() or "")

    within(check())


def test_health_and_reflection_answer(with_token: SecurityConfig) -> None:
    async def check() -> None:
        async with (
            echo_server(with_token) as port,
            open_channel(f"127.0.0.1:{port}", Credentials.read(with_token)) as channel,
        ):
            health = health_pb2_grpc.HealthStub(channel)
            reply = await health.Check(health_pb2.HealthCheckRequest(service="test.Echo"), timeout=DEADLINE_S)
            assert reply.status == health_pb2.HealthCheckResponse.SERVING

            async def ask() -> AsyncIterator[reflection_pb2.ServerReflectionRequest]:
                yield reflection_pb2.ServerReflectionRequest(list_services="")

            stub = reflection_pb2_grpc.ServerReflectionStub(channel)
            async for answer in stub.ServerReflectionInfo(ask(), timeout=DEADLINE_S):
                names = {service.name for service in answer.list_services_response.service}
                assert {"test.Echo", "grpc.health.v1.Health"} <= names

    within(check())


def test_an_oversize_message_is_refused_and_the_next_one_answered() -> None:
    security = plain(max_message_bytes=10_000)
    generous = plain(max_message_bytes=1_000_000)

    async def check() -> None:
        async with (
            echo_server(security) as port,
            open_channel(f"127.0.0.1:{port}", Credentials.read(generous)) as channel,
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call(channel, "unary_unary", b"x" * 20_000)
            assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert await call(channel, "unary_unary", b"x" * 5_000) == b"x" * 5_000

    within(check())


# ---------------------------------------------------------------- TLS


def openssl(directory: Path, *arguments: str) -> None:
    subprocess.run(["openssl", *arguments], cwd=directory, check=True, capture_output=True)


def make_authority(directory: Path) -> None:
    directory.mkdir()
    subject = ["-subj", "/CN=test authority", "-days", "2"]
    openssl(directory, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", "ca.key", "-out", "ca.pem", *subject)


def make_certificate(directory: Path) -> TLSConfig:
    """For localhost and 127.0.0.1, signed by the authority in `directory`."""
    (directory / "names").write_text("subjectAltName=DNS:localhost,IP:127.0.0.1\n")
    openssl(directory, "req", "-newkey", "rsa:2048", "-nodes", "-keyout", "key.pem", "-out", "csr", "-subj", "/CN=peer")
    signing = ["-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2", "-extfile", "names"]
    openssl(directory, "x509", "-req", "-in", "csr", "-out", "cert.pem", *signing)
    return TLSConfig(cert=directory / "cert.pem", key=directory / "key.pem", ca=directory / "ca.pem")


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> TLSConfig:
    directory = tmp_path_factory.mktemp("tls") / "ours"
    make_authority(directory)
    return make_certificate(directory)


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> TLSConfig:
    directory = tmp_path_factory.mktemp("tls") / "foreign"
    make_authority(directory)
    return make_certificate(directory)


async def try_call(serving: SecurityConfig, calling: SecurityConfig) -> grpc.StatusCode:
    async with (
        echo_server(serving) as port,
        open_channel(f"127.0.0.1:{port}", Credentials.read(calling)) as channel,
    ):
        try:
            assert await call(channel, "unary_unary") == b"hello"
        except grpc.aio.AioRpcError as error:
            return error.code()
    return grpc.StatusCode.OK


def test_mutual_tls_lets_only_our_own_in(ours: TLSConfig, foreign: TLSConfig) -> None:
    async def check() -> None:
        assert await try_call(plain(tls=ours), plain(tls=ours)) is grpc.StatusCode.OK
        for stranger in (plain(tls=foreign), plain()):
            assert await try_call(plain(tls=ours), stranger) is grpc.StatusCode.UNAVAILABLE
        mixed = TLSConfig(cert=foreign.cert, key=foreign.key, ca=ours.ca)  # trusts us, but is not one of us
        assert await try_call(plain(tls=ours), plain(tls=mixed)) is grpc.StatusCode.UNAVAILABLE

    within(check())


def test_a_server_that_is_not_ours_is_not_trusted(ours: TLSConfig, foreign: TLSConfig) -> None:
    served = TLSConfig(cert=foreign.cert, key=foreign.key)

    async def check() -> None:
        assert await try_call(plain(tls=served), plain(tls=ours)) is grpc.StatusCode.UNAVAILABLE

    within(check())


def test_metrics_beyond_loopback_need_tls(ours: TLSConfig) -> None:
    with pytest.raises(InsecureAddressError):
        serve_metrics("0.0.0.0", 0, "test")
    assert serve_metrics("0.0.0.0", 0, "test", ours) > 0


# ---------------------------------------------------------------- addresses and files


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.1.2.3", "example.org"])
def test_beyond_loopback_something_must_authenticate(host: str, with_token: SecurityConfig, ours: TLSConfig) -> None:
    with pytest.raises(InsecureAddressError, match="token_file"):
        require_safe_address(host, Credentials.read(plain()), "head")
    require_safe_address(host, Credentials.read(with_token), "head")
    require_safe_address(host, Credentials.read(plain(tls=ours)), "head")


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "localhost"])
def test_loopback_needs_nothing(host: str) -> None:
    require_safe_address(host, Credentials.read(plain()), "head")


def start_on(port: int) -> Callable[[], Awaitable[None]]:
    async def start() -> None:
        server = Server(Credentials.read(plain()), "second")
        try:
            await server.start("127.0.0.1", port)
        finally:
            await server.stop()

    return start


def test_a_busy_port_is_named() -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.listen()
        port = held.getsockname()[1]
        with pytest.raises(PortBusyError, match=f"second: cannot bind 127.0.0.1:{port}"):
            asyncio.run(start_on(port)())  # type: ignore[arg-type]
        with pytest.raises(PortBusyError, match=str(port)):
            serve_metrics("127.0.0.1", port, "second")


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"security\.token_file: .*nope"):
        Credentials.read(plain(token_file=tmp_path / "nope"))
    (tmp_path / "empty").write_text("\n")
    with pytest.raises(ConfigError, match="is empty"):
        Credentials.read(plain(token_file=tmp_path / "empty"))
    with pytest.raises(ConfigError, match=r"security\.tls\.cert"):
        Credentials.read(plain(tls=TLSConfig(cert=tmp_path / "nope", key=tmp_path / "nope")))
