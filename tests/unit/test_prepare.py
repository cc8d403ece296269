from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from services.config import Config, load_config
from services.errors import ConfigError, DataError, ModelError, PromptTooLongError, StreamRLError, UsageError
from trainer.prepare import prepare

ROOT = Path(__file__).resolve().parents[2]


def write_config(tmp_path: Path, **sections: Any) -> Path:
    tree = {
        "model": {
            "init": {
                "hidden_size": 16,
                "layers": 1,
                "heads": 2,
                "kv_heads": 1,
                "intermediate_size": 32,
                "max_positions": 160,
                "alphabet": "0123456789+*:;=",
            }
        },
        "warmup": {
            "examples": "trainer.tasks.addition:examples",
            "count": 64,
            "steps": 4,
            "batch_size": 8,
            "cache": str(tmp_path / "cache"),
        },
        "data": {
            "train": {"kind": "function", "fn": "trainer.tasks.addition:rows", "count": 20},
            "eval": {
                "kind": "function",
                "fn": "trainer.tasks.addition:rows",
                "count": 20,
                "options": {"held_out": True},
            },
        },
        "reward": {"fn": "trainer.tasks.addition:reward"},
        "sampling": {"max_tokens": 100},
    }
    tree.update(sections)
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


def run(config: Config) -> tuple[Path, list[dict[str, Any]]]:
    events: list[dict[str, Any]] = []
    return prepare(config, events.append), events


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, list[dict[str, Any]]]:
    path = write_config(tmp_path_factory.mktemp("prepared"))
    return path, *run(load_config(path))


def test_the_model_is_made_and_usable(prepared: tuple[Path, Path, list[dict[str, Any]]]) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    _, directory, events = prepared
    assert [event["event"] for event in events] == ["warmup"] * 4 + ["ready"]
    assert [event["step"] for event in events[:-1]] == [1, 2, 3, 4]
    assert events[-1] == {"event": "ready", "model": str(directory), "cached": False}
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory)
    ids = tokenizer("17+8:", return_tensors="pt")["input_ids"]
    assert tokenizer.decode(ids[0]) == "17+8:"
    assert ids.shape == (1, 5)
    assert model(ids).logits.shape == (1, 5, len(tokenizer))
    assert model.config.eos_token_id == tokenizer.eos_token_id == tokenizer("<eos>")["input_ids"][0]


def test_warm_up_is_cached_by_what_it_depends_on(prepared: tuple[Path, Path, list[dict[str, Any]]]) -> None:
    path, directory, _ = prepared
    again, events = run(load_config(path, ["optimizer.lr=0.5"]))
    assert again == directory
    assert events == [{"event": "ready", "model": str(directory), "cached": True}]
    for override in ("run.seed=1", "warmup.steps=2", "model.init.layers=2"):
        other, events = run(load_config(path, [override]))
        assert other != directory
        assert events[-1]["cached"] is False


def test_an_unfinished_directory_is_not_taken_for_the_model(
    prepared: tuple[Path, Path, list[dict[str, Any]]], tmp_path: Path
) -> None:
    path, directory, _ = prepared
    copied = tmp_path / "cache" / directory.name
    shutil.copytree(directory, copied)
    (copied / "warmup.json").unlink()
    config = load_config(path, [f"warmup.cache={tmp_path}/cache"])
    again, events = run(config)
    assert again == copied
    assert events[-1]["cached"] is False
    assert (copied / "warmup.json").exists()
    assert sorted(entry.name for entry in copied.parent.iterdir()) == [copied.name]


def test_warm_up_lowers_the_loss(tmp_path: Path) -> None:
    _, events = run(load_config(write_config(tmp_path), ["warmup.steps=60", "warmup.lr=0.01"]))
    losses = [event["loss"] for event in events[:-1]]
    assert sum(losses[-10:]) < 0.9 * sum(losses[:10])


@pytest.mark.parametrize(
    ("overrides", "error", "message"),
    [
        (["data.train.fn=trainer.tasks.addition:nothing"], ConfigError, "has no 'nothing'"),
        (["data.eval.options={wrong: 1}"], DataError, "wrong"),
        (["reward.fn=trainer.tasks.addition:nothing"], ConfigError, "reward.fn: .*has no 'nothing'"),
        (["warmup.examples=trainer.tasks.addition:nothing"], ConfigError, "warmup.examples: .*has no 'nothing'"),
        (["warmup.examples=trainer.tasks.addition:reward"], ConfigError, "warmup.examples: .*failed: TypeError"),
        (["model.init.alphabet='0123456789+'"], DataError, "characters that the tokenizer does not know"),
        (["model.init.alphabet='0123456789+*=:'"], ConfigError, "example .* not in model.init.alphabet"),
        (["sampling.stop=[ab]"], ConfigError, "sampling.stop"),
        (["sampling.max_tokens=155"], PromptTooLongError, "the model's max_position_embeddings = 160"),
        (["eval.max_tokens=155"], PromptTooLongError, "the model's max_position_embeddings = 160"),
        (["trainer.micro_batch_tokens=101"], PromptTooLongError, "trainer.micro_batch_tokens = 101"),
        (["model={path: /nowhere}"], ModelError, "/nowhere is not a directory"),
    ],
)
def test_mistakes_are_found_before_training(
    tmp_path: Path, overrides: list[str], error: type[StreamRLError], message: str
) -> None:
    events: list[dict[str, Any]] = []
    with pytest.raises(error, match=message) as caught:
        prepare(load_config(write_config(tmp_path), overrides), events.append)
    assert isinstance(caught.value, UsageError)
    assert events == []
    assert not any((tmp_path / "cache").glob("*"))


def test_a_model_directory_must_be_whole(prepared: tuple[Path, Path, list[dict[str, Any]]], tmp_path: Path) -> None:
    path, made, _ = prepared
    directory = tmp_path / "model"
    shutil.copytree(made, directory)
    config = load_config(path, [f"model={{path: {directory}}}"])
    assert run(config) == (directory, [{"event": "ready", "model": str(directory), "cached": False}])

    weights = (directory / "model.safetensors").read_bytes()
    (directory / "model.safetensors").write_bytes(weights[:-100])
    with pytest.raises(ModelError, match=r"model\.safetensors is not whole"):
        run(config)
    (directory / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="has no weights"):
        run(config)
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    (directory / "model-00001-of-00002.safetensors").write_bytes(weights)
    with pytest.raises(ModelError, match=r"model-00002-of-00002\.safetensors is missing"):
        run(config)
    (directory / "model-00002-of-00002.safetensors").write_bytes(weights)
    run(config)

    (directory / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match="no usable tokenizer"):
        run(config)
    (directory / "config.json").write_text('{"model_type": "unheard_of"}')
    with pytest.raises(ModelError, match="cannot be used"):
        run(config)
    (directory / "config.json").unlink()
    with pytest.raises(ModelError, match=r"no config\.json"):
        run(config)


def command(path: Path, *overrides: str, cwd: Path) -> tuple[int, list[dict[str, Any]]]:
    arguments = [part for override in overrides for part in ("--set", override)]
    done = subprocess.run(
        [sys.executable, "-m", "trainer.prepare", str(path), *arguments],
        cwd=cwd,
        env=dict(os.environ, PYTHONPATH=str(ROOT), PYTHONSAFEPATH="1"),
        capture_output=True,
        text=True,
        timeout=200,
    )
    return done.returncode, [json.loads(line) for line in done.stdout.splitlines()]


def test_the_command_prints_json_lines_only(tmp_path: Path) -> None:
    (tmp_path / "my_task.py").write_text(
        "print('imported')\nfrom trainer.tasks.addition import *\n"
        "def examples(count, seed):\n    print('noise')\n    return [('1+2:', '3')] * count\n"
    )
    code, events = command(write_config(tmp_path), "warmup.examples=my_task:examples", "warmup.steps=2", cwd=tmp_path)
    assert code == 0
    assert [event["event"] for event in events] == ["warmup", "warmup", "ready"]
    assert Path(events[-1]["model"]).is_dir()


def test_the_command_reports_an_error_and_its_code(tmp_path: Path) -> None:
    code, events = command(write_config(tmp_path), "data.train.fn=absent:rows", cwd=tmp_path)
    assert code == 2
    (event,) = events
    assert event["event"] == "error"
    assert "no module named 'absent'" in event["message"]


def test_held_out_prompts_that_are_trained_on_are_pointed_out(
    prepared: tuple[Path, Path, list[dict[str, Any]]], caplog: pytest.LogCaptureFixture
) -> None:
    run(load_config(prepared[0], ["data.eval.options={held_out: false}"]))
    assert "20 of 20 data.eval prompts are in data.train as well" in caplog.text
