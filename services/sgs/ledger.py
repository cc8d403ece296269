"""Who asks for which samples, who brings them, and how long either is waited for. A pure state machine over the book.

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
from services.sgs.book import SampleBook
from services.sgs.dispatch import Assignment, QueuedGroup
from services.sgs.placement import Load
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
        reconnect_s: how long lost ranks, ended streams that are not acknowledged, and what units bring unasked, are
            kept.
    """

    def __init__(
        self, order: Callable[[QueuedGroup], Key], *, max_attempts: int, window_s: float, reconnect_s: float
    ) -> None:
        self._max_attempts = max_attempts
        self._window_s = window_s
        self._reconnect_s = reconnect_s
        self.session: SessionKey | None = None
        self.streams: dict[str, StreamRecord[Payload]] = {}
        self.duplicates = 0
        self._replaced: deque[SessionKey] = deque(maxlen=_REMEMBERED_SESSIONS)
        self._held: dict[SessionKey, Held[Payload]] = {}
        self._book: SampleBook[Payload] = SampleBook(order)

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
            self._held.pop(key).drop(math.inf, self._book.orders)
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
            self._book.add_stream(request.stream)
        stream.min_version = max(stream.min_version, request.min_version)
        stream.total_prompts = max(stream.total_prompts, request.total_prompts)
        self._book.backlogs[request.stream].min_version = stream.min_version
        rank = stream.ranks.get(request.rank)
        if rank is None:
            rank = stream.ranks[request.rank] = RankRecord(request.stream, request.rank, request)
        rank.connection += 1
        rank.connected, rank.ended = True, False
        self._book.orders.add_wake(rank)
        self._book.enqueue(rank, request, self._held.get(request.session), now)
        for sample_id in request.have:
            self._book.settle(rank, sample_id)
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
            entry = self._book.entries.get(first)
            holder = entry.owner if entry else self._book.acknowledged.get(first)
            if holder is not None:
                raise InvalidRequestError(
                    f"stream {request.stream} rank {request.rank}: prompt {prompt.prompt_id} was already requested "
                    f"by rank {holder.rank} in stream {holder.stream}"
                )

    def disconnect(self, rank: RankRecord[Payload], connection: int, now: float) -> None:
        """The rank's stream broke. An older connection of a rank that is back changes nothing."""
        if rank.connection == connection and rank.connected:
            rank.connected, rank.lost_at = False, now
            self._forget_if_settled(rank)

    def end(self, rank: RankRecord[Payload], now: float) -> None:
        """The rank's stream ended after its last sample; what is not acknowledged stays for `reconnect_s`."""
        rank.connected, rank.ended, rank.lost_at = False, True, now
        self._forget_if_settled(rank)

    def acknowledge(self, session: SessionKey, ids: Iterable[SampleId]) -> None:
        """The rank holds these for good. Unknown ids and other sessions are ignored."""
        if session != self.session:
            return
        touched: dict[int, RankRecord[Payload]] = {}
        for sample_id in ids:
            entry = self._book.entries.get(sample_id)
            if entry is not None:
                touched[id(entry.owner)] = entry.owner
                self._book.settle(entry.owner, sample_id)
            elif (held := self._held.get(session)) and (result := held.take_result(sample_id)):
                self._book.orders.add_forget(result[0], [sample_id])
        for rank in touched.values():
            self._forget_if_settled(rank)

    def give_up(self, stream: str, reason: str) -> None:
        """Drop a stream that cannot be served; its ranks are told `reason`."""
        for rank in list(self.streams[stream].ranks.values()):
            self._drop(rank, reason)

    def _forget_if_settled(self, rank: RankRecord[Payload]) -> None:
        if rank.settled:
            self._drop(rank, "")

    def _drop(self, rank: RankRecord[Payload], reason: str) -> None:
        self._book.clear(rank)
        rank.connected, rank.dropped = False, reason
        self._book.orders.add_wake(rank)
        stream = self.streams[rank.stream]
        del stream.ranks[rank.rank]
        if not stream.ranks:
            del self.streams[rank.stream]
            self._book.drop_stream(rank.stream)

    # ------------------------------------------------------------------ units

    def start(self, plan: Sequence[Assignment], now: float) -> list[list[Entry[Payload]]]:
        """Carry out assignments; returns the started entries of each."""
        return self._book.start(plan, now)

    def finish(
        self, unit_id: str, session: SessionKey, results: Iterable[tuple[SampleId, Payload]], now: float
    ) -> None:
        """Samples that a unit finished. The first copy wins; for others the unit is told to forget its copy."""
        if self.session is not None and session != self.session:
            self._book.orders.add_forget(unit_id, [sample_id for sample_id, _payload in results])
            return
        for sample_id, payload in results:
            entry = self._book.entries.get(sample_id)
            if entry is None and sample_id not in self._book.acknowledged:
                if not self._held.setdefault(session, Held()).keep(unit_id, sample_id, payload, now):
                    self.duplicates += 1
            elif entry is None or entry.state in (State.FINISHED, State.FAILED):
                self.duplicates += 1
                if entry is None or entry.state is State.FAILED or entry.unit_id != unit_id:
                    self._book.orders.add_forget(unit_id, [sample_id])
            else:
                self._book.accept(entry, unit_id, payload)

    def unit_failed(self, unit_id: str, session: SessionKey, failures: Iterable[SampleFailure]) -> int:
        """A unit gave samples up: they are tried elsewhere, then fail. Returns how many were queued again."""
        again = 0
        for failure in failures:
            self._book.orders.add_forget(unit_id, [failure.id])
            entry = self._book.entries.get(failure.id) if session == self.session else None
            if entry is None or entry.state is not State.RUNNING or entry.unit_id != unit_id:
                continue
            if entry.attempt < self._max_attempts:
                self._book.queue_again(entry, unit_id)
                again += 1
            else:
                self._book.fail(entry, failure.code, f"{failure.message} ({_history(entry)})")
        return again

    def claim(self, unit_id: str, session: SessionKey, ids: Iterable[SampleId], now: float) -> int:
        """A registering unit names what it is still running. What is not wanted from it is cancelled there.

        Returns how many samples it goes on with.
        """
        kept = 0
        for sample_id in ids:
            entry = self._book.entries.get(sample_id)
            if self.session is not None and session != self.session:
                self._book.orders.add_cancel(unit_id, [sample_id])
            elif entry is not None and entry.state is State.QUEUED:
                self._book.place(entry, unit_id, now)
                kept += 1
            elif entry is None and sample_id not in self._book.acknowledged:
                self._held.setdefault(session, Held()).claim(unit_id, sample_id, now)
                kept += 1
            else:
                self._book.orders.add_cancel(unit_id, [sample_id])
        return kept

    def unit_lost(self, unit_id: str) -> int:
        """A unit is gone: its unfinished samples are queued again. Returns how many."""
        entries = self._book.placed.on(unit_id)
        for entry in entries:
            self._book.queue_again(entry, "")
        self._book.placed.drop_unit(unit_id)
        for held in self._held.values():
            held.lose(unit_id)
        for backlog in self._book.backlogs.values():
            backlog.forget_home(unit_id)
        return len(entries)

    def load(self, unit_id: str) -> Load:
        """What the unit holds, unasked claims included."""
        load = self._book.placed.load(unit_id)
        claims = sum(held.claims[unit_id] for held in self._held.values())
        return Load(load.samples + claims, load.work, load.tokens) if claims else load

    # ------------------------------------------------------------------ time

    def expired(self, now: float) -> list[OverdueNotice]:
        """Samples past their deadline: cancelled where they are, and queued again or failed."""
        overdue = []
        for entry in self._book.placed.overdue(now):
            notice = OverdueNotice(entry.id, entry.unit_id, entry.attempt)
            overdue.append(notice)
            self._book.orders.add_cancel(entry.unit_id, [entry.id])
            if entry.attempt < self._max_attempts:
                self._book.queue_again(entry, entry.unit_id)
                entry.owner.overdue.append(notice)
                self._book.orders.add_wake(entry.owner)
            else:
                seconds = f"{entry.owner.request.deadline_s:g} s"
                message = f"sample {entry.id}: not finished within {seconds} ({_history(entry)})"
                self._book.fail(entry, FailureCode.DEADLINE, message)
        return overdue

    def reap(self, now: float) -> list[RankRecord[Payload]]:
        """Drop ranks that stayed away or never acknowledged, and what units brought unasked. Returns those ranks."""
        before = now - self._reconnect_s
        gone = [
            rank
            for stream in self.streams.values()
            for rank in stream.ranks.values()
            if not rank.connected and rank.lost_at <= before
        ]
        for rank in gone:
            what = f"acknowledge its last {len(rank.entries)} samples" if rank.ended else "come back"
            self._drop(rank, f"rank {rank.rank} did not {what} within {self._reconnect_s:g} s")
        for key, held in list(self._held.items()):
            held.drop(before, self._book.orders)
            if not held:
                del self._held[key]
        return gone

    def fail_unfit(self, limit: int) -> None:
        """Fail queued samples longer than `limit`, the tokens of the longest sample that any unit can hold."""
        for backlog in self._book.backlogs.values():
            if backlog.longest <= limit:
                continue
            for group in [group for group in backlog.groups() if group.tokens > limit]:
                for k in list(group.ks):
                    entry = self._book.entries[SampleId(group.prompt_id, k)]
                    self._book.fail(
                        entry,
                        FailureCode.DOES_NOT_FIT,
                        f"sample {entry.id}: {group.prompt_tokens} prompt + {group.max_tokens} completion tokens do "
                        f"not fit: the largest unit holds {limit}",
                    )
            backlog.longest = limit

    # ------------------------------------------------------------------ what comes out

    def plannable(self, now: float) -> list[StreamBacklog]:
        """Queues whose stream is complete or has waited long enough, oldest first."""
        return [
            self._book.backlogs[stream.name]
            for stream in self.streams.values()
            if self._book.backlogs[stream.name].samples
            and (stream.arrived >= stream.total_prompts or now >= stream.first_at + self._window_s)
        ]

    def queued(self, stream: str) -> int:
        return self._book.backlogs[stream].samples

    def all_queued(self) -> int:
        return sum(backlog.samples for backlog in self._book.backlogs.values())

    def running(self) -> int:
        return self._book.placed.running

    def take_orders(self) -> Orders[Payload]:
        orders, self._book.orders = self._book.orders, Orders()
        return orders


def _history(entry: Entry[Payload]) -> str:
    return f"attempts: {entry.attempt}, on {', '.join(entry.tried)}"
