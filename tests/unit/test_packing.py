"""Micro-batches: hard budget, every sequence once, little padding."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.pipeline.packing import pack

lengths_and_budget = st.integers(1, 200).flatmap(
    lambda budget: st.tuples(st.lists(st.integers(1, budget), max_size=60), st.just(budget))
)


def padded(lengths: list[int], batches: list[list[int]]) -> int:
    return sum(len(batch) * max(lengths[i] for i in batch) for batch in batches)


@given(lengths_and_budget)
def test_budget_holds_and_every_sequence_comes_once(case: tuple[list[int], int]) -> None:
    lengths, budget = case
    batches = pack(lengths, budget)
    assert sorted(i for batch in batches for i in batch) == list(range(len(lengths)))
    assert all(batch and len(batch) * max(lengths[i] for i in batch) <= budget for batch in batches)
    assert batches == pack(list(lengths), budget)


@given(st.integers(1, 60).flatmap(lambda b: st.tuples(st.lists(st.integers(1, b), max_size=9), st.just(b))))
def test_cost_is_the_least_of_all_cuts_into_sorted_runs(case: tuple[list[int], int]) -> None:
    lengths, budget = case
    ordered = sorted(lengths, reverse=True)

    @cache
    def least(start: int) -> float:
        runs = (
            ((end - start) * ordered[start] + budget / 16 + least(end))
            for end in range(start + 1, len(ordered) + 1)
            if (end - start) * ordered[start] <= budget
        )
        return min(runs, default=0.0)

    batches = pack(lengths, budget)
    assert padded(lengths, batches) + len(batches) * budget / 16 == pytest.approx(least(0))


def test_equal_lengths_fill_the_budget() -> None:
    assert list(map(len, pack([10] * 25, 100))) == [10, 10, 5]


def test_a_few_long_ones_do_not_pad_the_short_ones() -> None:
    lengths = [1000, *[10] * 100]
    assert padded(lengths, pack(lengths, 8000)) < 1.1 * sum(lengths)


def test_too_long_names_the_index() -> None:
    with pytest.raises(ValueError, match="sequence 2 has 11 tokens"):
        pack([3, 10, 11], 10)
    with pytest.raises(ValueError, match="sequence 1 is empty"):
        pack([3, 0], 10)
