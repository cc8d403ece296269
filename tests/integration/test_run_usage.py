"""What a user can get wrong: one clear line, exit code 2, before anything trains."""

from __future__ import annotations

import json
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest
from runs import command, environment, make_model, write_config


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "model")


def refused(config: Path, *arguments: str) -> str:
    """Run, and return the one line that says why not."""
    done = subprocess.run(
        command("run", config, "--out", config.parent / "runs", *arguments),
        cwd=config.parent,
        env=environment(),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2, done.stderr
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, done.stderr
    assert "Traceback" not in done.stderr
    assert not list((config.parent / "runs").glob("*/metrics.jsonl"))
    return errors[0]


def write(tmp_path: Path, model: Path, **sections: dict[str, Any]) -> Path:
    return write_config(tmp_path, **{"model": {"path": str(model)}, **sections})


def test_unknown_key(tmp_path: Path, model: Path) -> None:
    line = refused(write(tmp_path, model), "--set", "pipeline.iteration=3")
    assert "pipeline.iteration" in line and "iterations" in line


def test_wrong_model_path(tmp_path: Path, model: Path) -> None:
    line = refused(write(tmp_path, model), "--set", "model.path=/no/such/model")
    assert "/no/such/model" in line


def test_empty_dataset(tmp_path: Path, model: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("")
    line = refused(write(tmp_path, model, data={"train": {"path": str(tmp_path / "empty.jsonl")}}))
    assert "empty.jsonl" in line


def test_malformed_row(tmp_path: Path, model: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "1+1=", "answer": "2"}\n{"prompt": "1+\n')
    line = refused(write(tmp_path, model, data={"train": {"path": str(rows)}}))
    assert f"{rows}:2" in line


def test_prompt_that_does_not_fit(tmp_path: Path, model: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    long = {"prompt": "1+" * 40, "answer": ""}
    rows.write_text(f'{{"prompt": "1+1=", "answer": "2"}}\n{json.dumps(long)}\n')
    line = refused(write(tmp_path, model, data={"train": {"path": str(rows)}}))
    assert f"{rows}:2" in line and "80" in line


def test_busy_port(tmp_path: Path, model: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        line = refused(write(tmp_path, model, sgs={"port": port}))
    assert str(port) in line


def test_beyond_loopback_without_authentication(tmp_path: Path, model: Path) -> None:
    line = refused(write(tmp_path, model, sgs={"host": "0.0.0.0"}))
    assert "0.0.0.0" in line and "token" in line


def test_reward_that_cannot_be_imported(tmp_path: Path, model: Path) -> None:
    line = refused(write(tmp_path, model, reward={"fn": "nowhere:reward"}))
    assert "nowhere" in line
