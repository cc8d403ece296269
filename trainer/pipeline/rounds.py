"""Dynamic batches: when a round starts, and which rank trains what. Pure, so that every rank plans alike."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from trainer.pipeline.packing import pack

# Loads that differ by less than this part of the mean are not worth moving a sample for.
_TOLERANCE = 1 / 32


class Place(NamedTuple):
    """A ready sample: the `item`-th of rank `owner`."""

    owner: int
    item: int


class Transfer(NamedTuple):
    """The `item`-th ready sample of rank `owner` is trained on by rank `assignee`."""

    owner: int
    item: int
    assignee: int


@dataclass(frozen=True)
class RoundPlan:
    """`micro_batches[rank]`: equally many on each rank, empty ones last; `transfers`: ordered by owner and item."""

    micro_batches: tuple[tuple[tuple[Place, ...], ...], ...]
    transfers: tuple[Transfer, ...]


def should_start(ready_tokens_by_rank: Sequence[int], world: int, budget: int, all_in: bool) -> bool:
    """Whether the ready samples of complete groups fill one micro-batch of `budget` tokens on each of `world` ranks.

    When all samples are in, whatever is left is trained on.
    """
    total = sum(ready_tokens_by_rank)
    return total > 0 and (all_in or total >= world * budget)


def plan_round(ready: Sequence[Sequence[int]], budget: int) -> RoundPlan:
    """Assign every ready sample to a rank; `ready[owner][item]` is its length in tokens.

    Loads differ by no more than the longest sample (or 1/32 of the mean load, where that is more); samples stay with
    their owner otherwise. Raises `ValueError` when a sample exceeds `budget` tokens alone.
    """
    assigned = _balance(ready)
    packed: list[list[list[Place]]] = []
    for places in assigned:
        lengths = [ready[place.owner][place.item] for place in places]
        try:
            packed.append([[places[index] for index in micro] for micro in pack(lengths, budget)])
        except ValueError:
            worst = max(places, key=lambda place: ready[place.owner][place.item])
            raise ValueError(
                f"sample {worst.item} of rank {worst.owner} has {ready[worst.owner][worst.item]} tokens; "
                f"a micro-batch holds {budget}"
            ) from None
    most = max(map(len, packed), default=0)
    return RoundPlan(
        micro_batches=tuple(tuple(map(tuple, micros)) + ((),) * (most - len(micros)) for micros in packed),
        transfers=tuple(
            sorted(
                Transfer(place.owner, place.item, rank)
                for rank, places in enumerate(assigned)
                for place in places
                if place.owner != rank
            )
        ),
    )


def _balance(ready: Sequence[Sequence[int]]) -> list[list[Place]]:
    """Move samples from the fullest rank to the emptiest, each time the one nearest to half their difference."""
    held = [
        sorted((length, Place(owner, item)) for item, length in enumerate(lengths))
        for owner, lengths in enumerate(ready)
    ]
    loads = [sum(lengths) for lengths in ready]
    tolerance = _TOLERANCE * sum(loads) / max(len(loads), 1)
    while True:
        # Ties go to the lowest rank.
        full = max(range(len(loads)), key=lambda rank: (loads[rank], -rank), default=0)
        empty = min(range(len(loads)), key=lambda rank: (loads[rank], rank), default=0)
        gap = loads[full] - loads[empty] if loads else 0
        at = _nearest(held[full], gap) if gap > tolerance else None
        if at is None:
            return [sorted(place for _, place in samples) for samples in held]
        length, place = held[full].pop(at)
        bisect.insort(held[empty], (length, place))
        loads[full] -= length
        loads[empty] += length


def _nearest(samples: Sequence[tuple[int, Place]], gap: int) -> int | None:
    """Index of the sample whose length is nearest to `gap` / 2, or None when moving any would not narrow the gap."""
    after = bisect.bisect_left(samples, gap / 2, key=lambda sample: sample[0])
    around = [at for at in (after - 1, after) if 0 <= at < len(samples) and samples[at][0] < gap]
    return min(around, key=lambda at: (abs(2 * samples[at][0] - gap), at), default=None)
