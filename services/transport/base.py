"""How weight bodies move, whatever carries them: who holds a body, and how a receiver puts one together.

A backend is a server that offers what a `WeightStore` holds, and a `Receiver` that fills an `Incoming` body.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import NamedTuple, Protocol

from services.errors import WeightsError
from services.transport.manifest import Manifest, Source, verify
from services.transport.packing import allocate

log = logging.getLogger(__name__)

_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 2.0


class SourceBrokenError(WeightsError):
    """A source stopped in between; it may be asked again, from where it stopped."""


class Held(NamedTuple):
    """One version and its bytes."""

    manifest: Manifest
    body: memoryview


class WeightStore:
    """Holds the newest version for fetching. A fetch that began earlier keeps its own reference to the older body,
    so that is freed when the last such fetch ends."""

    def __init__(self) -> None:
        self._held: Held | None = None

    def put(self, manifest: Manifest, body: memoryview) -> None:
        """Offer `body` (`manifest.total_bytes` bytes, not changed from now on) instead of what was held."""
        if body.nbytes != manifest.total_bytes:
            raise WeightsError(
                f"weights v{manifest.version}: body has {body.nbytes} bytes, manifest says {manifest.total_bytes}"
            )
        self._held = Held(manifest, body.cast("B").toreadonly())

    def get(self, transfer_id: str, version: int) -> Held:
        """Raises `WeightsError` when that is not what is held."""
        held = self._held
        if held is None:
            raise WeightsError(f"weights v{version} (transfer {transfer_id}): nothing is held here yet")
        if (held.manifest.transfer_id, held.manifest.version) != (transfer_id, version):
            raise WeightsError(
                f"weights v{version} (transfer {transfer_id}) are not held here; "
                f"v{held.manifest.version} (transfer {held.manifest.transfer_id}) is"
            )
        return held


class Incoming:
    """A body being put together in order: refuses what does not follow on the byte before."""

    def __init__(self, manifest: Manifest) -> None:
        self.manifest = manifest
        self.body = allocate(manifest.total_bytes)
        self.received = 0

    @property
    def complete(self) -> bool:
        return self.received == len(self.body)

    def write(self, offset: int, data: memoryview, peer: str) -> None:
        """Copy one chunk in. Raises `WeightsError` naming the tensor at which the stream of `peer` went wrong."""
        if offset < self.received:
            raise WeightsError(f"{self._where(peer)}: a chunk for byte {offset} came again (duplicated or reordered)")
        if offset > self.received:
            raise WeightsError(f"{self._where(peer)}: a chunk for byte {offset} came too early (missing or reordered)")
        if offset + len(data) > len(self.body):
            raise WeightsError(
                f"{self._where(peer)}: {offset + len(data)} bytes came, the manifest says {len(self.body)} (oversize)"
            )
        self.body[offset : offset + len(data)] = data
        self.received += len(data)

    def require_complete(self, peer: str) -> None:
        """Raise `SourceBrokenError` when the stream of `peer` ended early."""
        if not self.complete:
            raise SourceBrokenError(f"{self._where(peer)}: the stream ended early (truncated)")

    def restart(self) -> None:
        self.received = 0

    def _where(self, peer: str) -> str:
        inside = next(
            (t.name for t in self.manifest.tensors if t.offset <= self.received < t.offset + t.nbytes), "the end"
        )
        return f"weights v{self.manifest.version} from {peer}: at byte {self.received} of {len(self.body)} (`{inside}`)"


class Receiver(Protocol):
    """The receiving half of a backend."""

    async def receive(self, source: Source, incoming: Incoming) -> None:
        """Fill `incoming` from `incoming.received` on until it is complete.

        Raises `SourceBrokenError` when the source may be asked again, another `WeightsError` when it should not be.
        """
        ...


async def fetch(manifest: Manifest, receivers: Mapping[str, Receiver], deadline_s: float) -> memoryview:
    """The verified body of `manifest`: writable, 64-byte aligned, `manifest.total_bytes` bytes.

    Sources are tried in order and in rounds, each going on where the one before broke; one that answers wrongly is not
    asked again. Digests are checked in a thread. Raises `WeightsError` saying what each source did, at the latest after
    `deadline_s` seconds.
    """
    attempt = _Fetch(manifest, receivers)
    try:
        return await asyncio.wait_for(attempt.run(), deadline_s)
    except asyncio.TimeoutError:
        raise WeightsError(
            f"weights v{manifest.version}: not here after {deadline_s:g} s "
            f"({attempt.incoming.received} of {manifest.total_bytes} bytes){attempt.history()}"
        ) from None


class _Fetch:
    def __init__(self, manifest: Manifest, receivers: Mapping[str, Receiver]) -> None:
        self._manifest = manifest
        self._receivers = receivers
        self._problems: dict[Source, str] = {}
        self.incoming = Incoming(manifest)

    async def run(self) -> memoryview:
        usable = list(self._manifest.sources)
        pause_s = _FIRST_PAUSE_S
        while usable:
            before = self.incoming.received
            for source in list(usable):
                try:
                    await self._from(source)
                    return self.incoming.body
                except SourceBrokenError as error:
                    self._note(source, error)
                except WeightsError as error:
                    self._note(source, error)
                    usable.remove(source)
            pause_s = _FIRST_PAUSE_S if self.incoming.received > before else min(2 * pause_s, _LONGEST_PAUSE_S)
            if usable:
                await asyncio.sleep(pause_s)
        raise WeightsError(f"weights v{self._manifest.version}: no source could give them{self.history()}")

    def history(self) -> str:
        return "".join(f"; {problem}" for problem in self._problems.values())

    async def _from(self, source: Source) -> None:
        receiver = self._receivers.get(source.transport)
        if receiver is None:
            raise WeightsError(f"{source.address}: transport `{source.transport}` is not supported here")
        began_at = self.incoming.received
        await receiver.receive(source, self.incoming)
        try:
            await asyncio.to_thread(verify, self._manifest, self.incoming.body)
        except WeightsError as error:
            self.incoming.restart()
            kind = SourceBrokenError if began_at else WeightsError  # only a source that gave all bytes is to blame
            raise kind(f"{error} (received from {source.address})") from None

    def _note(self, source: Source, error: WeightsError) -> None:
        if self._problems.get(source) != str(error):
            log.warning("%s", error)
        self._problems[source] = str(error)
