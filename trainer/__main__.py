"""One rank of the trainer, started by torchrun: `python -m trainer CONFIG --sgs HOST:PORT --run-dir DIR`."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import threading
import traceback
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from types import FrameType

import torch
import torch.distributed as dist

from services import logs, metrics, processes
from services.config import Config, load_config
from services.errors import EXIT_FAILED, ConfigError, StreamRLError, UsageError
from trainer.peers import PeerError
from trainer.pipeline.loop import TrainLoop
from trainer.records import ERROR, write_json
from trainer.setup import Rank

logger = logging.getLogger(__name__)

STORE_ENV = "STREAMRL_STORE"
_COLLECTIVE_TIMEOUT = timedelta(minutes=10)


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code; a failure is one line in the log and in `error.json`."""
    options = _parser().parse_args(arguments)
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    logs.set_up(f"trainer/{rank}")
    processes.die_with_parent()
    stop = _stop_on_signals()
    try:
        config = load_config(options.config, options.set)
        _train(config, options, rank, world, stop)
    except Exception as error:
        code = error.exit_code if isinstance(error, StreamRLError) else EXIT_FAILED
        _leave_word(options.run_dir, rank, code, error)
        return code
    logger.info("ended: %s", processes.why_ended(stop.received))
    return 0


class _Stop(threading.Event):
    """Set by the first SIGTERM or SIGINT; the second one ends the process."""

    received: signal.Signals | None = None


def _train(config: Config, options: argparse.Namespace, rank: int, world: int, stop: _Stop) -> None:
    torch.set_num_threads(config.trainer.threads)
    port = metrics.serve_metrics(config.metrics.host, 0, f"trainer rank {rank}", tls=config.security.tls)
    logger.info("metrics on %s:%d", config.metrics.host, port)
    if world != config.trainer.ranks:
        raise ConfigError(f"trainer.ranks is {config.trainer.ranks}, but torchrun started {world}")
    _join(rank, world)
    with Rank(config, options.sgs, options.run_dir, options.resume, rank, world, stop) as it:
        TrainLoop(it.parts, it.first_iteration).run()
    dist.destroy_process_group()


def _join(rank: int, world: int) -> None:
    """The process group; over a file where the launcher names one, because a TCP store listens everywhere."""
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    path = os.environ.get(STORE_ENV)
    if path:
        store = dist.FileStore(path, world)
        dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=_COLLECTIVE_TIMEOUT)
    elif "MASTER_ADDR" in os.environ:
        dist.init_process_group(backend, timeout=_COLLECTIVE_TIMEOUT)
    else:
        raise UsageError("start the trainer with `streamrl trainer`, or under torchrun")


def _stop_on_signals() -> _Stop:
    stop = _Stop()

    def on_signal(number: int, _frame: FrameType | None) -> None:
        if stop.is_set():
            os._exit(128 + number)
        stop.received = signal.Signals(number)
        stop.set()

    signal.signal(signal.SIGTERM, on_signal)
    signal.signal(signal.SIGINT, on_signal)
    return stop


def _leave_word(run_dir: Path, rank: int, code: int, error: Exception) -> None:
    """The first rank to fail says why in `error.json`; those that fail because of it only say so in the log."""
    line = str(error) if isinstance(error, StreamRLError) else f"{type(error).__name__}: {error}"
    message = " ".join(line.split())
    logger.error("ended: %s", message)
    if not isinstance(error, UsageError):
        logger.error("%s", "".join(traceback.format_exception(error)))
    if isinstance(error, PeerError):
        return
    run_dir.mkdir(parents=True, exist_ok=True)
    if not (run_dir / ERROR).exists():
        write_json(run_dir / ERROR, {"exit_code": code, "message": f"trainer rank {rank}: {message}", "rank": rank})


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m trainer", description=__doc__)
    parser.add_argument("config", type=Path)
    parser.add_argument("--sgs", required=True, metavar="HOST:PORT", help="the head")
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--resume", metavar="auto|DIR", help="continue from a checkpoint")
    return parser


if __name__ == "__main__":
    sys.exit(main())
