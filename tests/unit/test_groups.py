"""Groups fill in any order; every id is settled once."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.errors import GenerationError
from services.samples import FailureCode, FinishReason, Sample, SampleFailure, SampleId, VersionSpan
from trainer.pipeline.groups import GroupAssembler, IterationLedger, ScoredGroup, require_whole


def make_sample(prompt_id: str, k: int, version: int = 0) -> Sample:
    return Sample(
        id=SampleId(prompt_id, k),
        token_ids=(5, 6, 1),
        logprobs=(-0.1, -0.2, -0.3),
        finish_reason=FinishReason.STOP,
        spans=(VersionSpan(version, 0, 3),),
        unit_id="unit-0",
    )


def make_failure(prompt_id: str, k: int) -> SampleFailure:
    return SampleFailure(SampleId(prompt_id, k), FailureCode.DEADLINE, f"{prompt_id}#{k}: too late", "unit-0")


@given(prompts=st.integers(1, 6), n=st.integers(1, 5), seed=st.integers(0, 2**32), data=st.data())
def test_every_group_comes_out_once_and_whole(prompts: int, n: int, seed: int, data: st.DataObject) -> None:
    ids = [f"train/{p}" for p in range(prompts)]
    assembler = GroupAssembler(ids, n)
    arrivals = [SampleId(p, k) for p in ids for k in range(n)]
    arrivals += data.draw(st.lists(st.sampled_from(arrivals), max_size=10))  # second copies
    random.Random(seed).shuffle(arrivals)
    out: list[ScoredGroup] = []
    fresh = 0
    for sample_id in arrivals:
        if not assembler.receive(sample_id):
            continue
        fresh += 1
        failed = data.draw(st.booleans())
        settled = (
            assembler.settle_failure(make_failure(*sample_id))
            if failed
            else assembler.settle_sample(make_sample(*sample_id), 1.0)
        )
        if settled is not None:
            out.append(settled)
    assert assembler.complete and assembler.missing == []
    assert fresh == prompts * n and assembler.duplicates == len(arrivals) - fresh
    assert sorted(group.prompt_id for group in out) == sorted(ids)
    for group in out:
        ks = [sample.id.k for sample in group.samples]
        assert ks == sorted(ks)
        assert sorted([*ks, *(failure.id.k for failure in group.failures)]) == list(range(n))


def test_rewards_stay_with_their_samples() -> None:
    assembler = GroupAssembler(["a"], 3)
    assembler.settle_sample(make_sample("a", 2), 2.0)
    assembler.settle_sample(make_sample("a", 0), None)
    group = assembler.settle_sample(make_sample("a", 1), 1.0)
    assert group is not None
    assert [(sample.id.k, reward) for sample, reward in zip(group.samples, group.rewards, strict=True)] == [
        (0, None),
        (1, 1.0),
        (2, 2.0),
    ]


def test_an_id_that_was_never_asked_for_does_not_count() -> None:
    assembler = GroupAssembler(["a"], 1)
    assert not assembler.receive(SampleId("b", 0))
    assert not assembler.receive(SampleId("a", 1))
    assert assembler.duplicates == 0


def test_ledger_names_losses_and_repeats() -> None:
    ledger = IterationLedger([SampleId("a", 0), SampleId("a", 1)])
    ledger.account(SampleId("a", 0))
    assert (ledger.lost, ledger.duplicated) == (1, 0)
    ledger.account(SampleId("a", 0))
    assert (ledger.lost, ledger.duplicated) == (1, 1)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"token_ids": (), "logprobs": (), "spans": ()}, "no tokens"),
        ({"logprobs": (-0.1, -0.2)}, "3 tokens but 2 log-probs"),
        ({"logprobs": (-0.1, float("nan"), -0.3)}, "log-prob of its token 1 is nan"),
        ({"logprobs": (-0.1, -0.2, float("-inf"))}, "log-prob of its token 2 is -inf"),
        ({"spans": ()}, "spans do not cover"),
        ({"spans": (VersionSpan(0, 0, 1), VersionSpan(1, 2, 3))}, "spans do not cover"),
        ({"kept_counts": (1, 1), "kept_ids": (5, 6)}, "kept sets"),
        ({"kept_counts": (1, 1, 1), "kept_ids": (5, 6)}, "kept sets"),
    ],
)
def test_a_sample_that_no_working_engine_gives_is_named(fields: dict[str, Any], says: str) -> None:
    whole = dataclasses.replace(make_sample("a", 2), spans=(VersionSpan(0, 0, 1), VersionSpan(1, 1, 3)))
    require_whole(whole)
    require_whole(dataclasses.replace(whole, kept_counts=(2, 0, 1), kept_ids=(5, 6, 1)))
    with pytest.raises(GenerationError, match=rf"sample a#2 from unit unit-0: .*{says}"):
        require_whole(dataclasses.replace(whole, **fields))
