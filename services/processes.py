"""How our processes die: with their parent, and never without a word.

`python -m services.processes COMMAND ...` runs a command of somebody else's under the same rule.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from pathlib import Path

from services.errors import StreamRLError

RUN_DIR_ENV = "STREAMRL_RUN_DIR"
PARENT_ENV = "STREAMRL_PARENT"
ENDED_FILE = "ended"
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36

_parent: int | None = None


def die_with_parent(sig: signal.Signals = signal.SIGTERM) -> None:
    """Have the kernel send `sig` to this process when its parent ends (Linux).

    The parent is who started it: `STREAMRL_PARENT` names it, in case it ended before this call.
    """
    global _parent
    named = os.environ.pop(PARENT_ENV, "")  # taken out: it is not the parent of this process's children
    parent = _parent = int(named) if named.isdigit() else os.getppid()
    _prctl(_PR_SET_PDEATHSIG, int(sig), "PR_SET_PDEATHSIG")
    if os.getppid() != parent:
        os.kill(os.getpid(), sig)


def parent_is_gone() -> bool:
    """Whether the parent that `die_with_parent` bound this process to has ended."""
    return _parent is not None and _parent != os.getppid()


def why_ended(received: signal.Signals | None) -> str:
    """Why this process was told to stop: what its supervisor left in `<run>/ended`, else what is known here."""
    if parent_is_gone():
        return f"its parent (process {_parent}) died"
    run_dir = os.environ.get(RUN_DIR_ENV)
    if run_dir:
        try:
            reason = (Path(run_dir) / ENDED_FILE).read_text().strip()
        except OSError:
            reason = ""
        if reason:
            return reason
    return f"received {received.name}" if received else "its work is done"


def adopt_orphans() -> None:
    """Make this process the parent of descendants whose own parent ended, so that none escapes (Linux)."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1, "PR_SET_CHILD_SUBREAPER")


def descendants(pid: int) -> list[int]:
    """Every living process below `pid`, parents first. Zombies do not count."""
    below = _by_parent()
    found: list[int] = []
    pending = [pid]
    while pending:
        more = below.get(pending.pop(), [])
        found += more
        pending += more
    return found


def children(pid: int) -> list[int]:
    """The living processes that `pid` itself started."""
    return _by_parent().get(pid, [])


def _by_parent() -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if fields[0] not in "ZX":
            found.setdefault(int(fields[1]), []).append(int(entry.name))
    return found


def signal_all(pids: list[int], sig: signal.Signals) -> None:
    """Send `sig` to each; one that is gone already is fine."""
    for pid in pids:
        try:
            os.kill(pid, sig)
        except ProcessLookupError:
            continue


def _prctl(option: int, value: int, name: str) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise StreamRLError(f"prctl({name}): {os.strerror(ctypes.get_errno())}")


def _main(command: list[str]) -> None:
    if not command:
        raise SystemExit("error: usage: python -m services.processes COMMAND ...")
    die_with_parent()
    os.execvp(command[0], command)


if __name__ == "__main__":
    _main(sys.argv[1:])
