"""gRPC servers and channels the way every process here makes them: loopback or authenticated, bounded, observable."""

from __future__ import annotations

import hmac
import ipaddress
import os
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from services.config import SecurityConfig
from services.errors import ConfigError, InsecureAddressError, PortBusyError

TRANSIENT = frozenset({grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED, grpc.StatusCode.UNKNOWN})
"""A peer that is gone, or going: worth a reconnect."""

_UNAUTHENTICATED = "a valid bearer token is needed (security.token_file or its environment variable)"


@dataclass(frozen=True)
class Credentials:
    """What `SecurityConfig` says, read from its files. `None` everywhere means plain loopback."""

    token: str | None
    server: grpc.ServerCredentials | None
    channel: grpc.ChannelCredentials | None
    max_message_bytes: int

    @classmethod
    def read(cls, config: SecurityConfig) -> Credentials:
        """Raises `ConfigError` for a file that cannot be read or an empty token."""
        token = os.environ.get(config.token_env) if config.token_env else None
        if config.token_file is not None:
            token = _read(config.token_file, "security.token_file").decode().strip()
            if not token:
                raise ConfigError(f"security.token_file: {config.token_file} is empty")
        if config.tls is None:
            return cls(token or None, None, None, config.max_message_bytes)
        cert, key = _read(config.tls.cert, "security.tls.cert"), _read(config.tls.key, "security.tls.key")
        ca = _read(config.tls.ca, "security.tls.ca") if config.tls.ca else None
        server = grpc.ssl_server_credentials([(key, cert)], root_certificates=ca, require_client_auth=ca is not None)
        channel = (
            grpc.ssl_channel_credentials(root_certificates=ca, private_key=key, certificate_chain=cert)
            if ca
            else grpc.ssl_channel_credentials(root_certificates=cert)
        )
        return cls(token or None, server, channel, config.max_message_bytes)


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def require_safe_address(host: str, credentials: Credentials, what: str) -> None:
    """Raise `InsecureAddressError` when `host` is beyond loopback and nothing authenticates callers."""
    if is_loopback(host) or credentials.token or credentials.server:
        return
    raise InsecureAddressError(
        f"{what}: refusing to listen on {host} without authentication: give security.token_file "
        "(or set STREAMRL_TOKEN), or security.tls, or bind 127.0.0.1"
    )


def join_address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _options(credentials: Credentials) -> list[tuple[str, Any]]:
    return [
        ("grpc.max_receive_message_length", credentials.max_message_bytes),
        ("grpc.max_send_message_length", credentials.max_message_bytes),
        ("grpc.so_reuseport", 0),
        ("grpc.keepalive_time_ms", 10_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.http2.ping_timeout_ms", 10_000),  # else a frozen peer is noticed after a minute
        ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 2_000),
    ]


class Server:
    """A grpc.aio server with health checking, reflection, token check and message bounds."""

    def __init__(self, credentials: Credentials, what: str) -> None:
        self._credentials = credentials
        self._what = what
        interceptors = [_TokenCheck(credentials.token)] if credentials.token else []
        self._server = grpc.aio.server(options=_options(credentials), interceptors=interceptors)
        self._health = health.aio.HealthServicer()
        self._names: list[str] = []
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)

    def add(self, register: Callable[[Any, Any], None], servicer: Any, full_name: str) -> None:
        """`register` is the generated `add_XServicer_to_server`; `full_name` like `streamrl.v1.Generation`."""
        register(servicer, self._server)
        self._names.append(full_name)

    async def start(self, host: str, port: int) -> int:
        """Bind, start, and return the bound port. Raises `InsecureAddressError` or `PortBusyError`."""
        require_safe_address(host, self._credentials, self._what)
        reflection.enable_server_reflection([*self._names, health.SERVICE_NAME, reflection.SERVICE_NAME], self._server)
        address = join_address(host, port)
        try:
            if self._credentials.server is not None:
                bound = self._server.add_secure_port(address, self._credentials.server)
            else:
                bound = self._server.add_insecure_port(address)
        except RuntimeError:
            bound = 0
        if bound == 0:
            raise PortBusyError(f"{self._what}: cannot bind {address}: in use or not an address of this host")
        await self._server.start()
        for name in ("", *self._names):
            await self._health.set(name, health_pb2.HealthCheckResponse.SERVING)
        return bound

    async def stop(self, grace_s: float = 0.5) -> None:
        await self._health.enter_graceful_shutdown()
        await self._server.stop(grace_s)


def open_channel(address: str, credentials: Credentials) -> grpc.aio.Channel:
    """A channel to `address` (host:port) that authenticates every call when a token is configured."""
    interceptors: Sequence[grpc.aio.ClientInterceptor] = _token_senders(credentials.token)
    if credentials.channel is not None:
        return grpc.aio.secure_channel(
            address, credentials.channel, options=_options(credentials), interceptors=interceptors
        )
    return grpc.aio.insecure_channel(address, options=_options(credentials), interceptors=interceptors)


def _read(path: Path, key: str) -> bytes:
    try:
        return path.expanduser().read_bytes()
    except OSError as error:
        raise ConfigError(f"{key}: {path} cannot be read: {error.strerror}") from None


class _TokenCheck(grpc.aio.ServerInterceptor):
    def __init__(self, token: str) -> None:
        self._expected = f"Bearer {token}".encode()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        handler = await continuation(handler_call_details)
        given = dict(handler_call_details.invocation_metadata).get("authorization", "")
        if handler is None or hmac.compare_digest(str(given).encode(), self._expected):
            return handler
        return _refusal(handler)


def _refusal(handler: grpc.RpcMethodHandler) -> grpc.RpcMethodHandler:
    """A handler of the same shape that only says no."""

    async def unary(_request: Any, context: grpc.aio.ServicerContext) -> None:
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, _UNAUTHENTICATED)

    async def stream(_request: Any, context: grpc.aio.ServicerContext) -> Any:
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, _UNAUTHENTICATED)
        yield

    shape = (handler.request_streaming, handler.response_streaming)
    make = {
        (False, False): lambda: grpc.unary_unary_rpc_method_handler(unary),
        (False, True): lambda: grpc.unary_stream_rpc_method_handler(stream),
        (True, False): lambda: grpc.stream_unary_rpc_method_handler(unary),
        (True, True): lambda: grpc.stream_stream_rpc_method_handler(stream),
    }[shape]
    return make()


def _token_senders(token: str | None) -> list[grpc.aio.ClientInterceptor]:
    """One interceptor per call shape: grpc.aio files an interceptor under the first shape it matches only."""
    if not token:
        return []
    header = ("authorization", f"Bearer {token}")

    def signed(details: grpc.aio.ClientCallDetails) -> grpc.aio.ClientCallDetails:
        metadata = grpc.aio.Metadata(*(details.metadata or ()), header)
        return details._replace(metadata=metadata)

    class UnaryUnary(grpc.aio.UnaryUnaryClientInterceptor):
        async def intercept_unary_unary(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
            return await continuation(signed(client_call_details), request)

    class UnaryStream(grpc.aio.UnaryStreamClientInterceptor):
        async def intercept_unary_stream(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
            return await continuation(signed(client_call_details), request)

    class StreamUnary(grpc.aio.StreamUnaryClientInterceptor):
        async def intercept_stream_unary(
            self, continuation: Any, client_call_details: Any, request_iterator: Any
        ) -> Any:
            return await continuation(signed(client_call_details), request_iterator)

    class StreamStream(grpc.aio.StreamStreamClientInterceptor):
        async def intercept_stream_stream(
            self, continuation: Any, client_call_details: Any, request_iterator: Any
        ) -> Any:
            return await continuation(signed(client_call_details), request_iterator)

    return [UnaryUnary(), UnaryStream(), StreamUnary(), StreamStream()]
