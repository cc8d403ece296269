"""Advantages that compare the samples of one prompt."""

from __future__ import annotations

import math
from collections.abc import Sequence


def group_advantages(rewards: Sequence[float | None], normalize_std: bool) -> list[float | None]:
    """Reward minus the group's mean, optionally divided by the group's (population) standard deviation.

    None is a sample that could not be scored: it has no part in the baseline and gets None. Equal rewards, and a
    single scored sample, give 0. Source: GRPO, arXiv 2402.03300, section 4.1.2 (outcome supervision); without the
    division it is that of "Understanding R1-Zero-like training", arXiv 2503.20783, section 3.
    Raises `ValueError` for a reward that is not finite.
    """
    scored = [reward for reward in rewards if reward is not None]
    if not all(map(math.isfinite, scored)):
        raise ValueError(f"rewards must be finite numbers or None: {list(rewards)}")
    if not scored:
        return [None] * len(rewards)
    if min(scored) == max(scored):
        return [None if reward is None else 0.0 for reward in rewards]
    # Dividing by the largest magnitude first keeps squares from overflowing or vanishing.
    unit = max(map(abs, scored))
    mean = math.fsum(reward / unit for reward in scored) / len(scored)
    centred = [None if reward is None else reward / unit - mean for reward in rewards]
    if not normalize_std:
        return [None if value is None else value * unit for value in centred]
    spread = math.sqrt(math.fsum(value * value for value in centred if value is not None) / len(scored))
    return [None if value is None else (value / spread if spread > 0 else 0.0) for value in centred]
