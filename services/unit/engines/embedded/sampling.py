"""Drawing tokens from logits: temperature, top-k, top-p, and one uniform per token that only the sample determines.

Each token is the inverse CDF, in vocabulary order, of one uniform that is hashed from (sample seed, token index). A
sample therefore does not depend on the batch that it shares: only a uniform within rounding of a boundary of the CDF
(about 1e-6 in float32) can give another token.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_MASK = (1 << 64) - 1


def _mix(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of splitmix64 (Steele, Lea, Flood 2014)."""
    z = (z ^ (z >> np.uint64(30))) * _MIX_1
    z = (z ^ (z >> np.uint64(27))) * _MIX_2
    return z ^ (z >> np.uint64(31))


def stream_of(seed: int) -> np.uint64:
    """The stream of one sample, from its 64-bit seed."""
    return np.uint64(_mix(np.array([(seed + int(_GAMMA)) & _MASK], dtype=np.uint64))[0])


def uniforms(streams: NDArray[np.uint64], indices: NDArray[np.int64]) -> NDArray[np.float64]:
    """One uniform in [0, 1) per row for completion token `indices[row]`: 52 bits, so that u * total < total."""
    z = streams + (indices + 1).astype(np.uint64) * _GAMMA
    return (_mix(z) >> np.uint64(12)) * 2.0**-52


@dataclass(frozen=True)
class Settings:
    """Per-row parameters, each of shape [rows]; temperature 0 is greedy, top_p 1 and top_k 0 are off."""

    temperature: NDArray[np.float32]
    top_p: NDArray[np.float64]
    top_k: NDArray[np.int64]


@dataclass(frozen=True)
class Draw:
    """One token per row.

    `tokens` int64 [rows]; `logprobs` float32 [rows]; `finite` bool [rows], False where the logits were NaN or
    infinite and the token means nothing. `kept` maps each truncated row to its kept token ids (int64, ascending).
    """

    tokens: NDArray[np.int64]
    logprobs: NDArray[np.float32]
    finite: NDArray[np.bool_]
    kept: dict[int, NDArray[np.int64]]


def draw(logits: torch.Tensor, settings: Settings, u: NDArray[np.float64]) -> Draw:
    """Draw one token per row of `logits` (float32 or float64 [rows, vocabulary]).

    The log-prob is that of the distribution drawn from: after temperature, then top-k, then top-p over what top-k
    left. Greedy rows take the first largest logit and carry its log-prob at temperature 1.
    """
    finite = torch.isfinite(logits.sum(-1))
    greedy = settings.temperature == 0
    scaled = logits
    if (settings.temperature != 1).any():
        temperature = np.where(greedy, np.float32(1), settings.temperature)
        scaled = logits / torch.from_numpy(temperature).to(logits.device).unsqueeze(-1)
    kept: dict[int, NDArray[np.int64]] = {}
    cut = np.flatnonzero(~greedy & ((settings.top_p < 1) | (settings.top_k > 0)))
    if len(cut):
        rows = torch.from_numpy(cut).to(logits.device)
        part = scaled[rows]
        keep = kept_mask(part, settings.top_k[cut], settings.top_p[cut])
        scaled = scaled.index_copy(0, rows, part.masked_fill(~keep, -torch.inf))
        counts = keep.sum(-1).cpu().numpy()
        ids = keep.nonzero()[:, 1].cpu().numpy()
        kept = dict(zip(cut.tolist(), np.split(ids, np.cumsum(counts)[:-1]), strict=True))
    logprobs = torch.log_softmax(scaled, -1)
    cdf = logprobs.exp().cumsum(-1, dtype=torch.float64)
    target = torch.from_numpy(u).to(logits.device).unsqueeze(-1) * cdf[:, -1:]
    tokens = torch.searchsorted(cdf, target, right=True).clamp_(max=logits.shape[-1] - 1)
    if greedy.any():
        largest = logits.argmax(-1, keepdim=True)
        tokens = torch.where(torch.from_numpy(greedy).to(logits.device).unsqueeze(-1), largest, tokens)
    chosen = logprobs.gather(-1, tokens)
    return Draw(tokens.squeeze(-1).cpu().numpy(), chosen.squeeze(-1).float().cpu().numpy(), finite.cpu().numpy(), kept)


def kept_mask(scaled: torch.Tensor, top_k: NDArray[np.int64], top_p: NDArray[np.float64]) -> torch.Tensor:
    """Which tokens top-k and then top-p keep: bool [rows, vocabulary].

    Exactly `top_k` tokens, equal logits by smaller id first; of those the shortest prefix, in the same order, whose
    probability (renormalised over the top-k) reaches `top_p`. The first token is always kept.
    """
    vocabulary = scaled.shape[-1]
    ordered, order = torch.sort(scaled, dim=-1, descending=True, stable=True)
    k = torch.from_numpy(np.where(top_k > 0, top_k, vocabulary)).to(scaled.device).unsqueeze(-1)
    p = torch.from_numpy(np.where(top_p < 1, top_p, np.inf)).to(scaled.device).unsqueeze(-1)
    keep = torch.arange(vocabulary, device=scaled.device) < k
    probabilities = torch.softmax(ordered.double().masked_fill(~keep, -torch.inf), -1)
    before = probabilities.cumsum(-1) - probabilities
    keep = keep & (before < p)
    keep[:, 0] = True
    return torch.zeros_like(keep).scatter_(-1, order, keep)
