"""From complete groups to samples ready for training: advantages, exclusions, and the account of every id."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from services.samples import Prompt, Sample, SampleId, staleness
from trainer.algorithms.advantages import group_advantages
from trainer.data.batch import TrainSample
from trainer.pipeline.groups import IterationLedger, ScoredGroup
from trainer.pipeline.tally import Tally

LedgerRow = dict[str, Any]
_NAMED = 3


@dataclass(frozen=True)
class Taken:
    """`counted` enter the denominator; `ready` are those of them that have a gradient."""

    counted: list[TrainSample]
    ready: list[TrainSample]


class Intake:
    """One iteration on one rank. A sample that failed, could not be scored or is too stale is excluded, never 0."""

    def __init__(
        self,
        prompts: Sequence[Prompt],
        n: int,
        *,
        version: int,
        staleness_bound: int,
        normalize_std: bool,
        skip_zero: bool,
        tally: Tally,
        on_row: Callable[[LedgerRow], None],
        on_sample: Callable[[Sample], None],
    ) -> None:
        """`skip_zero`: samples of zero advantage have no gradient (true without a KL term)."""
        self._prompts = {prompt.prompt_id: prompt.token_ids for prompt in prompts}
        self._version = version
        self._bound = staleness_bound
        self._normalize_std = normalize_std
        self._skip_zero = skip_zero
        self._tally = tally
        self._on_row = on_row
        self._on_sample = on_sample
        self.excluded: list[str] = []
        """The first samples that were left out, each with the reason."""
        self.ledger = IterationLedger(SampleId(prompt.prompt_id, k) for prompt in prompts for k in range(n))

    def take(self, group: ScoredGroup) -> Taken:
        behind = [staleness(self._version, sample.spans) for sample in group.samples]
        usable = [None if lag > self._bound else reward for lag, reward in zip(behind, group.rewards, strict=True)]
        advantages = group_advantages(usable, self._normalize_std)
        counted: list[TrainSample] = []
        for sample, lag, reward, advantage in zip(group.samples, behind, group.rewards, advantages, strict=True):
            self._tally.sample(sample, lag)
            self._on_sample(sample)
            outcome = "trained" if advantage is not None else "unscored" if reward is None else "stale"
            self._account(sample.id, outcome, reward=reward, staleness=lag, unit=sample.unit_id)
            if advantage is None:
                self._exclude(f"{sample.id} is {outcome}")
                continue
            assert reward is not None
            self._tally.add(reward=reward, scored=1)
            counted.append(
                TrainSample(
                    id=sample.id,
                    prompt=self._prompts[group.prompt_id],
                    completion=sample.token_ids,
                    behaviour_logprobs=sample.logprobs,
                    advantage=advantage,
                    kept_counts=sample.kept_counts,
                    kept_ids=sample.kept_ids,
                    staleness=lag,
                )
            )
        for failure in group.failures:
            self._account(failure.id, "failed", reason=failure.code.value, unit=failure.unit_id)
            self._exclude(failure.message)
        flat = bool(counted) and all(sample.advantage == 0.0 for sample in counted)
        self._tally.add(groups=1, zero_advantage_groups=flat)
        ready = [sample for sample in counted if sample.advantage != 0.0] if self._skip_zero else counted
        return Taken(counted, ready)

    def _exclude(self, reason: str) -> None:
        if len(self.excluded) < _NAMED:
            self.excluded.append(reason)

    def _account(self, sample_id: SampleId, outcome: str, **extra: Any) -> None:
        self.ledger.account(sample_id)
        if outcome != "trained":
            self._tally.add(**{outcome: 1})
        self._on_row(
            {
                "iteration": self._version,
                "prompt_id": sample_id.prompt_id,
                "k": sample_id.k,
                "outcome": outcome,
                **extra,
            }
        )
