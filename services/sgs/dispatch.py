"""Which queued samples go to which unit now: pure functions by policy name.

Work stays in the head until a unit has room, and a unit holds at most its slots plus a small lookahead. What has not
started can therefore still go to whichever unit frees first.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol


@dataclass(slots=True)
class QueuedGroup:
    """The samples `ks` of one prompt that wait for a unit. Lengths and `work` (of one sample) are in tokens.

    `arrival` orders prompts of equal work. `avoid` is a unit on which these samples got stuck; `home` is the unit
    that took siblings of them and holds the prompt's KV cache. Both are empty when there is none.
    """

    prompt_id: str
    ks: list[int]
    prompt_tokens: int
    max_tokens: int
    work: float
    arrival: int
    avoid: str = ""
    home: str = ""

    @property
    def tokens(self) -> int:
        """Of one whole sample, at most."""
        return self.prompt_tokens + self.max_tokens


@dataclass(slots=True)
class UnitView:
    """One attached unit: `room` is slots + lookahead minus what it holds, `load` outstanding tokens per slot.

    `version` is what it has committed (-1: nothing usable); `kv_free` counts every sample it holds at full length.
    """

    unit_id: str
    room: int
    load: float
    slots: int
    version: int
    max_sequence: int
    kv_tokens: int
    kv_free: int

    @property
    def limit(self) -> int:
        """Tokens of the longest sample it can hold."""
        return min(self.max_sequence, self.kv_tokens)


class QueuedStream(Protocol):
    """One stream's queue, in the policy's order."""

    @property
    def name(self) -> str: ...

    @property
    def min_version(self) -> int: ...

    def groups(self) -> Iterator[QueuedGroup]: ...


class Assignment(NamedTuple):
    """Hand samples `ks` of `group` (of `stream`) to `unit_id`."""

    stream: str
    group: QueuedGroup
    unit_id: str
    ks: tuple[int, ...]


class Policy(NamedTuple):
    """`order` sorts a stream's queue, smallest first; `plan` reads the streams, oldest first, and assigns."""

    order: Callable[[QueuedGroup], tuple[float, int, str]]
    plan: Callable[[Iterable[QueuedStream], Sequence[UnitView]], list[Assignment]]


def longest_first(group: QueuedGroup) -> tuple[float, int, str]:
    """Longest processing time first; ties by arrival."""
    return (-group.work, group.arrival, group.avoid)


def least_loaded(streams: Iterable[QueuedStream], units: Sequence[UnitView]) -> list[Assignment]:
    """Oldest stream first, longest group first, each to the least loaded unit that may start it.

    - A group goes whole to the least loaded unit that has slots and KV cache for all of it.
    - Where no unit has, the least loaded one with any room takes a part, and the rest waits for that unit as its home.
    - The rest of a group goes elsewhere only when a unit would otherwise stay idle, as the stream has nothing else.
    - A unit is avoided by a sample that got stuck on it, as long as another unit could take that sample at all.

    Inputs are not changed. Reads no more of a queue than it takes for the units' room to be filled.
    """
    room = {unit.unit_id: unit.room for unit in units if unit.room > 0}
    load = {unit.unit_id: unit.load for unit in units}
    kv_free = {unit.unit_id: unit.kv_free for unit in units}
    plan: list[Assignment] = []
    for stream in streams:
        if not room:
            break
        able = {unit.unit_id: unit for unit in units if unit.version >= stream.min_version}
        if any(unit_id in room for unit_id in able):
            _Filling(stream.name, able, room, load, kv_free, plan).fill(stream.groups())
    return plan


POLICIES: dict[str, Policy] = {"least_loaded": Policy(longest_first, least_loaded)}


@dataclass
class _Filling:
    """One stream being assigned; `room`, `load` and `kv_free` go on to the next stream."""

    stream: str
    able: dict[str, UnitView]
    room: dict[str, int]
    load: dict[str, float]
    kv_free: dict[str, int]
    plan: list[Assignment]
    heap: list[tuple[float, str]] = field(default_factory=list)

    def fill(self, groups: Iterable[QueuedGroup]) -> None:
        self.heap = [(self.load[unit_id], unit_id) for unit_id in self.able if unit_id in self.room]
        heapq.heapify(self.heap)
        longest = max(unit.limit for unit_id, unit in self.able.items() if unit_id in self.room)
        rests: list[tuple[QueuedGroup, list[int]]] = []
        for group in groups:
            if not self.heap:
                return
            if group.tokens > longest:
                continue
            rest = self._place(group)
            if rest:
                rests.append((group, rest))
        for group, rest in rests:
            while rest and (unit_id := self._pick(group, len(rest))):
                rest = self._give(group, rest, unit_id)

    def _place(self, group: QueuedGroup) -> list[int]:
        """Assign to the home unit, or choose one; what is left over is returned."""
        home = group.home if group.home in self.able and group.home != group.avoid else ""
        unit_id = home if home in self.room else self._pick(group, len(group.ks)) if not home else ""
        return self._give(group, group.ks, unit_id) if unit_id else group.ks

    def _pick(self, group: QueuedGroup, count: int) -> str:
        """The least loaded unit with room for `count` samples, else with any room, else ''."""
        aside: list[tuple[float, str]] = []
        chosen = ""
        while self.heap:
            load, unit_id = heapq.heappop(self.heap)
            if unit_id not in self.room or load != self.load[unit_id]:
                continue  # an entry from before this unit was given something
            aside.append((load, unit_id))
            if not self._may_take(group, unit_id):
                continue
            whole = group.prompt_tokens + count * group.max_tokens
            if self.room[unit_id] >= count and self.kv_free[unit_id] >= whole:
                chosen = unit_id
                break
            chosen = chosen or unit_id
        for entry in aside:
            heapq.heappush(self.heap, entry)
        return chosen

    def _may_take(self, group: QueuedGroup, unit_id: str) -> bool:
        if self.able[unit_id].limit < group.tokens:
            return False
        return group.avoid != unit_id or not any(
            other.limit >= group.tokens for other in self.able.values() if other.unit_id != unit_id
        )

    def _give(self, group: QueuedGroup, ks: list[int], unit_id: str) -> list[int]:
        count = min(self.room[unit_id], len(ks))
        self.plan.append(Assignment(self.stream, group, unit_id, tuple(ks[:count])))
        self.load[unit_id] += count * group.work / self.able[unit_id].slots
        self.kv_free[unit_id] -= group.prompt_tokens + count * group.max_tokens
        self.room[unit_id] -= count
        if self.room[unit_id] == 0:
            del self.room[unit_id]
        else:
            heapq.heappush(self.heap, (self.load[unit_id], unit_id))
        return ks[count:]
