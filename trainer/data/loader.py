"""Which prompts come next: epochs of permutations that any rank can compute and any run can resume."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import numpy as np

from services.errors import DataError

T = TypeVar("T")


class Loader:
    """Endless row indices: each epoch is every row once, in an order fixed by `(seed, epoch)`.

    Position `p` of a run is its p-th prompt and never comes twice; its row depends on `p` alone, so that the
    cursor is the whole state. `fingerprint` identifies the dataset for `load_state_dict`.
    """

    def __init__(self, count: int, seed: int, shuffle: bool, fingerprint: str = "") -> None:
        if count < 1:
            raise DataError("the dataset has no rows")
        self._count = count
        self._seed = seed
        self._shuffle = shuffle
        self._fingerprint = fingerprint
        self._cursor = 0
        self._epoch = -1
        self._order: np.ndarray = np.empty(0, dtype=np.int64)

    @property
    def cursor(self) -> int:
        """Prompts handed out so far."""
        return self._cursor

    @property
    def epochs(self) -> float:
        """Passes over the dataset so far."""
        return self._cursor / self._count

    def take(self, n: int) -> list[tuple[int, int]]:
        """The next `n` prompts as (position in the run, row index); an epoch may end and the next begin inside."""
        taken = [(position, self._row(position)) for position in range(self._cursor, self._cursor + n)]
        self._cursor += n
        return taken

    def state_dict(self) -> dict[str, Any]:
        """JSON data: the cursor, and what it counts through."""
        return {"cursor": self._cursor, **self._identity()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken; raises `DataError` when dataset, seed or shuffling differ."""
        for key, value in self._identity().items():
            if state.get(key) != value:
                raise DataError(
                    f"the checkpoint was made with another dataset order: {key} was {state.get(key)!r}, is {value!r}; "
                    "resume with the data it was trained on"
                )
        self._cursor = int(state["cursor"])

    def _identity(self) -> dict[str, Any]:
        return {
            "count": self._count,
            "seed": self._seed,
            "shuffle": self._shuffle,
            "fingerprint": self._fingerprint,
        }

    def _row(self, position: int) -> int:
        epoch, offset = divmod(position, self._count)
        if not self._shuffle:
            return offset
        if epoch != self._epoch:
            self._epoch = epoch
            self._order = np.random.default_rng((self._seed, epoch)).permutation(self._count)
        return int(self._order[offset])


def prompt_id(position: int) -> str:
    """The id of a training prompt: unique in a run, also across epochs and resumes."""
    return f"train/{position}"


def shard(items: Sequence[T], rank: int, world: int) -> list[T]:
    """Rank `rank`'s share of one iteration's prompts; every item goes to exactly one rank, counts differ by one."""
    return list(items[rank::world])


def fingerprint(texts: Iterable[str]) -> str:
    """A digest of a dataset's prompts, in order."""
    digest = hashlib.blake2b(digest_size=16)
    for text in texts:
        data = text.encode()
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.hexdigest()
