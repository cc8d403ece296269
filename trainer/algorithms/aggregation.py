"""How token losses add up to one number: a weight for each token, and one denominator for all ranks."""

from __future__ import annotations

from collections.abc import Sequence

from services.config import Config
from trainer.data.batch import TrainSample


def token_weights(samples: Sequence[TrainSample], config: Config) -> list[float]:
    """For each sample, the weight of each of its completion tokens in the unnormalised sum.

    `sequence_mean` is GRPO's 1/|o_i| (arXiv 2402.03300, equation 3), `token_mean` is DAPO's token-level loss
    (arXiv 2503.14476, equation 8), `constant` is Dr. GRPO's fixed length (arXiv 2503.20783, section 3.2).
    """
    if config.algorithm.aggregation == "sequence_mean":
        return [1.0 / len(sample.completion) for sample in samples]
    return [1.0] * len(samples)


def denominator(samples: Sequence[TrainSample], config: Config) -> float:
    """This rank's share of what the sum is divided by; add up the shares of all ranks and rounds."""
    if config.algorithm.aggregation == "token_mean":
        return float(sum(len(sample.completion) for sample in samples))
    if config.algorithm.aggregation == "sequence_mean":
        return float(len(samples))
    return float(len(samples) * (config.algorithm.constant_tokens or config.sampling.max_tokens))
