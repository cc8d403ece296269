from __future__ import annotations

import json
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from services.config import SourceConfig
from services.errors import ConfigError, DataError
from trainer.data.sources import load_rows


def jsonl(tmp_path: Path, *lines: str) -> SourceConfig:
    path = tmp_path / "data.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return SourceConfig(kind="jsonl", path=path)


def test_jsonl_rows_keep_their_line_and_other_keys(tmp_path: Path) -> None:
    source = jsonl(tmp_path, '{"prompt": "1+1=", "answer": 2, "level": "easy"}', "", '{"prompt": "2+2=", "answer": 4}')
    first, second = load_rows(source)
    assert (first.prompt, first.answer, first.extra) == ("1+1=", 2, {"level": "easy"})
    assert first.where == f"{source.path}:1"
    assert second.where == f"{source.path}:3"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": "x", "answer": 1', r"data\.jsonl:2: not valid JSON"),
        ('["x", 1]', r"data\.jsonl:2: expected an object with 'prompt', found list"),
        ('{"question": "x", "answer": 1}', r"data\.jsonl:2: no key 'prompt'; the row has 'question', 'answer'"),
        ('{"prompt": "x", "solution": 1}', r"data\.jsonl:2: no key 'answer'; the row has 'prompt', 'solution'"),
        ('{"prompt": 7, "answer": 1}', r"data\.jsonl:2: 'prompt' must be text or a list"),
        ('{"prompt": "", "answer": 1}', r"data\.jsonl:2: 'prompt' is empty"),
        ('{"prompt": [{"role": "user", "content": "x"}], "answer": 1}', r"data\.jsonl:2: .* set chat: true"),
    ],
)
def test_a_malformed_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        load_rows(jsonl(tmp_path, '{"prompt": "1+1=", "answer": 2}', line))


def test_chat_messages_are_checked(tmp_path: Path) -> None:
    good = jsonl(tmp_path, json.dumps({"prompt": [{"role": "user", "content": "x"}], "answer": 1}))
    assert load_rows(good.model_copy(update={"chat": True}))[0].prompt == [{"role": "user", "content": "x"}]
    bad = jsonl(tmp_path, json.dumps({"prompt": [{"content": "x"}], "answer": 1}))
    with pytest.raises(DataError, match=r":1: 'prompt' must be a list of messages with 'role' and 'content'"):
        load_rows(bad.model_copy(update={"chat": True}))


def test_missing_and_empty_files(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"none\.jsonl: no such file"):
        load_rows(SourceConfig(kind="jsonl", path=tmp_path / "none.jsonl"))
    with pytest.raises(DataError, match=r"none\.parquet: no such file"):
        load_rows(SourceConfig(kind="parquet", path=tmp_path / "none.parquet"))
    with pytest.raises(DataError, match="is a directory"):
        load_rows(SourceConfig(kind="jsonl", path=tmp_path))
    with pytest.raises(DataError, match=r"data\.jsonl: no rows"):
        load_rows(jsonl(tmp_path, ""))
    (tmp_path / "binary.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DataError, match="not UTF-8"):
        load_rows(SourceConfig(kind="jsonl", path=tmp_path / "binary.jsonl"))


def test_parquet_rows_keep_their_number(tmp_path: Path) -> None:
    path = tmp_path / "data.parquet"
    pq.write_table(pa.table({"q": ["a", "b"], "a": [1, 2], "n": [[1], [2, 3]]}), path)
    rows = load_rows(SourceConfig(kind="parquet", path=path, prompt_key="q", answer_key="a"))
    assert [(r.prompt, r.answer, r.extra, r.where) for r in rows] == [
        ("a", 1, {"n": [1]}, f"{path}: row 0"),
        ("b", 2, {"n": [2, 3]}, f"{path}: row 1"),
    ]
    with pytest.raises(DataError, match=r"row 0: no key 'prompt'; the row has 'q', 'a', 'n'"):
        load_rows(SourceConfig(kind="parquet", path=path))


def test_a_file_that_is_not_parquet(tmp_path: Path) -> None:
    path = tmp_path / "data.parquet"
    path.write_text("not parquet")
    with pytest.raises(DataError, match="cannot be read as Parquet"):
        load_rows(SourceConfig(kind="parquet", path=path))


def test_reasoning_gym_rows() -> None:
    source = SourceConfig(kind="reasoning_gym", name="chain_sum", count=5, seed=3, options={"max_terms": 3})
    rows = load_rows(source)
    assert len(rows) == 5
    assert rows == load_rows(source)
    assert rows[2].where == "chain_sum: row 2"
    assert rows[2].extra["index"] == 2


def test_reasoning_gym_mistakes() -> None:
    with pytest.raises(DataError, match="no dataset 'chain_sums'; did you mean 'chain_sum'"):
        load_rows(SourceConfig(kind="reasoning_gym", name="chain_sums"))
    with pytest.raises(DataError, match="wrong_option"):
        load_rows(SourceConfig(kind="reasoning_gym", name="chain_sum", options={"wrong_option": 1}))


@pytest.fixture
def working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path


def test_rows_of_a_function_in_the_working_directory(working_directory: Path) -> None:
    (working_directory / "my_rows.py").write_text(
        "def make(count, seed, base=0):\n"
        "    return [{'prompt': str(i), 'answer': base + i} for i in range(count)]\n"
        "def pairs(count, seed):\n"
        "    return [('a', 1)] * count\n"
        "def broken(count, seed):\n"
        "    return [{'prompt': 'a', 'answer': 1}, {'prompt': 'b'}]\n"
        "def raises(count, seed):\n"
        "    raise KeyError('why')\n"
        "def nothing(count, seed):\n"
        "    return None\n"
        "value = 3\n"
    )
    rows = load_rows(SourceConfig(kind="function", fn="my_rows:make", count=2, options={"base": 10}))
    assert [(r.prompt, r.answer) for r in rows] == [("0", 10), ("1", 11)]
    assert load_rows(SourceConfig(kind="function", fn="my_rows:pairs", count=2))[1].answer == 1
    for name, kind, message in [
        ("broken", DataError, r"my_rows:broken: row 1: no key 'answer'"),
        ("raises", DataError, r"KeyError: 'why'"),
        ("nothing", DataError, "expected a list of rows, found NoneType"),
        ("absent", ConfigError, "has no 'absent'"),
        ("value", ConfigError, "not a function"),
    ]:
        with pytest.raises(kind, match=message):
            load_rows(SourceConfig(kind="function", fn=f"my_rows:{name}"))


def test_functions_that_cannot_be_imported(working_directory: Path) -> None:
    with pytest.raises(ConfigError, match="no module named 'not_there'"):
        load_rows(SourceConfig(kind="function", fn="not_there:f"))
    with pytest.raises(ConfigError, match="not of the form module:function"):
        load_rows(SourceConfig(kind="function", fn="just_a_name"))
    (working_directory / "needs_more.py").write_text("import not_installed_at_all\n")
    with pytest.raises(ConfigError, match="importing 'needs_more' failed: No module named 'not_installed_at_all'"):
        load_rows(SourceConfig(kind="function", fn="needs_more:f"))
    (working_directory / "bad_syntax.py").write_text("def f(:\n")
    with pytest.raises(ConfigError, match="importing 'bad_syntax' failed: SyntaxError"):
        load_rows(SourceConfig(kind="function", fn="bad_syntax:f"))
