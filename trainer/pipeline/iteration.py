"""One iteration on one rank: dynamic batches from a stream of groups into optimizer steps.

The three modes differ only in when a round may start (`should_start`) and in which weights may generate
(`schedule.min_version`); the gradient is the same however the samples are cut (one global denominator per step).
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from services.config import Config
from trainer.algorithms.aggregation import denominator
from trainer.algorithms.stats import MicroStats, StepStats
from trainer.data.batch import TrainSample
from trainer.learner import Learner
from trainer.pipeline.exchange import Exchange
from trainer.pipeline.groups import ScoredGroup
from trainer.pipeline.intake import Intake
from trainer.pipeline.rounds import plan_round, should_start
from trainer.pipeline.schedule import group_quotas
from trainer.pipeline.tally import Tally
from trainer.rollout import Stream

_ALONE_POLL_S = 0.5
_SHARED_POLL_S = 0.02

OnSpan = Callable[[str, float, float], None]


class Stopped(Exception):
    """Every rank agreed to stop; the iteration's partial gradient was dropped."""


class _Status(NamedTuple):
    """What a rank tells the others before each round."""

    stop: int
    failed: int
    all_in: int


@dataclass(frozen=True)
class IterationResult:
    """`denominator` is the sum over steps and ranks of what losses were divided by."""

    rounds: int
    micro: MicroStats
    denominator: float
    last_step: StepStats


class IterationRunner:
    """Runs one iteration; all ranks call `run` together."""

    def __init__(
        self,
        config: Config,
        learner: Learner,
        exchange: Exchange,
        stream: Stream,
        intake: Intake,
        tally: Tally,
        *,
        stop: threading.Event,
        on_span: OnSpan,
    ) -> None:
        self._config = config
        self._learner = learner
        self._exchange = exchange
        self._stream = stream
        self._intake = intake
        self._tally = tally
        self._stop = stop
        self._on_span = on_span
        self._backlog: deque[ScoredGroup] = deque()
        self._ready: list[TrainSample] = []
        self._micro = MicroStats()
        self._used = 0
        self._weight = 0.0
        self._denominator = 0.0
        self._rounds = 0
        self._wait_s = 0.0
        self._train_s = 0.0

    def run(self) -> IterationResult:
        """Raises `Stopped`, or on every rank what failed on one: `GenerationError`, `RewardError`, `TrainingError`."""
        quotas = group_quotas(len(self._stream.request.prompts), self._config.pipeline.steps_per_iteration)
        for step, quota in enumerate(quotas):
            result = self._step(quota, may_stop=step == 0)
        self._tally.peak(wait_s=self._wait_s, train_s=self._train_s)
        return IterationResult(self._rounds, self._micro, self._denominator, result)

    def _step(self, quota: int, may_stop: bool) -> StepStats:
        """Rounds until every rank used its `quota` of groups, then one optimizer step."""
        while True:
            error = self._admit(quota)
            mine = _Status(self._stop.is_set() and may_stop, error is not None, self._used >= quota)
            statuses, lengths = self._agree(mine, error)
            if any(status.stop for status in statuses):
                raise Stopped
            all_in = all(status.all_in for status in statuses)
            if self._may_start(lengths, all_in):
                self._round(lengths)
            elif all_in:
                return self._finish_step()
            else:
                self._wait()

    def _admit(self, quota: int) -> Exception | None:
        """Take complete groups up to `quota`; an error is returned, so that all ranks learn of it together."""
        try:
            self._backlog.extend(self._stream.drain())
            while self._backlog and self._used < quota:
                taken = self._intake.take(self._backlog.popleft())
                self._used += 1
                self._ready.extend(taken.ready)
                self._weight += denominator(taken.counted, self._config)
        except Exception as error:
            return error
        return None

    def _agree(self, mine: _Status, error: Exception | None) -> tuple[list[_Status], list[list[int]]]:
        """All ranks' statuses and the lengths of their ready samples: metadata only."""
        rows = self._exchange.gather_ints([*map(int, mine), *(sample.tokens for sample in self._ready)])
        statuses = [_Status(*row[: len(_Status._fields)]) for row in rows]
        if any(status.failed for status in statuses):
            self._exchange.fail_together(error)
        return statuses, [row[len(_Status._fields) :] for row in rows]

    def _may_start(self, lengths: Sequence[Sequence[int]], all_in: bool) -> bool:
        tokens = [sum(row) for row in lengths]
        if not any(tokens):
            return False
        if self._config.pipeline.mode == "batch":
            return all_in
        return should_start(tokens, len(lengths), self._config.trainer.micro_batch_tokens, all_in)

    def _round(self, lengths: Sequence[Sequence[int]]) -> None:
        start = time.time()
        plan = plan_round(lengths, self._config.trainer.micro_batch_tokens)
        for micro in self._exchange.deliver(plan, self._ready):
            self._micro += self._learner.accumulate(micro)
        self._ready = []
        self._rounds += 1
        self._trained("train", start)

    def _wait(self) -> None:
        start = time.time()
        self._stream.wait(_ALONE_POLL_S if self._exchange.world == 1 else _SHARED_POLL_S)
        end = time.time()
        self._wait_s += end - start
        self._on_span("wait", start, end)

    def _finish_step(self) -> StepStats:
        start = time.time()
        total = sum(row[0] for row in self._exchange.gather_floats([self._weight]))
        self._weight = 0.0
        self._denominator += total
        stats = self._learner.step(total)
        self._trained("step", start)
        return stats

    def _trained(self, kind: str, start: float) -> None:
        end = time.time()
        self._train_s += end - start
        self._on_span(kind, start, end)
