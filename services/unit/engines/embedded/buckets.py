"""Cutting a batch of mixed lengths into parts, so that a few long samples do not make all pay for their length."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

CALL_TOKENS = 2000
"""Reading so many masked positions costs about as much as one more attention call."""


class Bucket(NamedTuple):
    """Rows `[start, end)` attend over `positions` positions."""

    start: int
    end: int
    positions: int


def buckets(lengths: NDArray[np.int64], call_tokens: int = CALL_TOKENS) -> list[Bucket]:
    """Cut rows of `lengths` tokens, in their order, into contiguous parts; each reads its longest row's positions.

    Splits where most masked positions are saved, as long as a split saves more than `call_tokens` of them.
    Works best on rows that are sorted by length.
    """
    parts: list[Bucket] = []
    todo = [(0, len(lengths))]
    while todo:
        start, end = todo.pop()
        part = lengths[start:end]
        whole = int(part.max())
        if (end - start) * whole - int(part.sum()) > call_tokens:
            left = np.maximum.accumulate(part)[:-1]
            right = np.maximum.accumulate(part[::-1])[::-1][1:]
            sizes = np.arange(1, end - start)
            saved = sizes * (whole - left) + (end - start - sizes) * (whole - right)
            best = int(saved.argmax())
            if saved[best] > call_tokens:
                cut = start + best + 1
                todo += [(cut, end), (start, cut)]
                continue
        parts.append(Bucket(start, end, whole))
    return parts


def arrange(lengths: NDArray[np.int64], steps: int, call_tokens: int = CALL_TOKENS) -> list[tuple[int, int]]:
    """Row swaps that bring the long rows to the front, when that pays within `steps` decode steps; else none.

    A swap is charged for moving the longer row's keys and values both ways, in positions.
    """
    falling = np.sort(lengths)[::-1]
    counts = np.arange(1, len(lengths))
    if not len(counts):
        return []
    costs = counts * falling[0] + (len(lengths) - counts) * falling[1:]
    front = int(costs.argmin()) + 1
    now = buckets(lengths, call_tokens)
    cost_now = sum((part.end - part.start) * part.positions for part in now) + (len(now) - 1) * call_tokens
    saved = cost_now - int(costs[front - 1]) - call_tokens
    if saved <= 0:
        return []
    limit = falling[front]
    ahead = [row for row in range(front) if lengths[row] <= limit]
    behind = [row for row in range(front, len(lengths)) if lengths[row] > limit]
    swaps = list(zip(ahead, behind, strict=False))
    moved = sum(4 * int(max(lengths[one], lengths[other])) for one, other in swaps)
    return swaps if saved * steps > moved else []
