"""Cutting and arranging a batch by length."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from services.unit.engines.embedded.buckets import arrange, buckets

Lengths = st.lists(st.integers(1, 300), min_size=1, max_size=60)


def cost(lengths: np.ndarray, call: int) -> int:
    parts = buckets(lengths, call)
    return sum((part.end - part.start) * part.positions for part in parts) + len(parts) * call


@given(Lengths, st.integers(0, 3000))
def test_parts_cover_all_rows_in_order_and_reach_every_length(lengths: list[int], call: int) -> None:
    parts = buckets(np.array(lengths), call)
    assert parts[0].start == 0
    assert parts[-1].end == len(lengths)
    assert all(one.end == two.start for one, two in pairwise(parts))
    assert all(part.positions == max(lengths[part.start : part.end]) for part in parts)
    whole = len(lengths) * max(lengths) + call
    assert cost(np.array(lengths), call) <= whole


def test_one_long_row_is_cut_off() -> None:
    lengths = np.array([400] + [20] * 63)
    assert [tuple(part) for part in buckets(lengths, 1000)] == [(0, 1, 400), (1, 64, 20)]
    assert len(buckets(lengths, 10**6)) == 1


@given(Lengths, st.integers(0, 3000))
def test_swaps_never_make_it_dearer(lengths: list[int], call: int) -> None:
    before = np.array(lengths)
    after = before.copy()
    for one, other in arrange(before, steps=16, call_tokens=call):
        after[[one, other]] = after[[other, one]]
    assert sorted(after) == sorted(before)
    assert cost(after, call) <= cost(before, call)


def test_long_rows_come_to_the_front_when_that_pays() -> None:
    scattered = np.array([20, 400] * 16)
    swaps = arrange(scattered, steps=1000, call_tokens=100)
    for one, other in swaps:
        scattered[[one, other]] = scattered[[other, one]]
    assert scattered.tolist() == [400] * 16 + [20] * 16
    assert arrange(np.array([20, 400] * 16), steps=0, call_tokens=100) == []
    assert arrange(np.array([20] * 60 + [400, 390]), steps=16, call_tokens=100) == []
