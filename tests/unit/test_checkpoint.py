"""A checkpoint counts only with its marker."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.errors import UsageError
from trainer import checkpoint
from trainer.records import Records, read_rows, truncate_after


def write(root: Path, iteration: int, finish: bool = True) -> Path:
    directory = checkpoint.step_directory(root, iteration)
    directory.mkdir(parents=True)
    (directory / "model.safetensors").write_bytes(b"x")
    if finish:
        checkpoint.finish(directory, checkpoint.TrainerState(iteration, {"cursor": 7}, seed=1))
    return directory


def test_a_half_written_checkpoint_is_passed_over(tmp_path: Path) -> None:
    write(tmp_path, 1)
    whole = write(tmp_path, 9)
    cut = write(tmp_path, 10, finish=False)
    assert checkpoint.newest(tmp_path) == whole
    assert checkpoint.read(whole) == checkpoint.TrainerState(9, {"cursor": 7}, seed=1)
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
        records.span("trainer/0", "train", 0.0, 1.0, iteration)
    records.flush()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "iterat')  # cut by a kill
    truncate_after(tmp_path, 2)
    assert [row["iteration"] for row in read_rows(tmp_path / "metrics.jsonl")] == [0, 1]
    assert [row["iteration"] for row in read_rows(tmp_path / "timeline.jsonl")] == [0, 1]
