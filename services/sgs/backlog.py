"""The queued samples of every stream, kept in the dispatch policy's order as they come and go."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from services.sgs.dispatch import Assignment, QueuedGroup

Key = tuple[float, int, str]


class StreamBacklog:
    """One stream's queued groups. A group is `(prompt_id, avoid)`: samples that avoid a unit queue by themselves."""

    def __init__(self, name: str, order: Callable[[QueuedGroup], Key]) -> None:
        self.name = name
        self.min_version = -1
        self.samples = 0
        self.longest = 0  # no queued sample has more tokens
        self._order = order
        self._sorted: list[tuple[Key, QueuedGroup]] = []
        self._groups: dict[tuple[str, str], QueuedGroup] = {}

    def groups(self) -> Iterator[QueuedGroup]:
        return (group for _key, group in self._sorted)

    def extend(self, groups: Iterable[QueuedGroup]) -> None:
        """Add many new groups at once."""
        for group in groups:
            self._groups[group.prompt_id, group.avoid] = group
            self._sorted.append((self._order(group), group))
            self.samples += len(group.ks)
            self.longest = max(self.longest, group.tokens)
        self._sorted.sort(key=lambda item: item[0])

    def put_back(self, like: QueuedGroup, k: int, avoid: str = "") -> None:
        """Queue one sample again; `like` describes its prompt."""
        group = self._groups.get((like.prompt_id, avoid))
        if group is not None:
            bisect.insort(group.ks, k)
        else:
            group = replace(like, ks=[k], avoid=avoid, home="")
            self._groups[group.prompt_id, avoid] = group
            bisect.insort(self._sorted, (self._order(group), group), key=lambda item: item[0])
            self.longest = max(self.longest, group.tokens)
        self.samples += 1

    def take(self, assignment: Assignment) -> None:
        """Remove what was assigned; the rest of the group now has a home."""
        group = self._groups[assignment.group.prompt_id, assignment.group.avoid]
        group.home = assignment.unit_id
        for k in assignment.ks:
            self._remove(group, k)

    def discard(self, prompt_id: str, k: int, avoid: str) -> None:
        """Remove one sample that is no longer wanted."""
        self._remove(self._groups[prompt_id, avoid], k)

    def forget_home(self, unit_id: str) -> None:
        """A unit is gone: what waited for it may go anywhere."""
        for group in self._groups.values():
            if group.home == unit_id:
                group.home = ""

    def _remove(self, group: QueuedGroup, k: int) -> None:
        group.ks.remove(k)
        self.samples -= 1
        if not group.ks:
            del self._groups[group.prompt_id, group.avoid]
            place = bisect.bisect_left(self._sorted, self._order(group), key=lambda item: item[0])
            del self._sorted[place]
