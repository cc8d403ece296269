"""What a rank says when another one failed first."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from services.errors import TrainingError


class PeerError(TrainingError):
    """This rank cannot go on because of another one; that one's own error is the cause of the run's end."""


@contextmanager
def waiting_for_peers(rank: int, what: str) -> Iterator[None]:
    """Around a collective and nothing else: its failure becomes a `PeerError` that says `what` was waited for."""
    try:
        yield
    except RuntimeError as error:
        raise PeerError(f"rank {rank}: waiting for {what}: {error}") from error
