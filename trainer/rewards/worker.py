"""One reward worker: `python -m trainer.rewards.worker` reads batches of calls as JSON lines and answers each call.

First line in: the reward's configuration; first line out: `{"ready": true}` or `{"error": message}`. Then each line
in is `{"calls": [[prompt, completion, answer, extra], ..]}`, answered by one line per call, in order:
`{"score": number}`, or `{"failed": kind, "message": text}` with kind `raised` or `not_a_number`.

The user's function may print: standard output goes to standard error, the replies to a descriptor of their own.
"""

from __future__ import annotations

import json
import math
import numbers
import os
import signal
import sys
from typing import Any

from services.errors import StreamRLError
from services.processes import die_with_parent
from trainer.rewards.functions import Reward, load_reward

MESSAGE_CHARS = 500


def main() -> None:
    """Serve until standard input ends."""
    die_with_parent(signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # on Ctrl-C the parent decides when scoring ends
    replies = os.dup(1)
    os.dup2(2, 1)
    requests = os.fdopen(os.dup(0), "rb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)

    try:
        reward = load_reward(json.loads(requests.readline()))
    except StreamRLError as error:
        _reply(replies, {"error": str(error)})
        sys.exit(error.exit_code)
    _reply(replies, {"ready": True})
    for line in requests:
        for prompt, completion, answer, extra in json.loads(line)["calls"]:
            _reply(replies, evaluate(reward, prompt, completion, answer, extra))


def evaluate(reward: Reward, prompt: str, completion: str, answer: Any, extra: dict[str, Any]) -> dict[str, Any]:
    """The reply to one call: a finite score, or why there is none."""
    try:
        value = reward(prompt, completion, answer, extra)
    except Exception as error:
        message = f"{type(error).__name__}: {error}"
        return {"failed": "raised", "message": message[:MESSAGE_CHARS]}
    value = value.item() if hasattr(value, "item") else value
    if not isinstance(value, numbers.Real):
        return {"failed": "not_a_number", "message": f"the reward is of type {type(value).__name__}"}
    if not math.isfinite(value):
        return {"failed": "not_a_number", "message": f"the reward is {float(value)}"}
    return {"score": float(value)}


def _reply(descriptor: int, reply: dict[str, Any]) -> None:
    data = memoryview(json.dumps(reply).encode() + b"\n")
    while data:
        data = data[os.write(descriptor, data) :]


if __name__ == "__main__":
    main()
