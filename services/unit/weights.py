"""How one unit follows the published versions: fetch and stage beside generation, commit when told."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

from services import metrics, wire
from services.errors import StreamRLError, WeightsError
from services.pb import streamrl_pb2 as pb
from services.transport.base import Receiver, fetch
from services.transport.manifest import Manifest
from services.transport.packing import check
from services.unit.engines.base import Engine

log = logging.getLogger(__name__)


class Version(NamedTuple):
    """A number, and the transfer that brought it: another trainer may publish the number again with other bytes."""

    version: int
    transfer_id: str


_NONE = Version(-1, "")


class WeightFollower:
    """Reports every step as a `UnitWeights` message. A version that fails leaves the unit on the one it has."""

    def __init__(
        self,
        engine: Engine,
        receivers: Mapping[str, Receiver],
        report: Callable[[pb.UnitWeights], None],
        deadline_s: float,
        max_bytes: int,
    ) -> None:
        """`deadline_s` bounds a commit, and a fetch whose `Stage` names none; `max_bytes` bounds a body."""
        self._engine = engine
        self._receivers = receivers
        self._report = report
        self._deadline_s = deadline_s
        self._max_bytes = max_bytes
        self._newest = _NONE
        self._staged = _NONE
        self._fetching: asyncio.Task[memoryview] | None = None
        self._staging: set[asyncio.Task[None]] = set()
        self._engine_turn = asyncio.Lock()
        self.committed = _NONE
        self.state = pb.UnitWeights(version=-1, state=pb.UnitWeights.NONE)

    def stage(self, message: pb.Stage) -> None:
        """Begin to fetch a version in the background, instead of any other that is on its way.

        One that is here already is reported as staged, also when it is committed: a head that says it again, after a
        reconnect, goes on to the commit.
        """
        manifest = wire.manifest(message.manifest)
        if not self._superseded(manifest) and self.state.state == pb.UnitWeights.STAGING:
            return
        if not self._superseded(manifest) and self.state.state in (pb.UnitWeights.STAGED, pb.UnitWeights.COMMITTED):
            self._report(_with(self.state, state=pb.UnitWeights.STAGED))
            return
        if self._fetching is not None:
            self._fetching.cancel()
        self._newest = _key(manifest)
        self._set(_about(self._newest, state=pb.UnitWeights.STAGING, stage_started_at=time.time()))
        task = asyncio.create_task(self._stage(manifest, message))
        self._staging.add(task)
        task.add_done_callback(self._staging.discard)

    async def commit(self, message: pb.Commit) -> None:
        """Swap a staged version in. Ends when the engine did, so that what is submitted next starts with it."""
        wanted = Version(message.version, message.transfer_id)
        if wanted == self.committed == self._newest and self.state.state == pb.UnitWeights.COMMITTED:
            self._report(self.state)
            return
        what = f"weights v{wanted.version}"
        try:
            pause_s = await asyncio.wait_for(self._commit(wanted), self._deadline_s)
        except asyncio.TimeoutError:
            self._fail(wanted, f"{what}: the engine did not commit within {self._deadline_s:g} s")
        except StreamRLError as error:
            self._fail(wanted, str(error))
        else:
            self.committed = wanted
            metrics.UNIT_VERSION.set(wanted.version)
            metrics.UNIT_COMMIT_SECONDS.observe(pause_s)
            about = self.state if wanted == self._newest else _about(wanted)
            self._set(_with(about, state=pb.UnitWeights.COMMITTED, committed_at=time.time(), commit_pause_s=pause_s))

    async def _commit(self, wanted: Version) -> float:
        async with self._engine_turn:  # the engine knows versions by number only: no other may be staged meanwhile
            if wanted != self._staged:
                raise WeightsError(f"weights v{wanted.version} cannot be committed: not what is staged")
            pause_s = await self._engine.commit(wanted.version)
            self._staged = _NONE
            return pause_s

    async def close(self) -> None:
        if self._fetching is not None:
            self._fetching.cancel()
        for task in list(self._staging):
            task.cancel()
        await asyncio.gather(*self._staging, return_exceptions=True)

    async def _stage(self, manifest: Manifest, message: pb.Stage) -> None:
        began = time.monotonic()
        try:
            await self._fetch_and_stage(manifest, message)
        except asyncio.CancelledError:
            if not self._superseded(manifest):
                raise
        except StreamRLError as error:
            if not self._superseded(manifest):
                self._fail(_key(manifest), str(error))
            return
        except Exception as error:
            log.exception("weights v%d: staging failed", manifest.version)
            if not self._superseded(manifest):
                self._fail(_key(manifest), f"weights v{manifest.version}: {type(error).__name__}: {error}")
            return
        if self._superseded(manifest):
            log.info("weights v%d: dropped, v%d came instead", manifest.version, self._newest.version)
            return
        metrics.UNIT_STAGE_SECONDS.observe(time.monotonic() - began)
        self._set(_with(self.state, state=pb.UnitWeights.STAGED, staged_at=time.time()))

    async def _fetch_and_stage(self, manifest: Manifest, message: pb.Stage) -> None:
        if self._superseded(manifest):
            return
        check(manifest, message.manifest.total_bytes, message.manifest.digest, self._max_bytes)
        deadline_s = message.deadline_s or self._deadline_s
        self._fetching = asyncio.create_task(fetch(manifest, self._receivers, deadline_s))
        body = await self._fetching
        async with self._engine_turn:  # an engine stages one version at a time, the newest last
            if not self._superseded(manifest):
                self._staged = _NONE
                await self._engine.stage(manifest, body)
                self._staged = _key(manifest)

    def _superseded(self, manifest: Manifest) -> bool:
        return self._newest != _key(manifest)

    def _fail(self, version: Version, error: str) -> None:
        log.error("%s", error)
        metrics.UNIT_WEIGHTS_FAILED.inc()
        self._set(_about(version, state=pb.UnitWeights.FAILED, error=error))

    def _set(self, state: pb.UnitWeights) -> None:
        """Report, and remember what is about the newest version that was asked for."""
        if (state.version, state.transfer_id) == self._newest:
            self.state = state
        self._report(state)


def _key(manifest: Manifest) -> Version:
    return Version(manifest.version, manifest.transfer_id)


def _about(version: Version, **fields: object) -> pb.UnitWeights:
    return _with(pb.UnitWeights(version=version.version, transfer_id=version.transfer_id), **fields)


def _with(base: pb.UnitWeights, **fields: object) -> pb.UnitWeights:
    changed = pb.UnitWeights()
    changed.CopyFrom(base)
    for name, value in fields.items():
        setattr(changed, name, value)
    return changed
