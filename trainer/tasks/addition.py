"""Repeated addition: `482+7:` asks to add 7 to 482 until a hundred is passed: `489;496;503`.

The answer (the last number) can be verified, and how long it is follows from the prompt: the number of additions k has
the long-tailed distribution P(k) ~ 1/k, so that most answers are short and a tenth is several times the median.
"""

from __future__ import annotations

import hashlib
import random
from collections import defaultdict
from collections.abc import Iterator
from itertools import islice, takewhile
from typing import Any

STARTS = range(100, 900)
STEPS = range(1, 10)
MAX_ADDITIONS = 16
HELD_OUT_ONE_IN = 8
PARTIAL_CREDIT = 0.5


def examples(count: int, seed: int) -> list[tuple[str, str]]:
    """`count` worked examples (prompt, completion) for supervised warm-up; none of them is held out."""
    problems = _problems(f"examples/{seed}", False, MAX_ADDITIONS)
    return [(_prompt(*problem), ";".join(map(str, _sums(*problem)))) for problem in islice(problems, count)]


def rows(count: int, seed: int, held_out: bool = False, max_additions: int = MAX_ADDITIONS) -> list[dict[str, Any]]:
    """`count` rows {"prompt", "answer", "additions"}; those with `held_out` share no prompt with those without.

    Prompts repeat when `count` is large: there are about 5000 different ones, an eighth of them held out.
    """
    made = []
    for problem in islice(_problems(f"rows/{seed}", held_out, max_additions), count):
        sums = _sums(*problem)
        made.append({"prompt": _prompt(*problem), "answer": sums[-1], "additions": len(sums)})
    return made


def reward(prompt: str, completion: str, answer: int) -> float:
    """1 when the last number, after the last `;`, is the answer; else half the fraction of sums right from the start.

    The partial credit pays for right sums only, in their order, so that nothing but adding correctly raises it.
    """
    numbers = completion.split(";")
    if numbers[-1] == str(answer):
        return 1.0
    start, _, step = prompt.rstrip(":").partition("+")
    expected = list(map(str, _sums(int(start), int(step))))
    pairs = zip(numbers, expected, strict=False)
    right = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    return PARTIAL_CREDIT * right / len(expected)


def _problems(seed: str, held_out: bool, max_additions: int) -> Iterator[tuple[int, int]]:
    by_additions: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for start in STARTS:
        for step in STEPS:
            additions = len(_sums(start, step))
            if additions <= max_additions and _is_held_out(_prompt(start, step)) == held_out:
                by_additions[additions].append((start, step))
    counts = sorted(by_additions)
    weights = [1 / additions for additions in counts]
    rng = random.Random(seed)
    while True:
        (additions,) = rng.choices(counts, weights)
        yield rng.choice(by_additions[additions])


def _is_held_out(prompt: str) -> bool:
    """A property of the prompt alone, so that no choice of seeds lets a held-out prompt into training."""
    return hashlib.blake2b(prompt.encode()).digest()[0] % HELD_OUT_ONE_IN == 0


def _prompt(start: int, step: int) -> str:
    return f"{start}+{step}:"


def _sums(start: int, step: int) -> list[int]:
    """start + step, start + 2 step, .. up to the first in the next hundred."""
    return list(range(start + step, start - start % 100 + 100 + step, step))
