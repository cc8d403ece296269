"""Users' own functions, named `module:function` in the configuration."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from services.errors import ConfigError


def load_function(spec: str, key: str) -> Callable[..., Any]:
    """Import what `spec` ("module:function") names; `key` is where the configuration says so, for the message.

    The working directory is searched last, so that a user's file never shadows an installed package.
    Raises `ConfigError`, also when importing the module raises.
    """
    module_name, separator, path = spec.partition(":")
    if not (module_name and separator and path):
        raise ConfigError(f"{key}: {spec!r} is not of the form module:function")
    cwd = str(Path.cwd())
    if cwd not in sys.path:
        sys.path.append(cwd)
        importlib.invalidate_caches()
    try:
        target: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and (module_name == error.name or module_name.startswith(error.name + ".")):
            raise ConfigError(
                f"{key}: no module named {error.name!r} (for {spec}); it is looked for among the installed packages "
                f"and in {cwd}"
            ) from None
        raise ConfigError(f"{key}: importing {module_name!r} failed: {error}") from error
    except Exception as error:
        raise ConfigError(f"{key}: importing {module_name!r} failed: {type(error).__name__}: {error}") from error
    for name in path.split("."):
        if not hasattr(target, name):
            raise ConfigError(f"{key}: {module_name!r} ({getattr(target, '__file__', '?')}) has no {path!r}")
        target = getattr(target, name)
    if not callable(target):
        raise ConfigError(f"{key}: {spec} is not a function but {type(target).__name__}")
    function: Callable[..., Any] = target
    return function
