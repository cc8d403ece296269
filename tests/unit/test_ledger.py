"""The sample ledger: scripted cases, and random interleavings against what must always hold."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from services.samples import FailureCode, SampleFailure, SampleId
from services.sgs.dispatch import UnitView, least_loaded, longest_first
from services.sgs.ledger import Ledger
from services.sgs.records import (
    InvalidRequestError,
    PromptInfo,
    RankRecord,
    Request,
    RequestRefusedError,
    SessionKey,
    State,
)

S1 = SessionKey("run", "s1")
S2 = SessionKey("run", "s2")
SLOTS = 3


def ledger(max_attempts: int = 3) -> Ledger[str]:
    return Ledger(longest_first, max_attempts=max_attempts, window_s=1.0, reconnect_s=10.0)


def request(
    prompts: list[str], *, n: int = 2, rank: int = 0, session: SessionKey = S1, have: tuple[SampleId, ...] = (),
    stream: str = "train/0", total: int = 0, deadline_s: float = 5.0,
) -> Request:  # fmt: skip
    infos = tuple(PromptInfo(name, 10 + len(name), 20.0) for name in prompts)
    return Request(session, stream, rank, total, infos, n, 10, -1, deadline_s, have)


def view(book: Ledger[str], unit_id: str, slots: int = SLOTS) -> UnitView:
    load = book.load(unit_id)
    return UnitView(unit_id, slots - load.samples, load.work / slots, slots, 0, 1000, 100_000, 100_000 - load.tokens)


def plan(book: Ledger[str], units: list[str], now: float, slots: int = SLOTS) -> list[tuple[str, SampleId]]:
    assigned = least_loaded(book.plannable(now), [view(book, unit, slots) for unit in units])
    started = book.start(assigned, now)
    return [(entry.unit_id, entry.id) for entries in started for entry in entries]


def read(rank: RankRecord[str]) -> list[str]:
    return rank.deliver(len, 10_000).results


def one(prompt: str, k: int = 0) -> SampleId:
    return SampleId(prompt, k)


def test_ledger_first_copy_wins_and_the_second_unit_forgets() -> None:
    book = ledger()
    rank = book.open(request(["a"], n=1), 0.0)
    plan(book, ["u"], 0.0)
    book.unit_lost("u")
    plan(book, ["v"], 0.0)
    book.finish("u", S1, [(one("a"), "from u")], 1.0)
    assert book.take_orders().cancel == {"v": [one("a")]}
    book.finish("v", S1, [(one("a"), "from v")], 1.0)
    assert book.duplicates == 1
    assert book.take_orders().forget == {"v": [one("a")]}
    assert read(rank) == ["from u"]
    assert rank.all_sent


def test_ledger_forgets_a_stream_once_it_is_delivered_and_acknowledged() -> None:
    book = ledger()
    rank = book.open(request(["a"], n=1), 0.0)
    plan(book, ["u"], 0.0)
    book.finish("u", S1, [(one("a"), "x")], 1.0)
    read(rank)
    book.end(rank, 1.0)
    assert book.streams
    book.acknowledge(S1, [one("a")])
    assert not book.streams and book.take_orders().forget == {"u": [one("a")]}
    again = book.open(request(["a"], n=1, have=(one("a"),)), 2.0)
    assert again.all_sent and read(again) == []


def test_ledger_sends_again_what_a_broken_stream_may_have_lost() -> None:
    book = ledger()
    rank = book.open(request(["a"]), 0.0)
    plan(book, ["u"], 0.0)
    book.finish("u", S1, [(one("a", 0), "x"), (one("a", 1), "y")], 1.0)
    assert rank.deliver(len, 100).first == 2 and rank.all_sent
    book.disconnect(rank, rank.connection, 1.0)
    book.open(request(["a"], have=(one("a", 0),)), 2.0)
    assert not rank.all_sent
    delivery = rank.deliver(len, 100)
    assert (delivery.results, delivery.first) == (["y"], 0) and rank.all_sent


def test_ledger_keeps_an_acknowledged_stream_until_it_has_ended() -> None:
    book = ledger()
    rank = book.open(request(["a"], n=1), 0.0)
    plan(book, ["u"], 0.0)
    book.finish("u", S1, [(one("a"), "x")], 1.0)
    read(rank)
    book.acknowledge(S1, [one("a")])
    assert book.streams
    book.end(rank, 1.0)
    assert not book.streams


def test_ledger_an_ended_stream_waits_for_its_acknowledgement_no_longer_than_for_a_lost_rank() -> None:
    book = ledger()
    rank = book.open(request(["a"], n=1), 0.0)
    plan(book, ["u"], 0.0)
    book.finish("u", S1, [(one("a"), "x")], 1.0)
    read(rank)
    book.end(rank, 1.0)
    assert book.reap(1.0 + 10.0 - 0.1) == [] and book.streams
    (gone,) = book.reap(1.0 + 10.0)
    assert gone is rank and "did not acknowledge its last 1 samples" in rank.dropped
    assert not book.streams and book.take_orders().forget == {"u": [one("a")]}
    again = book.open(request(["a"], n=1, have=(one("a"),)), 20.0)
    assert again.all_sent and read(again) == []


def test_ledger_a_sample_that_came_back_and_fits_no_unit_left_fails() -> None:
    book = ledger()
    rank = book.open(request(["a"], n=1), 0.0)
    tokens = book.plannable(0.0)[0].longest
    plan(book, ["u"], 0.0)
    book.fail_unfit(tokens - 1)
    assert read(rank) == [] and book.running() == 1
    book.unit_lost("u")
    book.fail_unfit(tokens - 1)
    (failure,) = rank.deliver(len, 100).failures
    assert failure.code is FailureCode.DOES_NOT_FIT and rank.all_sent


def test_ledger_overdue_samples_move_on_and_then_fail() -> None:
    book = ledger(max_attempts=2)
    rank = book.open(request(["a"], n=1), 0.0)
    assert plan(book, ["u", "v"], 0.0) == [("u", one("a"))]
    assert book.expired(4.9) == []
    assert [tuple(notice) for notice in book.expired(5.0)] == [(one("a"), "u", 1)]
    assert plan(book, ["u"], 5.0) == [("u", one("a"))], "a lone unit is used again"
    book.unit_lost("u")
    assert plan(book, ["v"], 6.0) == [("v", one("a"))]
    assert book.expired(11.0)[0].attempt == 3
    delivery = rank.deliver(len, 100)
    (failure,) = delivery.failures
    assert failure.code is FailureCode.DEADLINE and "a#0" in failure.message and "u, v" in failure.message
    assert len(delivery.overdue) == 1 and rank.all_sent


def test_ledger_avoids_the_unit_a_sample_was_stuck_on() -> None:
    book = ledger()
    book.open(request(["a"], n=1), 0.0)
    assert plan(book, ["u", "v"], 0.0) == [("u", one("a"))]
    book.expired(5.0)
    assert plan(book, ["u", "v"], 5.0) == [("v", one("a"))]


def test_ledger_retries_engine_failures_then_fails() -> None:
    book = ledger(max_attempts=2)
    rank = book.open(request(["a"], n=1), 0.0)
    failure = SampleFailure(one("a"), FailureCode.ENGINE, "boom", "u")
    for unit in ("u", "v"):
        assert plan(book, ["u", "v"], 0.0) == [(unit, one("a"))]
        book.unit_failed(unit, S1, [failure])
    assert rank.deliver(len, 100).failures[0].message == "boom (attempts: 2, on u, v)"


def test_ledger_successor_adopts_claims_and_held_results() -> None:
    book = ledger()
    assert book.claim("u", S1, [one("a", 0), one("zombie")], 0.0) == 2
    book.finish("u", S1, [(one("a", 1), "x")], 0.0)
    assert book.load("u").samples == 2
    rank = book.open(request(["a"], n=3), 1.0)
    assert read(rank) == ["x"]
    assert plan(book, ["u", "v"], 1.0) == [("v", one("a", 2))]
    book.reap(10.0)
    assert book.take_orders().cancel == {"u": [one("zombie")]}
    assert book.load("u").samples == 1


def test_ledger_new_session_cancels_the_older_ones_work() -> None:
    book = ledger()
    old = book.open(request(["a", "b"], n=1), 0.0)
    plan(book, ["u"], 0.0)
    book.finish("u", S1, [(one("a"), "x")], 0.0)
    book.open(request(["a", "b"], n=1, session=S2), 1.0)
    orders = book.take_orders()
    assert orders.cancel == {"u": [one("b")]} and orders.forget == {"u": [one("a")]}
    assert "replaced" in old.dropped
    with pytest.raises(RequestRefusedError, match="replaced"):
        book.open(request(["a"], session=S1), 2.0)
    book.finish("u", S1, [(one("b"), "late")], 2.0)
    assert book.take_orders().forget == {"u": [one("b")]}
    assert book.claim("u", S1, [one("b")], 2.0) == 0


def test_ledger_serves_one_run_at_a_time() -> None:
    book = ledger()
    rank = book.open(request(["a"]), 0.0)
    other = SessionKey("other", "s")
    with pytest.raises(RequestRefusedError, match="serving run run"):
        book.open(request(["a"], session=other), 0.0)
    book.disconnect(rank, rank.connection, 0.0)
    assert book.reap(9.9) == []
    assert book.reap(10.0) == [rank]
    book.open(request(["a"], session=other), 11.0)


def test_ledger_refuses_prompts_that_are_taken_or_given_twice() -> None:
    book = ledger()
    book.open(request(["a"]), 0.0)
    with pytest.raises(InvalidRequestError, match="rank 0 in stream train/0"):
        book.open(request(["b", "a"], rank=1), 0.0)
    with pytest.raises(InvalidRequestError, match="twice"):
        book.open(request(["c", "c"], rank=2), 0.0)
    assert book.all_queued() == 2


def test_ledger_samples_that_fit_nowhere_fail() -> None:
    book = ledger()
    rank = book.open(request(["a", "longer"], n=1), 0.0)
    book.fail_unfit(25)
    (failure,) = rank.deliver(len, 100).failures
    assert failure.code is FailureCode.DOES_NOT_FIT and failure.id == one("longer") and "25" in failure.message
    assert book.all_queued() == 1


def test_ledger_an_older_connection_of_a_rank_changes_nothing() -> None:
    book = ledger()
    rank = book.open(request(["a"], n=1), 0.0)
    first = rank.connection
    book.open(request(["a"], n=1), 1.0)
    book.disconnect(rank, first, 2.0)
    assert rank.connected and book.reap(100.0) == []


def test_ledger_delivers_in_bounded_events() -> None:
    book = ledger()
    rank = book.open(request(["a"], n=3), 0.0)
    plan(book, ["u"], 0.0)
    book.finish("u", S1, [(one("a", k), "x" * 6) for k in range(3)], 0.0)
    sizes = [len(rank.deliver(len, 12).results) for _ in range(3)]
    assert sizes == [2, 1, 0]
    assert [len(rank.deliver(len, 1).results) for _ in range(1)] == [0]


class LedgerMachine(RuleBasedStateMachine):
    """Ranks, units and time in any order. The ranks here behave: they name everything they hold when they return."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.book = ledger(max_attempts=2)
        self.units: set[str] = set()
        self.working: dict[str, set[SampleId]] = {}
        self.stale: set[tuple[str, SampleId]] = set()
        self.ranks: dict[int, RankRecord[str]] = {}
        self.asked: dict[int, list[str]] = {}
        self.received: dict[int, Counter[SampleId]] = {}
        self.acknowledged: set[SampleId] = set()

    def ids(self, rank: int) -> set[SampleId]:
        return {one(prompt, k) for prompt in self.asked[rank] for k in range(2)}

    def obey(self) -> None:
        orders = self.book.take_orders()
        for unit, ids in orders.cancel.items():
            self.working.get(unit, set()).difference_update(ids)

    @initialize()
    def begin(self) -> None:
        self.attach("u", False)
        self.request(0, 2)
        self.plan()

    @rule(rank=st.integers(0, 1), count=st.integers(1, 3))
    def request(self, rank: int, count: int) -> None:
        if rank in self.asked:
            return
        self.asked[rank] = [f"p{rank}-{i}" for i in range(count)]
        self.received[rank] = Counter()
        self.ranks[rank] = self.book.open(request(self.asked[rank], rank=rank), self.now)

    @rule(rank=st.integers(0, 1))
    def reconnect(self, rank: int) -> None:
        if rank in self.asked:
            have = tuple(self.received[rank])
            self.ranks[rank] = self.book.open(request(self.asked[rank], rank=rank, have=have), self.now)
            self.acknowledged.update(have)

    @rule(rank=st.integers(0, 1))
    def disconnect(self, rank: int) -> None:
        if rank in self.ranks:
            self.book.disconnect(self.ranks[rank], self.ranks[rank].connection, self.now)

    @rule(rank=st.integers(0, 1), lost=st.booleans())
    def deliver(self, rank: int, lost: bool) -> None:
        record = self.ranks.get(rank)
        if record is None or not record.connected:
            return
        delivery = record.deliver(len, 3)
        if lost:
            self.book.disconnect(record, record.connection, self.now)
            return
        got = [one(*_parse(payload)) for payload in delivery.results] + [f.id for f in delivery.failures]
        self.received[rank].update(got)
        assert not self.acknowledged & set(got), "delivered again after it was acknowledged"

    @rule(rank=st.integers(0, 1), data=st.data())
    def acknowledge(self, rank: int, data: st.DataObject) -> None:
        if self.received.get(rank):
            ids = data.draw(st.lists(st.sampled_from(sorted(self.received[rank])), unique=True))
            self.book.acknowledge(S1, ids)
            self.acknowledged.update(ids)

    @rule(unit=st.sampled_from("uvw"), keep=st.booleans())
    def attach(self, unit: str, keep: bool) -> None:
        if unit in self.units:
            self.lose(unit)
        self.units.add(unit)
        claims = {sample_id for who, sample_id in self.stale if who == unit and keep}
        self.stale = {(who, i) for who, i in self.stale if who != unit}
        self.working[unit] = set(claims)
        self.book.claim(unit, S1, sorted(claims), self.now)
        self.obey()

    @rule(unit=st.sampled_from("uvw"))
    def lose(self, unit: str) -> None:
        if unit in self.units:
            self.units.discard(unit)
            self.book.unit_lost(unit)
            self.stale.update((unit, sample_id) for sample_id in self.working.pop(unit))

    @rule()
    def plan(self) -> None:
        self.obey()
        for unit, sample_id in plan(self.book, sorted(self.units), self.now):
            self.working[unit].add(sample_id)

    @precondition(lambda self: any(self.working.values()))
    @rule(data=st.data(), fails=st.booleans())
    def finish(self, data: st.DataObject, fails: bool) -> None:
        busy = sorted((unit, sample_id) for unit, ids in self.working.items() for sample_id in ids)
        unit, sample_id = data.draw(st.sampled_from(busy))
        self.working[unit].discard(sample_id)
        if fails:
            self.book.unit_failed(unit, S1, [SampleFailure(sample_id, FailureCode.ENGINE, "boom", unit)])
        else:
            self.book.finish(unit, S1, [(sample_id, f"{sample_id}")], self.now)

    @precondition(lambda self: bool(self.stale))
    @rule(data=st.data())
    def finish_late(self, data: st.DataObject) -> None:
        unit, sample_id = data.draw(st.sampled_from(sorted(self.stale)))
        self.book.finish(unit, S1, [(sample_id, f"{sample_id}")], self.now)

    @rule(seconds=st.sampled_from([0.5, 3.0, 6.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.book.expired(self.now)
        self.obey()

    @invariant()
    def nothing_is_lost(self) -> None:
        states: Counter[State] = Counter()
        for rank, record in self.ranks.items():
            if record.dropped or record.stream not in self.book.streams:
                continue
            if self.book.streams[record.stream].ranks.get(rank) is not record:
                assert self.ids(rank) <= self.acknowledged, "forgotten before everything was acknowledged"
                continue
            assert set(record.entries) | record.acknowledged == self.ids(rank)
            assert not set(record.entries) & record.acknowledged
            assert record.acknowledged <= self.acknowledged
            assert record.unsent == sum(not entry.sent for entry in record.entries.values())
            states.update(entry.state for entry in record.entries.values())
        assert self.book.all_queued() == states[State.QUEUED]
        assert self.book.running() == states[State.RUNNING]
        assert all(self.book.load(unit).samples <= SLOTS or not self.units for unit in self.units)

    def teardown(self) -> None:
        """Whatever happened: a healthy unit and patient ranks end with every sample exactly where it belongs."""
        self.attach("u", False)
        for rank in list(self.asked):
            self.reconnect(rank)
        for _ in range(100):
            self.plan()
            for sample_id in sorted(self.working["u"]):
                self.working["u"].discard(sample_id)
                self.book.finish("u", S1, [(sample_id, f"{sample_id}")], self.now)
            self.wait(6.0)
            for rank, record in self.ranks.items():
                self.deliver(rank, False)
                if record.all_sent and record.connected:
                    self.book.end(record, self.now)
        for rank in self.asked:
            assert set(self.received[rank]) | self.acknowledged >= self.ids(rank)
            assert self.ranks[rank].all_sent
            self.book.acknowledge(S1, self.ids(rank))
            self.acknowledged |= self.ids(rank)
        assert not self.book.streams and self.book.all_queued() == self.book.running() == 0


def _parse(payload: str) -> tuple[str, int]:
    prompt, _, k = payload.partition("#")
    return prompt, int(k)


TestLedgerMachine = LedgerMachine.TestCase
TestLedgerMachine.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)
