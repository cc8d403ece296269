"""Whether and when a service that died is started again. Pure: time is an argument."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field


@dataclass
class RestartBudget:
    """At most `limit` restarts in any `window_s` seconds, each after a delay that doubles from `first_delay_s`."""

    limit: int = 5
    window_s: float = 300.0
    first_delay_s: float = 0.2
    max_delay_s: float = 10.0
    _restarts: deque[float] = field(default_factory=deque)

    def next_delay(self, now: float) -> float | None:
        """Seconds to wait before the restart, which is counted; `None` when the budget is spent."""
        while self._restarts and now - self._restarts[0] > self.window_s:
            self._restarts.popleft()
        if len(self._restarts) >= self.limit:
            return None
        delay = min(self.first_delay_s * 2 ** len(self._restarts), self.max_delay_s)
        self._restarts.append(now)
        return delay
