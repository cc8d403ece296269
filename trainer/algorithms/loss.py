"""The policy loss: clipped surrogate and KL to a reference, as an unnormalised sum."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from services.config import AlgorithmConfig
from trainer.algorithms.logprobs import Policy
from trainer.algorithms.stats import MicroStats
from trainer.data.batch import MicroBatch


def clipped_surrogate(
    logprobs: torch.Tensor, batch: MicroBatch, clip_low: float, clip_high: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Loss of each token [T], and whether clipping decides it (bool [T]).

    With r = exp(new - behaviour): -min(r A, clip(r, 1 - low, 1 + high) A). Source: PPO, arXiv 1707.06347, equation 7,
    as used by GRPO, arXiv 2402.03300, equation 3; two bounds as in DAPO, arXiv 2503.14476, equation 10. The old
    policy is the one that generated: its log-probs are the engine's own.
    """
    ratio = (logprobs - batch.behaviour).exp()
    plain = ratio * batch.advantages
    clipped = ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * batch.advantages
    return -torch.minimum(plain, clipped), clipped < plain


def kl_estimate(logprobs: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """[T] exp(ref - new) - (ref - new) - 1: unbiased, never negative. Source: arXiv 2402.03300, equation 4 ("k3")."""
    difference = reference - logprobs
    return difference.expm1() - difference


@dataclass(frozen=True)
class GRPO:
    """The objective of one micro-batch: sum over completion tokens of weight x (surrogate + kl_coef x KL)."""

    config: AlgorithmConfig

    def __call__(self, policy: Policy, reference: Policy | None, batch: MicroBatch) -> tuple[torch.Tensor, MicroStats]:
        """Scalar loss, not divided by anything, and its stats (`seconds` left 0).

        A micro-batch of no samples gives a loss of 0 whose gradients are 0 for every parameter.
        """
        logprobs = policy(batch)
        kl = None
        if reference is not None:
            with torch.no_grad():
                anchor = reference(batch)
            kl = kl_estimate(logprobs, anchor)
        if batch.samples == 0:
            return logprobs.sum() * 0.0, MicroStats()
        token_loss, clipped = clipped_surrogate(logprobs, batch, self.config.clip_low, self.config.clip_high)
        if kl is not None:
            token_loss = token_loss + self.config.kl_coef * kl
        loss = torch.dot(batch.weights, token_loss)
        with torch.no_grad():
            stats = _stats(loss, logprobs, clipped, kl, batch)
        return loss, stats


def _stats(
    loss: torch.Tensor, logprobs: torch.Tensor, clipped: torch.Tensor, kl: torch.Tensor | None, batch: MicroBatch
) -> MicroStats:
    gap = (logprobs - batch.behaviour).abs() * batch.on_policy
    kl_sum = loss.new_zeros(()) if kl is None else kl.sum()
    counts = torch.stack([clipped.sum(), batch.on_policy.sum()])
    # One copy from the device for all of them.
    numbers = torch.stack([loss, gap.sum(), gap.max(), kl_sum, -logprobs.sum(), *counts.to(loss.dtype)]).tolist()
    return MicroStats(
        loss_sum=numbers[0],
        samples=batch.samples,
        tokens=len(batch.targets),
        clipped=round(numbers[5]),
        gap_tokens=round(numbers[6]),
        gap_sum=numbers[1],
        gap_max=numbers[2],
        kl_sum=numbers[3],
        entropy_sum=numbers[4],
    )
