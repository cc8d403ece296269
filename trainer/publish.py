"""Weights leave the trainer: a snapshot of version v, served to the units, announced at the head."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
import torch

from services import wire
from services.config import Config
from services.errors import GenerationError
from services.pb import streamrl_pb2 as pb
from services.pb import streamrl_pb2_grpc as pb_grpc
from services.rpc import TRANSIENT
from services.transport.grpc import GrpcWeightServer
from services.transport.manifest import Manifest, Source, TensorMeta, body_digest, layout
from services.transport.packing import allocate, tensor_bytes

logger = logging.getLogger(__name__)

_COMMIT = {"boundary": pb.COMMIT_POLICY_BOUNDARY, "immediate": pb.COMMIT_POLICY_IMMEDIATE}
_POLL_S = 30.0
_RETRY_S = 0.5

OnUnit = Callable[[int, pb.UnitWeights], None]


@dataclass(frozen=True)
class Snapshot:
    """Copied bytes of one version; `tensors` still lack their digests."""

    version: int
    tensors: tuple[TensorMeta, ...]
    body: memoryview


class Snapshotter:
    """Copies full weights into one buffer in the transfer dtype, one parameter at a time."""

    def __init__(self, metas: Sequence[TensorMeta], dtype: str) -> None:
        """`metas` say what `take` will be given; `dtype` is that of the transfer, or "model"."""
        dtypes = [meta.dtype if dtype == "model" else dtype for meta in metas]
        self._tensors = layout(
            (meta.name, of, meta.shape, tensor_bytes(meta.name, of, meta.shape))
            for meta, of in zip(metas, dtypes, strict=True)
        )

    def take(self, version: int, weights: Iterable[tuple[str, torch.Tensor]]) -> Snapshot:
        """`weights` yields every announced tensor in its order."""
        body = allocate(sum(tensor.nbytes for tensor in self._tensors))
        for meta, (name, value) in zip(self._tensors, weights, strict=True):
            assert meta.name == name, f"got {name} where {meta.name} was announced"
            target = torch.frombuffer(body, dtype=getattr(torch, meta.dtype), count=value.numel(), offset=meta.offset)
            target.copy_(value.detach().reshape(-1))
        return Snapshot(version, tuple(self._tensors), body)


class Publisher:
    """Serves the newest snapshot and tells the head. Lives on rank 0's service loop."""

    def __init__(
        self,
        channel: grpc.aio.Channel,
        server: GrpcWeightServer,
        source: Source,
        *,
        run_id: str,
        session: str,
        config: Config,
        on_unit: OnUnit,
    ) -> None:
        self._stub: Any = pb_grpc.GenerationStub(channel)
        self._server = server
        self._source = source
        self._run_id = run_id
        self._session = session
        self._deadline_s = config.weights.deadline_s
        self._reconnect_s = config.sgs.reconnect_s
        self._commit = _COMMIT[config.pipeline.commit]
        self._on_unit = on_unit
        self._manifest: Manifest | None = None
        self._following: asyncio.Task[None] | None = None

    async def publish(self, snapshot: Snapshot) -> None:
        """Serve `snapshot` and announce it. Digests are computed off the loop."""
        tensors = await asyncio.to_thread(_with_digests, snapshot)
        manifest = Manifest(snapshot.version, uuid.uuid4().hex, tensors, (self._source,))
        self._server.put(manifest, snapshot.body)
        self._manifest = manifest
        await self._announce_until_heard()
        if self._following is not None:
            self._following.cancel()
        self._following = asyncio.create_task(self._follow(manifest.version))

    async def announce(self) -> None:
        """Tell the head (again, after it was replaced) what is current; harmless when it knows."""
        if self._manifest is None:
            return
        request = pb.PublishRequest(
            run_id=self._run_id,
            session=self._session,
            manifest=wire.manifest_pb(self._manifest),
            commit=self._commit,
            deadline_s=self._deadline_s,
        )
        await self._stub.PublishWeights(request, timeout=10.0)

    async def _announce_until_heard(self) -> None:
        """The head may be about to be replaced: try for `sgs.reconnect_s`. Raises `GenerationError`."""
        until = time.monotonic() + self._reconnect_s
        while True:
            try:
                return await self.announce()
            except grpc.aio.AioRpcError as error:
                if error.code() not in TRANSIENT or time.monotonic() > until:
                    raise GenerationError(
                        f"weights v{self._manifest and self._manifest.version}: the head did not take them: "
                        f"{error.code().name}: {error.details()}"
                    ) from None
            await asyncio.sleep(_RETRY_S)

    async def _follow(self, version: int) -> None:
        """Report each unit once it committed or failed `version`, until all have or a newer one is out."""
        reported: set[str] = set()
        while True:
            request = pb.WeightStatusRequest(version=version, wait_s=_POLL_S, until=pb.UnitWeights.COMMITTED)
            started = time.monotonic()
            try:
                status = await self._stub.WeightStatus(request, timeout=_POLL_S + 10.0)
            except grpc.aio.AioRpcError as error:
                logger.debug("weights v%d: status: %s", version, error.code())
                await asyncio.sleep(1.0)
                continue
            for unit in status.units:
                settled = unit.state in (pb.UnitWeights.COMMITTED, pb.UnitWeights.FAILED)
                if unit.version == version and settled and unit.unit_id not in reported:
                    reported.add(unit.unit_id)
                    self._on_unit(version, unit)
            if status.version > version or reported >= {unit.unit_id for unit in status.units} != set():
                return
            if time.monotonic() - started < 0.1:  # nothing to wait for yet: no unit is attached
                await asyncio.sleep(0.5)


def _with_digests(snapshot: Snapshot) -> tuple[TensorMeta, ...]:
    view = snapshot.body
    return tuple(
        tensor._replace(digest=body_digest(view[tensor.offset : tensor.offset + tensor.nbytes]))
        for tensor in snapshot.tensors
    )
