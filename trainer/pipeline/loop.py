"""The training loop of one rank: open streams ahead, run iterations, publish, evaluate, save."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

from services.config import Config
from services.errors import TrainingError
from services.jsonlines import JsonLines
from services.samples import Prompt, Sample, SamplingParams
from services.transport.packing import Packer
from trainer import checkpoint
from trainer.algorithms.stats import MicroStats
from trainer.data.loader import Loader, prompt_id, shard
from trainer.data.prompts import PromptItem, PromptSet
from trainer.evaluate import EvalResult, Evaluator
from trainer.learner import Learner
from trainer.pipeline.exchange import Exchange
from trainer.pipeline.intake import Intake
from trainer.pipeline.iteration import IterationResult, IterationRunner, Stopped
from trainer.pipeline.report import RunReport
from trainer.pipeline.schedule import min_version, open_until, staleness_bound
from trainer.pipeline.tally import Tally
from trainer.publish import Publisher, Snapshotter
from trainer.records import METRICS, Records
from trainer.rollout import RolloutClient, Stream, StreamRequest
from trainer.scoring import SampleScorer
from trainer.service_loop import ServiceLoop


@dataclass(frozen=True)
class Parts:
    """What a rank's loop works with; `publisher` is there on rank 0 only."""

    config: Config
    learner: Learner
    exchange: Exchange
    services: ServiceLoop
    client: RolloutClient
    publisher: Publisher | None
    scorer: SampleScorer
    records: Records
    train: PromptSet
    held_out: PromptSet | None
    loader: Loader
    sampling: SamplingParams
    eval_sampling: SamplingParams
    run_dir: Path
    stop: threading.Event


class TrainLoop:
    """Construct on every rank, then `run`. Iteration `i` trains at version `i` and publishes `i + 1`."""

    def __init__(self, parts: Parts, first_iteration: int) -> None:
        self._p = parts
        self._config = parts.config
        self._first = self._iteration = first_iteration
        self._opened = first_iteration
        self._streams: dict[int, Stream] = {}
        self._snapshotter = Snapshotter(parts.learner.tensor_metas(), parts.config.weights.dtype)
        self._cursors = {first_iteration: parts.loader.cursor}
        earlier = JsonLines(parts.run_dir / METRICS).read()
        self._report = RunReport(parts.config, parts.records, first_iteration, earlier)
        self._evaluator: Evaluator | None = None
        if parts.held_out is not None:
            self._evaluator = Evaluator(
                parts.held_out,
                parts.eval_sampling,
                parts.exchange,
                self._open,
                stop=parts.stop,
                on_result=self._on_evaluation,
            )

    def run(self) -> None:
        """Until the last iteration or a stop; then checkpoint, model and summary are on disk."""
        self._publish()
        self._evaluate_now()
        self._report.begin()
        try:
            while self._iteration < self._config.pipeline.iterations:
                self._open_streams()
                self._run_iteration()
                self._between_iterations()
            if self._iteration > self._first:
                self._evaluate_now()
        except Stopped:
            pass  # all ranks agreed; what was finished is saved below
        directory = self._checkpoint()
        if self._p.exchange.rank == 0:
            checkpoint.export_model(directory, self._p.run_dir / "model")
        finished = self._iteration == self._config.pipeline.iterations
        self._report.finish(iterations=self._iteration, finished=finished)
        self._p.records.flush()

    def _open_streams(self) -> None:
        for iteration in range(self._opened, open_until(self._iteration, self._config.pipeline)):
            items = self._p.loader.take(self._config.pipeline.prompts_per_iteration)
            mine = shard(items, self._p.exchange.rank, self._p.exchange.world)
            rows = {prompt_id(position): self._p.train.item(row) for position, row in mine}
            request = StreamRequest(
                name=f"train/{iteration}",
                prompts=tuple(Prompt(name, item.token_ids) for name, item in rows.items()),
                total_prompts=len(items),
                n=self._config.sampling.n,
                sampling=self._p.sampling,
                min_version=min_version(iteration, self._config.pipeline),
            )
            self._streams[iteration] = self._open(request, rows)
            self._opened = iteration + 1
            self._cursors[self._opened] = self._p.loader.cursor

    def _open(self, request: StreamRequest, rows: dict[str, PromptItem]) -> Stream:
        async def score(sample: Sample) -> float | None:
            return await self._p.scorer.score(rows[sample.id.prompt_id], sample)

        stream = Stream(request)
        self._p.services.start(self._p.client.run(stream, score))
        return stream

    def _run_iteration(self) -> None:
        iteration = self._iteration
        stream = self._streams.pop(iteration)
        tally, rows = Tally(), list[dict[str, Any]]()
        intake = Intake(
            stream.request.prompts,
            stream.request.n,
            version=iteration,
            staleness_bound=staleness_bound(self._config.pipeline),
            normalize_std=self._config.algorithm.normalize_std,
            skip_zero=self._config.algorithm.kl_coef == 0.0,
            tally=tally,
            on_row=rows.append,
            on_sample=self._sample_span,
        )
        result = IterationRunner(
            self._config,
            self._p.learner,
            self._p.exchange,
            stream,
            intake,
            tally,
            stop=self._p.stop,
            on_span=self._lane(f"trainer/{self._p.exchange.rank}"),
        ).run()
        tally.add(lost=intake.ledger.lost, duplicated=intake.ledger.duplicated + stream.assembler.duplicates)
        self._p.records.ledger(rows)
        tally, result = self._over_ranks(tally, result)
        if tally.sums["scored"] == 0:
            self._nothing_trained(tally, intake.excluded)
        self._iteration += 1
        del self._cursors[iteration]
        publish_s = self._publish()
        self._report.iteration(iteration, tally, result, publish_s)

    def _over_ranks(self, tally: Tally, result: IterationResult) -> tuple[Tally, IterationResult]:
        """Collective."""
        vectors = self._p.exchange.gather_floats([*tally.vector(), *result.micro.vector()])
        cut = len(tally.vector())
        micro = MicroStats()
        for vector in vectors:
            micro += MicroStats.of(vector[cut:])
        return Tally.merge([vector[:cut] for vector in vectors]), replace(result, micro=micro)

    def _nothing_trained(self, tally: Tally, excluded: Sequence[str]) -> NoReturn:
        """Raise `TrainingError` on every rank; one that has samples of its own names the first. Collective."""
        counts = ", ".join(f"{tally.sums[name]:.0f} {name}" for name in ("failed", "unscored", "stale"))
        error = TrainingError(
            f"iteration {self._iteration}: no sample could be trained on ({counts}): {'; '.join(excluded)}"
        )
        self._p.exchange.fail_together(error if excluded else None)

    def _publish(self) -> float:
        """Copy the weights (collective) and hand them to the service loop; returns the seconds this took."""
        start = time.time()
        if self._p.publisher is None:
            for _tensor in self._p.learner.weights():
                pass
            return time.time() - start
        packer = self._snapshotter.take(self._iteration, self._p.learner.weights())
        self._p.services.start(self._hand_over(self._p.publisher, packer))
        end = time.time()
        self._p.records.span("trainer/0", "publish", start, end, self._iteration - 1)
        return end - start

    async def _hand_over(self, publisher: Publisher, packer: Packer) -> None:
        """Without new weights no new samples come: what is waited for ends with the reason."""
        try:
            await publisher.publish(packer)
        except Exception as error:
            self._p.client.fail(error)

    def _between_iterations(self) -> None:
        every = self._config.eval.every
        last = self._iteration == self._config.pipeline.iterations
        if self._evaluator is not None:
            if every and self._iteration % every == 0 and not last:
                self._evaluator.start(self._iteration)
            self._evaluator.settle()
        self._p.records.flush()
        if self._iteration % self._config.checkpoint.every == 0 and not last:
            self._checkpoint()

    def _evaluate_now(self) -> None:
        if self._evaluator is None:
            return
        start = time.time()
        self._evaluator.start(self._iteration)
        self._evaluator.finish()
        self._lane(f"trainer/{self._p.exchange.rank}")("eval", start, time.time())

    def _on_evaluation(self, result: EvalResult) -> None:
        self._report.evaluation(self._iteration, result)

    def _checkpoint(self) -> Path:
        """Everything that must move together, the marker last. Collective."""
        start = time.time()
        root = self._p.run_dir / "checkpoints"
        directory = checkpoint.step_directory(root, self._iteration)
        if checkpoint.finished(directory):
            return directory  # a stop, or a resume, right after it was written
        if self._p.exchange.rank == 0:
            checkpoint.begin(directory)
        self._p.learner.save(directory)
        self._p.exchange.gather_ints([])  # every rank has written its part
        if self._p.exchange.rank == 0:
            loader = {**self._p.loader.state_dict(), "cursor": self._cursors[self._iteration]}
            checkpoint.finish(directory, checkpoint.TrainerState(self._iteration, loader))
            checkpoint.prune(root, self._config.checkpoint.keep)
        self._lane(f"trainer/{self._p.exchange.rank}")("checkpoint", start, time.time())
        return directory

    def _sample_span(self, sample: Sample) -> None:
        self._p.records.span(
            f"unit/{sample.unit_id}",
            "sample",
            sample.timings.started_at,
            sample.timings.finished_at,
            self._iteration,
            tokens=len(sample.token_ids),
        )

    def _lane(self, lane: str) -> Callable[[str, float, float], None]:
        iteration = self._iteration

        def record(kind: str, start: float, end: float) -> None:
            self._p.records.span(lane, kind, start, end, iteration)

        return record
