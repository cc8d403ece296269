from __future__ import annotations

from itertools import pairwise
from statistics import median, quantiles

import pytest

from trainer.tasks.addition import examples, reward, rows


def next_hundred(prompt: str) -> tuple[int, int]:
    """The answer and how many additions it takes, one by one."""
    value, step = map(int, prompt.rstrip(":").split("+"))
    additions = 0
    hundred = value - value % 100 + 100
    while value < hundred:
        value += step
        additions += 1
    return value, additions


def test_worked_examples_are_right() -> None:
    for prompt, completion in examples(300, 0):
        answer, additions = next_hundred(prompt)
        assert reward(prompt, completion, answer) == 1.0
        start, step = map(int, prompt.rstrip(":").split("+"))
        values = [start, *map(int, completion.split(";"))]
        assert [b - a for a, b in pairwise(values)] == [step] * additions


def test_rows_are_right() -> None:
    for held_out in (False, True):
        for row in rows(300, 0, held_out=held_out):
            assert (row["answer"], row["additions"]) == next_hundred(row["prompt"])
    assert max(row["additions"] for row in rows(300, 0, max_additions=5)) == 5


@pytest.mark.parametrize(
    ("completion", "expected"),
    [
        ("489;496;503", 1.0),
        ("503", 1.0),
        ("488;497;503", 1.0),
        ("489;496;503;510", 0.5),
        ("489;496", 1 / 3),
        ("489;496;503;", 0.5),
        ("489;489;489;489", 1 / 6),
        ("503;489", 0.0),
        ("496;489", 0.0),
        ("489;496;0503", 1 / 3),
        ("489;496;5031", 1 / 3),
        ("489:503", 0.0),
        ("", 0.0),
    ],
)
def test_the_last_number_counts_and_right_sums_before_it_a_little(completion: str, expected: float) -> None:
    assert reward("482+7:", completion, 503) == pytest.approx(expected)


def test_rows_repeat_with_the_seed() -> None:
    assert rows(50, 1) == rows(50, 1)
    assert rows(50, 1) != rows(50, 2)
    assert rows(20, 1) == rows(50, 1)[:20]


def test_held_out_prompts_are_in_no_training_set() -> None:
    held_out = {row["prompt"] for seed in range(3) for row in rows(1000, seed, held_out=True)}
    trained = {row["prompt"] for seed in range(3) for row in rows(3000, seed)}
    warmed = {prompt for seed in range(3) for prompt, _ in examples(3000, seed)}
    assert len(held_out) > 150
    assert not held_out & trained
    assert not held_out & warmed


def test_output_lengths_are_long_tailed_and_follow_the_prompt() -> None:
    worked = examples(4000, 0)
    lengths = [len(completion) for _, completion in worked]
    assert quantiles(lengths, n=10)[-1] >= 3 * median(lengths)
    by_additions: dict[int, list[int]] = {}
    for prompt, completion in worked:
        by_additions.setdefault(next_hundred(prompt)[1], []).append(len(completion))
    means = [sum(by_additions[k]) / len(by_additions[k]) for k in sorted(by_additions)]
    assert means == sorted(means)
    assert sorted(by_additions) == list(range(1, 17))
