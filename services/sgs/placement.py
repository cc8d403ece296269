"""What each unit was handed and has not finished, and when that is overdue."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic

from services.samples import SampleId
from services.sgs.records import Entry, Payload, State

_SLACK = 1024


@dataclass(slots=True)
class Load:
    """Samples, their estimated tokens, and their tokens at full length."""

    samples: int = 0
    work: float = 0.0
    tokens: int = 0


class Placement(Generic[Payload]):
    """Running entries by unit. Times are seconds on the caller's clock."""

    def __init__(self) -> None:
        self.running = 0
        self._units: dict[str, dict[SampleId, Entry[Payload]]] = {}
        self._loads: dict[str, Load] = {}
        self._deadlines: list[tuple[float, SampleId, int, Entry[Payload]]] = []

    def add(self, entry: Entry[Payload], unit_id: str, now: float) -> None:
        """One attempt at `entry` starts on `unit_id`."""
        entry.state, entry.unit_id, entry.started_at = State.RUNNING, unit_id, now
        entry.attempt += 1
        if unit_id not in entry.tried:
            entry.tried = (*entry.tried, unit_id)
        self._units.setdefault(unit_id, {})[entry.id] = entry
        load = self._loads.setdefault(unit_id, Load())
        load.samples += 1
        load.work += entry.group.work
        load.tokens += entry.group.tokens
        self.running += 1
        heapq.heappush(self._deadlines, (now + entry.owner.request.deadline_s, entry.id, entry.attempt, entry))

    def remove(self, entry: Entry[Payload]) -> None:
        """The attempt is over; the caller sets the new state."""
        del self._units[entry.unit_id][entry.id]
        load = self._loads[entry.unit_id]
        load.samples -= 1
        load.work -= entry.group.work
        load.tokens -= entry.group.tokens
        self.running -= 1

    def load(self, unit_id: str) -> Load:
        return self._loads.get(unit_id, Load())

    def on(self, unit_id: str) -> list[Entry[Payload]]:
        return list(self._units.get(unit_id, {}).values())

    def drop_unit(self, unit_id: str) -> None:
        """Forget an empty unit."""
        self._units.pop(unit_id, None)
        self._loads.pop(unit_id, None)

    def overdue(self, now: float) -> Iterator[Entry[Payload]]:
        """Entries whose present attempt is past its deadline, each once; the caller removes them."""
        while self._deadlines and self._deadlines[0][0] <= now:
            _at, _id, attempt, entry = heapq.heappop(self._deadlines)
            if _current(entry, attempt):
                yield entry
        if len(self._deadlines) > 2 * self.running + _SLACK:
            self._deadlines = [item for item in self._deadlines if _current(item[3], item[2])]
            heapq.heapify(self._deadlines)


def _current(entry: Entry[Payload], attempt: int) -> bool:
    return entry.state is State.RUNNING and entry.attempt == attempt
