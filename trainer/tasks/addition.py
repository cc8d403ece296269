"""Sums of two to ten numbers, worked out in running sums: `17+8+93=` is answered `17+8=25;25+93=118`.

The answer can be verified, and its length follows from the prompt: the number of terms k has the long-tailed
distribution P(k) ~ 1 / (k - 1), so that most answers are short and a tenth is several times the median.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from typing import Any

HELD_OUT_ONE_IN = 10


def examples(count: int, seed: int) -> list[tuple[str, str]]:
    """`count` worked examples (prompt, completion) for supervised warm-up; none of them is held out."""
    stream = _problems(f"examples/{seed}", held_out=False, max_terms=10, max_value=99)
    return [(_prompt(terms), _worked(terms)) for terms, _ in zip(stream, range(count), strict=False)]


def rows(
    count: int, seed: int, held_out: bool = False, max_terms: int = 10, max_value: int = 99
) -> list[dict[str, Any]]:
    """`count` rows {"prompt", "answer", "terms"}; those with `held_out` share no prompt with those without."""
    stream = _problems(f"rows/{seed}", held_out, max_terms, max_value)
    return [
        {"prompt": _prompt(terms), "answer": sum(terms), "terms": len(terms)}
        for terms, _ in zip(stream, range(count), strict=False)
    ]


def reward(prompt: str, completion: str, answer: int) -> float:
    """1 when what follows the last `=` (or the whole completion) is the sum, else 0."""
    return float(completion.rpartition("=")[2] == str(answer))


def _problems(seed: str, held_out: bool, max_terms: int, max_value: int) -> Iterator[list[int]]:
    rng = random.Random(seed)
    counts = range(2, max_terms + 1)
    weights = [1 / (terms - 1) for terms in counts]
    while True:
        (count,) = rng.choices(counts, weights)
        terms = [rng.randint(1, max_value) for _ in range(count)]
        if _is_held_out(_prompt(terms)) == held_out:
            yield terms


def _is_held_out(prompt: str) -> bool:
    """A property of the prompt alone, so that no choice of seeds lets a held-out prompt into training."""
    return hashlib.blake2b(prompt.encode()).digest()[0] % HELD_OUT_ONE_IN == 0


def _prompt(terms: list[int]) -> str:
    return "+".join(map(str, terms)) + "="


def _worked(terms: list[int]) -> str:
    steps, total = [], terms[0]
    for term in terms[1:]:
        steps.append(f"{total}+{term}={total + term}")
        total += term
    return ";".join(steps)
