"""Log lines of every process: UTC time, level, who speaks, what; on stderr."""

from __future__ import annotations

import logging
import os
import sys
import time

LEVEL_ENV = "STREAMRL_LOG"


def set_up(role: str) -> None:
    """Log to stderr as `role`; `STREAMRL_LOG=DEBUG` in the environment shows more."""
    level = os.environ.get(LEVEL_ENV, "INFO").upper()
    handler = logging.StreamHandler(sys.stderr)
    formatter = logging.Formatter(f"%(asctime)s.%(msecs)03dZ %(levelname)-7s {role}: %(message)s", "%Y-%m-%dT%H:%M:%S")
    formatter.converter = time.gmtime
    handler.setFormatter(formatter)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level if isinstance(logging.getLevelName(level), int) else logging.INFO)
