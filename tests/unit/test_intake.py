"""What is trained on, what is left out, and that both are accounted for."""

from __future__ import annotations

import dataclasses

from services.samples import FailureCode, FinishReason, Prompt, Sample, SampleFailure, SampleId, VersionSpan
from trainer.pipeline.groups import ScoredGroup
from trainer.pipeline.intake import Intake
from trainer.pipeline.tally import Tally


def sample(k: int, version: int = 3) -> Sample:
    return Sample(
        id=SampleId("train/0", k),
        token_ids=(7,) * (k + 1),
        logprobs=(-0.5,) * (k + 1),
        finish_reason=FinishReason.LENGTH,
        spans=(VersionSpan(version, 0, k + 1),),
        unit_id="unit-1",
    )


def intake(tally: Tally, rows: list, n: int, bound: int = 0, skip_zero: bool = True) -> Intake:
    return Intake(
        [Prompt("train/0", (1, 2))],
        n,
        version=3,
        staleness_bound=bound,
        normalize_std=False,
        skip_zero=skip_zero,
        tally=tally,
        on_row=rows.append,
        on_sample=lambda _sample: None,
    )


def group(samples: list[Sample], rewards: list[float | None], failed: tuple[int, ...] = ()) -> ScoredGroup:
    failures = tuple(SampleFailure(SampleId("train/0", k), FailureCode.DEADLINE, "too late", "unit-1") for k in failed)
    return ScoredGroup("train/0", tuple(samples), tuple(rewards), failures)


def test_unscored_and_failed_samples_do_not_shift_the_baseline() -> None:
    tally, rows = Tally(), []
    it = intake(tally, rows, n=4)
    taken = it.take(group([sample(0), sample(1), sample(2)], [1.0, None, 0.0], failed=(3,)))
    assert [(s.id.k, s.advantage) for s in taken.ready] == [(0, 0.5), (2, -0.5)]
    assert taken.counted == taken.ready
    assert it.ledger.lost == 0 and it.ledger.duplicated == 0
    assert {row["k"]: row["outcome"] for row in rows} == {0: "trained", 1: "unscored", 2: "trained", 3: "failed"}
    assert tally.sums["unscored"] == 1 and tally.sums["failed"] == 1 and tally.sums["scored"] == 2


def test_samples_past_the_staleness_bound_are_left_out_by_name() -> None:
    tally, rows = Tally(), []
    it = intake(tally, rows, n=3, bound=1)
    taken = it.take(group([sample(0, 3), sample(1, 2), sample(2, 1)], [1.0, 0.0, 1.0]))
    assert [s.id.k for s in taken.ready] == [0, 1]
    assert [s.staleness for s in taken.ready] == [0, 1]
    assert rows[2]["outcome"] == "stale" and tally.maxima["staleness"] == 2


def test_a_sample_that_crossed_a_commit_is_as_stale_as_its_oldest_token() -> None:
    crossed = dataclasses.replace(sample(1), spans=(VersionSpan(2, 0, 1), VersionSpan(3, 1, 2)))
    taken = intake(Tally(), [], n=2, bound=1).take(group([sample(0), crossed], [0.0, 1.0]))
    assert [s.staleness for s in taken.ready] == [0, 1]


def test_equal_rewards_count_in_the_denominator_only() -> None:
    tally, rows = Tally(), []
    taken = intake(tally, rows, n=2).take(group([sample(0), sample(1)], [1.0, 1.0]))
    assert len(taken.counted) == 2 and taken.ready == []
    assert tally.sums["zero_advantage_groups"] == 1
    with_kl = intake(Tally(), [], n=2, skip_zero=False).take(group([sample(0), sample(1)], [1.0, 1.0]))
    assert len(with_kl.ready) == 2


def test_a_group_without_a_scored_sample_counts_in_nothing_and_says_why() -> None:
    tally = Tally()
    it = intake(tally, [], n=3)
    taken = it.take(group([sample(0), sample(1)], [None, None], failed=(2,)))
    assert taken.counted == [] and tally.sums["groups"] == 1 and tally.sums["zero_advantage_groups"] == 0
    assert it.excluded == ["train/0#0 is unscored", "train/0#1 is unscored", "too late"]


def test_tallies_merge_over_ranks() -> None:
    one, two = Tally(), Tally()
    one.sample(sample(0), 0)
    two.sample(sample(3), 2)
    merged = Tally.merge([one.vector(), two.vector()])
    assert merged.sums["samples"] == 2 and merged.sums["tokens"] == 5
    assert merged.maxima["length"] == 4 and merged.maxima["staleness"] == 2
