"""The one configuration of every process: a YAML file, checked before anything starts.

Unknown keys are refused with the nearest valid name; `--set a.b=c` overrides single values.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from services.errors import ConfigError

Port = int


class Section(BaseModel):
    """A part of the configuration: immutable, no unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class RunConfig(Section):
    name: str = "run"
    seed: int = 0
    out: Path = Field(Path("runs"), description="run directories are made below it")


class ModelInit(Section):
    """A small model made from nothing (Qwen2 architecture) with a character tokenizer; for `warmup`."""

    hidden_size: int = 128
    layers: int = 4
    heads: int = 4
    kv_heads: int = 4
    intermediate_size: int = 512
    max_positions: int = 512
    alphabet: str = "0123456789abcdefghijklmnopqrstuvwxyz +-*/=.,:;?()\n"


class ModelConfig(Section):
    """Either a directory in Hugging Face format, or `init`."""

    path: Path | None = None
    init: ModelInit | None = None
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"

    @model_validator(mode="after")
    def _one_of(self) -> ModelConfig:
        if (self.path is None) == (self.init is None):
            raise ValueError("give exactly one of model.path (a Hugging Face directory) and model.init")
        return self


class WarmupConfig(Section):
    """Supervised warm-up on a task's worked examples; its result is cached by the content of the configuration."""

    examples: str = Field(description="module:function(count, seed) -> [(prompt text, completion text)]")
    count: int = 20_000
    steps: int = 300
    batch_size: int = 64
    lr: float = 1e-3
    cache: Path = Path("~/.cache/streamrl")


class SourceConfig(Section):
    """Where prompts come from.

    `jsonl` and `parquet` read `path`; `reasoning_gym` makes the dataset `name`; `function` calls
    `fn(count, seed, **options)`, which returns rows like those of a file.
    """

    kind: Literal["jsonl", "parquet", "reasoning_gym", "function"] = "jsonl"
    path: Path | None = None
    name: str | None = None
    fn: str | None = Field(None, description="module:function")
    count: int = Field(1000, gt=0, description="rows to make (reasoning_gym, function)")
    seed: int = 0
    options: dict[str, Any] = Field(default_factory=dict)
    prompt_key: str = "prompt"
    answer_key: str = "answer"
    chat: bool = Field(False, description="apply the tokenizer's chat template")

    @model_validator(mode="after")
    def _needs(self) -> SourceConfig:
        need = {"jsonl": "path", "parquet": "path", "reasoning_gym": "name", "function": "fn"}[self.kind]
        if getattr(self, need) is None:
            raise ValueError(f"kind: {self.kind} needs `{need}`")
        return self


class DataConfig(Section):
    train: SourceConfig
    eval: SourceConfig | None = None
    shuffle: bool = True


class RewardConfig(Section):
    """How completions are scored, in worker processes that are killed past `timeout_s`."""

    kind: Literal["function", "reasoning_gym", "math_verify"] = "function"
    fn: str | None = Field(None, description="module:function(prompt, completion, answer) -> float")
    timeout_s: float = Field(10.0, gt=0)
    workers: int = Field(1, gt=0)

    @model_validator(mode="after")
    def _needs(self) -> RewardConfig:
        if self.kind == "function" and self.fn is None:
            raise ValueError("kind: function needs `fn` (module:function)")
        return self


class SamplingConfig(Section):
    n: int = Field(8, gt=0, description="samples per prompt: the group")
    temperature: float = Field(1.0, gt=0)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=0, description="0: off")
    max_tokens: int = Field(256, gt=0)
    stop: list[str] = Field(default_factory=list, description="tokens that end a sample, beside the tokenizer's EOS")


class AlgorithmConfig(Section):
    """GRPO: group advantage, clipped ratio, optional KL to the initial weights."""

    name: Literal["grpo"] = "grpo"
    clip_low: float = Field(0.2, gt=0)
    clip_high: float = Field(0.2, gt=0)
    kl_coef: float = Field(0.0, ge=0)
    normalize_std: bool = Field(True, description="divide the centred rewards by the group's standard deviation")
    aggregation: Literal["token_mean", "sequence_mean", "constant"] = "token_mean"
    constant_tokens: int = Field(
        0, ge=0, description="aggregation: constant divides by sequences x this; 0: max_tokens"
    )


class OptimizerConfig(Section):
    lr: float = Field(1e-4, gt=0)
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0
    warmup_steps: int = Field(0, ge=0)
    max_grad_norm: float = Field(1.0, gt=0)


class EmulatedTraining(Section):
    """Training that only sleeps, to measure pipelines on a small machine."""

    seconds_per_token: float = 1e-5
    seconds_per_step: float = 0.01


class TrainerConfig(Section):
    ranks: int = Field(1, gt=0)
    backend: Literal["ddp", "fsdp2", "emulated"] = "ddp"
    emulated: EmulatedTraining = EmulatedTraining()
    threads: int = Field(1, gt=0, description="torch threads per rank")
    micro_batch_tokens: int = Field(8192, gt=0, description="padded tokens of one micro-batch at most")
    device: Literal["cpu", "cuda", "auto"] = "auto"
    host: str = Field("127.0.0.1", description="rank 0 serves weights here")
    advertise: str | None = Field(None, description="how units reach rank 0, when it is not `host`")
    port: Port = 0


class PipelineConfig(Section):
    mode: Literal["batch", "stream", "async"] = "stream"
    iterations: int = Field(100, gt=0)
    prompts_per_iteration: int = Field(32, gt=0)
    steps_per_iteration: int = Field(1, gt=0, description="optimizer steps per iteration")
    staleness: int = Field(1, ge=1, description="async: trainer version minus a sample's oldest version, at most")
    commit: Literal["boundary", "immediate"] = "boundary"


class SGSConfig(Section):
    """The head."""

    host: str = "127.0.0.1"
    port: Port = 0
    units: int = Field(2, gt=0, description="units that `streamrl run` starts")
    dispatch: Literal["least_loaded"] = "least_loaded"
    window_s: float = Field(0.2, gt=0, description="planning waits this long for the announced prompts")
    sample_deadline_s: float = Field(120.0, gt=0, description="for one attempt at one sample")
    max_attempts: int = Field(3, gt=0)
    heartbeat_s: float = Field(1.0, gt=0)
    unit_timeout_s: float = Field(10.0, gt=0, description="silence after which a unit counts as dead")
    no_unit_timeout_s: float = Field(120.0, gt=0, description="a request fails when no usable unit is there so long")
    reconnect_s: float = Field(
        30.0, gt=0, description="how long peers try to reach a lost head, and it keeps a lost rank"
    )
    lookahead: int = Field(2, ge=0, description="samples a unit holds beyond its slots")


class EmulatedEngine(Section):
    """Sleeps by a latency profile: one decode step takes ptl_base_s + ptl_per_sequence_s * batch seconds."""

    ptl_base_s: float = 0.01
    ptl_per_sequence_s: float = 0.0
    prefill_s_per_token: float = 0.0
    time_scale: float = Field(1.0, gt=0)
    lengths: Literal["constant", "uniform", "lognormal", "trace"] = "lognormal"
    mean: float = 64.0
    sigma: float = 1.0
    trace: Path | None = Field(None, description="JSON lines: {prompt_id, lengths: [..]}")


class EngineConfig(Section):
    """What runs inside one DP unit."""

    kind: Literal["embedded", "emulated"] = "embedded"
    slots: int = Field(64, gt=0, description="samples decoded together at most")
    max_sequence_tokens: int = Field(512, gt=0)
    threads: int = Field(1, gt=0)
    device: Literal["cpu", "cuda", "auto"] = "auto"
    datacenter: str = "local"
    emulated: EmulatedEngine = EmulatedEngine()


class WeightsConfig(Section):
    dtype: Literal["model", "float32", "bfloat16"] = Field("model", description="transfer dtype")
    chunk_bytes: int = Field(1 << 20, gt=0, le=3 << 20)
    deadline_s: float = Field(120.0, gt=0, description="for one unit's fetch")
    max_bytes: int = Field(64 << 30, gt=0, description="a unit refuses a version larger than this")


class TLSConfig(Section):
    """PEM files. Servers present `cert`/`key`; with `ca`, both sides verify each other (mTLS)."""

    cert: Path
    key: Path
    ca: Path | None = None


class SecurityConfig(Section):
    """Needed as soon as anything listens beyond loopback."""

    token_file: Path | None = Field(None, description="a bearer token; every call carries it")
    token_env: str | None = "STREAMRL_TOKEN"
    tls: TLSConfig | None = None
    max_message_bytes: int = Field(4 << 20, gt=0)


class MetricsConfig(Section):
    host: str = "127.0.0.1"
    port: Port = Field(0, description="of the head; units and trainer always take a free one")


class EvalConfig(Section):
    every: int = Field(0, ge=0, description="iterations between evaluations; 0: only at the start and the end")
    max_tokens: int | None = None


class CheckpointConfig(Section):
    every: int = Field(50, gt=0, description="iterations; one is always written at the end and on Ctrl-C")
    keep: int = Field(2, gt=0)


class Config(Section):
    run: RunConfig = RunConfig()
    model: ModelConfig
    warmup: WarmupConfig | None = None
    data: DataConfig
    reward: RewardConfig
    sampling: SamplingConfig = SamplingConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    trainer: TrainerConfig = TrainerConfig()
    pipeline: PipelineConfig = PipelineConfig()
    sgs: SGSConfig = SGSConfig()
    engine: EngineConfig = EngineConfig()
    weights: WeightsConfig = WeightsConfig()
    security: SecurityConfig = SecurityConfig()
    metrics: MetricsConfig = MetricsConfig()
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()

    @model_validator(mode="after")
    def _consistent(self) -> Config:
        if self.model.init is not None and self.warmup is None:
            raise ValueError("model.init needs a `warmup` section: an untrained model earns no reward")
        if self.pipeline.prompts_per_iteration % self.pipeline.steps_per_iteration:
            raise ValueError("pipeline.prompts_per_iteration must be a multiple of pipeline.steps_per_iteration")
        if self.sampling.max_tokens >= self.engine.max_sequence_tokens:
            raise ValueError("sampling.max_tokens must be below engine.max_sequence_tokens, which includes the prompt")
        return self


def load_config(path: Path, overrides: Sequence[str] = ()) -> Config:
    """Read `path`, apply `a.b=value` overrides (values are YAML), and check all of it.

    Relative paths in the file are relative to the working directory. Raises `ConfigError` with one line per problem.
    """
    try:
        tree = yaml.safe_load(path.read_text())
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: expected a mapping of sections, found {type(tree).__name__}")
    for override in overrides:
        _apply(tree, override)
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(f"{path}: " + "; ".join(_explain(problem, tree) for problem in error.errors())) from None


def _apply(tree: dict[str, Any], override: str) -> None:
    key, separator, value = override.partition("=")
    if not separator or not key:
        raise ConfigError(f"--set {override}: expected KEY=VALUE, for example --set pipeline.mode=async")
    *parents, leaf = key.split(".")
    node = tree
    for parent in parents:
        child = node.get(parent)
        if child is None:
            child = node[parent] = {}
        if not isinstance(child, dict):
            raise ConfigError(f"--set {override}: `{parent}` is a value, not a section")
        node = child
    try:
        node[leaf] = yaml.safe_load(value)
    except yaml.YAMLError:
        raise ConfigError(f"--set {override}: the value is not valid YAML") from None


def _explain(problem: Any, tree: dict[str, Any]) -> str:
    where = [str(part) for part in problem["loc"]]
    key = ".".join(where) or "config"
    if problem["type"] == "extra_forbidden":
        near = difflib.get_close_matches(where[-1], _valid_keys(where[:-1]), n=1, cutoff=0.5)
        return f"unknown key `{key}`" + (f"; did you mean `{near[0]}`?" if near else "")
    if problem["type"] == "missing":
        return f"missing key `{key}`"
    message = problem["msg"].removeprefix("Value error, ")
    return f"`{key}`: {message}"


def _valid_keys(path: Sequence[str]) -> list[str]:
    model: type[BaseModel] = Config
    for part in path:
        field = model.model_fields.get(part)
        if field is None:
            return []
        candidates = [field.annotation, *getattr(field.annotation, "__args__", ())]
        sections = [c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel)]
        if not sections:
            return []
        model = sections[0]
    return list(model.model_fields)
