"""Where prompts come from: files, reasoning-gym datasets and users' functions, all as the same rows."""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from services.config import SourceConfig
from services.errors import DataError
from trainer.plugins import load_function


@dataclass(frozen=True)
class Row:
    """One prompt of a dataset.

    `prompt` is text, or chat messages (`[{"role": .., "content": ..}, ..]`). `where` names the row for messages
    (`file:line`). `extra` holds the row's other values as JSON data; a reasoning-gym row says how its dataset was made
    and its index there, from which the scorer makes the exact entry again.
    """

    prompt: str | list[dict[str, Any]]
    answer: Any
    where: str
    extra: dict[str, Any] = field(default_factory=dict)


def load_rows(source: SourceConfig) -> list[Row]:
    """All rows of `source`, in its order.

    Raises `DataError` naming file and line (or row) for anything malformed, missing or empty, and `ConfigError`
    for a function that cannot be imported.
    """
    rows = _READERS[source.kind](source)
    if not rows:
        raise DataError(f"{_title(source)}: no rows")
    return rows


def _title(source: SourceConfig) -> str:
    return str(source.path or source.name or source.fn)


def _jsonl(source: SourceConfig) -> list[Row]:
    path = _existing(source)
    rows = []
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if not line.strip():
                    continue
                where = f"{path}:{number}"
                try:
                    record = json.loads(line)
                except json.JSONDecodeError as error:
                    raise DataError(f"{where}: not valid JSON: {error.msg} (column {error.colno})") from None
                rows.append(_row(record, where, source))
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 text: {error.reason} at byte {error.start}") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from None
    return rows


def _parquet(source: SourceConfig) -> list[Row]:
    from pyarrow import ArrowException
    from pyarrow.parquet import ParquetFile

    path = _existing(source)
    rows: list[Row] = []
    try:
        with ParquetFile(path) as file:
            for batch in file.iter_batches():
                for record in batch.to_pylist():
                    rows.append(_row(record, f"{path}: row {len(rows)}", source))
    except (ArrowException, OSError) as error:
        raise DataError(f"{path}: cannot be read as Parquet: {_one_line(error)}") from None
    return rows


def _reasoning_gym(source: SourceConfig) -> list[Row]:
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    name = source.name or ""
    if name not in DATASETS:
        near = difflib.get_close_matches(name, list(DATASETS), n=1, cutoff=0.4)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise DataError(f"reasoning-gym has no dataset {name!r}{hint}")
    try:
        dataset = reasoning_gym.create_dataset(name, size=source.count, seed=source.seed, **source.options)
        entries = [dataset[index] for index in range(source.count)]
    except Exception as error:
        raise DataError(f"reasoning-gym {name!r} with options {source.options}: {_one_line(error)}") from error
    made = {"name": name, "size": source.count, "seed": source.seed, "options": source.options}
    rows = []
    for index, entry in enumerate(entries):
        where = f"{name}: row {index}"
        answer = _jsonable(entry["answer"], where)
        rows.append(Row(entry["question"], answer, where, {"reasoning_gym": made, "index": index}))
    return rows


def _function(source: SourceConfig) -> list[Row]:
    fn = source.fn or ""
    function = load_function(fn, "data.fn")
    records = _call(function, source)
    if isinstance(records, str | bytes | Mapping) or not isinstance(records, Iterable):
        raise DataError(f"{fn}: expected a list of rows, found {type(records).__name__}")
    return [_row(_mapping(record, source), f"{fn}: row {index}", source) for index, record in enumerate(records)]


def _call(function: Callable[..., Any], source: SourceConfig) -> Any:
    try:
        return function(source.count, source.seed, **source.options)
    except Exception as error:
        raise DataError(f"{source.fn}(count={source.count}, seed={source.seed}): {_one_line(error)}") from error


def _mapping(record: Any, source: SourceConfig) -> Any:
    if isinstance(record, tuple) and len(record) == 2:
        return {source.prompt_key: record[0], source.answer_key: record[1]}
    return record


_READERS: dict[str, Callable[[SourceConfig], list[Row]]] = {
    "jsonl": _jsonl,
    "parquet": _parquet,
    "reasoning_gym": _reasoning_gym,
    "function": _function,
}


def _existing(source: SourceConfig) -> Path:
    path = Path(source.path or "").expanduser()
    if not path.exists():
        raise DataError(f"{path}: no such file")
    if path.is_dir():
        raise DataError(f"{path}: is a directory, not a file")
    return path


def _row(record: Any, where: str, source: SourceConfig) -> Row:
    if not isinstance(record, Mapping):
        raise DataError(f"{where}: expected an object with {source.prompt_key!r}, found {type(record).__name__}")
    for key, option in ((source.prompt_key, "prompt_key"), (source.answer_key, "answer_key")):
        if key not in record:
            keys = ", ".join(map(repr, record)) or "none"
            raise DataError(f"{where}: no key {key!r}; the row has {keys} (set {option})")
    extra = {key: value for key, value in record.items() if key not in (source.prompt_key, source.answer_key)}
    prompt = _prompt(record[source.prompt_key], where, source)
    return Row(prompt, _jsonable(record[source.answer_key], where), where, _jsonable(extra, where))


def _prompt(value: Any, where: str, source: SourceConfig) -> str | list[dict[str, Any]]:
    key = source.prompt_key
    if isinstance(value, str):
        if not value:
            raise DataError(f"{where}: {key!r} is empty")
        return value
    if not isinstance(value, list):
        raise DataError(f"{where}: {key!r} must be text or a list of chat messages, found {type(value).__name__}")
    if not source.chat:
        raise DataError(f"{where}: {key!r} is a list of chat messages; set chat: true")
    well_formed = all(isinstance(m, Mapping) and isinstance(m.get("role"), str) and "content" in m for m in value)
    if not value or not well_formed:
        raise DataError(f"{where}: {key!r} must be a list of messages with 'role' and 'content'")
    return [dict(message) for message in value]


def _jsonable(value: Any, where: str) -> Any:
    """`value` as JSON gives it back: rows travel to the reward's workers as JSON."""
    try:
        return json.loads(json.dumps(value, default=str))
    except (TypeError, ValueError) as error:
        raise DataError(f"{where}: cannot be written as JSON: {_one_line(error)}") from None


def _one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
