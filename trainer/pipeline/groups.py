"""Groups as they fill, and the account of every sample id: pure state, one instance per stream and rank."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from services.errors import GenerationError
from services.samples import Sample, SampleFailure, SampleId


@dataclass(frozen=True)
class ScoredGroup:
    """All outcomes of one prompt: `rewards[i]` belongs to `samples[i]`, and is None where scoring failed."""

    prompt_id: str
    samples: tuple[Sample, ...]
    rewards: tuple[float | None, ...]
    failures: tuple[SampleFailure, ...]


def require_whole(sample: Sample) -> None:
    """Raise `GenerationError`, naming sample and unit, for one that no working engine gives.

    It has tokens, a finite log-prob for each, spans that cover them, and kept sets for all of them or for none.
    """
    tokens, wrong = len(sample.token_ids), ""
    if not tokens:
        wrong = "it has no tokens"
    elif len(sample.logprobs) != tokens:
        wrong = f"it has {tokens} tokens but {len(sample.logprobs)} log-probs"
    elif not all(map(math.isfinite, sample.logprobs)):
        at = next(t for t, logprob in enumerate(sample.logprobs) if not math.isfinite(logprob))
        wrong = f"the log-prob of its token {at} is {sample.logprobs[at]}"
    elif [span.start for span in sample.spans] + [tokens] != [0, *(span.end for span in sample.spans)]:
        wrong = f"its version spans do not cover its {tokens} tokens"
    elif (sample.kept_counts and len(sample.kept_counts) != tokens) or sum(sample.kept_counts) != len(sample.kept_ids):
        wrong = "its kept sets do not fit its tokens"
    if wrong:
        raise GenerationError(f"sample {sample.id} from unit {sample.unit_id}: {wrong}; the unit's engine is at fault")


@dataclass
class _Open:
    samples: list[Sample] = field(default_factory=list)
    rewards: list[float | None] = field(default_factory=list)
    failures: list[SampleFailure] = field(default_factory=list)


class GroupAssembler:
    """Collects `n` outcomes for each prompt. A sample is received once, then settled once (scored or failed)."""

    def __init__(self, prompt_ids: Sequence[str], n: int) -> None:
        self._n = n
        self._open = {prompt_id: _Open() for prompt_id in prompt_ids}
        self._unreceived = {SampleId(prompt_id, k) for prompt_id in prompt_ids for k in range(n)}
        self._received: set[SampleId] = set()
        self.duplicates = 0

    def receive(self, sample_id: SampleId) -> bool:
        """Whether this copy counts: False for a second one, or for an id that was never asked for."""
        if sample_id not in self._unreceived:
            self.duplicates += sample_id in self._received
            return False
        self._unreceived.remove(sample_id)
        self._received.add(sample_id)
        return True

    def settle_sample(self, sample: Sample, reward: float | None) -> ScoredGroup | None:
        """Returns the group when this was its last outcome."""
        group = self._open[sample.id.prompt_id]
        group.samples.append(sample)
        group.rewards.append(reward)
        return self._close(sample.id.prompt_id)

    def settle_failure(self, failure: SampleFailure) -> ScoredGroup | None:
        self._open[failure.id.prompt_id].failures.append(failure)
        return self._close(failure.id.prompt_id)

    @property
    def received(self) -> Iterable[SampleId]:
        return self._received

    @property
    def missing(self) -> list[SampleId]:
        """Ids still to come, in a fixed order."""
        return sorted(self._unreceived)

    @property
    def complete(self) -> bool:
        """Whether every group was returned."""
        return not self._open

    def _close(self, prompt_id: str) -> ScoredGroup | None:
        group = self._open[prompt_id]
        if len(group.samples) + len(group.failures) < self._n:
            return None
        del self._open[prompt_id]
        order = sorted(range(len(group.samples)), key=lambda i: group.samples[i].id.k)
        return ScoredGroup(
            prompt_id,
            tuple(group.samples[i] for i in order),
            tuple(group.rewards[i] for i in order),
            tuple(group.failures),
        )


class IterationLedger:
    """Proves that each sample id of an iteration is accounted for exactly once on this rank."""

    def __init__(self, expected: Iterable[SampleId]) -> None:
        self._open = set(expected)
        self.duplicated = 0

    def account(self, sample_id: SampleId) -> None:
        if sample_id in self._open:
            self._open.remove(sample_id)
        else:
            self.duplicated += 1

    @property
    def lost(self) -> int:
        return len(self._open)
