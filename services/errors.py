"""Every error streamrl raises on purpose, with the exit code its process ends with.

A message is one line that says what is wrong, where, and what to do. The CLI prints it without a traceback.
"""

from __future__ import annotations

EXIT_FAILED = 1
EXIT_USAGE = 2


class StreamRLError(Exception):
    """Base of all; `exit_code` is what the process returns."""

    exit_code = EXIT_FAILED


class UsageError(StreamRLError):
    """Something the user gave is wrong; nothing was trained."""

    exit_code = EXIT_USAGE


class ConfigError(UsageError):
    """The configuration: file, key or value."""


class DataError(UsageError):
    """A dataset: missing, empty, or a malformed row (file and line are named)."""


class ModelError(UsageError):
    """A model directory or tokenizer that cannot be loaded."""


class PromptTooLongError(UsageError):
    """A prompt that does not fit with its completion; the prompt is named."""


class PortBusyError(UsageError):
    """An address that cannot be bound."""


class InsecureAddressError(UsageError):
    """An address beyond loopback without a token or TLS."""


class MissingExtraError(UsageError):
    """An optional package is not installed; the message names the extra."""


class GenerationError(StreamRLError):
    """The generation service cannot give what was asked (no units, refused, gone past its deadline)."""


class EngineError(StreamRLError):
    """An engine failed on one sample."""


class WeightsError(StreamRLError):
    """A weight transfer was refused: digest, missing or foreign tensor, deadline."""


class TrainingError(StreamRLError):
    """Training cannot go on: non-finite loss, a rank that is gone, nothing left to train on."""


class RewardError(StreamRLError):
    """A reward function cannot be loaded or answered with something that is not a finite number."""
