"""Sampling against brute force in float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.unit.engines.embedded.sampling import Settings, draw, kept_mask, stream_of, uniforms


def of(rows: int, temperature: float = 1.0, top_p: float = 1.0, top_k: int = 0) -> Settings:
    return Settings(
        np.full(rows, temperature, dtype=np.float32), np.full(rows, top_p), np.full(rows, top_k, dtype=np.int64)
    )


def reference(logits: list[float], temperature: float, top_p: float, top_k: int) -> tuple[list[int], list[float]]:
    """Kept ids (ascending) and the float64 probabilities over them."""
    scaled = [value / temperature for value in logits]
    order = sorted(range(len(scaled)), key=lambda i: (-scaled[i], i))
    order = order[:top_k] if top_k else order
    top = max(scaled)
    weights = [math.exp(scaled[i] - top) for i in order]
    total, kept, before = sum(weights), [], 0.0
    for i, weight in zip(order, weights, strict=True):
        if kept and before >= top_p:
            break
        kept.append(i)
        before += weight / total
    kept.sort()
    weights = [math.exp(scaled[i] - top) for i in kept]
    return kept, [weight / sum(weights) for weight in weights]


def splitmix64(state: int) -> int:
    mask = (1 << 64) - 1
    z = state & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return z ^ (z >> 31)


@given(st.integers(0, 2**64 - 1), st.integers(0, 10**6))
def test_uniforms_are_splitmix64(seed: int, index: int) -> None:
    gamma = 0x9E3779B97F4A7C15
    expected = (splitmix64(splitmix64(seed + gamma) + (index + 1) * gamma) >> 12) * 2.0**-52
    got = uniforms(np.array([stream_of(seed)]), np.array([index]))
    assert got[0] == expected
    assert 0 <= got[0] < 1


def test_uniforms_are_uniform_over_seeds_and_positions() -> None:
    streams = np.array([stream_of(seed) for seed in range(200)])
    table = np.stack([uniforms(streams, np.full(200, index)) for index in range(200)])
    counts, _ = np.histogram(table, bins=100, range=(0, 1))
    assert ((counts - 400) ** 2 / 400).sum() < 160
    assert abs(np.corrcoef(table[:-1].ravel(), table[1:].ravel())[0, 1]) < 0.02
    assert abs(np.corrcoef(table[:, :-1].ravel(), table[:, 1:].ravel())[0, 1]) < 0.02


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_tokens_logprobs_and_kept_sets_match_brute_force(data: st.DataObject) -> None:
    vocabulary = data.draw(st.integers(2, 12))
    rows = data.draw(st.integers(1, 5))
    values = st.integers(-12, 12).map(lambda n: n / 4)
    logits = [data.draw(st.lists(values, min_size=vocabulary, max_size=vocabulary)) for _ in range(rows)]
    temperature = [data.draw(st.sampled_from([0.0, 0.5, 1.0, 2.0])) for _ in range(rows)]
    top_p = [data.draw(st.sampled_from([0.113, 0.5003, 0.9007, 1.0])) for _ in range(rows)]
    top_k = [data.draw(st.integers(0, vocabulary + 1)) for _ in range(rows)]
    u = np.array([data.draw(st.floats(0, 1, exclude_max=True)) for _ in range(rows)])
    drawn = draw(
        torch.tensor(logits, dtype=torch.float64),
        Settings(np.array(temperature, dtype=np.float32), np.array(top_p), np.array(top_k, dtype=np.int64)),
        u,
    )
    for row in range(rows):
        token = int(drawn.tokens[row])
        if temperature[row] == 0:
            _, probabilities = reference(logits[row], 1.0, 1.0, 0)
            assert token == max(range(vocabulary), key=lambda i: (logits[row][i], -i))
            assert drawn.logprobs[row] == pytest.approx(math.log(probabilities[token]), abs=1e-5)
            assert row not in drawn.kept
            continue
        kept, probabilities = reference(logits[row], temperature[row], top_p[row], top_k[row])
        if top_p[row] < 1 or top_k[row] > 0:
            assert drawn.kept[row].tolist() == kept
        else:
            assert row not in drawn.kept
        place = kept.index(token)
        assert drawn.logprobs[row] == pytest.approx(math.log(probabilities[place]), abs=1e-5)
        below = sum(probabilities[:place])
        assert below - 1e-9 <= u[row] <= below + probabilities[place] + 1e-9


@pytest.mark.parametrize(
    ("temperature", "top_p", "top_k"), [(1.0, 1.0, 0), (0.7, 1.0, 0), (1.3, 0.8, 0), (1.0, 0.9, 5)]
)
def test_frequencies_follow_the_distribution(temperature: float, top_p: float, top_k: int) -> None:
    count, vocabulary = 20_000, 16
    logits = torch.randn(vocabulary, generator=torch.Generator().manual_seed(3))
    u = uniforms(np.array([stream_of(seed) for seed in range(count)]), np.zeros(count, dtype=np.int64))
    drawn = draw(logits.expand(count, -1), of(count, temperature, top_p, top_k), u)
    kept, probabilities = reference(logits.tolist(), temperature, top_p, top_k)
    seen = np.bincount(drawn.tokens, minlength=vocabulary)
    assert seen.sum() == seen[kept].sum() == count
    expected = np.array(probabilities) * count
    chi_square = ((seen[kept] - expected) ** 2 / expected).sum()
    freedom = len(kept) - 1
    assert chi_square < freedom + 4 * math.sqrt(2 * freedom)


def test_ties_go_to_the_smaller_id() -> None:
    logits = torch.tensor([[1.0, 2.0, 2.0, 2.0, 0.0]])
    assert kept_mask(logits, np.array([2]), np.array([1.0])).tolist() == [[False, True, True, False, False]]
    assert kept_mask(logits, np.array([0]), np.array([1e-9])).tolist() == [[False, True, False, False, False]]
    assert draw(logits, of(1, temperature=0.0), np.array([0.9])).tokens.tolist() == [1]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_rows_that_are_not_finite_are_named_and_hurt_no_other(bad: float) -> None:
    logits = torch.zeros(3, 4)
    logits[1, 2] = bad
    drawn = draw(logits, of(3), np.array([0.1, 0.5, 0.9]))
    assert drawn.finite.tolist() == [True, False, True]
    assert drawn.tokens[[0, 2]].tolist() == [0, 3]


def test_the_largest_uniform_never_draws_a_token_without_probability() -> None:
    logits = torch.tensor([[0.0, 0.3, -200.0, -200.0]] * 2)
    drawn = draw(logits, of(2), np.array([0.0, 1 - 2.0**-52]))
    assert drawn.tokens.tolist() == [0, 1]
