"""A checkpoint counts only with its marker."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from services.config import Config
from services.errors import UsageError
from trainer import checkpoint
from trainer.records import Records, earlier_run, truncate_from
from trainer.setup import Rank


def write(root: Path, iteration: int, finish: bool = True) -> Path:
    directory = checkpoint.step_directory(root, iteration)
    directory.mkdir(parents=True)
    (directory / "model.safetensors").write_bytes(b"x")
    if finish:
        checkpoint.finish(directory, checkpoint.TrainerState(iteration, {"cursor": 7}))
    return directory


def test_a_half_written_checkpoint_is_passed_over(tmp_path: Path) -> None:
    write(tmp_path, 1)
    whole = write(tmp_path, 9)
    cut = write(tmp_path, 10, finish=False)
    assert checkpoint.newest(tmp_path) == whole
    assert checkpoint.read(whole) == checkpoint.TrainerState(9, {"cursor": 7})
    with pytest.raises(UsageError, match="not a finished checkpoint"):
        checkpoint.read(cut)


def test_pruning_keeps_the_newest(tmp_path: Path) -> None:
    for iteration in (1, 2, 3):
        write(tmp_path, iteration)
    checkpoint.prune(tmp_path, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000002", "step-000003"]


def test_nothing_there(tmp_path: Path) -> None:
    assert checkpoint.newest(tmp_path / "missing") is None


def test_a_resumed_run_starts_where_the_checkpoint_was(tmp_path: Path) -> None:
    records = Records(tmp_path, rank=0)
    for iteration in range(4):
        records.metrics({"kind": "iteration", "iteration": iteration})
        records.ledger([{"iteration": iteration, "k": k} for k in range(2)])
        records.span("trainer/0", "train", 0.0, 1.0, iteration)
    records.flush()
    records.summary({"finished": False})
    # One rank was killed inside a row, another one appended after it.
    with (tmp_path / "ledger.jsonl").open("a") as file:
        file.write('{"iteration": 4, "k"{"iteration": 4, "k": 1}\n{"iterat')
    assert truncate_from(tmp_path, 2) == [{"kind": "iteration", "iteration": i} for i in (0, 1)]
    for name, each in (("metrics", 1), ("timeline", 1), ("ledger", 2)):
        text = (tmp_path / f"{name}.jsonl").read_text()
        assert [json.loads(line)["iteration"] for line in text.splitlines()] == [0] * each + [1] * each
    assert not (tmp_path / "summary.json").exists()


def test_a_half_written_checkpoint_leaves_nothing_in_the_next(tmp_path: Path) -> None:
    cut = write(tmp_path, 3, finish=False)
    (cut / "model-00002-of-00002.safetensors").touch()
    checkpoint.begin(cut)
    assert list(cut.iterdir()) == [] and not checkpoint.finished(cut)


def test_a_resume_removes_what_it_does_again(tmp_path: Path) -> None:
    kept = [write(tmp_path, iteration) for iteration in (2, 4)]
    write(tmp_path, 6)
    write(tmp_path, 8, finish=False)
    checkpoint.discard_from(tmp_path, 4, but=kept[1])
    assert sorted(tmp_path.iterdir()) == kept
    checkpoint.discard_from(tmp_path, 4, but=None)
    assert sorted(tmp_path.iterdir()) == kept[:1]


def test_a_directory_that_holds_a_run_is_noticed(tmp_path: Path) -> None:
    assert earlier_run(tmp_path) is None
    Records(tmp_path, rank=0).metrics({"iteration": 0})
    assert earlier_run(tmp_path) == tmp_path / "metrics.jsonl"
    sections = {"model": {"path": "m"}, "data": {"train": {"path": "d"}}, "reward": {"fn": "a:b"}}
    with pytest.raises(UsageError, match=r"metrics\.jsonl is of an earlier run: .*--resume auto"):
        Rank(Config.model_validate(sections), "127.0.0.1:1", tmp_path, None, 0, 1, threading.Event())
