"""Held-out accuracy: greedy completions from the generation service, scored like training samples."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import astuple, dataclass, replace

from services.samples import Prompt, SamplingParams
from trainer.data.loader import shard
from trainer.data.prompts import PromptItem, PromptSet
from trainer.pipeline.exchange import Exchange
from trainer.rollout import Stream, StreamRequest

CORRECT = 1.0
"""A completion is correct when its reward reaches this."""

_POLL_S = 0.1

OpenStream = Callable[[StreamRequest, dict[str, PromptItem]], Stream]


@dataclass(frozen=True)
class EvalResult:
    """Sums over the held-out set; `missing` samples failed or could not be scored and count in nothing else.

    `version` is the oldest that may answer: during training the last samples may come from the one after it.
    """

    version: int
    samples: float = 0.0
    correct: float = 0.0
    reward: float = 0.0
    tokens: float = 0.0
    missing: float = 0.0

    @property
    def accuracy(self) -> float | None:
        """Correct ones among the scored, 0 to 1; None when nothing could be scored."""
        return self.correct / self.samples if self.samples else None


class _Pass:
    """This rank's share of one evaluation."""

    def __init__(self, stream: Stream, version: int) -> None:
        self.stream = stream
        self.sums = EvalResult(version)

    def collect(self) -> tuple[bool, Exception | None]:
        """Count what came since the last call; True once all is in. The stream's error is returned, not raised:
        all ranks learn of it together."""
        try:
            groups = self.stream.drain()
        except Exception as error:
            return False, error
        for group in groups:
            scored = [
                (sample, reward)
                for sample, reward in zip(group.samples, group.rewards, strict=True)
                if reward is not None
            ]
            self.sums = replace(
                self.sums,
                samples=self.sums.samples + len(scored),
                correct=self.sums.correct + sum(reward >= CORRECT for _sample, reward in scored),
                reward=self.sums.reward + sum(reward for _sample, reward in scored),
                tokens=self.sums.tokens + sum(len(sample.token_ids) for sample, _reward in scored),
                missing=self.sums.missing + len(group.failures) + len(group.samples) - len(scored),
            )
        return self.stream.exhausted, None


class Evaluator:
    """Opens evaluations and collects them while training goes on. All ranks call its methods together."""

    def __init__(
        self,
        prompts: PromptSet,
        sampling: SamplingParams,
        exchange: Exchange,
        open_stream: OpenStream,
        *,
        stop: threading.Event,
        on_result: Callable[[EvalResult], None],
    ) -> None:
        self._prompts = prompts
        self._sampling = sampling
        self._exchange = exchange
        self._open_stream = open_stream
        self._stop = stop
        self._on_result = on_result
        self._passes: deque[_Pass] = deque()
        self._opened = 0

    def start(self, version: int) -> None:
        """Ask for one pass at `version` or newer."""
        name = f"eval/{version}.{self._opened}"
        self._opened += 1
        share = shard(range(len(self._prompts)), self._exchange.rank, self._exchange.world)
        rows = {f"{name}/{row}": self._prompts.item(row) for row in share}
        request = StreamRequest(
            name=name,
            prompts=tuple(Prompt(prompt, item.token_ids) for prompt, item in rows.items()),
            total_prompts=len(self._prompts),
            n=1,
            sampling=self._sampling,
            min_version=version,
        )
        self._passes.append(_Pass(self._open_stream(request, rows), version))

    def settle(self) -> bool:
        """Report the passes that are in on every rank, oldest first; True when none is open. Collective.

        Raises on every rank what failed on one.
        """
        while self._passes:
            current = self._passes[0]
            complete, error = current.collect()
            mine = [complete, self._stop.is_set(), error is not None, *astuple(current.sums)]
            rows = self._exchange.gather_floats(mine)
            if any(row[2] for row in rows):
                self._exchange.fail_together(error)
            if any(row[1] for row in rows):
                self._passes.clear()
                return True
            if not all(row[0] for row in rows):
                return False
            self._passes.popleft()
            totals = [sum(column) for column in zip(*(row[4:] for row in rows), strict=True)]
            self._on_result(EvalResult(current.sums.version, *totals))
        return True

    def finish(self) -> None:
        """Wait for every open pass, or for a stop. Collective."""
        while not self.settle():
            self._passes[0].stream.wait(_POLL_S)
