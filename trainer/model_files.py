"""Is a model directory whole? Asked before anything is started with it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from services.errors import ModelError


def check_model_files(directory: Path) -> tuple[Any, int | None]:
    """The tokenizer of a Hugging Face directory, and how many positions its model has (None: unbounded).

    Raises `ModelError` naming what is missing or broken: directory, configuration, weights, tokenizer.
    """
    from transformers import AutoConfig, AutoTokenizer

    if not directory.is_dir():
        raise ModelError(f"model.path: {directory} is not a directory; give a model in Hugging Face format")
    if not (directory / "config.json").is_file():
        raise ModelError(f"model.path: {directory} has no config.json")
    try:
        model_config = AutoConfig.from_pretrained(directory)
    except Exception as error:  # the library raises many kinds, down to KeyError
        raise ModelError(f"model.path: {directory}/config.json cannot be used: {_one_line(error)}") from error
    _check_weights(directory)
    try:
        tokenizer = AutoTokenizer.from_pretrained(directory)
    except Exception as error:
        raise ModelError(f"model.path: {directory} has no usable tokenizer: {_one_line(error)}") from error
    positions = getattr(model_config.get_text_config(), "max_position_embeddings", None)
    return tokenizer, positions


def _check_weights(directory: Path) -> None:
    from safetensors import SafetensorError, safe_open

    index = directory / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (ValueError, KeyError, AttributeError) as error:
            raise ModelError(f"model.path: {index} cannot be read: {_one_line(error)}") from None
    else:
        names = sorted(path.name for path in directory.glob("*.safetensors"))
    if not names:
        raise ModelError(f"model.path: {directory} has no weights (*.safetensors)")
    for name in names:
        try:
            with safe_open(directory / name, framework="numpy"):
                pass
        except FileNotFoundError:
            raise ModelError(f"model.path: {directory}/{name} is missing; {index.name} lists it") from None
        except (SafetensorError, OSError) as error:
            raise ModelError(f"model.path: {directory}/{name} is not whole: {_one_line(error)}") from None


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}"
