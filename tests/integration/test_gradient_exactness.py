"""The gradient of an iteration does not depend on how it was cut: real ranks, real backends, float64."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import training_worker
from safetensors.torch import load_file
from training_cases import CASES, make_config, make_samples, relative_error, slow_gradient, write_model

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module", params=[1, 2], ids=["1 rank", "2 ranks"])
def trained(request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp(f"ranks{request.param}")
    if request.param == 1:
        training_worker.main(model, out, rank=0, world=1)
    else:
        run_ranks(request.param, model, out)
    return out


def run_ranks(world: int, model: Path, out: Path) -> None:
    """Without torchrun, which is one more process that imports torch."""
    paths = os.pathsep.join([str(ROOT), str(HERE)])
    ranks = [
        subprocess.Popen(
            [sys.executable, str(HERE / "training_worker.py"), str(model), str(out), str(rank), str(world)],
            env=os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world)
    ]
    try:
        for rank in ranks:
            _out, err = rank.communicate(timeout=280)
            assert rank.returncode == 0, err[-4000:]
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()


@pytest.mark.parametrize(("aggregation", "case"), CASES)
@pytest.mark.parametrize("backend", ["ddp", "fsdp2"])
def test_gradient_and_update_equal_those_of_one_batch(
    trained: Path, model: Path, backend: str, aggregation: str, case: str
) -> None:
    config = make_config(model, algorithm={"aggregation": aggregation})
    expected = slow_gradient(model, config, make_samples(11))
    directory = trained / f"{backend}-{aggregation}-{case}"
    moments = load_file(directory / "optimizer.safetensors")
    # After one step the first moment is (1 - beta1) times the gradient.
    gradient = {name: moments[f"{name}.exp_avg"] / (1 - config.optimizer.betas[0]) for name in expected}
    assert relative_error(gradient, expected) < 1e-9
    before, after = load_file(model / "model.safetensors"), load_file(directory / "model.safetensors")
    step = {name: after[name] - before[name] for name in expected}
    adam = {name: -config.optimizer.lr * g / (g.abs() + config.optimizer.eps) for name, g in expected.items()}
    assert relative_error(step, adam) < 1e-9


def test_loss_curve_is_the_same_on_both_backends_and_resumes(trained: Path) -> None:
    ddp, fsdp2 = (json.loads((trained / f"{backend}-curve.json").read_text()) for backend in ("ddp", "fsdp2"))
    assert torch.allclose(torch.tensor(ddp["curve"]), torch.tensor(fsdp2["curve"]), rtol=1e-9)
    for backend, run in (("ddp", ddp), ("fsdp2", fsdp2)):
        assert run["again"] == run["curve"][3:]
        assert run["skipped"] and run["empty_tokens"] == 0
        weights = load_file(trained / f"{backend}-weights.safetensors")
        resumed = load_file(trained / f"{backend}-resumed.safetensors")
        assert weights.keys() == resumed.keys()
        assert all(torch.equal(weights[name], resumed[name]) for name in weights)
    pair = [load_file(trained / f"{backend}-weights.safetensors") for backend in ("ddp", "fsdp2")]
    assert relative_error(*pair) < 1e-9


def test_a_failure_of_one_rank_reaches_all(trained: Path) -> None:
    *others, failed = [path.read_text() for path in sorted(trained.glob("failed-*"))]
    assert failed == "ValueError: of one rank"
    assert others in ([], ["PeerError: rank 1 failed: ValueError: of one rank"])
