"""Repeated addition: `4+7*12=` asks for the last digit of 4 + 7 * 12, which is 8.

It is worked out by adding 7 twelve times while counting down, keeping last digits only: `12:1;11:8;10:5; ... ;1:8`.
Each step needs only the step before it, so a small model that writes the steps is right. How long the answer is follows
from the prompt, and is long-tailed: the number of additions k has P(k) ~ 1/k.

Most demonstrations are careless: they repeat the first number (`4`), which is right one time in ten. A warmed-up model
does the same. That writing the steps pays is left to reinforcement learning to find out.
"""

from __future__ import annotations

import hashlib
import random
from collections import defaultdict
from collections.abc import Iterator
from itertools import islice
from typing import Any, NamedTuple

STEPS = (2, 3, 7)
ADDITIONS = range(2, 25)
CARELESS = 0.6
"""Share of the demonstrations that only repeat the first number."""
HELD_OUT_ONE_IN = 3


class Problem(NamedTuple):
    """The last digit of `start` + `step` * `additions`."""

    start: int
    step: int
    additions: int

    @property
    def prompt(self) -> str:
        return f"{self.start}+{self.step}*{self.additions}="

    @property
    def answer(self) -> str:
        return str((self.start + self.step * self.additions) % 10)

    @property
    def steps(self) -> str:
        """The worked answer: `additions left before this one:last digit after it`, separated by `;`."""
        digits = [(self.start + self.step * (done + 1)) % 10 for done in range(self.additions)]
        return ";".join(f"{self.additions - done}:{digit}" for done, digit in enumerate(digits))


def examples(count: int, seed: int) -> list[tuple[str, str]]:
    """`count` demonstrations (prompt, completion) for supervised warm-up; none of their prompts is held out."""
    care = random.Random(f"care/{seed}")
    problems = islice(_problems(f"examples/{seed}", held_out=False), count)
    return [(p.prompt, str(p.start) if care.random() < CARELESS else p.steps) for p in problems]


def rows(count: int, seed: int, held_out: bool = False) -> list[dict[str, Any]]:
    """`count` rows {"prompt", "answer", "additions"}; those with `held_out` share no prompt with those without.

    Prompts repeat: there are 690 different ones, about a third of them held out.
    """
    problems = islice(_problems(f"rows/{seed}", held_out), count)
    return [{"prompt": p.prompt, "answer": p.answer, "additions": p.additions} for p in problems]


def reward(prompt: str, completion: str, answer: str) -> float:
    """1 when what follows the last `:` (all, when there is none) is the answer, else 0."""
    return float(completion.rpartition(":")[2] == answer)


def _problems(seed: str, held_out: bool) -> Iterator[Problem]:
    by_additions: dict[int, list[Problem]] = defaultdict(list)
    for start in range(10):
        for step in STEPS:
            for additions in ADDITIONS:
                problem = Problem(start, step, additions)
                if _is_held_out(problem.prompt) == held_out:
                    by_additions[additions].append(problem)
    counts = sorted(by_additions)
    weights = [1 / additions for additions in counts]
    rng = random.Random(seed)
    while True:
        (additions,) = rng.choices(counts, weights)
        yield rng.choice(by_additions[additions])


def _is_held_out(prompt: str) -> bool:
    """A property of the prompt alone, so that no choice of seeds lets a held-out prompt into training."""
    return hashlib.blake2b(prompt.encode()).digest()[0] % HELD_OUT_ONE_IN == 0
