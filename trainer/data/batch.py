"""What one rank trains on: samples with their advantages, and their right-padded micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from services.errors import TrainingError
from services.samples import SampleId

if TYPE_CHECKING:
    import numpy.typing as npt


@dataclass(frozen=True)
class TrainSample:
    """One scored completion.

    `behaviour_logprobs[t]` (natural log) is that of `completion[t]` under the distribution it was drawn from;
    `kept_counts`/`kept_ids` are the kept vocabulary of each step, flattened, and empty when nothing was cut.
    """

    id: SampleId
    prompt: tuple[int, ...]
    completion: tuple[int, ...]
    behaviour_logprobs: tuple[float, ...]
    advantage: float
    kept_counts: tuple[int, ...] = ()
    kept_ids: tuple[int, ...] = ()
    staleness: int = 0

    @property
    def tokens(self) -> int:
        """Prompt and completion together."""
        return len(self.prompt) + len(self.completion)


@dataclass(frozen=True)
class KeptSets:
    """The kept vocabulary of the cut steps of a micro-batch.

    `rows` int64 [cut]: which completion tokens were cut; `segments` int64 [entries]: for each entry, the place in
    `rows`; `ids` int64 [entries]: the vocabulary id of the entry.
    """

    rows: torch.Tensor
    segments: torch.Tensor
    ids: torch.Tensor


@dataclass(frozen=True)
class MicroBatch:
    """Rows of tokens, and the T completion tokens of all rows, flattened.

    `input_ids` int64 [rows, longest - 1]: the last token of a sequence predicts nothing and is left out. Padding is
    on the right, where a causal model cannot see it, so no attention mask is needed. `positions` int64 [T]: index
    into the flattened rows of the state that predicts each completion token. `targets` int64 [T];
    `behaviour`, `advantages`, `weights` [T] in the model's floating dtype; `on_policy` bool [T]: staleness 0.
    `samples` and `tokens` count real sequences and real (unpadded) prompt and completion tokens.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    targets: torch.Tensor
    behaviour: torch.Tensor
    advantages: torch.Tensor
    weights: torch.Tensor
    on_policy: torch.Tensor
    kept: KeptSets | None
    samples: int
    tokens: int


def collate(
    samples: Sequence[TrainSample],
    weights: Sequence[float],
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> MicroBatch:
    """Pad `samples` on the right; `weights[i]` is the weight of each completion token of sample i.

    No samples give one row of one token with weight 0: something to run the same collectives on. Raises
    `TrainingError` naming a sample that has no prompt, no completion, or log-probs that do not fit or are not finite.
    """
    for sample in samples:
        _check(sample)
    if not samples:
        return _empty(dtype, device)
    prompts = np.array([len(sample.prompt) for sample in samples])
    lengths = np.array([len(sample.completion) for sample in samples])
    width = int((prompts + lengths).max()) - 1
    rows = np.zeros((len(samples), width + 1), dtype=np.int64)
    for row, sample in zip(rows, samples, strict=True):
        row[: sample.tokens] = sample.prompt + sample.completion
    starts = np.arange(len(samples)) * width + prompts - 1
    within = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    behaviour = np.concatenate([np.asarray(sample.behaviour_logprobs) for sample in samples])
    targets = np.concatenate([np.asarray(sample.completion, dtype=np.int64) for sample in samples])

    def per_token(values: Sequence[float]) -> torch.Tensor:
        return torch.from_numpy(np.repeat(np.asarray(values, dtype=np.float64), lengths)).to(device, dtype)

    fresh = np.repeat(np.array([sample.staleness == 0 for sample in samples]), lengths)
    return MicroBatch(
        input_ids=torch.from_numpy(np.ascontiguousarray(rows[:, :-1])).to(device),
        positions=torch.from_numpy(np.repeat(starts, lengths) + within).to(device),
        targets=torch.from_numpy(targets).to(device),
        behaviour=torch.from_numpy(behaviour).to(device, dtype),
        advantages=per_token([sample.advantage for sample in samples]),
        weights=per_token(weights),
        on_policy=torch.from_numpy(fresh).to(device),
        kept=_kept_sets(samples, lengths, device),
        samples=len(samples),
        tokens=int((prompts + lengths).sum()),
    )


def _check(sample: TrainSample) -> None:
    if not sample.prompt or not sample.completion:
        raise TrainingError(f"sample {sample.id}: needs at least one prompt and one completion token")
    if len(sample.behaviour_logprobs) != len(sample.completion):
        raise TrainingError(
            f"sample {sample.id}: {len(sample.behaviour_logprobs)} log-probs for {len(sample.completion)} tokens"
        )
    if not np.isfinite(sample.behaviour_logprobs).all() or not np.isfinite(sample.advantage):
        raise TrainingError(f"sample {sample.id}: a behaviour log-prob or the advantage is not finite")
    if sample.kept_counts and len(sample.kept_counts) != len(sample.completion):
        raise TrainingError(
            f"sample {sample.id}: {len(sample.kept_counts)} kept counts for {len(sample.completion)} tokens"
        )
    if sum(sample.kept_counts) != len(sample.kept_ids):
        raise TrainingError(f"sample {sample.id}: kept counts do not add up to its {len(sample.kept_ids)} kept ids")


def _empty(dtype: torch.dtype, device: torch.device | str) -> MicroBatch:
    index = torch.zeros(1, dtype=torch.int64, device=device)
    zero = torch.zeros(1, dtype=dtype, device=device)
    nothing = torch.zeros(1, dtype=torch.bool, device=device)
    return MicroBatch(index.view(1, 1), index, index, zero, zero, zero, nothing, None, samples=0, tokens=0)


def _kept_sets(
    samples: Sequence[TrainSample], lengths: npt.NDArray[np.int64], device: torch.device | str
) -> KeptSets | None:
    if not any(sample.kept_counts for sample in samples):
        return None
    counts = np.concatenate(
        [
            np.asarray(sample.kept_counts or (0,) * int(length), dtype=np.int64)
            for sample, length in zip(samples, lengths, strict=True)
        ]
    )
    ids = np.concatenate([np.asarray(sample.kept_ids, dtype=np.int64) for sample in samples])
    rows = np.flatnonzero(counts)
    segments = np.repeat(np.arange(len(rows)), counts[rows])
    return KeptSets(*(torch.from_numpy(array).to(device) for array in (rows, segments, ids)))
