"""Cutting sequences into micro-batches of bounded padded size."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

# One more micro-batch costs about as much as this part of a full one; below it, padding is cheaper than cutting.
_OVERHEAD = 1 / 16


def pack(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Micro-batches of indices into `lengths`, each with rows x longest <= `budget` tokens.

    Sorted by length, the cut that minimises padded tokens plus a fixed cost per micro-batch is found by dynamic
    programming over contiguous runs, so that a few long sequences do not pad many short ones. Longest first, ties by
    index. Raises `ValueError` naming the first index that exceeds the budget alone.
    """
    for index, length in enumerate(lengths):
        if length > budget:
            raise ValueError(f"sequence {index} has {length} tokens; a micro-batch holds {budget}")
        if length < 1:
            raise ValueError(f"sequence {index} is empty")
    order = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    ends = _cut([lengths[index] for index in order], budget)
    batches, start = [], 0
    while start < len(order):
        batches.append(order[start : ends[start]])
        start = ends[start]
    return batches


def _cut(descending: Sequence[int], budget: int) -> list[int]:
    """For each start, where the best run that begins there ends."""
    count = len(descending)
    cost = np.zeros(count + 1)
    ends = [0] * count
    rows = np.arange(1, count + 1)
    for start in range(count - 1, -1, -1):
        longest = descending[start]
        most = min(budget // longest, count - start)
        options = cost[start + 1 : start + 1 + most] + longest * rows[:most]
        # The longest run among equals: fewer micro-batches.
        best = most - 1 - int(np.argmin(options[::-1]))
        ends[start] = start + 1 + best
        cost[start] = options[best] + budget * _OVERHEAD
    return ends
