"""Group advantages against a float64 reference, and the cases that must never give NaN."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.algorithms.advantages import group_advantages

rewards = st.lists(st.none() | st.floats(-1e3, 1e3), max_size=12)


@given(rewards, st.booleans())
def test_matches_numpy_and_keeps_unscored_out(values: list[float | None], normalize: bool) -> None:
    got = group_advantages(values, normalize)
    assert [g is None for g in got] == [v is None for v in values]
    scored = np.array([v for v in values if v is not None], dtype=np.float64)
    if not len(scored):
        return
    centred = scored - scored.mean()
    if normalize and scored.max() > scored.min():
        if scored.std() < 1e-6:  # too close together for numpy's own rounding
            assert all(math.isfinite(g) for g in got if g is not None)
            return
        centred = centred / scored.std()
    assert np.allclose([g for g in got if g is not None], centred, rtol=1e-6, atol=1e-9)


@given(st.lists(st.none() | st.floats(allow_nan=False, allow_infinity=False), max_size=8), st.booleans())
def test_never_nan(values: list[float | None], normalize: bool) -> None:
    assert not any(math.isnan(g) for g in group_advantages(values, normalize) if g is not None)


@given(st.floats(-1e6, 1e6), st.integers(1, 9), st.booleans())
def test_equal_rewards_are_exactly_zero(value: float, count: int, normalize: bool) -> None:
    assert group_advantages([value] * count, normalize) == [0.0] * count


def test_an_unscored_sample_is_not_a_zero() -> None:
    assert group_advantages([1.0, None, 3.0], False) == [-1.0, None, 1.0]
    assert group_advantages([None, 0.7, None], True) == [None, 0.0, None]
    assert group_advantages([None, None], True) == [None, None]


def test_non_finite_reward_is_refused() -> None:
    with pytest.raises(ValueError, match="finite"):
        group_advantages([1.0, math.nan], True)
