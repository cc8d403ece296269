"""What the ledger keeps: requests of ranks, one entry per sample, and what it wants said to units."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import Generic, NamedTuple, TypeVar

from services.errors import GenerationError
from services.samples import SampleFailure, SampleId
from services.sgs.dispatch import QueuedGroup

Payload = TypeVar("Payload")


class SessionKey(NamedTuple):
    """One life of one run's trainer."""

    run_id: str
    session: str

    def __str__(self) -> str:
        return f"{self.run_id}/{self.session}"


class RequestRefusedError(GenerationError):
    """A request that the present state does not allow (a replaced session, another run)."""


class InvalidRequestError(GenerationError):
    """A request that can never be right; the message names the field or the prompt."""


class State(Enum):
    QUEUED = "queued"
    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"
    ACKNOWLEDGED = "acknowledged"


@dataclass(frozen=True)
class PromptInfo:
    """`tokens` is the prompt's length, `work` the estimated tokens of one sample, `body` what units are sent."""

    prompt_id: str
    tokens: int
    work: float
    body: object = None


@dataclass(frozen=True)
class Request:
    """One rank's share of a stream.

    `deadline_s` is for one attempt; `have` lists what the rank already holds; `body` is what units are sent.
    """

    session: SessionKey
    stream: str
    rank: int
    total_prompts: int
    prompts: tuple[PromptInfo, ...]
    n: int
    max_tokens: int
    min_version: int
    deadline_s: float
    have: tuple[SampleId, ...] = ()
    body: object = None


@dataclass(eq=False, slots=True)
class Entry(Generic[Payload]):
    """One sample that is not acknowledged yet. Times are seconds on the caller's clock."""

    id: SampleId
    owner: RankRecord[Payload]
    group: QueuedGroup
    queued_at: float
    state: State = State.QUEUED
    unit_id: str = ""
    attempt: int = 0
    started_at: float = 0.0
    avoid: str = ""
    tried: tuple[str, ...] = ()
    result: Payload | None = None
    failure: SampleFailure | None = None
    sent: bool = False
    delivered: bool = False


class OverdueNotice(NamedTuple):
    id: SampleId
    unit_id: str
    attempt: int


class Delivery(NamedTuple, Generic[Payload]):
    """What one event of a rank's stream carries; `first` counts samples that were never sent before."""

    results: list[Payload]
    failures: list[SampleFailure]
    overdue: list[OverdueNotice]
    first: int

    def __bool__(self) -> bool:
        return bool(self.results or self.failures or self.overdue)


@dataclass(eq=False)
class RankRecord(Generic[Payload]):
    """One rank's part of one stream: alive from its request until everything is acknowledged."""

    stream: str
    rank: int
    request: Request
    connection: int = 0
    connected: bool = False
    lost_at: float = 0.0  # when `connected` last became false
    ended: bool = False
    dropped: str = ""
    unsent: int = 0
    failed: int = 0
    prompts: dict[str, PromptInfo] = field(default_factory=dict)
    entries: dict[SampleId, Entry[Payload]] = field(default_factory=dict)
    acknowledged: set[SampleId] = field(default_factory=set)
    ready: deque[Entry[Payload]] = field(default_factory=deque)
    overdue: list[OverdueNotice] = field(default_factory=list)

    @property
    def all_sent(self) -> bool:
        return self.unsent == 0

    @property
    def settled(self) -> bool:
        """Nothing is left that the rank could still ask for."""
        if self.connected:
            return False
        return not self.entries or (self.ended and all(e.state is State.FAILED for e in self.entries.values()))

    def deliver(self, size: Callable[[Payload], int], limit: int) -> Delivery[Payload]:
        """What the rank's stream sends next: at least one ready sample, and no more than `limit` by `size`."""
        delivery: Delivery[Payload] = Delivery([], [], self.overdue, 0)
        self.overdue = []
        total = first = 0
        while self.ready:
            entry = self.ready[0]
            if entry.state is State.FINISHED and entry.result is not None:
                total += size(entry.result)
                if total > limit and delivery.results:
                    break
                delivery.results.append(entry.result)
            elif entry.state is State.FAILED and entry.failure is not None:
                delivery.failures.append(entry.failure)
            self.ready.popleft()
            if entry.state is not State.ACKNOWLEDGED:
                entry.sent = True
                self.unsent -= 1
                first += entry.state is State.FINISHED and not entry.delivered
                entry.delivered = True
        return delivery._replace(first=first)


@dataclass
class StreamRecord(Generic[Payload]):
    """One stream over all its ranks."""

    name: str
    min_version: int
    total_prompts: int
    first_at: float
    ranks: dict[int, RankRecord[Payload]] = field(default_factory=dict)
    unserved_since: float | None = None

    @property
    def arrived(self) -> int:
        return sum(len(rank.prompts) for rank in self.ranks.values())


@dataclass
class Orders(Generic[Payload]):
    """What the ledger wants done: ids per unit to cancel or forget, ranks that have something to read.

    `failures` are the samples that were given up meanwhile.
    """

    cancel: dict[str, list[SampleId]] = field(default_factory=dict)
    forget: dict[str, list[SampleId]] = field(default_factory=dict)
    wake: dict[int, RankRecord[Payload]] = field(default_factory=dict)
    failures: list[SampleFailure] = field(default_factory=list)

    def add_cancel(self, unit_id: str, ids: Iterable[SampleId]) -> None:
        self.cancel.setdefault(unit_id, []).extend(ids)

    def add_forget(self, unit_id: str, ids: Iterable[SampleId]) -> None:
        self.forget.setdefault(unit_id, []).extend(ids)

    def add_wake(self, rank: RankRecord[Payload]) -> None:
        self.wake[id(rank)] = rank


class Held(Generic[Payload]):
    """What units bring of one session before any request names it: running ids, and finished samples."""

    def __init__(self) -> None:
        self._claims: dict[SampleId, tuple[str, float]] = {}
        self._results: dict[SampleId, tuple[str, Payload, float]] = {}
        self.claims: Counter[str] = Counter()

    def claim(self, unit_id: str, sample_id: SampleId, now: float) -> None:
        self.take_claim(sample_id)
        self._claims[sample_id] = (unit_id, now)
        self.claims[unit_id] += 1

    def keep(self, unit_id: str, sample_id: SampleId, payload: Payload, now: float) -> bool:
        """False for a second copy."""
        self.take_claim(sample_id)
        if sample_id in self._results:
            return False
        self._results[sample_id] = (unit_id, payload, now)
        return True

    def take_result(self, sample_id: SampleId) -> tuple[str, Payload] | None:
        found = self._results.pop(sample_id, None)
        return None if found is None else (found[0], found[1])

    def take_claim(self, sample_id: SampleId) -> str | None:
        found = self._claims.pop(sample_id, None)
        if found is None:
            return None
        self.claims[found[0]] -= 1
        return found[0]

    def lose(self, unit_id: str) -> None:
        self._claims = {key: claim for key, claim in self._claims.items() if claim[0] != unit_id}
        del self.claims[unit_id]

    def drop(self, before: float, orders: Orders[Payload]) -> None:
        """Cancel and forget what has waited since `before` or longer."""
        for sample_id, (unit_id, since) in list(self._claims.items()):
            if since <= before:
                self.take_claim(sample_id)
                orders.add_cancel(unit_id, [sample_id])
        for sample_id, (unit_id, _payload, since) in list(self._results.items()):
            if since <= before:
                del self._results[sample_id]
                orders.add_forget(unit_id, [sample_id])

    def __len__(self) -> int:
        return len(self._claims) + len(self._results)
