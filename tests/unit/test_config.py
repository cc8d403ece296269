"""The configuration: what is refused, and how clearly."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from services.config import load_config
from services.errors import EXIT_USAGE, ConfigError
from services.launch.rundir import RunDir, with_model

MINIMAL = {
    "model": {"path": "/models/small"},
    "data": {"train": {"kind": "jsonl", "path": "train.jsonl"}},
    "reward": {"fn": "mine:score"},
}


def write(tmp_path: Path, tree: object) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(tree if isinstance(tree, str) else yaml.safe_dump(tree))
    return path


def refused(path: Path, overrides: list[str] | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides or [])
    assert caught.value.exit_code == EXIT_USAGE
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_defaults_fill_a_minimal_file(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, MINIMAL))
    assert config.sgs.units == 2
    assert config.model.path == Path("/models/small")


@pytest.mark.parametrize(
    ("key", "wrong", "near"),
    [
        ("", "pipelines", "pipeline"),
        ("pipeline", "iteration", "iterations"),
        ("engine.emulated", "ptl_base", "ptl_base_s"),
        ("data.train", "paths", "path"),
        ("security.tls", "certs", "cert"),
        ("model.init", "hidden_sizes", "hidden_size"),
    ],
)
def test_an_unknown_key_is_named_with_the_nearest_valid_one(tmp_path: Path, key: str, wrong: str, near: str) -> None:
    full = f"{key}.{wrong}" if key else wrong
    message = refused(write(tmp_path, MINIMAL), [f"{full}=1"])
    assert f"unknown key `{full}`" in message
    assert f"did you mean `{near}`?" in message


def test_every_problem_is_reported(tmp_path: Path) -> None:
    message = refused(write(tmp_path, {**MINIMAL, "sampling": {"n": 0}, "sgs": {"units": "many"}}))
    assert "`sampling.n`" in message
    assert "`sgs.units`" in message


def test_a_missing_section_is_named(tmp_path: Path) -> None:
    assert "missing key `reward`" in refused(write(tmp_path, {k: v for k, v in MINIMAL.items() if k != "reward"}))


@pytest.mark.parametrize("model", [{}, {"path": "/m", "init": {}}])
def test_exactly_one_of_path_and_init(tmp_path: Path, model: dict[str, object]) -> None:
    assert "exactly one of model.path" in refused(write(tmp_path, {**MINIMAL, "model": model}))


def test_an_untrained_model_needs_a_warmup(tmp_path: Path) -> None:
    assert "needs a `warmup` section" in refused(write(tmp_path, {**MINIMAL, "model": {"init": {}}}))


def test_a_completion_must_leave_room_for_the_prompt(tmp_path: Path) -> None:
    overrides = ["sampling.max_tokens=64", "engine.max_sequence_tokens=64"]
    assert "sampling.max_tokens must be below" in refused(write(tmp_path, MINIMAL), overrides)


def test_overrides_are_yaml_and_reach_sections_that_the_file_leaves_out(tmp_path: Path) -> None:
    overrides = ["pipeline.mode=async", "sampling.stop=[a, b]", "optimizer.lr=1.0e-3", "checkpoint.every=7"]
    config = load_config(write(tmp_path, MINIMAL), overrides)
    assert config.pipeline.mode == "async"
    assert config.sampling.stop == ["a", "b"]
    assert config.optimizer.lr == pytest.approx(1e-3)
    assert config.checkpoint.every == 7


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("pipeline.mode", "expected KEY=VALUE"),
        ("=3", "expected KEY=VALUE"),
        ("model.path.x=3", "`path` is a value, not a section"),
        ("sampling.stop=[a", "not valid YAML"),
    ],
)
def test_a_malformed_override_says_what_it_should_be(tmp_path: Path, override: str, says: str) -> None:
    assert says in refused(write(tmp_path, MINIMAL), [override])


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a: [1, 2", "not valid YAML"),
        ("- a\n- b\n", "expected a mapping of sections, found list"),
        ("", "expected a mapping of sections, found NoneType"),
    ],
)
def test_a_file_that_is_no_configuration(tmp_path: Path, text: str, says: str) -> None:
    assert says in refused(write(tmp_path, text))


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    assert "no such file" in refused(tmp_path / "nope.yaml")
    assert "cannot be read" in refused(tmp_path)


def test_the_resolved_configuration_reads_back_with_the_prepared_model(tmp_path: Path) -> None:
    tree = {**MINIMAL, "model": {"init": {}}, "warmup": {"examples": "mine:examples"}}
    config = load_config(write(tmp_path, tree), ["security.token_file=secret"])
    resolved = with_model(config, Path("/cache/warm"))
    run = RunDir.open(tmp_path / "run")
    run.write_config(resolved)
    assert load_config(run.config) == resolved
    assert resolved.model.path == Path("/cache/warm")
    assert resolved.model.init is None
    assert resolved.warmup is None


def test_run_directories_do_not_collide(tmp_path: Path) -> None:
    first, second = (RunDir.create(tmp_path, "a", 1_700_000_000.0) for _ in range(2))
    assert first.path != second.path
    assert first.logs.is_dir()
    assert second.services.is_dir()
