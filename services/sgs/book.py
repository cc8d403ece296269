"""Every sample that is not acknowledged yet, and the moves between its states. Pure; each move keeps all counts right.

Who may ask for which move when is the ledger's affair.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic

from services.samples import FailureCode, SampleFailure, SampleId
from services.sgs.backlog import Key, StreamBacklog
from services.sgs.dispatch import Assignment, QueuedGroup
from services.sgs.placement import Placement
from services.sgs.records import Entry, Held, Orders, Payload, RankRecord, Request, State


class SampleBook(Generic[Payload]):
    """Queued -> running -> finished or failed -> acknowledged. Times are seconds on the caller's clock."""

    def __init__(self, order: Callable[[QueuedGroup], Key]) -> None:
        """`order` sorts a stream's queue."""
        self.entries: dict[SampleId, Entry[Payload]] = {}
        self.acknowledged: dict[SampleId, RankRecord[Payload]] = {}
        self.backlogs: dict[str, StreamBacklog] = {}
        self.placed: Placement[Payload] = Placement()
        self.orders: Orders[Payload] = Orders()
        self._order = order
        self._arrivals = 0

    # ------------------------------------------------------------------ in

    def add_stream(self, name: str) -> None:
        self.backlogs[name] = StreamBacklog(name, self._order)

    def drop_stream(self, name: str) -> None:
        """Forget an empty stream."""
        del self.backlogs[name]

    def enqueue(self, rank: RankRecord[Payload], request: Request, held: Held[Payload] | None, now: float) -> None:
        """Queue the prompts of `request` that are new; what units brought of them unasked is used."""
        groups = []
        for prompt in request.prompts:
            if prompt.prompt_id in rank.prompts:
                continue
            rank.prompts[prompt.prompt_id] = prompt
            self._arrivals += 1
            group = QueuedGroup(prompt.prompt_id, [], prompt.tokens, request.max_tokens, prompt.work, self._arrivals)
            for k in range(request.n):
                entry = Entry(SampleId(prompt.prompt_id, k), rank, group, now)
                rank.entries[entry.id] = self.entries[entry.id] = entry
                rank.unsent += 1
                if not (held and self._adopt(entry, held, now)):
                    group.ks.append(k)
            if group.ks:
                groups.append(group)
        self.backlogs[rank.stream].extend(groups)

    def _adopt(self, entry: Entry[Payload], held: Held[Payload], now: float) -> bool:
        result = held.take_result(entry.id)
        claimed_by = held.take_claim(entry.id)
        if result is not None:
            entry.unit_id, entry.result, entry.state = result[0], result[1], State.FINISHED
            entry.owner.ready.append(entry)
            return True
        if claimed_by is not None:
            self.placed.add(entry, claimed_by, now)
            return True
        return False

    # ------------------------------------------------------------------ between states

    def start(self, plan: Sequence[Assignment], now: float) -> list[list[Entry[Payload]]]:
        """Carry out assignments; returns the started entries of each."""
        started = []
        for assignment in plan:
            self.backlogs[assignment.stream].take(assignment)
            entries = [self.entries[SampleId(assignment.group.prompt_id, k)] for k in assignment.ks]
            for entry in entries:
                self.placed.add(entry, assignment.unit_id, now)
            started.append(entries)
        return started

    def place(self, entry: Entry[Payload], unit_id: str, now: float) -> None:
        """A queued sample turns out to be running on `unit_id`."""
        self._unqueue(entry)
        self.placed.add(entry, unit_id, now)

    def queue_again(self, entry: Entry[Payload], avoid: str) -> None:
        """From running back to the queue; `avoid` names the unit on which it got stuck, if any."""
        self.placed.remove(entry)
        entry.state, entry.avoid = State.QUEUED, avoid
        self.backlogs[entry.owner.stream].put_back(entry.group, entry.id.k, avoid)

    def accept(self, entry: Entry[Payload], unit_id: str, payload: Payload) -> None:
        """The first finished copy; another unit that still runs it is told to stop."""
        if entry.state is State.QUEUED:
            self._unqueue(entry)
        else:
            if entry.unit_id != unit_id:
                self.orders.add_cancel(entry.unit_id, [entry.id])
            self.placed.remove(entry)
        entry.state, entry.unit_id, entry.result = State.FINISHED, unit_id, payload
        entry.owner.ready.append(entry)
        self.orders.add_wake(entry.owner)

    def fail(self, entry: Entry[Payload], code: FailureCode, message: str) -> None:
        """Give a queued or running sample up; its rank is told `message`."""
        if entry.state is State.RUNNING:
            self.placed.remove(entry)
        else:
            self._unqueue(entry)
        entry.state = State.FAILED
        entry.failure = SampleFailure(entry.id, code, message, entry.unit_id)
        self.orders.failures.append(entry.failure)
        entry.owner.failed += 1
        entry.owner.ready.append(entry)
        self.orders.add_wake(entry.owner)

    def _unqueue(self, entry: Entry[Payload]) -> None:
        self.backlogs[entry.owner.stream].discard(entry.id.prompt_id, entry.id.k, entry.avoid)

    # ------------------------------------------------------------------ out

    def settle(self, rank: RankRecord[Payload], sample_id: SampleId) -> None:
        """The rank holds this one for good; an unknown id is ignored."""
        entry = rank.entries.pop(sample_id, None)
        if entry is None:
            return
        self._withdraw(entry)
        if not entry.sent:
            rank.unsent -= 1
            self.orders.add_wake(rank)
        rank.acknowledged.add(sample_id)
        self.acknowledged[sample_id] = rank

    def clear(self, rank: RankRecord[Payload]) -> None:
        """Forget all of a rank's samples, wherever they are."""
        for entry in rank.entries.values():
            self._withdraw(entry)
        rank.entries.clear()
        for sample_id in rank.acknowledged:
            del self.acknowledged[sample_id]
        rank.acknowledged.clear()
        rank.ready.clear()

    def _withdraw(self, entry: Entry[Payload]) -> None:
        """Take an entry out of wherever it is; units stop or forget it."""
        if entry.state is State.QUEUED:
            self._unqueue(entry)
        elif entry.state is State.RUNNING:
            self.orders.add_cancel(entry.unit_id, [entry.id])
            self.placed.remove(entry)
        elif entry.state is State.FINISHED:
            self.orders.add_forget(entry.unit_id, [entry.id])
        entry.result = None
        entry.state = State.ACKNOWLEDGED
        del self.entries[entry.id]
