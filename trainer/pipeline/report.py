"""What a run says about itself: one metrics row per iteration and evaluation, Prometheus, and the summary."""

from __future__ import annotations

import time
from typing import Any

from services import metrics
from services.config import Config
from trainer.evaluate import EvalResult
from trainer.pipeline.iteration import IterationResult
from trainer.pipeline.tally import Tally
from trainer.records import Records

_REWARD_WINDOW = 5
"""Iterations averaged for `reward_start` and `reward_end`."""


class RunReport:
    """Fed with values already reduced over ranks."""

    def __init__(self, config: Config, records: Records) -> None:
        self._config = config
        self._records = records
        self._started = time.time()
        self._last = self._started
        self._rewards: list[float] = []
        self._accuracies: list[float] = []
        self._sums: dict[str, float] = {}
        self._staleness_max = 0.0
        self._gap_max = 0.0
        self._wait_s = 0.0

    def iteration(self, iteration: int, tally: Tally, result: IterationResult, publish_s: float) -> None:
        """`iteration` has just ended, its weights were handed to publishing in `publish_s` seconds."""
        now = time.time()
        seconds, self._last = now - self._last, now
        micro, sums, peaks = result.micro, tally.sums, tally.maxima
        tokens_trained = max(micro.tokens, 1)
        reward = tally.mean("reward", "scored")
        row: dict[str, Any] = {
            "kind": "iteration",
            "iteration": iteration,
            "iterations": self._config.pipeline.iterations,
            "time": now,
            "version": iteration + 1,
            "reward": reward,
            "samples": int(sums["samples"]),
            "tokens": int(sums["tokens"]),
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
            "loss": micro.loss_sum / tokens_trained,
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
            **{
                name: int(sums[name])
                for name in ("unscored", "failed", "stale", "lost", "duplicated", "groups", "zero_advantage_groups")
            },
        }
        self._records.metrics(row)
        self._count(row, tally)
        _to_prometheus(row)

    def begin(self) -> None:
        """The first iteration starts now."""
        self._last = time.time()

    def evaluation(self, iteration: int, result: EvalResult) -> None:
        self._accuracies.append(result.accuracy)
        metrics.TRAINER_ACCURACY.set(result.accuracy)
        samples = max(result.samples, 1)
        self._records.metrics(
            {
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
        )

    def finish(self, *, iterations: int, finished: bool) -> None:
        """Write summary.json. Rates are over the whole run, evaluations included."""
        wall_s = time.time() - self._started
        rewards = self._rewards
        head, tail = rewards[:_REWARD_WINDOW], rewards[-_REWARD_WINDOW:]
        self._records.summary(
            {
                "finished": finished,
                "mode": self._config.pipeline.mode,
                "seed": self._config.run.seed,
                "iterations": iterations,
                "wall_s": wall_s,
                "accuracy_start": self._accuracies[0] if self._accuracies else None,
                "accuracy_end": self._accuracies[-1] if self._accuracies else None,
                "reward_start": sum(head) / len(head) if head else None,
                "reward_end": sum(tail) / len(tail) if tail else None,
                "samples": int(self._sums.get("samples", 0)),
                "tokens": int(self._sums.get("tokens", 0)),
                "samples_per_s": self._sums.get("samples", 0) / wall_s,
                "tokens_per_s": self._sums.get("tokens", 0) / wall_s,
                "staleness_max": int(self._staleness_max),
                "samples_lost": int(self._sums.get("lost", 0)),
                "samples_duplicated": int(self._sums.get("duplicated", 0)),
                "samples_unscored": int(self._sums.get("unscored", 0)),
                "samples_failed": int(self._sums.get("failed", 0)),
                "samples_stale": int(self._sums.get("stale", 0)),
                "bubble_share": min(1.0, self._wait_s / wall_s),
                "logprob_gap_max": self._gap_max,
            }
        )

    def _count(self, row: dict[str, Any], tally: Tally) -> None:
        self._rewards.append(row["reward"])
        self._staleness_max = max(self._staleness_max, row["staleness_max"])
        self._gap_max = max(self._gap_max, row["logprob_gap_max"])
        self._wait_s += row["wait_s"]
        for name, value in tally.sums.items():
            self._sums[name] = self._sums.get(name, 0.0) + value


def _to_prometheus(row: dict[str, Any]) -> None:
    metrics.TRAINER_ITERATION.set(row["iteration"] + 1)
    metrics.TRAINER_REWARD.set(row["reward"])
    metrics.TRAINER_STALENESS.set(row["staleness_max"])
    metrics.TRAINER_LOGPROB_GAP.set(row["logprob_gap_max"])
    metrics.TRAINER_TOKENS.inc(row["tokens"])
    metrics.TRAINER_ITERATION_SECONDS.observe(row["iteration_s"])
    metrics.TRAINER_WAIT_SECONDS.observe(row["wait_s"])
    metrics.TRAINER_TRAIN_SECONDS.observe(row["train_s"])
    metrics.TRAINER_PUBLISH_SECONDS.observe(row["publish_s"])
    excluded = {name: row[name] for name in ("unscored", "failed", "stale")}
    for outcome, count in {**excluded, "trained": row["samples"] - row["unscored"] - row["stale"]}.items():
        metrics.TRAINER_SAMPLES.labels(outcome).inc(count)
