from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.config import RewardConfig, SourceConfig
from services.errors import ConfigError, RewardError
from trainer.data.sources import load_rows
from trainer.rewards.scorer import Scorer

REWARDS = """
import ctypes, math, os, sys, time

def echo(prompt, completion, answer):
    print("noise on standard output")
    return float(completion == answer)

def by_word(prompt, completion, answer):
    if completion == "hang":
        time.sleep(3600)
    if completion == "exit":
        os._exit(7)
    if completion == "segfault":
        ctypes.string_at(0)
    if completion == "raise":
        raise ValueError("bad completion")
    if completion == "text":
        return "1.0"
    if completion == "nan":
        return math.nan
    if completion == "inf":
        return math.inf
    if completion == "pid":
        return os.getpid()
    if completion == "torch":
        return "torch" in sys.modules
    return float(completion)

def vanishes(prompt, completion, answer):
    os.unlink(__file__)
    os._exit(1)
"""


@pytest.fixture
def fn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    (tmp_path / "my_rewards.py").write_text(REWARDS)
    monkeypatch.chdir(tmp_path)
    yield "my_rewards"


def score_all(config: RewardConfig, calls: list[tuple[str, str, object]]) -> tuple[list[float | None], Scorer]:
    async def run() -> tuple[list[float | None], Scorer]:
        scorer = Scorer(config)
        await scorer.start()
        try:
            scores = await asyncio.gather(*(scorer.score(*call, {}) for call in calls))
        finally:
            await scorer.close()
        return scores, scorer

    return asyncio.run(asyncio.wait_for(run(), 120))


def test_scores_come_back_in_order_and_users_may_print(fn: str) -> None:
    calls = [("p", str(i), str(i - i % 2)) for i in range(500)]
    scores, scorer = score_all(RewardConfig(fn=f"{fn}:echo", workers=2), calls)
    assert scores == [float(i % 2 == 0) for i in range(500)]
    assert scorer.counts == {"scored": 500}


def test_what_cannot_be_scored_is_none_and_the_rest_goes_on(fn: str, caplog: pytest.LogCaptureFixture) -> None:
    words = ["1", "hang", "2", "exit", "3", "segfault", "4", "raise", "raise", "text", "nan", "inf", "5"]
    with caplog.at_level(logging.WARNING):
        scores, scorer = score_all(RewardConfig(fn=f"{fn}:by_word", timeout_s=1), [("p", w, None) for w in words])
    assert scores == [float(word) if word.isdigit() else None for word in words]
    assert scorer.counts == {"scored": 5, "timeout": 1, "crash": 2, "raised": 2, "not_a_number": 3}
    assert caplog.text.count("ValueError: bad completion") == 1
    for reason in ("no result within 1 s", "exit code 7", "SIGSEGV", "of type str", "is nan", "is inf"):
        assert caplog.text.count(reason) == 1, reason


def test_a_call_that_hangs_holds_up_nobody_else(fn: str) -> None:
    async def run() -> None:
        scorer = Scorer(RewardConfig(fn=f"{fn}:by_word", timeout_s=3600, workers=2))
        await scorer.start()
        stuck = asyncio.create_task(scorer.score("p", "hang", None, {}))
        await asyncio.sleep(0)
        assert await asyncio.gather(*(scorer.score("p", "1", None, {}) for _ in range(20))) == [1.0] * 20
        assert not stuck.done()
        await scorer.close()
        with pytest.raises(asyncio.CancelledError):
            await stuck

    asyncio.run(asyncio.wait_for(run(), 120))


def test_a_stalled_event_loop_is_not_the_workers_fault(fn: str) -> None:
    async def run() -> None:
        scorer = Scorer(RewardConfig(fn=f"{fn}:by_word", timeout_s=0.5))
        await scorer.start()
        call = asyncio.create_task(scorer.score("p", "1", None, {}))
        await asyncio.sleep(0)
        subprocess.run(["sleep", "1"], check=True)  # noqa: ASYNC221 - the stall is the test
        assert await call == 1.0
        await scorer.close()

    asyncio.run(asyncio.wait_for(run(), 120))


def test_a_killed_worker_is_replaced(fn: str) -> None:
    async def run() -> None:
        scorer = Scorer(RewardConfig(fn=f"{fn}:by_word"))
        await scorer.start()
        pid = await scorer.score("p", "pid", None, {})
        assert pid is not None
        os.kill(int(pid), signal.SIGKILL)
        scores = [await scorer.score("p", "1", None, {}) for _ in range(2)]
        assert scores in ([None, 1.0], [1.0, 1.0])
        assert await scorer.score("p", "pid", None, {}) != pid
        await scorer.close()

    asyncio.run(asyncio.wait_for(run(), 120))


def test_a_worker_is_light(fn: str) -> None:
    assert score_all(RewardConfig(fn=f"{fn}:by_word"), [("p", "torch", None)])[0] == [0.0]


def test_a_function_that_cannot_be_loaded_fails_at_start(fn: str) -> None:
    for spec, message in [(f"{fn}:nothing", "has no 'nothing'"), ("absent:f", "no module named 'absent'")]:
        with pytest.raises(ConfigError, match=f"reward.fn: .*{message}") as caught:
            score_all(RewardConfig(fn=spec), [])
        assert caught.value.exit_code == 2


def test_a_worker_that_cannot_come_back_is_an_error(fn: str) -> None:
    with pytest.raises(RewardError, match=r"cannot be started again: .*no module named 'my_rewards'"):
        score_all(RewardConfig(fn=f"{fn}:vanishes"), [("p", "1", None)] * 2)


def test_workers_die_with_their_parent(fn: str, tmp_path: Path) -> None:
    script = (
        "import asyncio, sys\n"
        "from services.config import RewardConfig\n"
        "from trainer.rewards.scorer import Scorer\n"
        "async def run():\n"
        "    scorer = Scorer(RewardConfig(fn='my_rewards:by_word'))\n"
        "    await scorer.start()\n"
        "    print(int(await scorer.score('p', 'pid', None, {})), flush=True)\n"
        "    await scorer.score('p', 'hang', None, {})\n"
        "asyncio.run(run())\n"
    )
    root = Path(__file__).resolve().parents[2]
    environment = dict(os.environ, PYTHONPATH=str(root))
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, env=environment) as parent:
        assert parent.stdout is not None
        worker = int(parent.stdout.readline())
        os.kill(worker, 0)
        parent.kill()
    for _ in range(600):
        if not _alive(worker):
            return
        subprocess.run(["sleep", "0.05"], check=True)
    pytest.fail("the worker outlived its parent")


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_math_verify() -> None:
    calls = [
        ("p", r"so the answer is \boxed{\frac{2}{4}}", r"\frac{1}{2}"),
        ("p", "the answer is 0.5", "1/2"),
        ("p", "the answer is 7", 8),
        ("p", "I do not know", "8"),
        ("p", "8", ""),
    ]
    scores, scorer = score_all(RewardConfig(kind="math_verify"), calls)
    assert scores == [1.0, 1.0, 0.0, 0.0, None]
    assert scorer.counts["raised"] == 1


@pytest.mark.parametrize("name", ["chain_sum", "spell_backward", "calendar_arithmetic"])
def test_reasoning_gym_scores_its_own_rows(name: str) -> None:
    rows = load_rows(SourceConfig(kind="reasoning_gym", name=name, count=4, seed=5))

    async def run() -> list[float | None]:
        scorer = Scorer(RewardConfig(kind="reasoning_gym"))
        await scorer.start()
        texts = [text for row in rows for text in (row.answer, f"so <answer> {row.answer} </answer>.", "nonsense!")]
        calls = zip(texts, [row for row in rows for _ in range(3)], strict=True)
        scores = await asyncio.gather(*(scorer.score(row.prompt, t, row.answer, row.extra) for t, row in calls))
        await scorer.close()
        return list(scores)

    scores = asyncio.run(asyncio.wait_for(run(), 120))
    for right, tagged, wrong in zip(scores[::3], scores[1::3], scores[2::3], strict=True):
        assert right == tagged == 1.0
        assert wrong is None or wrong < 0.5
