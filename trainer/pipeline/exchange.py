"""What trainer ranks tell each other: a little metadata to all, and samples from peer to peer. Never pickle."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

import numpy as np
import torch
import torch.distributed as dist

from services.samples import SampleId
from trainer.data.batch import TrainSample
from trainer.peers import PeerError, waiting_for_peers
from trainer.pipeline.rounds import Place, RoundPlan

if TYPE_CHECKING:
    import numpy.typing as npt

_HEAD = 7  # integers that say how long the parts of one sample are


def encode(samples: Sequence[TrainSample]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """Samples as flat int64 and float64 arrays; `decode` gives equal ones back."""
    ints: list[npt.NDArray[np.int64]] = []
    floats: list[npt.NDArray[np.float64]] = []
    for sample in samples:
        name = np.frombuffer(sample.id.prompt_id.encode(), dtype=np.uint8)
        parts: tuple[npt.NDArray[np.uint8] | tuple[int, ...], ...] = (
            name,
            sample.prompt,
            sample.completion,
            sample.kept_counts,
            sample.kept_ids,
        )
        ints.append(np.array([sample.id.k, sample.staleness, *map(len, parts)], dtype=np.int64))
        ints.extend(np.asarray(part, dtype=np.int64) for part in parts)
        floats.append(np.array([sample.advantage, *sample.behaviour_logprobs], dtype=np.float64))
    return (
        np.concatenate([np.array([len(samples)], dtype=np.int64), *ints]),
        np.concatenate([np.empty(0), *floats]),
    )


def decode(ints: npt.NDArray[np.int64], floats: npt.NDArray[np.float64]) -> list[TrainSample]:
    """The samples `encode` was given."""
    samples, at, place = [], 1, 0
    for _ in range(int(ints[0])):
        k, staleness, *lengths = map(int, ints[at : at + _HEAD])
        at += _HEAD
        parts = []
        for length in lengths:
            parts.append(ints[at : at + length])
            at += length
        name, prompt, completion, kept_counts, kept_ids = parts
        advantage, *behaviour = floats[place : place + 1 + len(completion)].tolist()
        place += 1 + len(completion)
        samples.append(
            TrainSample(
                id=SampleId(name.astype(np.uint8).tobytes().decode(), k),
                prompt=tuple(prompt.tolist()),
                completion=tuple(completion.tolist()),
                behaviour_logprobs=tuple(behaviour),
                advantage=advantage,
                kept_counts=tuple(kept_counts.tolist()),
                kept_ids=tuple(kept_ids.tolist()),
                staleness=staleness,
            )
        )
    return samples


class Exchange:
    """Collectives of the trainer's ranks over the default process group (gloo for CPU tensors).

    The group's timeout bounds every wait; what exceeds it is a `PeerError` that says what was waited for. With one
    rank nothing is sent and no process group is needed.
    """

    def __init__(self, rank: int, world: int) -> None:
        self.rank = rank
        self.world = world

    def gather_ints(self, values: Sequence[int]) -> list[list[int]]:
        """Every rank's integers (any number of them), by rank. Collective."""
        return [[int(value) for value in row] for row in self._gather(torch.tensor(list(values), dtype=torch.int64))]

    def gather_floats(self, values: Sequence[float]) -> list[list[float]]:
        """Every rank's floats (any number of them), by rank. Collective."""
        return self._gather(torch.tensor(list(values), dtype=torch.float64))

    def fail_together(self, error: Exception | None) -> NoReturn:
        """End every rank once the ranks know that one of them has an `error`. Collective.

        A rank raises its own; one that has none raises a `PeerError` with what the first of the others said.
        """
        said = self.gather_ints(list(f"{type(error).__name__}: {error}".encode()) if error is not None else [])
        if error is not None:
            raise error
        rank, text = next((rank, text) for rank, text in enumerate(said) if text)
        raise PeerError(f"rank {rank} failed: {bytes(text).decode()}")

    def deliver(self, plan: RoundPlan, samples: Sequence[TrainSample]) -> list[list[TrainSample]]:
        """This rank's micro-batches of `plan`, after samples moved to where they are trained on. Collective.

        `samples` are this rank's ready ones, in the order whose lengths were planned with.
        """
        here = {Place(self.rank, item): sample for item, sample in enumerate(samples)}
        outgoing: dict[int, list[int]] = defaultdict(list)
        incoming: dict[int, list[Place]] = defaultdict(list)
        for owner, item, assignee in plan.transfers:
            if owner == self.rank:
                outgoing[assignee].append(item)
            if assignee == self.rank:
                incoming[owner].append(Place(owner, item))
        received = self._swap({peer: [samples[item] for item in items] for peer, items in outgoing.items()}, incoming)
        for peer, places in incoming.items():
            here.update(zip(places, received[peer], strict=True))
        return [[here[place] for place in micro] for micro in plan.micro_batches[self.rank]]

    def _gather(self, mine: torch.Tensor) -> list[list[float]]:
        if self.world == 1:
            return [mine.tolist()]
        with waiting_for_peers(self.rank, "the other ranks' metadata"):
            sizes = list(torch.empty(self.world, 1, dtype=torch.int64))
            dist.all_gather(sizes, torch.tensor([mine.numel()]))
            counts = [int(size) for size in sizes]
            most = max(counts)
            if most == 0:
                return [[] for _ in range(self.world)]
            padded = torch.zeros(most, dtype=mine.dtype)
            padded[: mine.numel()] = mine
            rows = list(torch.empty(self.world, most, dtype=mine.dtype))
            dist.all_gather(rows, padded)
        return [row[:count].tolist() for row, count in zip(rows, counts, strict=True)]

    def _swap(
        self, outgoing: dict[int, list[TrainSample]], incoming: dict[int, list[Place]]
    ) -> dict[int, list[TrainSample]]:
        bodies = {peer: encode(samples) for peer, samples in outgoing.items()}
        sent: list[tuple[int, dist.Work | None]] = []
        for peer, (ints, floats) in sorted(bodies.items()):
            for part in (np.array([len(ints), len(floats)]), ints, floats):
                sent.append((peer, dist.isend(torch.from_numpy(part), peer)))
        sizes = {peer: torch.empty(2, dtype=torch.int64) for peer in sorted(incoming)}
        self._wait([(peer, dist.irecv(size, peer)) for peer, size in sizes.items()], "the size of samples")
        arrived = {
            peer: (torch.empty(int(size[0]), dtype=torch.int64), torch.empty(int(size[1]), dtype=torch.float64))
            for peer, size in sizes.items()
        }
        waits = [(peer, dist.irecv(part, peer)) for peer, parts in arrived.items() for part in parts]
        self._wait(waits, "samples")
        self._wait(sent, "the taking of samples")
        return {peer: decode(ints.numpy(), floats.numpy()) for peer, (ints, floats) in arrived.items()}

    def _wait(self, works: Sequence[tuple[int, dist.Work | None]], what: str) -> None:
        for peer, work in works:
            with waiting_for_peers(self.rank, f"{what}, rank {peer}"):
                if work is not None:
                    work.wait()
