"""Weights leave the trainer: a snapshot of version v, served to the units, announced at the head."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import grpc
import torch

from services import metrics, wire
from services.config import Config
from services.errors import GenerationError
from services.pb import streamrl_pb2 as pb
from services.pb import streamrl_pb2_grpc as pb_grpc
from services.rpc import TRANSIENT
from services.transport.grpc import GrpcWeightServer
from services.transport.manifest import Manifest, Source, TensorMeta
from services.transport.packing import Packer, TensorSpec

logger = logging.getLogger(__name__)

_COMMIT = {"boundary": pb.COMMIT_POLICY_BOUNDARY, "immediate": pb.COMMIT_POLICY_IMMEDIATE}
_SETTLED = (pb.UnitWeights.COMMITTED, pb.UnitWeights.FAILED)
_POLL_S = 2.0  # a head that knows of no version waits as long before it says so
_WATCH_S = 1.0
_RETRY_S = 0.5

OnUnit = Callable[[int, pb.UnitWeights], None]


class Snapshotter:
    """Copies full weights into one body in the transfer dtype, one parameter at a time."""

    def __init__(self, metas: Sequence[TensorMeta], dtype: str) -> None:
        """`metas` say what `take` will be given; `dtype` is that of the transfer, or "model"."""
        self._specs = [TensorSpec(meta.name, meta.dtype if dtype == "model" else dtype, meta.shape) for meta in metas]

    def take(self, version: int, weights: Iterable[tuple[str, torch.Tensor]]) -> Packer:
        """The filled packer of `version`; `weights` yields every announced tensor. Raises `WeightsError`."""
        packer = Packer(version, uuid.uuid4().hex, self._specs)
        dtypes = {spec.name: spec.dtype for spec in self._specs}
        for name, value in weights:
            room = packer.room(name)
            if value.numel():
                target = torch.frombuffer(room, dtype=getattr(torch, dtypes[name]))
                target.copy_(value.detach().reshape(-1))
        return packer


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
        self._turn = asyncio.Lock()

    async def publish(self, packer: Packer) -> None:
        """Serve what was packed and announce it; digests are computed off the loop. Raises `GenerationError`.

        Calls take turns: an older version that took long must not replace a newer one.
        """
        async with self._turn:
            taken_at = time.time()
            manifest = replace(await asyncio.to_thread(packer.finish), sources=(self._source,))
            self._server.put(manifest, packer.body)
            self._manifest = manifest
            if self._following is not None:
                self._following.cancel()
            await self._announce_until_heard()
            self._following = asyncio.create_task(self._follow(manifest.version, taken_at))
            self._following.add_done_callback(_log_failure)

    async def close(self) -> None:
        """Stop following the newest version."""
        if self._following is not None:
            self._following.cancel()
            await asyncio.gather(self._following, return_exceptions=True)

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

    async def _follow(self, version: int, taken_at: float) -> None:
        """Report each unit that committed or failed `version`, also one that comes later, until a newer one is out.

        A head that was replaced and does not know the version is told: no stream of this rank may be open then.
        """
        reported: set[str] = set()
        staged_at: float | None = taken_at
        while True:
            request = pb.WeightStatusRequest(version=version, wait_s=_POLL_S, until=pb.UnitWeights.COMMITTED)
            try:
                status = await self._stub.WeightStatus(request, timeout=_POLL_S + 10.0)
                if status.version < version:
                    await self.announce()
            except grpc.aio.AioRpcError as error:
                logger.debug("weights v%d: status: %s", version, error.code())
                await asyncio.sleep(_WATCH_S)
                continue
            if status.version > version:
                return
            units = {unit.unit_id: unit for unit in status.units if unit.version == version}
            settled = {name for name, unit in units.items() if unit.state in _SETTLED}
            for name in sorted(settled - reported):
                self._on_unit(version, units[name])
            reported |= settled
            if staged_at is not None and settled and settled == {unit.unit_id for unit in status.units}:
                staged_at = max([staged_at, *(unit.staged_at for unit in units.values())])
                metrics.TRAINER_PUBLISH_SECONDS.observe(staged_at - taken_at)
                staged_at = None
            await asyncio.sleep(_WATCH_S)


def _log_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and task.exception() is not None:
        logger.error("weights are not followed any more", exc_info=task.exception())
