"""What a run says about itself: one metrics row per iteration and evaluation, Prometheus, and the summary."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any

from services import metrics
from services.config import Config
from trainer.evaluate import EvalResult
from trainer.pipeline.iteration import IterationResult
from trainer.pipeline.tally import Tally
from trainer.records import Records

logger = logging.getLogger(__name__)

Row = dict[str, Any]
_COUNTED = ("unscored", "failed", "stale", "lost", "duplicated", "groups", "zero_advantage_groups")
_REWARD_WINDOW = 5
"""Iterations averaged for `reward_start` and `reward_end`."""


class RunReport:
    """Fed with values already reduced over ranks.

    A row's `iteration_s` is all the time since the row before: waiting, training, publishing, and evaluations and
    checkpoints in between. `train_s` is forward, backward and step, `wait_s` the time in which no round could start
    because samples were missing (both of the slowest rank), and `bubble_share` is `wait_s` / `iteration_s`: waiting
    for another rank's training is in neither. `publish_s` is the copying of weights, which training waits for.
    `loss` is the objective; `kl`, `entropy`, `clip_share` and `logprob_gap_*` are means (`_max`: the largest) over the
    `tokens_trained`, those of samples with a gradient (`MicroStats`).
    """

    def __init__(self, config: Config, records: Records, first_iteration: int, earlier: Sequence[Row]) -> None:
        """`earlier`: the rows of the lives that a resumed run goes on from; they count in the summary."""
        self._config = config
        self._records = records
        self._first_iteration = first_iteration
        self._started = self._last = time.time()
        self._earlier_s = sum(row["iteration_s"] for row in earlier if row["kind"] == "iteration")
        self._iterations = [row for row in earlier if row["kind"] == "iteration"]
        self._evaluations = [row for row in earlier if row["kind"] == "eval"]

    def iteration(self, iteration: int, tally: Tally, result: IterationResult, publish_s: float) -> None:
        """`iteration` has just ended, its weights were copied in `publish_s` seconds."""
        now = time.time()
        seconds, self._last = now - self._last, now
        micro, sums, peaks = result.micro, tally.sums, tally.maxima
        tokens_trained = max(micro.tokens, 1)
        row: Row = {
            "kind": "iteration",
            "iteration": iteration,
            "iterations": self._config.pipeline.iterations,
            "time": now,
            "version": iteration + 1,
            "reward": tally.mean("reward", "scored"),
            "samples": int(sums["samples"]),
            "tokens": int(sums["tokens"]),
            "tokens_trained": micro.tokens,
            "samples_per_s": sums["samples"] / seconds,
            "tokens_per_s": sums["tokens"] / seconds,
            "iteration_s": seconds,
            "generation_s": tally.generation_s,
            "train_s": peaks["train_s"],
            "wait_s": peaks["wait_s"],
            "publish_s": publish_s,
            "bubble_share": min(1.0, peaks["wait_s"] / seconds),
            "staleness_max": max(0, int(peaks["staleness"])) if sums["samples"] else 0,
            "staleness_mean": tally.mean("staleness", "samples"),
            "loss": micro.loss_sum / result.denominator if result.denominator else 0.0,
            "grad_norm": result.last_step.grad_norm,
            "lr": result.last_step.lr,
            "kl": micro.kl_sum / tokens_trained,
            "entropy": micro.entropy_sum / tokens_trained,
            "clip_share": micro.clipped / tokens_trained,
            "logprob_gap_mean": micro.gap_sum / max(micro.gap_tokens, 1),
            "logprob_gap_max": micro.gap_max,
            "length_mean": tally.mean("tokens", "samples"),
            "length_max": max(0, int(peaks["length"])) if sums["samples"] else 0,
            "rounds": result.rounds,
            **{name: int(sums[name]) for name in _COUNTED},
        }
        self._records.metrics(row)
        self._iterations.append(row)
        _to_prometheus(row)

    def begin(self) -> None:
        """The first iteration starts now."""
        self._last = time.time()

    def evaluation(self, iteration: int, result: EvalResult) -> None:
        """`accuracy` is of what could be scored: None when that is nothing."""
        if result.missing:
            logger.warning("evaluation of v%d: %d samples have no score", result.version, result.missing)
        if result.accuracy is not None:
            metrics.TRAINER_ACCURACY.set(result.accuracy)
        samples = max(result.samples, 1)
        row: Row = {
            "kind": "eval",
            "iteration": iteration,
            "time": time.time(),
            "version": result.version,
            "accuracy": result.accuracy,
            "reward": result.reward / samples,
            "samples": int(result.samples),
            "missing": int(result.missing),
            "length_mean": result.tokens / samples,
        }
        self._records.metrics(row)
        self._evaluations.append(row)

    def finish(self, *, iterations: int, finished: bool) -> None:
        """Write summary.json, which covers all lives of a resumed run.

        `wall_s` is this life's, plus the iterations that earlier ones did before the checkpoint; rates are over all of
        it, evaluations included. `bubble_share` is over iterations alone. `accuracy_end` is None when nothing was
        evaluated after the start.
        """
        wall_s = time.time() - self._started + self._earlier_s
        rewards = [row["reward"] for row in self._iterations]
        accuracies = [row["accuracy"] for row in self._evaluations]
        samples, tokens = self._sum("samples"), self._sum("tokens")
        self._records.summary(
            {
                "finished": finished,
                "mode": self._config.pipeline.mode,
                "seed": self._config.run.seed,
                "iterations": iterations,
                "resumed_at": self._first_iteration or None,
                "wall_s": wall_s,
                "accuracy_start": accuracies[0] if accuracies else None,
                "accuracy_end": accuracies[-1] if len(accuracies) > 1 else None,
                "reward_start": _mean(rewards[:_REWARD_WINDOW]),
                "reward_end": _mean(rewards[-_REWARD_WINDOW:]),
                "samples": samples,
                "tokens": tokens,
                "samples_per_s": samples / wall_s,
                "tokens_per_s": tokens / wall_s,
                "staleness_max": max((row["staleness_max"] for row in self._iterations), default=0),
                "samples_lost": self._sum("lost"),
                "samples_duplicated": self._sum("duplicated"),
                "samples_unscored": self._sum("unscored"),
                "samples_failed": self._sum("failed"),
                "samples_stale": self._sum("stale"),
                "bubble_share": min(1.0, self._sum("wait_s") / max(self._sum("iteration_s"), 1e-9)),
                "logprob_gap_max": max((row["logprob_gap_max"] for row in self._iterations), default=0.0),
            }
        )

    def _sum(self, key: str) -> Any:
        return sum(row[key] for row in self._iterations)


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _to_prometheus(row: Row) -> None:
    metrics.TRAINER_ITERATION.set(row["iteration"] + 1)
    metrics.TRAINER_REWARD.set(row["reward"])
    metrics.TRAINER_STALENESS.set(row["staleness_max"])
    metrics.TRAINER_LOGPROB_GAP.set(row["logprob_gap_max"])
    metrics.TRAINER_TOKENS.inc(row["tokens_trained"])
    metrics.TRAINER_ITERATION_SECONDS.observe(row["iteration_s"])
    metrics.TRAINER_WAIT_SECONDS.observe(row["wait_s"])
    metrics.TRAINER_TRAIN_SECONDS.observe(row["train_s"])
    excluded = {name: row[name] for name in ("unscored", "failed", "stale")}
    for outcome, count in {**excluded, "trained": row["samples"] - row["unscored"] - row["stale"]}.items():
        metrics.TRAINER_SAMPLES.labels(outcome).inc(count)
