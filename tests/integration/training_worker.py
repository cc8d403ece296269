"""One rank of several: `training_worker.py MODEL OUT RANK WORLD`. Runs every case and writes what came out."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from training_cases import CASES, make_config, make_samples

from services.config import Config
from trainer.algorithms.aggregation import denominator
from trainer.data.batch import TrainSample
from trainer.learner import Learner
from trainer.peers import PeerError
from trainer.pipeline.exchange import Exchange
from trainer.pipeline.rounds import plan_round


def owned(case: str, rank: int, samples: list[TrainSample]) -> list[TrainSample]:
    """`lopsided`: rank 0 owns all."""
    if case == "lopsided":
        return samples if rank == 0 else []
    return samples[rank :: dist.get_world_size()]


def train(learner: Learner, exchange: Exchange, config: Config, mine: list[TrainSample]) -> tuple[float, float]:
    """One iteration in two rounds through plan and exchange; returns loss and gradient norm."""
    half = (len(mine) + 1) // 2
    loss = share = 0.0
    for part in (mine[:half], mine[half:]):
        plan = plan_round(exchange.gather_ints([sample.tokens for sample in part]), 32)
        for micro in exchange.deliver(plan, part):
            loss += learner.accumulate(micro).loss_sum
            share += denominator(micro, config)
    total = sum(row[0] for row in exchange.gather_floats([share]))
    summed = sum(row[0] for row in exchange.gather_floats([loss]))
    return summed / total, learner.step(total).grad_norm


def idle_rank(learner: Learner, exchange: Exchange, config: Config, samples: list[TrainSample]) -> None:
    """Rank 0 trains on all, the others on empty micro-batches."""
    for start in range(0, len(samples), 4):
        learner.accumulate(samples[start : start + 4] if exchange.rank == 0 else [])
    learner.accumulate([])
    learner.step(denominator(samples, config))


def main(model: Path, out: Path, rank: int, world: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{out / 'store'}", rank=rank, world_size=world)
    exchange = Exchange(rank, world)
    assert exchange.gather_ints(list(range(rank))) == [list(range(peer)) for peer in range(world)]
    for backend in ("ddp", "fsdp2"):
        for aggregation, case in CASES:
            trainer = {"backend": backend, "device": "cpu"}
            config = make_config(model, trainer=trainer, algorithm={"aggregation": aggregation})
            learner = Learner(config, model, rank, world)
            if case == "idle":
                idle_rank(learner, exchange, config, make_samples(11))
            else:
                train(learner, exchange, config, owned(case, rank, make_samples(11)))
            learner.save(out / f"{backend}-{aggregation}-{case}")
        course(backend, model, out, exchange)
    try:
        exchange.fail_together(ValueError("of one rank") if rank == world - 1 else None)
    except (ValueError, PeerError) as error:
        (out / f"failed-{rank}").write_text(f"{type(error).__name__}: {error}")
    dist.barrier()
    dist.destroy_process_group()


def course(backend: str, model: Path, out: Path, exchange: Exchange) -> None:
    """Five steps with KL and clipping, a checkpoint after the third, resumed in another learner."""
    config = make_config(
        model,
        trainer={"backend": backend, "device": "cpu"},
        algorithm={"kl_coef": 0.05},
        optimizer={"lr": 1e-2, "max_grad_norm": 0.5, "warmup_steps": 3},
    )
    learner = Learner(config, model, exchange.rank, exchange.world)
    curve = []
    for step in range(5):
        curve.append(train(learner, exchange, config, owned("even", exchange.rank, make_samples(9, seed=step))))
        if step == 2:
            learner.save(out / f"{backend}-checkpoint")
    dist.barrier()
    resumed = Learner(config, model, exchange.rank, exchange.world)
    resumed.load(out / f"{backend}-checkpoint")
    again = [
        train(resumed, exchange, config, owned("even", exchange.rank, make_samples(9, seed=step))) for step in (3, 4)
    ]
    empty = resumed.accumulate([])
    skipped = resumed.step(0.0)
    weights = dict(learner.weights())
    continued = dict(resumed.weights())
    assert [meta.name for meta in learner.tensor_metas()] == list(weights)
    if exchange.rank == 0:
        save_file(weights, out / f"{backend}-weights.safetensors")
        save_file(continued, out / f"{backend}-resumed.safetensors")
        result = {"curve": curve, "again": again, "skipped": skipped.skipped, "empty_tokens": empty.tokens}
        (out / f"{backend}-curve.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
