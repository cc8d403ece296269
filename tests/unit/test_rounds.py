"""Rounds: every sample once, equal micro-batch counts, balance, few moves; and samples on the wire between ranks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.samples import SampleId
from trainer.data.batch import TrainSample
from trainer.pipeline.exchange import Exchange, decode, encode
from trainer.pipeline.rounds import Place, RoundPlan, plan_round, should_start

BUDGET = 64
ready_samples = st.lists(st.lists(st.integers(1, BUDGET), max_size=25), min_size=1, max_size=6)


def loads(ready: list[list[int]], plan: RoundPlan) -> list[int]:
    return [sum(ready[p.owner][p.item] for micro in rank for p in micro) for rank in plan.micro_batches]


@given(ready_samples)
def test_every_sample_once_within_budget_and_equal_counts(ready: list[list[int]]) -> None:
    plan = plan_round(ready, BUDGET)
    places = [place for rank in plan.micro_batches for micro in rank for place in micro]
    assert sorted(places) == [Place(o, i) for o, row in enumerate(ready) for i in range(len(row))]
    assert len({len(rank) for rank in plan.micro_batches}) == 1
    for rank in plan.micro_batches:
        for micro in rank:
            assert len(micro) * max((ready[p.owner][p.item] for p in micro), default=0) <= BUDGET
    assert plan == plan_round([list(row) for row in ready], BUDGET)


@given(ready_samples)
def test_transfers_are_exactly_the_samples_trained_elsewhere(ready: list[list[int]]) -> None:
    plan = plan_round(ready, BUDGET)
    moved = {
        (place.owner, place.item, rank)
        for rank, micros in enumerate(plan.micro_batches)
        for micro in micros
        for place in micro
        if place.owner != rank
    }
    assert list(plan.transfers) == sorted(moved)


@given(ready_samples)
def test_load_is_balanced(ready: list[list[int]]) -> None:
    load = loads(ready, plan_round(ready, BUDGET))
    longest = max((length for row in ready for length in row), default=0)
    assert max(load) - min(load) <= max(longest, sum(load) / len(load) / 32)


@given(st.integers(1, 6), st.integers(1, 10), st.integers(1, BUDGET))
def test_balanced_ranks_move_nothing(world: int, count: int, length: int) -> None:
    assert plan_round([[length] * count for _ in range(world)], BUDGET).transfers == ()


def test_moves_no_more_than_half_when_one_rank_has_all() -> None:
    plan = plan_round([[10] * 40, []], BUDGET)
    assert loads([[10] * 40, []], plan) == [200, 200]
    assert len(plan.transfers) == 20


def test_nothing_ready_is_an_empty_plan() -> None:
    assert plan_round([[], []], BUDGET) == RoundPlan(micro_batches=((), ()), transfers=())


def test_too_long_names_owner_and_item() -> None:
    with pytest.raises(ValueError, match="sample 1 of rank 1 has 65 tokens"):
        plan_round([[3], [4, 65]], BUDGET)


def test_a_round_starts_when_the_ranks_are_full_or_all_is_in() -> None:
    assert not should_start([63, 64], 2, 64, all_in=False)
    assert should_start([0, 128], 2, 64, all_in=False)
    assert should_start([1, 0], 2, 64, all_in=True)
    assert not should_start([0, 0], 2, 64, all_in=True)


ids = st.integers(0, 2**40)
floats = st.floats(allow_nan=False, width=64)


@st.composite
def train_samples(draw: st.DrawFn) -> TrainSample:
    completion = draw(st.lists(ids, min_size=1, max_size=5))
    counts = draw(st.just([]) | st.lists(st.integers(0, 3), min_size=len(completion), max_size=len(completion)))
    return TrainSample(
        id=SampleId(draw(st.text(max_size=8)), draw(st.integers(0, 99))),
        prompt=tuple(draw(st.lists(ids, max_size=5))),
        completion=tuple(completion),
        behaviour_logprobs=tuple(draw(st.lists(floats, min_size=len(completion), max_size=len(completion)))),
        advantage=draw(floats),
        kept_counts=tuple(counts),
        kept_ids=tuple(draw(st.lists(ids, min_size=sum(counts), max_size=sum(counts)))),
        staleness=draw(st.integers(0, 9)),
    )


@given(st.lists(train_samples(), max_size=5))
def test_samples_survive_encoding(samples: list[TrainSample]) -> None:
    assert decode(*encode(samples)) == samples


def test_one_rank_needs_no_process_group() -> None:
    exchange = Exchange(0, 1)
    samples = [TrainSample(SampleId("p", k), (1,), (2,) * (k + 1), (-1.0,) * (k + 1), 0.5) for k in range(3)]
    plan = plan_round([[sample.tokens for sample in samples]], BUDGET)
    assert exchange.gather_ints([3, 4]) == [[3, 4]]
    assert exchange.gather_floats([0.5]) == [[0.5]]
    assert [s for micro in exchange.deliver(plan, samples) for s in micro] == samples[::-1]
