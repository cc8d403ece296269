"""Where every sample is: queued, running on a unit, finished until acknowledged, or failed. A pure state machine.

A sample is delivered once: its first finished copy wins, and it is kept until the rank acknowledges it. Times are
seconds on the caller's clock; nothing here waits, sends or reads a clock.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Generic

from services.samples import FailureCode, SampleFailure, SampleId
from services.sgs.backlog import Key, StreamBacklog
from services.sgs.dispatch import Assignment, QueuedGroup
from services.sgs.placement import Load, Placement
from services.sgs.records import (
    Entry,
    Held,
    InvalidRequestError,
    Orders,
    OverdueNotice,
    Payload,
    RankRecord,
    Request,
    RequestRefusedError,
    SessionKey,
    State,
    StreamRecord,
)

_REMEMBERED_SESSIONS = 64


class Ledger(Generic[Payload]):
    """All samples of the one session that the head serves.

    Args:
        order: the dispatch policy's order inside a stream.
        max_attempts: handed to units so often before a sample fails.
        window_s: planning waits this long for a stream's announced prompts.
        reconnect_s: how long lost ranks, and what units bring unasked, are kept.
    """

    def __init__(
        self, order: Callable[[QueuedGroup], Key], *, max_attempts: int, window_s: float, reconnect_s: float
    ) -> None:
        self._order = order
        self._max_attempts = max_attempts
        self._window_s = window_s
        self._reconnect_s = reconnect_s
        self.session: SessionKey | None = None
        self.streams: dict[str, StreamRecord[Payload]] = {}
        self.duplicates = 0
        self._replaced: deque[SessionKey] = deque(maxlen=_REMEMBERED_SESSIONS)
        self._backlogs: dict[str, StreamBacklog] = {}
        self._entries: dict[SampleId, Entry[Payload]] = {}
        self._acknowledged: dict[SampleId, RankRecord[Payload]] = {}
        self._placed: Placement[Payload] = Placement()
        self._held: dict[SessionKey, Held[Payload]] = {}
        self._orders: Orders[Payload] = Orders()
        self._arrivals = 0

    # ------------------------------------------------------------------ sessions and requests

    def enter(self, session: SessionKey) -> bool:
        """Make `session` the one that is served; True when it is new, and then everything older is dropped.

        Raises `RequestRefusedError` for a session that was replaced, or for another run while one is being served.
        """
        if session == self.session:
            return False
        if session in self._replaced:
            raise RequestRefusedError(
                f"session {session} was replaced by {self.session}: this trainer is not the newest"
            )
        if self.session is not None and session.run_id != self.session.run_id and self.streams:
            raise RequestRefusedError(
                f"this head is serving run {self.session.run_id}; start another for {session.run_id}"
            )
        if self.session is not None:
            self._replaced.append(self.session)
        for stream in list(self.streams.values()):
            for rank in list(stream.ranks.values()):
                self._drop(rank, f"session {self.session} was replaced by {session}")
        for key in [key for key in self._held if key != session]:
            self._held.pop(key).drop(math.inf, self._orders)
        self.session = session
        return True

    def open(self, request: Request, now: float) -> RankRecord[Payload]:
        """Take a rank's request, or take it up again; what units hold for it is adopted.

        The record's `connection` counts requests of the same rank: the newest owns the record.
        Raises `RequestRefusedError` or `InvalidRequestError`; nothing has changed then.
        """
        known = self.streams.get(request.stream)
        owner = known.ranks.get(request.rank) if known and request.session == self.session else None
        self._check(request, owner)
        self.enter(request.session)
        stream = self.streams.get(request.stream)
        if stream is None:
            stream = StreamRecord(request.stream, request.min_version, request.total_prompts, now)
            self.streams[request.stream] = stream
            self._backlogs[request.stream] = StreamBacklog(request.stream, self._order)
        stream.min_version = max(stream.min_version, request.min_version)
        stream.total_prompts = max(stream.total_prompts, request.total_prompts)
        self._backlogs[request.stream].min_version = stream.min_version
        rank = stream.ranks.get(request.rank)
        if rank is None:
            rank = stream.ranks[request.rank] = RankRecord(request.stream, request.rank, request)
        rank.connection += 1
        rank.connected, rank.ended = True, False
        self._orders.add_wake(rank)
        self._enqueue(rank, request, now)
        self._settle(rank, request.have)
        for entry in rank.entries.values():
            if entry.sent:
                entry.sent = False
                rank.unsent += 1
                rank.ready.append(entry)
        return rank

    def _check(self, request: Request, owner: RankRecord[Payload] | None) -> None:
        seen: set[str] = set()
        for prompt in request.prompts:
            if prompt.prompt_id in seen:
                raise InvalidRequestError(f"stream {request.stream}: prompt {prompt.prompt_id} is given twice")
            seen.add(prompt.prompt_id)
            if request.session != self.session or (owner and prompt.prompt_id in owner.prompts):
                continue
            first = SampleId(prompt.prompt_id, 0)
            entry = self._entries.get(first)
            holder = entry.owner if entry else self._acknowledged.get(first)
            if holder is not None:
                raise InvalidRequestError(
                    f"stream {request.stream} rank {request.rank}: prompt {prompt.prompt_id} was already requested "
                    f"by rank {holder.rank} in stream {holder.stream}"
                )

    def _enqueue(self, rank: RankRecord[Payload], request: Request, now: float) -> None:
        held = self._held.get(request.session)
        groups = []
        for prompt in request.prompts:
            if prompt.prompt_id in rank.prompts:
                continue
            rank.prompts[prompt.prompt_id] = prompt
            self._arrivals += 1
            group = QueuedGroup(prompt.prompt_id, [], prompt.tokens, request.max_tokens, prompt.work, self._arrivals)
            for k in range(request.n):
                entry = Entry(SampleId(prompt.prompt_id, k), rank, group, now)
                rank.entries[entry.id] = self._entries[entry.id] = entry
                rank.unsent += 1
                if not self._adopt(entry, held, now):
                    group.ks.append(k)
            if group.ks:
                groups.append(group)
        self._backlogs[rank.stream].extend(groups)

    def _adopt(self, entry: Entry[Payload], held: Held[Payload] | None, now: float) -> bool:
        """Use what a unit brought of this sample before it was asked for."""
        if not held:
            return False
        result = held.take_result(entry.id)
        claimed_by = held.take_claim(entry.id)
        if result is not None:
            entry.unit_id, entry.result, entry.state = result[0], result[1], State.FINISHED
            entry.owner.ready.append(entry)
            return True
        if claimed_by is not None:
            self._placed.add(entry, claimed_by, now)
            return True
        return False

    def disconnect(self, rank: RankRecord[Payload], connection: int, now: float) -> None:
        """The rank's stream broke. An older connection of a rank that is back changes nothing."""
        if rank.connection == connection and rank.connected:
            rank.connected, rank.lost_at = False, now
            self._forget_if_settled(rank)

    def end(self, rank: RankRecord[Payload]) -> None:
        """The rank's stream ended after its last sample; what is not acknowledged stays."""
        rank.connected, rank.ended = False, True
        self._forget_if_settled(rank)

    def acknowledge(self, session: SessionKey, ids: Iterable[SampleId]) -> None:
        """The rank holds these for good. Unknown ids and other sessions are ignored."""
        if session != self.session:
            return
        touched: dict[int, RankRecord[Payload]] = {}
        for sample_id in ids:
            entry = self._entries.get(sample_id)
            if entry is not None:
                touched[id(entry.owner)] = entry.owner
                self._settle(entry.owner, [sample_id])
            elif (held := self._held.get(session)) and (result := held.take_result(sample_id)):
                self._orders.add_forget(result[0], [sample_id])
        for rank in touched.values():
            self._forget_if_settled(rank)

    def _settle(self, rank: RankRecord[Payload], ids: Iterable[SampleId]) -> None:
        for sample_id in ids:
            entry = rank.entries.pop(sample_id, None)
            if entry is None:
                continue
            self._withdraw(entry)
            if not entry.sent:
                rank.unsent -= 1
                self._orders.add_wake(rank)
            entry.state = State.ACKNOWLEDGED
            rank.acknowledged.add(sample_id)
            self._acknowledged[sample_id] = rank

    def _withdraw(self, entry: Entry[Payload]) -> None:
        """Take an entry out of wherever it is; units stop or forget it."""
        if entry.state is State.QUEUED:
            self._backlogs[entry.owner.stream].discard(entry.id.prompt_id, entry.id.k, entry.avoid)
        elif entry.state is State.RUNNING:
            self._orders.add_cancel(entry.unit_id, [entry.id])
            self._placed.remove(entry)
        elif entry.state is State.FINISHED:
            self._orders.add_forget(entry.unit_id, [entry.id])
        entry.result = None
        del self._entries[entry.id]

    def give_up(self, stream: str, reason: str) -> None:
        """Drop a stream that cannot be served; its ranks are told `reason`."""
        for rank in list(self.streams[stream].ranks.values()):
            self._drop(rank, reason)

    def _forget_if_settled(self, rank: RankRecord[Payload]) -> None:
        if rank.settled:
            self._drop(rank, "")

    def _drop(self, rank: RankRecord[Payload], reason: str) -> None:
        for entry in rank.entries.values():
            self._withdraw(entry)
            entry.state = State.ACKNOWLEDGED
        rank.entries.clear()
        for sample_id in rank.acknowledged:
            del self._acknowledged[sample_id]
        rank.acknowledged.clear()
        rank.ready.clear()
        rank.connected, rank.dropped = False, reason
        self._orders.add_wake(rank)
        stream = self.streams[rank.stream]
        del stream.ranks[rank.rank]
        if not stream.ranks:
            del self.streams[rank.stream]
            del self._backlogs[rank.stream]

    # ------------------------------------------------------------------ units

    def start(self, plan: Sequence[Assignment], now: float) -> list[list[Entry[Payload]]]:
        """Carry out assignments; returns the started entries of each."""
        started = []
        for assignment in plan:
            self._backlogs[assignment.stream].take(assignment)
            entries = [self._entries[SampleId(assignment.group.prompt_id, k)] for k in assignment.ks]
            for entry in entries:
                self._placed.add(entry, assignment.unit_id, now)
            started.append(entries)
        return started

    def _queue_again(self, entry: Entry[Payload], avoid: str) -> None:
        self._placed.remove(entry)
        entry.state, entry.avoid = State.QUEUED, avoid
        self._backlogs[entry.owner.stream].put_back(entry.group, entry.id.k, avoid)

    def finish(
        self, unit_id: str, session: SessionKey, results: Iterable[tuple[SampleId, Payload]], now: float
    ) -> None:
        """Samples that a unit finished. The first copy wins; for others the unit is told to forget its copy."""
        if self.session is not None and session != self.session:
            self._orders.add_forget(unit_id, [sample_id for sample_id, _payload in results])
            return
        for sample_id, payload in results:
            entry = self._entries.get(sample_id)
            if entry is None and sample_id not in self._acknowledged:
                if not self._held.setdefault(session, Held()).keep(unit_id, sample_id, payload, now):
                    self.duplicates += 1
            elif entry is None or entry.state in (State.FINISHED, State.FAILED):
                self.duplicates += 1
                if entry is None or entry.state is State.FAILED or entry.unit_id != unit_id:
                    self._orders.add_forget(unit_id, [sample_id])
            else:
                self._accept(entry, unit_id, payload)

    def _accept(self, entry: Entry[Payload], unit_id: str, payload: Payload) -> None:
        if entry.state is State.QUEUED:
            self._backlogs[entry.owner.stream].discard(entry.id.prompt_id, entry.id.k, entry.avoid)
        else:
            if entry.unit_id != unit_id:
                self._orders.add_cancel(entry.unit_id, [entry.id])
            self._placed.remove(entry)
        entry.state, entry.unit_id, entry.result = State.FINISHED, unit_id, payload
        entry.owner.ready.append(entry)
        self._orders.add_wake(entry.owner)

    def unit_failed(self, unit_id: str, session: SessionKey, failures: Iterable[SampleFailure]) -> int:
        """A unit gave samples up: they are tried elsewhere, then fail. Returns how many were queued again."""
        again = 0
        for failure in failures:
            self._orders.add_forget(unit_id, [failure.id])
            entry = self._entries.get(failure.id) if session == self.session else None
            if entry is None or entry.state is not State.RUNNING or entry.unit_id != unit_id:
                continue
            if entry.attempt < self._max_attempts:
                self._queue_again(entry, unit_id)
                again += 1
            else:
                self._fail(entry, failure.code, f"{failure.message} ({_history(entry)})")
        return again

    def claim(self, unit_id: str, session: SessionKey, ids: Iterable[SampleId], now: float) -> int:
        """A registering unit names what it is still running. What is not wanted from it is cancelled there.

        Returns how many samples it goes on with.
        """
        kept = 0
        for sample_id in ids:
            entry = self._entries.get(sample_id)
            if self.session is not None and session != self.session:
                self._orders.add_cancel(unit_id, [sample_id])
            elif entry is not None and entry.state is State.QUEUED:
                self._backlogs[entry.owner.stream].discard(sample_id.prompt_id, sample_id.k, entry.avoid)
                self._placed.add(entry, unit_id, now)
                kept += 1
            elif entry is None and sample_id not in self._acknowledged:
                self._held.setdefault(session, Held()).claim(unit_id, sample_id, now)
                kept += 1
            else:
                self._orders.add_cancel(unit_id, [sample_id])
        return kept

    def unit_lost(self, unit_id: str) -> int:
        """A unit is gone: its unfinished samples are queued again. Returns how many."""
        entries = self._placed.on(unit_id)
        for entry in entries:
            self._queue_again(entry, "")
        self._placed.drop_unit(unit_id)
        for held in self._held.values():
            held.lose(unit_id)
        for backlog in self._backlogs.values():
            backlog.forget_home(unit_id)
        return len(entries)

    def load(self, unit_id: str) -> Load:
        """What the unit holds, unasked claims included."""
        load = self._placed.load(unit_id)
        claims = sum(held.claims[unit_id] for held in self._held.values())
        return Load(load.samples + claims, load.work, load.tokens) if claims else load

    # ------------------------------------------------------------------ time

    def expired(self, now: float) -> list[OverdueNotice]:
        """Samples past their deadline: cancelled where they are, and queued again or failed."""
        overdue = []
        for entry in self._placed.overdue(now):
            notice = OverdueNotice(entry.id, entry.unit_id, entry.attempt)
            overdue.append(notice)
            self._orders.add_cancel(entry.unit_id, [entry.id])
            if entry.attempt < self._max_attempts:
                self._queue_again(entry, entry.unit_id)
                entry.owner.overdue.append(notice)
                self._orders.add_wake(entry.owner)
            else:
                seconds = f"{entry.owner.request.deadline_s:g} s"
                message = f"sample {entry.id}: not finished within {seconds} ({_history(entry)})"
                self._fail(entry, FailureCode.DEADLINE, message)
        return overdue

    def reap(self, now: float) -> list[RankRecord[Payload]]:
        """Drop ranks that stayed away, and what units brought that nobody asked for. Returns the dropped ranks."""
        before = now - self._reconnect_s
        gone = [
            rank
            for stream in self.streams.values()
            for rank in stream.ranks.values()
            if not rank.connected and not rank.ended and rank.lost_at <= before
        ]
        for rank in gone:
            self._drop(rank, f"rank {rank.rank} did not come back within {self._reconnect_s:g} s")
        for key, held in list(self._held.items()):
            held.drop(before, self._orders)
            if not held:
                del self._held[key]
        return gone

    def fail_unfit(self, limit: int) -> None:
        """Fail queued samples longer than `limit`, the tokens of the longest sample that any unit can hold."""
        for backlog in self._backlogs.values():
            if backlog.longest <= limit:
                continue
            for group in [group for group in backlog.groups() if group.tokens > limit]:
                for k in list(group.ks):
                    entry = self._entries[SampleId(group.prompt_id, k)]
                    self._fail(
                        entry,
                        FailureCode.DOES_NOT_FIT,
                        f"sample {entry.id}: {group.prompt_tokens} prompt + {group.max_tokens} completion tokens do "
                        f"not fit: the largest unit holds {limit}",
                    )

    def _fail(self, entry: Entry[Payload], code: FailureCode, message: str) -> None:
        if entry.state is State.RUNNING:
            self._placed.remove(entry)
        else:
            self._backlogs[entry.owner.stream].discard(entry.id.prompt_id, entry.id.k, entry.avoid)
        entry.state = State.FAILED
        entry.failure = SampleFailure(entry.id, code, message, entry.unit_id)
        self._orders.failures.append(entry.failure)
        entry.owner.failed += 1
        entry.owner.ready.append(entry)
        self._orders.add_wake(entry.owner)

    # ------------------------------------------------------------------ what comes out

    def plannable(self, now: float) -> list[StreamBacklog]:
        """Queues whose stream is complete or has waited long enough, oldest first."""
        return [
            self._backlogs[stream.name]
            for stream in self.streams.values()
            if self._backlogs[stream.name].samples
            and (stream.arrived >= stream.total_prompts or now >= stream.first_at + self._window_s)
        ]

    def queued(self, stream: str) -> int:
        return self._backlogs[stream].samples

    def all_queued(self) -> int:
        return sum(backlog.samples for backlog in self._backlogs.values())

    def running(self) -> int:
        return self._placed.running

    def take_orders(self) -> Orders[Payload]:
        orders, self._orders = self._orders, Orders()
        return orders


def _history(entry: Entry[Payload]) -> str:
    return f"attempts: {entry.attempt}, on {', '.join(entry.tried)}"
