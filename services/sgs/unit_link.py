"""One attached unit as the head sees it: what it said of itself, and the commands that wait to be sent to it."""

from __future__ import annotations

import asyncio
from collections import deque

from services.pb import streamrl_pb2 as pb

_DETAILS_BYTES = 64  # of one group beside its prompt


class UnitLink:
    """Times are seconds on the head's clock. `lost` says why the unit counts as gone, empty while it does not."""

    def __init__(self, register: pb.Register, now: float) -> None:
        self.unit_id: str = register.unit_id
        self.register = register
        self.last_seen = now
        self.heartbeat: pb.Heartbeat | None = None
        self.heartbeat_at = now
        self.finished = 0
        self.lost = ""
        self.commands: deque[pb.HeadCommand] = deque()
        self.wake = asyncio.Event()

    @property
    def limit(self) -> int:
        """Tokens of the longest sample it can hold."""
        return min(self.register.max_sequence, self.register.kv_tokens)

    def send(self, command: pb.HeadCommand) -> None:
        self.commands.append(command)
        self.wake.set()

    def lose(self, reason: str) -> None:
        self.lost = reason
        self.wake.set()


class AssignBatch:
    """Groups for one unit that share a request's sampling, cut into commands of bounded size."""

    def __init__(self, link: UnitLink, head: pb.Assign, max_bytes: int) -> None:
        self._link = link
        self._head = head
        self._max_bytes = max_bytes
        self._groups: list[pb.AssignedGroup] = []
        self._bytes = 0

    def add(self, prompt: pb.Prompt, ks: list[int], queued_at: float) -> None:
        size = prompt.ByteSize() + _DETAILS_BYTES + 5 * len(ks)
        if self._groups and self._bytes + size > self._max_bytes:
            self.flush()
        self._groups.append(pb.AssignedGroup(prompt=prompt, ks=ks, queued_at=queued_at))
        self._bytes += size

    def flush(self) -> None:
        assign = pb.Assign(
            run_id=self._head.run_id,
            session=self._head.session,
            seed=self._head.seed,
            sampling=self._head.sampling,
            groups=self._groups,
        )
        self._link.send(pb.HeadCommand(assign=assign))
        self._groups, self._bytes = [], 0
